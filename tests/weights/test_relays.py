"""Relays as processes: what travels, what it costs, and what happens when one dies, hangs, is full or comes late."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from asyncrl.ports import EngineError
from asyncrl.processes import free_port
from asyncrl.weights.outlet import Outlet
from asyncrl.wire import RelayOrders, RelayState

from .relays import World, world

pytestmark = pytest.mark.timeout(180)


def size(of: World, version: int) -> int:
    return (of.folder(0) / f"v{version}" / "model.safetensors").stat().st_size


async def test_every_server_loads_each_version_from_its_own_host(tmp_path: Path) -> None:
    async with world(tmp_path, 3, megabytes=5) as w:
        for version in (1, 2, 3):
            await w.broadcast(version)
            assert [server.version for server in w.servers] == [version] * 3
        for index in range(3):
            assert w.state(index).versions == [2, 3], "the newest two stay"
            assert w.state(index).folder == str(w.folder(index))
            assert w.state(index).received == 3 * size(w, 3), "no byte came twice"
            assert sorted(path.name for path in w.folder(index).iterdir()) == ["lock", "v2", "v3"]
        assert w.seen.counters == ["weights/stall_s"] * 3
        assert w.seen.spans == ["broadcast"] * 3
        await w.transport.close()
        assert list(tmp_path.glob("*/v*")) == [], "freed"
    assert list(tmp_path.iterdir()) == [], "and nothing is left when the relays have ended"


async def test_a_relay_gives_no_faster_than_it_may(tmp_path: Path) -> None:
    async with world(tmp_path, 2, megabytes=8, max_mb_s=16) as w:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await w.transport.prepare(1)
        await w.transport.arrive(w.engines(), 1)
        assert loop.time() - began > 0.4


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["the master", "in the middle", "the last"])
async def test_a_relay_killed_in_mid_broadcast_costs_the_others_no_byte(tmp_path: Path, victim: int) -> None:
    async with world(tmp_path, 3, megabytes=48) as w:
        others = [i for i in range(3) if i != victim]
        await w.transport.prepare(1)
        await w.until(lambda: w.state(victim).received > 2**20)
        await w.kill(victim)
        await w.transport.arrive(w.engines(*others), 1)
        await w.transport.deliver(w.engines(*others), 1)
        assert [w.servers[i].version for i in others] == [1, 1]
        assert [w.state(i).received for i in others] == [size_of_file(w, others[0])] * 2
        assert any("is gone" in note for note in w.notes)


def size_of_file(w: World, index: int) -> int:
    return (w.folder(index) / "v1" / "model.safetensors").stat().st_size


async def test_a_relay_that_hangs_is_cut_out_too(tmp_path: Path) -> None:
    async with world(tmp_path, 2, megabytes=24, silence_s=4.0) as w:
        await w.transport.prepare(1)
        await w.until(lambda: w.state(0).received > 2**20)
        await w.kill(0, signal.SIGSTOP)
        await w.transport.arrive(w.engines(1), 1)
        await w.transport.deliver(w.engines(1), 1)
        await w.kill(0, signal.SIGCONT)
        await w.up()
        await w.broadcast(2)
        assert [server.version for server in w.servers] == [2, 2], "and is taken in again when it wakes up"


async def test_a_relay_is_told_nothing_before_it_has_said_what_it_holds(tmp_path: Path) -> None:
    """One that only was silent for a moment is no longer in the chain, and would be told to drop all that it holds."""
    w = World(tmp_path, 1, megabytes=1)
    orders: asyncio.Queue[RelayOrders] = asyncio.Queue()

    async def control(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await asyncio.sleep(0.3)
        state = RelayState(run="test", data_port=1, folder="", versions=[1])
        await connection.send_bytes(msgspec.json.encode(state))
        async for message in connection:
            orders.put_nowait(msgspec.json.decode(message.data, type=RelayOrders))
        return connection

    app = web.Application()
    app.router.add_get("/control", control)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", w.ports[0]).start()
        await w.transport.prepare(1)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(w.transport.watch())
            assert (await orders.get()).versions == (1,)
            watching.cancel()
    finally:
        w.trainer.outlet.close()
        await runner.cleanup()


async def test_one_that_was_killed_comes_back_at_the_end_and_catches_up(tmp_path: Path) -> None:
    async with world(tmp_path, 2, megabytes=2) as w:
        await w.broadcast(1)
        await w.broadcast(2)
        await w.kill(0)
        assert (w.folder(0) / "v2").exists(), "a killed one leaves its folder behind"
        await w.without(0)
        await w.start(0)
        await w.up()
        await w.until(lambda: w.state(0).versions == [1, 2])
        assert w.transport.chain.relays == (w.urls[1], w.urls[0])
        await w.transport.deliver(w.engines(0), 1)
        assert w.servers[0].version == 1


async def test_a_dead_relays_folder_is_removed_by_whichever_starts_next(tmp_path: Path) -> None:
    async with world(tmp_path, 2, megabytes=1) as w:
        await w.broadcast(1)
        await w.kill(1)
        dead, w.ports[1] = w.folder(1), free_port()
        await w.start(1)
        async with asyncio.timeout(60):
            while dead.exists():  # noqa: ASYNC110 (another process does it)
                await asyncio.sleep(0.02)
        assert w.folder(0).exists(), "a living one's is not"


async def test_a_server_whose_relay_is_gone_is_told_so_and_the_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.weights.relay_transport.GONE_S", 0.2)
    async with world(tmp_path, 2, megabytes=1) as w:
        await w.kill(1)
        await w.transport.prepare(1)
        await w.transport.arrive(w.engines(), 1)
        with pytest.raises(EngineError, match=r"s1: cannot load version 1: relay http://127.0.0.1:\d+ is gone"):
            await w.transport.deliver(w.engines(), 1)
        assert w.servers[0].version == 1


async def test_why_a_relay_never_comes_is_told_once_and_again_where_its_weights_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.weights.relay_transport.GONE_S", 0.3)
    monkeypatch.setenv("ASYNCRL_TOKEN", "a" * 32)  # the first relay's; the run shows none, and there is no second
    w = World(tmp_path, 2, megabytes=1)
    await w.start(0)
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", w.ports[0])
                    break
                await asyncio.sleep(0.02)
            writer.close()
            watching = tasks.create_task(w.transport.watch())
            await asyncio.sleep(1.0)
            for engine, why in ((0, "it answered 401: set ASYNCRL_TOKEN"), (1, "Cannot connect")):
                with pytest.raises(EngineError, match=rf"relay http://127.0.0.1:\d+ is gone \({why}"):
                    await w.transport.deliver([w.engines()[engine]], 1)
            watching.cancel()
        assert sorted(note.partition("(")[0].split(" ", 2)[2] for note in w.notes) == ["does not come "] * 2
        assert any("401: set ASYNCRL_TOKEN" in note for note in w.notes)
    finally:
        w.trainer.outlet.close()
        await w.kill(0)


async def test_a_relay_without_the_runs_token_is_told_so_by_who_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started by hand, where the run drew a token: anyone controls it."""
    monkeypatch.delenv("ASYNCRL_TOKEN", raising=False)
    async with world(tmp_path, 1, megabytes=1) as w:
        w.trainer.outlet.close()
        w.trainer.outlet = Outlet("127.0.0.1", "a" * 32)
        await w.transport.prepare(1)
        await w.transport.arrive(w.engines(), 1)
        with pytest.raises(EngineError, match=r"s0: cannot load version 1: .* not the run's token; set ASYNCRL_TOKEN"):
            await w.transport.deliver(w.engines(), 1)
        assert len(w.notes) == 1 and "set ASYNCRL_TOKEN" in w.notes[0]


async def test_full_memory_is_one_line_and_costs_the_other_relays_nothing(tmp_path: Path) -> None:
    """The master's memory is full: the next takes from the trainer in its place, and what was there before stays."""
    async with world(tmp_path, 2, megabytes=1) as w:
        await w.broadcast(1)
        (w.folder(0) / ".v2.part").write_text("in the way, as a full memory would be")
        await w.transport.prepare(2)
        await w.transport.arrive(w.engines(), 2)
        with pytest.raises(EngineError, match=r"s0: cannot load version 2: .*no room for version 2 .*keep_versions"):
            await w.transport.deliver(w.engines(), 2)
        assert w.servers[1].version == 2
        assert w.state(0).versions == [1]
        assert len(w.notes) == 1 and "no room for version 2 (0.00 GB)" in w.notes[0]
        (w.folder(0) / ".v2.part").unlink()
        await w.broadcast(3)
        assert [server.version for server in w.servers] == [3, 3]


async def test_killing_any_relay_at_any_moment_never_lets_anything_corrupt_be_loaded(tmp_path: Path) -> None:
    """The servers compare what they load (``relays.PlayedServer``). bench/relay.py does this a hundred times."""
    rng = random.Random(0)
    async with world(tmp_path, 3, megabytes=8) as w:
        for version in range(1, 6):
            victim = rng.randrange(3)
            others = [i for i in range(3) if i != victim]
            await w.transport.prepare(version)
            await asyncio.sleep(rng.uniform(0, 0.05))
            await w.kill(victim)
            await w.transport.arrive(w.engines(*others), version)
            await w.transport.deliver(w.engines(*others), version)
            await w.without(victim)
            await w.start(victim)
            await w.transport.deliver(w.engines(victim), version)
            assert [server.version for server in w.servers] == [version] * 3
