"""Who has the run's token and who has not, at everything that listens; and where nobody else can reach it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from asyncrl.access import (
    VARIABLE,
    AccessError,
    demand,
    given_token,
    guard,
    header,
    is_loopback,
    matches,
    run_token,
)
from asyncrl.build.setup import checked_token
from asyncrl.config import RecipeError, load_table
from asyncrl.serve.__main__ import main as serve
from asyncrl.weights.relay_main import main as relay

TOKEN = "a-token-of-this-very-run"


@pytest.fixture(autouse=True)
def none_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@asynccontextmanager
async def guarded(token: str) -> AsyncIterator[str]:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application(middlewares=[guard(token)])
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("shown", "status"),
    [(TOKEN, 200), ("", 401), (TOKEN[:-1], 401), (f"{TOKEN}x", 401), (TOKEN.upper(), 401)],
)
async def test_a_guarded_server_answers_those_who_have_its_token(shown: str, status: int) -> None:
    async with guarded(TOKEN) as url, aiohttp.ClientSession(headers=header(shown)) as session:
        async with session.get(url) as response:
            assert response.status == status
            assert TOKEN not in await response.text()
        async with session.get(f"{url}nowhere") as response:  # what is there is nobody else's business either
            assert response.status == (404 if status == 200 else 401)


async def test_without_a_token_everybody_on_the_machine_may_ask() -> None:
    async with guarded("") as url, aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200


def test_a_token_is_compared_whole_whatever_is_shown() -> None:
    assert matches(TOKEN, TOKEN) and matches("anything", "")
    assert not matches("", TOKEN) and not matches("\u00e4", TOKEN) and not matches("\udcff", TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_loopback_is_the_default_and_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    demand("--host", host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "node7", "localhost.example.org"])
def test_elsewhere_a_token_is_demanded_in_one_line_that_names_the_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(AccessError, match=r"^--host .*ASYNCRL_TOKEN.*127\.0\.0\.1$"):
        demand("--host", host, "")
    demand("--host", host, TOKEN)


@pytest.mark.parametrize(
    "bad", ["short", "has a space in it, which is bad", "line\nbreak-in-the-middle", "ümläüte" * 4]
)
def test_a_token_that_cannot_be_used_is_one_line_without_it(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, bad)
    with pytest.raises(AccessError) as error:
        given_token()
    assert VARIABLE in str(error.value) and bad not in str(error.value)


def test_every_run_draws_a_token_of_its_own_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run_token()) >= 32 and run_token() != run_token()
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert run_token() == TOKEN


@pytest.mark.parametrize("command", ["serve", "relay"])
def test_what_is_started_by_hand_for_other_machines_needs_a_token(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--host", "0.0.0.0", "--port", "0"]
    code = serve([str(tmp_path), *arguments]) if command == "serve" else relay(arguments)
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"asyncrl {command}: --host 0.0.0.0: other machines reach it") and VARIABLE in line


def test_relays_elsewhere_reach_the_trainer_only_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"transport": "relay", "relay_urls": ["http://10.0.0.7:31000"], "address": "10.0.0.1"}
    recipe = load_table({"weights": weights, "engine": {"urls": ["http://10.0.0.7:30000"]}})
    with pytest.raises(RecipeError, match=r"^weights\.address = 10\.0\.0\.1: .*ASYNCRL_TOKEN"):
        checked_token(recipe)
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert checked_token(recipe) == TOKEN


def test_the_store_of_an_update_group_listens_where_it_is_told_and_nowhere_else() -> None:
    from asyncrl.weights.sender import UpdateGroup  # torch

    group = UpdateGroup("127.0.0.1", 2, "g", "gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", group.port))  # taken, if it listened on all addresses
    with socket.create_connection(("127.0.0.1", group.port), timeout=5):
        group.close()
