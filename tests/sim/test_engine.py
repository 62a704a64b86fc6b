"""The simulated server behind the Engine port: its streams' times against a step-by-step reference."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, GenerateRequest
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.loop import run

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
