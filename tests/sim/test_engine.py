"""The simulated server: progress by the cost model, KV budget, interruption and death."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, EngineError, EngineRejected, GenerateRequest
from asyncrl.sim.engine import GENERATED, SimEngine
from asyncrl.sim.loop import run

COST = CostModel(k1=1e-5, k2=0.01, k3=0.001, k4=0.005, prefill=1e-4)


def engine(length: int = 50, **kwargs: object) -> SimEngine:
    return SimEngine("s", rng=random.Random(0), lengths=lambda rng: length, cost=COST, **kwargs)  # type: ignore[arg-type]


def request(rid: str = "a", prompt: int = 10, limit: int = 1000, n: int = 1) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=[1] * prompt, max_new_tokens=limit, n=n)


async def collect(server: SimEngine, wanted: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in server.generate(wanted)]


def now() -> float:
    return asyncio.get_running_loop().time()


def stepwise(prompts: list[int], lengths: list[int]) -> float:
    """Seconds until all are done when they start together, one decode step at a time."""
    seconds = COST.prefill * sum(prompts)
    made = [0] * len(prompts)
    while alive := [i for i, m in enumerate(made) if m < lengths[i]]:
        seconds += COST.step(len(alive), sum(prompts[i] + made[i] for i in alive))
        for i in alive:
            made[i] += 1
    return seconds


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=6), st.sampled_from([0, 1, 7]))
@settings(deadline=None, max_examples=40)
def test_completion_time_is_the_sum_of_the_steps(work: list[tuple[int, int]], interval: int) -> None:
    async def main() -> float:
        lengths = iter([length for _, length in work])
        server = SimEngine(
            "s", rng=random.Random(0), lengths=lambda rng: next(lengths), cost=COST, stream_interval=interval
        )
        async with asyncio.TaskGroup() as group:
            for i, (prompt, _) in enumerate(work):
                group.create_task(collect(server, request(str(i), prompt)))
        assert server.steps == max(length for _, length in work)
        return now()

    assert run(main()) == pytest.approx(stepwise([p for p, _ in work], [n for _, n in work]), rel=1e-6)


def test_ids_count_down_to_the_end_of_turn() -> None:
    chunks = run(collect(engine(5), request()))
    assert [i for c in chunks for i in c.output_ids] == [GENERATED + r for r in (4, 3, 2, 1, 0)]
    assert [c.finish_reason for c in chunks] == ["stop"]


@given(st.integers(1, 40), st.integers(0, 40))
@settings(deadline=None, max_examples=30)
def test_an_interrupted_response_goes_on_to_the_same_end(length: int, wait_steps: int) -> None:
    async def main() -> None:
        first, second = engine(length), engine(999)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(first, request()))
            await asyncio.sleep(0.001 + wait_steps * 0.016)
            await first.pause()
        partial = [i for c in task.result() for i in c.output_ids]
        if task.result()[-1].finish_reason == "abort" and partial:
            rest = await collect(
                second, GenerateRequest(rid="b", input_ids=[1] * 10 + partial, max_new_tokens=1000 - len(partial))
            )
            partial += [i for c in rest for i in c.output_ids]
            assert rest[-1].finish_reason == "stop"
            assert partial == [GENERATED + r for r in range(length - 1, -1, -1)]

    run(main())


def test_streams_in_steps_of_the_interval() -> None:
    chunks = run(collect(engine(20, stream_interval=8), request()))
    assert [len(c.output_ids) for c in chunks] == [8, 8, 4]
    assert [c.finish_reason for c in chunks] == [None, None, "stop"]


def test_length_limit_ends_a_response() -> None:
    chunks = run(collect(engine(100), request(limit=30)))
    assert sum(len(c.output_ids) for c in chunks) == 30
    assert chunks[-1].finish_reason == "length"


def test_kv_budget_is_never_exceeded_and_everyone_finishes() -> None:
    async def main() -> None:
        server = engine(60, max_tokens=200, stream_interval=1)
        done = 0

        async def one(i: int) -> None:
            nonlocal done
            async for _ in server.generate(request(str(i), 20, 100)):
                assert (await server.load()).used_tokens <= 200
            done += 1

        async with asyncio.TaskGroup() as group:
            for i in range(8):
                group.create_task(one(i))
        assert done == 8

    run(main())


def test_max_running_is_kept() -> None:
    async def main() -> int:
        server, most = engine(10, max_running=3), 0
        async with asyncio.TaskGroup() as group:
            for i in range(10):
                group.create_task(collect(server, request(str(i))))
            for _ in range(50):
                await asyncio.sleep(0.01)
                most = max(most, (await server.load()).running)
        return most

    assert run(main()) == 3


def test_a_paused_server_holds_new_requests_until_it_resumes() -> None:
    async def main() -> None:
        server = engine(10)
        await server.pause()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(server, request()))
            await asyncio.sleep(5)
            assert not task.done()
            await server.resume()
        assert task.result()[-1].finish_reason == "stop"
        assert now() == pytest.approx(5 + stepwise([10], [10]))

    run(main())


def test_death_breaks_every_request_off_and_refuses_new_ones() -> None:
    async def main() -> None:
        server = engine(1000, stream_interval=10)
        received: list[Chunk] = []

        async def one() -> None:
            with pytest.raises(EngineError, match="connection lost"):
                async for chunk in server.generate(request()):
                    received.append(chunk)

        async with asyncio.TaskGroup() as group:
            group.create_task(one())
            await asyncio.sleep(1)
            server.kill()
        assert received and all(len(c.output_ids) == 10 for c in received)
        assert not await server.health()
        with pytest.raises(EngineError, match="refused"):
            await collect(server, request("b"))
        server.restart()
        assert (await server.connect()).version == 0
        assert (await collect(server, request("c", limit=5)))[-1].finish_reason == "length"

    run(main())


def test_requests_it_cannot_hold_are_rejected() -> None:
    with pytest.raises(EngineRejected, match="exceed its context"):
        run(collect(engine(context_length=50), request(prompt=30, limit=30)))


def test_leaving_early_frees_the_slot() -> None:
    async def main() -> None:
        server = engine(1000, stream_interval=1, max_running=1)
        stream = server.generate(request())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await server.load()).running == 0
        assert (await collect(server, request("b", limit=3)))[-1].finish_reason == "length"

    run(main())
