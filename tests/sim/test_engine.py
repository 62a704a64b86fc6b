"""The simulated server behind the Engine port: its streams' times against a step-by-step reference."""

from __future__ import annotations

import asyncio
import random
import sys
from array import array
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, EngineRejected, GenerateRequest
from asyncrl.sim.engine import GENERATED, SimEngine
from asyncrl.sim.loop import VirtualLoop, run

from .reference import Job, Reference, Tokens

COST = CostModel(k1=1.2345e-5, k2=0.0101234, k3=0.00107891, k4=0.0053217, k5=1.1317e-4)
"""Odd figures, so that no event falls on a step's end by chance."""


def engine(length: int = 50, **kwargs: object) -> SimEngine:
    return SimEngine("s", rng=random.Random(0), lengths=lambda rng, ids: length, cost=COST, **kwargs)  # type: ignore[arg-type]


def request(rid: str = "a", prompt: int = 10, limit: int = 1000, n: int = 1) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=[1] * prompt, max_new_tokens=limit, n=n)


async def collect(server: SimEngine, wanted: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in server.generate(wanted)]


def now() -> float:
    return asyncio.get_running_loop().time()


# --- against the reference

OBSERVATION = (7, 8, 9)
LENGTHS = tuple(range(3, 40, 6))
"""What a request's first token says about its response's length."""


class Work:
    """A random script: batches of requests that arrive together, aborts, pauses with or without a load, slowness."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.options = {
            "max_running": rng.choice([1, 2, 3, 8]),
            "max_tokens": rng.choice([110, 110, 150, 250, 100_000]),
            "stream_interval": rng.choice([0, 0, 1, 5]),
            "chunked_prefill": rng.choice([0, 0, 1, 4, 16, 64]),
            "prefix_cache": rng.random() < 0.7,
        }
        self.script: list[tuple[float, str, list[tuple[Tokens, int, int]]]] = []
        """(time, what, the requests that arrive: tokens, limit, turns)."""
        time, paused = 0.0, False
        for _ in range(rng.randint(1, 12)):
            kind = rng.choice(["arrive"] * 5 + ["abort", "abort", "pause", "load", "slow"])
            if paused and kind in ("pause", "load"):
                kind = "resume"
            paused = {"pause": True, "load": True, "resume": False}.get(kind, paused)
            batch = []
            if kind == "arrive":
                for _ in range(rng.choice([1, 1, 2, 4])):
                    head = (rng.randrange(len(LENGTHS)),) + (1,) * rng.randint(0, 9)
                    batch.append((head + (2,) * rng.randint(0, 20), rng.choice([5, 17, 40]), rng.randint(1, 2)))
            self.script.append((time, kind, batch))
            time += rng.choice([0.0003, 0.0117, 0.05, 0.31]) * rng.uniform(0.9, 1.1)
        if paused:
            self.script.append((time + 1.7, "resume", []))

    def followed(self, tokens: Tokens, output: Tokens) -> Tokens | None:
        """The second turn's input, if it fits."""
        longer = tokens + output + OBSERVATION
        return longer if len(longer) + 40 <= 110 else None

    def simulated(self) -> tuple[list[list[tuple[float, int, str | None, int]]], SimEngine]:
        replies: list[list[tuple[float, int, str | None, int]]] = []

        async def one(server: SimEngine, tokens: Tokens | None, limit: int, turns: int) -> None:
            while tokens is not None and turns:
                chunks: list[tuple[float, int, str | None, int]] = []
                rid, output = str(len(replies)), ()
                replies.append(chunks)
                wanted = GenerateRequest(rid=rid, input_ids=array("i", tokens), max_new_tokens=limit)
                async for c in server.generate(wanted):
                    chunks.append((now(), len(c.output_ids), c.finish_reason, c.cached_tokens))
                    output += tuple(c.output_ids)
                turns -= 1
                tokens = self.followed(tokens, output) if chunks[-1][2] == "stop" else None

        async def main() -> SimEngine:
            server = SimEngine(
                "s",
                rng=random.Random(0),
                lengths=lambda rng, ids: LENGTHS[ids[0]],
                cost=COST,
                load_s=0.0,
                **self.options,
            )
            async with asyncio.TaskGroup() as group:
                for time, kind, batch in self.script:
                    await asyncio.sleep(time - now())
                    for tokens, limit, turns in batch:
                        group.create_task(one(server, tokens, limit, turns))
                    if kind == "abort" and replies:
                        await server.abort(str(len(replies) // 2))
                    elif kind in ("pause", "load"):
                        await server.pause()
                        if kind == "load":
                            await server.load_from_disk("", 1)
                    elif kind == "resume":
                        await server.resume()
                    elif kind == "slow":
                        server.slow(2.7)
            return server

        server = run(main())
        return replies, server

    def expected(self) -> tuple[list[list[tuple[float, int, str | None, int]]], Reference]:
        jobs: list[Job] = []
        turns_of: dict[Job, tuple[int, int]] = {}

        def arrive(tokens: Tokens, limit: int, turns: int) -> None:
            job = Job(tokens=tokens, remaining=LENGTHS[tokens[0]], budget=limit)
            jobs.append(job)
            turns_of[job] = (limit, turns)
            reference.arrive(job)

        def ended(job: Job) -> None:
            limit, turns = turns_of[job]
            longer = self.followed(job.tokens, job.whole[len(job.tokens) :])
            if job.finish_reason == "stop" and turns > 1 and longer:
                arrive(longer, limit, turns - 1)

        reference = Reference(COST, on_end=ended, **self.options)  # type: ignore[arg-type]

        def event(kind: str, batch: list[tuple[Tokens, int, int]]) -> None:
            for tokens, limit, turns in batch:
                arrive(tokens, limit, turns)
            if kind == "abort" and jobs:
                reference.abort(jobs[len(jobs) // 2])
            elif kind in ("pause", "load"):
                reference.pause()
                if kind == "load":
                    reference.load()
            elif kind == "resume":
                reference.resume()
            elif kind == "slow":
                reference.slow = 2.7

        for time, kind, batch in self.script:
            reference.at(time, lambda kind=kind, batch=batch: event(kind, batch))  # type: ignore[misc]
        reference.run()
        return [job.chunks for job in jobs], reference


@given(st.integers(0, 10**9))
@settings(deadline=None, max_examples=150)
def test_every_chunk_comes_when_the_reference_says(seed: int) -> None:
    work = Work(seed)
    expected, reference = work.expected()
    replies, engine = work.simulated()
    assert [[c[1:] for c in chunks] for chunks in replies] == [[c[1:] for c in chunks] for chunks in expected]
    assert [c[0] for chunks in replies for c in chunks] == pytest.approx([c[0] for chunks in expected for c in chunks])
    server = engine.server
    assert (server.steps, server.prefilled, server.preemptions) == (
        reference.steps,
        reference.prefilled,
        reference.preemptions,
    )
    assert server.busy_s == pytest.approx(reference.busy_s)
    assert server.cached_tokens == len(reference.held)
    assert (server.running, len(server.waiting), server.used_tokens) == (0, 0, 0)


# --- the port's promises


def test_ids_count_down_to_the_end_of_turn() -> None:
    chunks = run(collect(engine(5), request()))
    assert [c.output_ids for c in chunks] == [array("i", [GENERATED + r for r in (4, 3, 2, 1, 0)])]
    assert [c.finish_reason for c in chunks] == ["stop"]
    assert chunks[0].logprobs == array("f", [-0.5] * 5)
    assert chunks[0].versions == array("i", [0] * 5)


def test_very_long_responses_count_down_as_well() -> None:
    length = (1 << 20) + 5
    chunks = run(collect(engine(length), request(limit=7)))
    assert chunks[0].output_ids == array("i", range(GENERATED + length - 1, GENERATED + length - 8, -1))


@given(st.integers(1, 40), st.integers(0, 40), st.booleans())
@settings(deadline=None, max_examples=30)
def test_an_interrupted_response_goes_on_to_the_same_end(length: int, wait_steps: int, as_array: bool) -> None:
    async def main() -> None:
        first, second = engine(length), engine(999)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(first, request()))
            await asyncio.sleep(0.001 + wait_steps * 0.016)
            await first.pause()
        partial = [i for c in task.result() for i in c.output_ids]
        if task.result()[-1].finish_reason == "abort" and partial:
            ids = [1] * 10 + partial
            rest = await collect(
                second,
                GenerateRequest(
                    rid="b", input_ids=array("i", ids) if as_array else ids, max_new_tokens=1000 - len(partial)
                ),
            )
            partial += [i for c in rest for i in c.output_ids]
            assert rest[-1].finish_reason == "stop"
            assert partial == [GENERATED + r for r in range(length - 1, -1, -1)]

    run(main())


def test_lengths_hear_the_request() -> None:
    server = SimEngine("s", rng=random.Random(0), lengths=lambda rng, ids: 3 * len(ids))
    assert [len(c.output_ids) for c in run(collect(server, request(prompt=7)))] == [21]


def test_length_limit_ends_a_response() -> None:
    chunks = run(collect(engine(100), request(limit=30)))
    assert sum(len(c.output_ids) for c in chunks) == 30
    assert chunks[-1].finish_reason == "length"


def test_a_measurement_goes_on_to_the_length_limit() -> None:
    asked = GenerateRequest(rid="a", input_ids=[1], max_new_tokens=30, ignore_eos=True)
    assert [(len(c.output_ids), c.finish_reason) for c in run(collect(engine(3), asked))] == [(30, "length")]


def test_requests_it_cannot_hold_are_rejected() -> None:
    with pytest.raises(EngineRejected, match="exceed its context"):
        run(collect(engine(context_length=50), request(prompt=30, limit=30)))
    with pytest.raises(EngineRejected, match="exceed its context"):
        run(collect(engine(max_tokens=50), request(prompt=30, limit=30)))
    with pytest.raises(EngineRejected, match="0 prompt tokens"):
        run(collect(engine(), request(prompt=0)))


def test_an_id_that_is_running_is_rejected_and_the_running_one_goes_on() -> None:
    async def main() -> None:
        server = engine(20)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(server, request("a")))
            await asyncio.sleep(0.05)
            with pytest.raises(EngineRejected, match="'a' is already running"):
                await collect(server, request("a"))
        assert task.result()[-1].finish_reason == "stop"

    run(main())


def test_max_running_and_the_kv_budget_are_kept() -> None:
    async def main() -> None:
        server = engine(60, max_tokens=200, max_running=5, stream_interval=1)
        most = 0

        async def one(i: int) -> None:
            nonlocal most
            async for _ in server.generate(request(str(i), 20, 100)):
                load = await server.load()
                most = max(most, load.running)
                assert load.used_tokens <= 200
                assert server.server.cached_tokens <= 200

        async with asyncio.TaskGroup() as group:
            for i in range(12):
                group.create_task(one(i))
        assert most == 5
        assert server.server.preemptions > 0

    run(main())


def test_group_members_share_their_prompt_in_the_cache_and_a_load_flushes_it() -> None:
    async def main() -> None:
        server = engine(5)
        first = await collect(server, request("a", 30))
        second = await collect(server, request("b", 30))
        assert [first[0].cached_tokens, second[0].cached_tokens] == [0, 29]
        await server.pause()
        await server.resume()
        assert (await collect(server, request("c", 30)))[0].cached_tokens == 29
        await server.pause()
        await server.load_from_disk("", 1)
        await server.resume()
        assert (await collect(server, request("d", 30)))[0].cached_tokens == 0
        assert server.server.prefilled == 30 + 1 + 1 + 30

    run(main())


def test_a_load_waits_for_running_requests_and_no_request_mixes_versions() -> None:
    async def main() -> None:
        server = engine(30, load_s=2.0)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(collect(server, request("a")))
            await asyncio.sleep(0.1)
            loading = group.create_task(server.load_from_disk("", 7))
            await asyncio.sleep(0)
            waiting = group.create_task(collect(server, request("b")))
            await asyncio.sleep(1.9)
            assert running.done() and not loading.done() and server.version == 0
        assert set(running.result()[0].versions) == {0}
        assert set(waiting.result()[0].versions) == {7}

    run(main())


def test_leaving_early_frees_the_slot() -> None:
    async def main() -> None:
        server = engine(1000, stream_interval=1, max_running=1)
        stream = server.generate(request())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await server.load()).running == 0
        assert (await collect(server, request("b", limit=3)))[-1].finish_reason == "length"

    run(main())


class CancellingLoop(VirtualLoop):
    """Cancels ``victim`` at its ``left``-th turn from now."""

    left = 0
    victim: asyncio.Task[None] | None = None

    def _run_once(self) -> None:
        self.left -= 1
        if self.left == 0 and self.victim is not None:
            self.victim.cancel()
        super()._run_once()


def cancelled_at(turn: int, main: Coroutine[Any, Any, None]) -> bool:
    """Run ``main`` and cancel it at the loop's ``turn``-th turn; False if it had ended before."""
    loop = CancellingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        async def outer() -> bool:
            async with asyncio.TaskGroup() as group:
                loop.victim = group.create_task(main)
                loop.left = turn
            return loop.left <= 0

        return runner.run(outer())


@pytest.mark.parametrize("hung", [False, True])
def test_cancelling_at_any_await_leaves_nothing_behind(hung: bool) -> None:
    """Clients, a pause and a load are cancelled at each turn of the loop; also while the server hangs."""

    async def main() -> None:
        server = engine(12, stream_interval=3, max_running=2, max_tokens=1100)
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(4):
                    group.create_task(collect(server, request(str(i), n=1 + i % 2)))
                await asyncio.sleep(0.05)
                if hung:
                    server.hang(True)
                    await asyncio.sleep(1)
                    server.hang(False)
                await server.pause()
                await server.load_from_disk("", 1)
                await server.resume()
                await collect(server, request("last"))
        finally:
            server.hang(False)
            assert (server.server.running, len(server.server.waiting)) == (0, 0)
            assert server.server.used_tokens == 0

    turn = 1
    while cancelled_at(turn, main()):
        turn += 1
    assert turn > 20


def test_one_script_gives_one_trace() -> None:
    for seed in range(5):
        assert Work(seed).simulated()[0] == Work(seed).simulated()[0]


def test_the_work_of_an_event_does_not_grow_with_the_running_sequences() -> None:
    """The function calls of a request are counted, not timed."""

    def calls_per_request(running: int) -> float:
        async def main() -> None:
            rng = random.Random(0)
            server = SimEngine("s", rng=rng, lengths=lambda r, ids: r.randint(200, 600), max_running=running)

            async def client(i: int) -> None:
                for turn in range(2):
                    ids = array("i", [1 + i] * 10)
                    await collect(server, GenerateRequest(rid=f"{i}/{turn}", input_ids=ids, max_new_tokens=1000))

            async with asyncio.TaskGroup() as group:
                for i in range(running):
                    group.create_task(client(i))

        count = 0

        def counting(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counting)
        try:
            run(main())
        finally:
            sys.setprofile(None)
        return count / (2 * running)

    assert calls_per_request(512) < 1.3 * calls_per_request(32)
