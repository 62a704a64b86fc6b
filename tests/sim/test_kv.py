"""KV that a simulated server takes from another: when it comes, what it spares, and what may go wrong meanwhile."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, EngineError, GenerateRequest
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.kv import PAST_S, KvLink
from asyncrl.sim.loop import run

COST = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=0.01, k5=0.001)
TOKEN_S = 0.0001
"""A tenth of what a token's prefill takes."""
PROMPT = array("i", range(2, 202))


def fleet(kv_reuse: bool = True, length: int = 50) -> tuple[SimEngine, SimEngine]:
    peers: dict[str, SimEngine] = {}
    link = KvLink(token_s=TOKEN_S, peers=peers) if kv_reuse else None
    for name in ("a", "b"):
        peers[name] = SimEngine(
            name, rng=random.Random(0), lengths=lambda rng, ids: length, cost=COST, load_s=0.5, kv_link=link
        )
    return peers["a"], peers["b"]


async def generate(server: SimEngine, ids: array[int], rid: str = "x", kv_from: str = "") -> list[Chunk]:
    request = GenerateRequest(rid=rid, input_ids=ids, max_new_tokens=1000, kv_from=kv_from)
    return [chunk async for chunk in server.generate(request)]


def now() -> float:
    return asyncio.get_running_loop().time()


async def begun(a: SimEngine) -> array[int]:
    """A request's tokens after half of its response, on ``a``."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(generate(a, PROMPT))
        await asyncio.sleep(0.001 * len(PROMPT) + 0.01 * 25 + 0.005)
        await a.abort("x")
    return PROMPT + task.result()[-1].output_ids


def test_only_a_link_makes_a_server_give() -> None:
    async def main() -> list[str]:
        return [(await server.connect()).kv_url for pair in (fleet(), fleet(kv_reuse=False)) for server in pair]

    assert run(main()) == ["a", "b", "", ""]


def test_a_transfer_takes_the_prefill_s_place() -> None:
    async def main() -> None:
        a, b = fleet()
        ids = await begun(a)
        assert len(ids) == 225
        start = now()
        chunks = await generate(b, ids, kv_from="a")
        assert (sum(len(c.output_ids) for c in chunks), chunks[-1].finish_reason) == (25, "stop")
        assert (b.server.prefilled, chunks[-1].cached_tokens) == (1, 224)
        assert now() - start == pytest.approx(TOKEN_S * 224 + 0.001 + 0.01 * 25)
        # What is here is not taken again.
        await generate(b, ids, "y", kv_from="a")
        assert b.server.prefilled == 2

    run(main())


def test_what_was_given_is_the_first_to_be_forgotten() -> None:
    async def main() -> None:
        a, b = fleet(length=1)
        prompts = (PROMPT, array("i", range(201, 1, -1)))
        kept, moved = [ids + (await generate(a, ids))[-1].output_ids for ids in prompts]
        await generate(b, moved, kv_from="a")
        cache = a.server._cache
        assert cache is not None
        cache.evict(200)
        assert a.held(0, kept.tobytes(), 200) == 200
        assert a.held(0, moved.tobytes(), 200) <= 1

    run(main())


def test_one_transfer_comes_after_another() -> None:
    async def main() -> None:
        a, b = fleet(length=1)
        other = array("i", range(201, 1, -1))
        for ids in (PROMPT, other):
            await generate(a, ids)
        start = now()
        async with asyncio.TaskGroup() as group:
            for rid, ids in (("x", PROMPT), ("y", other)):
                group.create_task(generate(b, ids, rid, kv_from="a"))
        assert now() - start == pytest.approx(2 * TOKEN_S * 199 + 0.001 + 0.01)

    run(main())


@pytest.mark.parametrize(
    "what", ["killed", "cut off", "hung", "of another version", "empty", "unknown", "without a link"]
)
def test_where_nothing_can_be_taken_it_is_computed(what: str) -> None:
    async def main() -> None:
        a, b = fleet(kv_reuse=what != "without a link")
        ids = await begun(a)
        match what:
            case "killed":
                a.kill()
            case "cut off":
                a.partition(True)
            case "hung":
                a.hang(True)
            case "of another version":
                await b.load_from_disk("", 1)
            case "empty":
                a.kill()
                a.restart()
        await generate(b, ids, kv_from="elsewhere" if what == "unknown" else "a")
        assert b.server.prefilled == len(ids)

    run(main())


def test_a_server_that_dies_before_the_end_has_given_nothing() -> None:
    async def main() -> None:
        a, b = fleet()
        ids = await begun(a)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generate(b, ids, kv_from="a"))
            await asyncio.sleep(TOKEN_S * 100)
            assert (await b.load()).waiting == 1
            a.kill()
        assert task.result()[-1].finish_reason == "stop"
        assert b.server.prefilled == len(ids)

    run(main())


@pytest.mark.parametrize("later", [0.0, PAST_S])
def test_a_server_that_has_newer_weights_gives_what_it_held_for_a_while(later: float) -> None:
    async def main() -> None:
        a, b = fleet()
        ids = await begun(a)
        await a.pause()
        await a.load_from_disk("", 1)
        await a.resume()
        await asyncio.sleep(later)
        await generate(b, ids, kv_from="a")
        assert b.server.prefilled == (len(ids) if later else 1)

    run(main())


def test_weights_that_change_meanwhile_make_it_worthless() -> None:
    async def main() -> None:
        a, b = fleet()
        ids = await begun(a)
        b._load_s = TOKEN_S
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generate(b, ids, kv_from="a"))
            await asyncio.sleep(TOKEN_S)
            await b.load_from_disk("", 1)
        assert set(task.result()[-1].versions) == {1}
        assert b.server.prefilled == len(ids)

    run(main())


@pytest.mark.parametrize("how", ["aborted", "paused", "left", "killed"])
def test_a_request_whose_kv_is_on_its_way_can_end(how: str) -> None:
    async def main() -> None:
        a, b = fleet()
        ids = await begun(a)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generate(b, ids, kv_from="a"))
            await asyncio.sleep(TOKEN_S * 100)
            match how:
                case "aborted":
                    await b.abort("x")
                case "paused":
                    await b.pause()
                    await b.resume()
                case "left":
                    task.cancel()
                case "killed":
                    b.kill()
                    with pytest.raises(EngineError):
                        await asyncio.shield(task)
                    return
        if how != "left":
            assert [c.finish_reason for c in task.result()] == ["abort"]
        await asyncio.sleep(1.0)
        assert (b.server.running, (await b.load()).waiting, b.server.prefilled) == (0, 0, 0)
        await generate(b, ids, "y", kv_from="a")  # it came all the same
        assert b.server.prefilled == 1

    async def killed() -> None:
        try:
            await main()
        except* EngineError:
            assert how == "killed"

    run(killed())
