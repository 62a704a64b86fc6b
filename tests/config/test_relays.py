"""Which relay a server loads from, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import RecipeError, load_table
from asyncrl.config.relays import relays_of


def test_each_server_has_the_relay_of_its_host() -> None:
    servers = ["http://b:30000", "http://a:30000", "http://b:30001", "http://c:1"]
    assert relays_of(servers, ["http://a:31000", "http://b:31000"]) == [
        *("http://b:31000", "http://a:31000", "http://b:31000"),
        None,
    ]


def test_the_servers_of_a_host_with_several_relays_take_turns() -> None:
    servers = [f"http://localhost:{port}" for port in range(5)]
    relays = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert relays_of(servers, relays) == [relays[i % 2] for i in range(5)]


def recipe(**weights: Any) -> dict[str, Any]:
    return {"weights": {"transport": "relay", **weights}}


def test_relays_are_started_here_or_named() -> None:
    assert load_table(recipe()).weights.relays == 1
    load_table(recipe(relay_urls=["http://localhost:31000"]))
    load_table({**recipe(relay_urls=["http://a:31000"]), "engine": {"urls": ["http://a:30000"]}})
    load_table({"weights": {"relay_urls": ["http://a:1"]}})  # of no account for another transport


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (recipe(relay_urls=["a:31000"]), "weights.relay_urls = a:31000: write http://HOST:PORT"),
        (
            recipe(relay_urls=["http://a:1"]),
            r"weights.relay_urls = \['http://a:1'\]: no relay on the host of http://127.0.0.1; start one there",
        ),
        (
            {**recipe(), "engine": {"urls": ["http://a:30000"]}},
            r"weights.relay_urls = \[\]: no relay on the host of http://a:30000; start one there",
        ),
    ],
)
def test_a_server_without_a_relay_on_its_host_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_table(table)
