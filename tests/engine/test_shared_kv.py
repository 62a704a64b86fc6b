"""KV that SGLang servers share is that of one version: what the server is asked for, and in which order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from asyncrl.engine.sglang import SGLangEngine
from asyncrl.ports import EngineError, EngineRejected

from .scripted import Exchange, Server, hangs

Make = Callable[..., SGLangEngine]
STORAGE = "/hicache/storage-backend"
SHARES: dict[str, Any] = {
    "kind": "sglang",
    "kv_reuse": True,
    "kv_storage": {"master_server_address": "host:50051", "extra_backend_tag": "ours alone decides this"},
}


def asked(server: Server) -> list[str]:
    """Method and last part of what changed the server."""
    skipped = ("/health", "/server_info", "/model_info")
    return [f"{e.request.method} {e.path.rpartition('/')[2]}" for e in server.exchanges if e.path not in skipped]


def refuse(*methods: str) -> Callable[[Exchange], Any]:
    async def answer(exchange: Exchange) -> web.Response:
        if exchange.request.method in methods:
            return web.Response(status=400, text="Admin API key is not configured.")
        return web.Response(text="done.\n")

    return answer


async def test_a_storage_is_attached_by_the_name_of_the_version_that_was_loaded(server: Server, make: Make) -> None:
    engine = make(**SHARES)
    await engine.connect()
    assert asked(server) == ["DELETE storage-backend"]  # nothing is shared before the first load
    for version in (3, 4):
        server.exchanges.clear()
        server.control["/model_info"]["weight_version"] = str(version)
        await engine.load_from_disk("/weights", version)
        assert asked(server) == [
            "POST flush_cache",
            "DELETE storage-backend",
            "POST update_weights_from_disk",
            "PUT storage-backend",
        ]
        [_, body] = server.asked(STORAGE)
        assert body["hicache_storage_backend"] == "mooncake"
        assert json.loads(body["hicache_storage_backend_extra_config_json"]) == {
            "master_server_address": "host:50051",
            "extra_backend_tag": f"run-{version}",
        }
    server.exchanges.clear()
    await engine.load_from_group(["w"], ["float32"], [[2]], "group", 4)
    assert asked(server)[:2] == ["POST flush_cache", "DELETE storage-backend"]
    assert asked(server)[-1] == "PUT storage-backend"


async def test_weights_stay_as_they_are_where_the_storage_of_the_old_ones_cannot_be_detached(
    server: Server, make: Make
) -> None:
    engine = make(**SHARES)
    server.on_control[STORAGE] = refuse("DELETE")
    with pytest.raises(EngineError, match="storage-backend") as refusal:
        await engine.load_from_disk("/weights", 3)
    assert not isinstance(refusal.value, EngineRejected)  # which would end the run
    with pytest.raises(EngineError, match="storage-backend"):
        await engine.load_from_group(["w"], ["float32"], [[2]], "group", 3)
    assert asked(server) == ["POST flush_cache", "DELETE storage-backend"] * 2


async def test_weights_that_could_not_be_loaded_are_not_named(server: Server, make: Make) -> None:
    engine = make(**SHARES)
    server.control["/update_weights_from_disk"] = {"success": False, "message": "no such folder"}
    with pytest.raises(EngineRejected, match="no such folder"):
        await engine.load_from_disk("/weights", 3)
    server.control["/update_weights_from_disk"] = {"success": True, "message": ""}
    with pytest.raises(EngineError, match="says it holds weights 'default'"):
        await engine.load_from_disk("/weights", 3)
    assert "PUT storage-backend" not in asked(server)


async def test_a_server_without_a_storage_serves_all_the_same(server: Server, make: Make) -> None:
    engine = make(**SHARES)
    server.on_control[STORAGE] = refuse("PUT")
    server.control["/model_info"]["weight_version"] = "3"
    await engine.load_from_disk("/weights", 3)
    assert asked(server)[-1] == "PUT storage-backend"


async def test_a_server_that_was_not_started_for_it_is_refused(server: Server, make: Make) -> None:
    server.on_control[STORAGE] = refuse("PUT", "DELETE")
    with pytest.raises(EngineRejected, match=r"cannot share KV .*Admin API key.*start it with --enable-hier"):
        await make(**SHARES).connect()


async def load(engine: SGLangEngine, server: Server, way: str) -> None:
    server.control["/model_info"]["weight_version"] = "3"
    if way == "disk":
        await engine.load_from_disk("/weights", 3)
    else:
        await engine.load_from_group(["w"], ["float32"], [[2]], "group", 3)


@pytest.mark.parametrize("way", ["disk", "group"])
@pytest.mark.parametrize("idle", [True, False])
async def test_copies_to_the_host_are_waited_for_before_weights_change(
    server: Server, make: Make, way: str, idle: bool
) -> None:
    """Its requests have ended, but SGLang refuses weights until these have, too. Where they do not, it says so then."""
    waits: list[str] = []

    async def flush(exchange: Exchange) -> web.Response:
        waits.append(exchange.request.query_string)
        return web.Response(text="Cache flushed.\n") if idle else web.Response(status=400, text="Timed out waiting.")

    server.on_control["/flush_cache"] = flush
    await load(make(kind="sglang", host_kv_tokens=1000, control_timeout_s=5.0), server, way)
    first = "update_weights_from_disk" if way == "disk" else "begin_weight_update"
    assert asked(server)[:2] == ["POST flush_cache", f"POST {first}"]
    assert waits == ["timeout=2.5"]


async def test_a_server_that_was_started_elsewhere_says_whether_it_copies(server: Server, make: Make) -> None:
    engine = make(kind="sglang")
    server.control["/server_info"]["enable_hierarchical_cache"] = True
    await engine.connect()
    await load(engine, server, "disk")
    assert asked(server) == ["POST flush_cache", "POST update_weights_from_disk"]


async def test_weights_stay_where_a_server_does_not_answer_before_them(server: Server, make: Make) -> None:
    server.on_control["/flush_cache"] = hangs(headers=False)
    with pytest.raises(EngineError, match=r"no answer to flush_cache within 0.2 s"):
        await load(make(kind="sglang", host_kv_tokens=1000, control_timeout_s=0.2), server, "disk")
    assert asked(server) == ["POST flush_cache"]


async def test_none_of_it_is_asked_of_others(server: Server, make: Make) -> None:
    for settings in ({"kind": "sglang"}, {"kind": "embedded"}):
        engine = make(**settings)
        await engine.connect()
        server.control["/model_info"]["weight_version"] = "3"
        await engine.load_from_disk("/weights", 3)
    assert asked(server) == ["POST update_weights_from_disk"] * 2
