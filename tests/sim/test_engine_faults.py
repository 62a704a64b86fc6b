"""Faults of the simulated server: what the runtime gets to see of each, and that each ends."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from asyncrl.ports import Chunk, EngineError, EngineRejected, GenerateRequest
from asyncrl.sim.engine import ABORT_TIMEOUT_S, HEALTH_TIMEOUT_S, SimEngine
from asyncrl.sim.loop import run
from asyncrl.sim.process import NOTICE_S

from .test_engine import COST, collect, now, request


def engine(length: int = 1000, **kwargs: object) -> SimEngine:
    options = {"stream_interval": 10, "idle_timeout_s": 20.0, "control_timeout_s": 30.0, **kwargs}
    return SimEngine("s", rng=random.Random(0), lengths=lambda rng, ids: length, cost=COST, **options)  # type: ignore[arg-type]


async def broken(server: SimEngine, wanted: GenerateRequest) -> tuple[list[Chunk], str]:
    """What came of a request that must break, and why it broke."""
    received: list[Chunk] = []
    with pytest.raises(EngineError) as failure:
        async for chunk in server.generate(wanted):
            received.append(chunk)
    assert not isinstance(failure.value, EngineRejected)
    assert "\n" not in str(failure.value) and str(failure.value).startswith("s: ")
    return received, str(failure.value)


async def serves(server: SimEngine) -> bool:
    return (await collect(server, request("probe", limit=5)))[-1].finish_reason == "length"


# --- kill and restart


def test_death_breaks_every_request_off_and_refuses_new_ones() -> None:
    async def main() -> None:
        server = engine(start_s=15.0)
        await server.load_from_disk("", 4)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(broken(server, request()))
            await asyncio.sleep(0.25)
            loading = group.create_task(failing(server.load_from_disk("", 5)))
            await asyncio.sleep(0.75)
            server.kill()
            await asyncio.sleep(0)
        received, why = task.result()
        assert received and all(len(c.output_ids) == 10 for c in received), "what was streamed stays, the rest is lost"
        assert "connection broke" in why and "connection broke" in loading.result()
        assert now() == 1.5  # the first load's time and the wait
        assert not await server.health()
        for call in (collect(server, request("b")), server.pause(), server.resume(), server.load()):
            assert "connection refused" in await failing(call)
        await server.abort("x")  # nothing of this client is there: the adapter does not ask
        server.restart()
        await asyncio.sleep(14)
        assert not await server.health()
        assert (await server.connect()).version == 0
        assert now() == 16.5
        assert (server.server.running, server.server.cached_tokens) == (0, 0)
        assert await serves(server)

    async def failing(call: object) -> str:
        with pytest.raises(EngineError) as failure:
            await call  # type: ignore[misc]
        return str(failure.value)

    run(main())


def test_a_connection_waits_for_a_server_only_so_long() -> None:
    async def main() -> None:
        server = engine(connect_timeout_s=40.0)
        server.kill()
        with pytest.raises(EngineError, match=r"not ready within engine.connect_timeout_s \(40 s\)"):
            await server.connect()
        assert now() == 40.0

    run(main())


def test_a_restart_forgets_a_pause_and_a_hang() -> None:
    async def main() -> None:
        server = engine()
        await server.pause()
        server.hang(True)
        server.restart()
        assert await server.health()
        assert await serves(server)

    run(main())


def test_a_kill_during_the_start_is_not_forgotten() -> None:
    async def main() -> None:
        server = engine(start_s=5.0)
        server.restart()
        await asyncio.sleep(1)
        server.kill()
        await asyncio.sleep(10)
        assert not await server.health()
        server.restart()
        await asyncio.sleep(5)
        assert await server.health()

    run(main())


# --- hang


def test_a_hung_server_runs_its_callers_into_their_deadlines_and_then_goes_on_where_it_was() -> None:
    async def main() -> None:
        server = engine(100)
        whole = [len(c.output_ids) for c in await collect(server, request("a"))]
        alone = now()
        async with asyncio.TaskGroup() as group:
            survivor = group.create_task(collect(server, request("b", prompt=10)))
            await asyncio.sleep(alone / 2)
            server.hang(True)
            began = now()
            steps = server.server.steps
            assert not await server.health()
            assert now() == pytest.approx(began + HEALTH_TIMEOUT_S)
            await asyncio.sleep(5)
            assert server.server.steps == steps, "time stands still"
            server.hang(False)
        assert [len(c.output_ids) for c in survivor.result()] == whole
        assert now() == pytest.approx(2 * alone + 2 * HEALTH_TIMEOUT_S, abs=COST.k5 * 10)

        server.hang(True)
        began = now()
        received, why = await broken(server, request("c"))
        assert (received, now()) == ([], pytest.approx(began + 20.0))
        assert "idle_timeout_s" in why
        for call in (server.pause, server.resume, server.load):
            began = now()
            with pytest.raises(EngineError, match=r"no answer to /\w.* within 30 s: hung"):
                await call()
            assert now() == pytest.approx(began + 30.0)
        with pytest.raises(EngineError, match="no answer to /update_weights_from_disk within 30 s"):
            await server.load_from_disk("", 3)
        assert server.version == 0
        server.hang(False)
        await asyncio.sleep(1)
        assert server.version == 3, "the server found the call when it woke up"
        assert await serves(server)

    run(main())


def test_callers_that_still_wait_are_answered_when_the_hang_ends() -> None:
    async def main() -> None:
        server = engine(30)
        server.hang(True)
        async with asyncio.TaskGroup() as group:
            pausing, health = group.create_task(server.pause()), group.create_task(server.health())
            held = group.create_task(collect(server, request()))
            connecting = group.create_task(server.connect())
            await asyncio.sleep(4)
            assert not any(t.done() for t in (pausing, health, held, connecting))
            server.hang(False)
            await asyncio.sleep(0.1)
            assert pausing.done() and health.result() and connecting.done()
            await server.resume()
        assert held.result()[-1].finish_reason in ("stop", "abort")

    run(main())


def test_a_kill_ends_the_waiting_for_a_hung_server() -> None:
    async def main() -> None:
        server = engine()
        server.hang(True)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(broken(server, request()))

            async def pause() -> None:
                with pytest.raises(EngineError, match="connection broke"):
                    await server.pause()

            group.create_task(pause())
            await asyncio.sleep(2)
            server.kill()
        assert now() == 2.0
        assert task.result()[0] == []

    run(main())


def test_leaving_a_hung_server_takes_as_long_as_telling_it() -> None:
    async def main() -> None:
        server = engine(stream_interval=1)
        async with aclosing(server.generate(request())) as chunks:
            await anext(chunks)
            server.hang(True)
            began = now()
        assert now() == pytest.approx(began + ABORT_TIMEOUT_S)
        server.hang(False)
        assert (await server.load()).running == 0

    run(main())


# --- deadlines without a fault


def test_a_request_that_waits_too_long_in_the_queue_is_given_up() -> None:
    async def main() -> None:
        server = engine(10_000, max_running=1)
        async with asyncio.TaskGroup() as group:
            group.create_task(collect(server, request("a", limit=3000)))
            await asyncio.sleep(0)
            received, why = await broken(server, request("b"))
        assert received == [] and "idle_timeout_s" in why

    run(main())


def test_a_request_that_streams_is_given_up_at_its_own_deadline_only() -> None:
    async def main() -> None:
        server = engine(100_000, request_timeout_s=55.0, context_length=200_000)
        received, why = await broken(server, request(limit=100_000))
        assert "request_timeout_s" in why and now() == pytest.approx(55.0)
        assert sum(len(c.output_ids) for c in received) > 1900
        assert (await server.load()).running == 0

    run(main())


def test_without_a_stream_silence_says_nothing() -> None:
    async def main() -> None:
        server = engine(3000, stream_interval=0)
        assert len((await collect(server, request(limit=3000)))[0].output_ids) == 3000
        assert now() > 40.0

    run(main())


# --- slow


def test_a_slow_server_takes_longer_and_recovers() -> None:
    async def main() -> None:
        server = engine(100, prefix_cache=False)
        await collect(server, request("a"))
        normal = now()
        server.slow(3.0)
        began = now()
        await collect(server, request("b"))
        assert now() - began == pytest.approx(3 * normal)
        server.slow(1.0)
        began = now()
        await collect(server, request("c"))
        assert now() - began == pytest.approx(normal)

    run(main())


# --- partition


def test_behind_a_partition_the_server_goes_on_and_then_drops_its_lost_clients() -> None:
    async def main() -> None:
        server = engine()
        await server.load_from_disk("", 6)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(broken(server, request()))
            await asyncio.sleep(1)
            server.partition(True)
            await asyncio.sleep(0)
        assert now() == 1.5 and "connection broke" in task.result()[1]
        assert not await server.health()
        with pytest.raises(EngineError, match="connection refused"):
            await collect(server, request("b"))
        steps = server.server.steps
        await asyncio.sleep(NOTICE_S - 0.1)
        assert server.server.running == 1 and server.server.steps > steps
        await asyncio.sleep(0.2)
        assert server.server.running == 0
        server.partition(False)
        assert (await server.connect()).version == 6
        assert await serves(server)

    run(main())


def test_what_a_partition_left_behind_does_not_touch_a_new_process() -> None:
    async def main() -> None:
        server = engine(1000)
        async with asyncio.TaskGroup() as group:
            group.create_task(broken(server, request("a")))
            await asyncio.sleep(0.5)
            server.partition(True)
            server.restart()
            server.partition(False)
            task = group.create_task(collect(server, request("a", limit=300)))
        assert task.result()[-1].finish_reason == "length"

    run(main())


# --- replies


@pytest.mark.parametrize("n", [1, 2])
def test_a_dropped_reply_breaks_its_stream_before_the_last_chunk(n: int) -> None:
    async def main() -> None:
        lengths = iter([25, 500])
        server = SimEngine("s", rng=random.Random(0), lengths=lambda rng, ids: next(lengths, 500), stream_interval=10)
        server.drop_reply()
        received, why = await broken(server, request(n=n))
        assert [len(c.output_ids) for c in received] == [10] * (2 * n)
        assert all(c.finish_reason is None for c in received)
        assert "before the last token" in why
        assert server.server.running == 0
        assert await serves(server), "only one is lost"

    run(main())


@pytest.mark.parametrize("n", [1, 2])
def test_a_duplicate_breaks_the_stream_and_never_gives_a_reply_two_ends(n: int) -> None:
    async def main() -> None:
        lengths = iter([15, 40])
        server = SimEngine("s", rng=random.Random(0), lengths=lambda rng, ids: next(lengths), stream_interval=10)
        server.duplicate_reply()
        received, why = await broken(server, request(n=n))
        ends = [c.index for c in received if c.finish_reason is not None]
        assert ends == [0]
        assert sum(len(c.output_ids) for c in received if c.index == 0) == 15
        assert "unexpected reply index 0" in why
        assert server.server.running == 0

    run(main())


# --- weights


def test_corrupt_weights_are_refused_by_name_and_the_old_ones_stay() -> None:
    async def main() -> None:
        server = engine(20)
        await collect(server, request("a"))
        await server.pause()
        server.corrupt_weights()
        with pytest.raises(EngineError, match=r"^s: version 1 was refused: .*checksum"):
            await server.load_from_disk("", 1)
        assert server.version == 0
        await server.resume()
        [*_, last] = await collect(server, request("b"))
        assert set(last.versions) == {0} and last.cached_tokens > 0
        await server.pause()
        await server.load_from_disk("", 1)
        assert server.version == 1

    run(main())
