"""Which servers may give each other KV."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import RecipeError, load_table


def recipe(**engine: Any) -> None:
    load_table({"model": {"path": "/m"}, "engine": engine})


def test_it_is_off_and_may_be_turned_on() -> None:
    recipe(urls=["http://127.0.0.1:1", "http://host-b:1"])
    recipe(kv_reuse=True, host_kv_tokens=1000)
    recipe(kv_reuse=True, urls=["http://localhost:1", "http://[::1]:2"])
    recipe(kv_reuse=True, urls=["http://host-a:1", "http://host-b:1"])
    storage = {"master_server_address": "host-c:50051"}
    recipe(kv_reuse=True, kind="sglang", urls=["http://127.0.0.1:1", "http://host-b:1"], kv_storage=storage)


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (
            {"kv_reuse": True, "kind": "sglang"},
            r"engine\.kv_reuse = true: needs engine\.urls of SGLang servers .* have no key",
        ),
        (
            {"kv_reuse": True, "kind": "sglang", "urls": ["http://127.0.0.1:1"]},
            r"engine\.kv_storage = \{\}: give Mooncake's settings",
        ),
        (
            {"kv_reuse": True, "urls": ["http://host-a:1", "http://127.0.0.1:1"]},
            r"engine\.urls = http://127\.0\.0\.1:1: other hosts' servers cannot take KV from there; name its host",
        ),
        (
            {"host_kv_tokens": 9, "kind": "sglang", "device": "cpu"},
            r"engine\.host_kv_tokens = 9: SGLang registers such memory with CUDA, .* leave it out on a CPU",
        ),
        ({"host_kv_tokens": -1}, r"engine\.host_kv_tokens = -1: must be 0 or more"),
    ],
)
def test_what_cannot_work_is_refused(engine: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        recipe(**engine)
