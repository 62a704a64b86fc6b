"""Rows that are kept and used again: what is found, what is never found, and that replies are those of an engine that
keeps nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.serve import kv_cache
from asyncrl.serve.loop import Engine
from asyncrl.serve.model import Model
from asyncrl.serve.prefix_cache import PrefixCache, key_of
from asyncrl.serve.scheduler import Sequence

from .harness import Client, logprobs, prompt, reference, serving

LONG = 1500


def cached(reply: dict[str, Any]) -> int:
    return int(reply["meta_info"]["cached_tokens"])


def exact(reply: dict[str, Any], model: Any, ids: list[int]) -> bool:
    return logprobs(reply) == pytest.approx(reference(model, ids, reply["output_ids"]), abs=1e-4)


async def dialogue(client: Client, ids: list[int], tokens: int = 6) -> tuple[dict[str, Any], list[int]]:
    """A reply, and the tokens so far."""
    reply = await client.generate(ids, max_new_tokens=tokens)
    return reply, ids + reply["output_ids"]


# --- the search


def test_what_was_given_goes_first() -> None:
    cache = PrefixCache()
    keys = [key_of([i, i, i]) for i in range(3)]
    for key in keys:
        cache.add(key, torch.zeros(1, 2, 1, 3, 1))
    cache.given(keys[1])
    cache.trim(6)
    assert [cache.longest(key)[0] for key in keys] == [3, 0, 3]
    cache.trim(3)
    assert [cache.longest(key)[0] for key in keys] == [0, 0, 3]


short = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(
    st.lists(st.tuples(st.sampled_from(["save", "run", "remove", "trim"]), short), max_size=25),
    short,
    st.sampled_from([0, 4, 9]),
)
def test_the_longest_shared_prefix_is_found(steps: list[tuple[str, list[int]]], wanted: list[int], host: int) -> None:
    cache = PrefixCache(host)
    # Least recently used first: on the device, and in host memory.
    saved: dict[tuple[int, ...], None] = {}
    hosted: dict[tuple[int, ...], None] = {}
    running: set[tuple[int, ...]] = set()
    for what, tokens in steps:
        key, name = key_of(tokens), tuple(tokens)
        match what:
            case "save":
                cache.add(key, torch.empty(len(tokens)))
                if name not in running:
                    saved.pop(name, None)
                    hosted.pop(name, None)
                    saved[name] = None
            case "run":
                cache.add(key, Sequence(rid="", prompt=tokens, max_new=1))
                saved.pop(name, None)
                hosted.pop(name, None)
                running.add(name)
            case "remove":
                cache.remove(key)
                saved.pop(name, None)
                hosted.pop(name, None)
                running.discard(name)
            case _:
                cache.trim(5)
                while sum(map(len, saved)) > 5:
                    del saved[oldest := next(iter(saved))]
                    if len(oldest) <= host:
                        hosted[oldest] = None
                    while sum(map(len, hosted)) > host:
                        del hosted[next(iter(hosted))]
        assert (cache.saved, cache.hosted) == (sum(map(len, saved)), sum(map(len, hosted)))
    shares = [_shared(wanted, tokens) for tokens in {*saved, *hosted, *running}]
    count, key = cache.longest(key_of(wanted))
    assert count == max(shares, default=0)
    if count:
        assert key.startswith(key_of(wanted[:count]))
        assert cache[key] is cache[key]


def _shared(a: list[int], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- what is used again


async def test_a_dialogue_computes_only_what_is_new(client: Client, model: Any) -> None:
    """Over several length classes. The last token of a reply has no rows yet: nothing has read it."""
    ids, before = prompt(1, 20), 0
    for turn in range(6):
        reply, after = await dialogue(client, ids)
        assert cached(reply) == before
        assert exact(reply, model, ids)
        before = len(after) - 1
        ids = after + prompt(100 + turn, 30)


@pytest.mark.parametrize("length", [5, 60, 200])
async def test_a_group_computes_its_prompt_once(client: Client, model: Any, length: int) -> None:
    """Few tokens are computed beside each other instead: waiting for them costs more."""
    ids = prompt(2, length)
    replies = await client.generate(ids, n=4, max_new_tokens=20)
    assert sorted(map(cached, replies)) == ([0, 0, 0, 0] if length == 5 else [0, *[length - 1] * 3])
    assert all(exact(reply, model, ids) for reply in replies)
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 4


async def test_a_running_request_lends_its_prompt(client: Client, model: Any) -> None:
    ids = prompt(3, 100)
    async with asyncio.TaskGroup() as group:
        group.create_task(client.generate(ids, rid="long", max_new_tokens=LONG))
        await client.until_running(1)
        longer = [*ids, 7, 8]
        reply = await client.generate(longer, max_new_tokens=10)
        assert (cached(reply), exact(reply, model, longer)) == (100, True)
        await client.post("/abort_request", {"rid": "long"})


async def test_prompts_that_part_in_the_middle_share_what_is_before(client: Client, model: Any) -> None:
    """And the rows that were shared stay for the next."""
    first = prompt(4, 150)
    await client.generate(first, max_new_tokens=5)
    for at in (149, 90, 64, 1):
        ids = [*first[:at], (first[at] + 1) % 90 + 2, *prompt(5, 40)]
        reply = await client.generate(ids, max_new_tokens=10)
        assert (cached(reply), exact(reply, model, ids)) == (at, True)
    assert cached(await client.generate(first, max_new_tokens=1)) == 149


async def test_an_aborted_request_goes_on_with_its_rows(client: Client, model: Any) -> None:
    ids = prompt(6, 30)
    async for chunk in client.stream(ids, rid="r", max_new_tokens=LONG, stream_interval=8):
        assert cached(chunk) == 0
        ids += chunk["output_ids"]
        if chunk["meta_info"]["completion_tokens"] == 8:
            await client.post("/abort_request", {"rid": "r"})
    reply = await client.generate(ids, max_new_tokens=10)
    assert (cached(reply), exact(reply, model, ids)) == (len(ids) - 1, True)


async def test_a_retracted_request_goes_on_with_its_rows(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    original = Model._prefill_chunk

    def counted(self: Model, arena: Any, row: int, tokens: Any, positions: Any, real: torch.Tensor) -> torch.Tensor:
        computed.append(int(real.sum()))
        return original(self, arena, row, tokens, positions, real)

    monkeypatch.setattr(Model, "_prefill_chunk", counted)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(prompt(7, 40), max_new_tokens=200))
        await client.until_running(1)
        await client.post("/pause_generation", {"mode": "retract"})
        await client.post("/continue_generation")
    assert computed == [40, 1]
    assert cached(task.result()) == 0, "of its first run, as SGLang counts"


# --- what is not


async def test_old_rows_give_way_and_the_budget_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens: two dialogues of a hundred fit beside what runs, and the one that was used last stays."""
    held: list[int] = []
    original = Engine._publish_load

    def watched(self: Engine) -> None:
        held.append(self.scheduler.used + self._cache.kept)
        original(self)

    monkeypatch.setattr(Engine, "_publish_load", watched)
    async with serving(folder, max_tokens=300) as client:
        for seed in (1, 2, 1, 3):
            await client.generate(prompt(seed, 95), max_new_tokens=5)
        assert [cached(await client.generate(prompt(seed, 95), max_new_tokens=5)) for seed in (1, 2)] == [94, 0]
        await client.generate(prompt(4, 250), max_new_tokens=50)
        assert cached(await client.generate(prompt(1, 95), max_new_tokens=5)) == 0
    assert 200 < max(held) <= 300


async def test_host_memory_keeps_what_the_device_has_no_room_for(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that wait while others run, up to its own bound."""
    moved = 0

    def to_host(rows: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        moved += 1
        return rows.clone()  # elsewhere, as from a device

    monkeypatch.setattr(kv_cache, "_to_host", to_host)
    async with serving(folder, max_tokens=300, host_kv_tokens=320) as client:
        waiting = [await dialogue(client, prompt(seed, 95)) for seed in (1, 2, 3, 4, 5)]
        await client.generate(prompt(6, 250), max_new_tokens=40)  # needs all of the device
        cache = client.server.engine._cache
        assert (cache.kept, cache.hosted, moved) == (289, 300, 5)
        for _, ids in (waiting[4], waiting[0]):  # used last, and first
            reply = await client.generate([*ids, 7, 8], max_new_tokens=5)
            assert cached(reply) == (100 if ids is waiting[4][1] else 0)
            assert exact(reply, model, [*ids, 7, 8])
        await client.post("/flush_cache")
        assert (cache.kept, cache.hosted) == (0, 0)


@pytest.mark.gpu
async def test_rows_go_to_pinned_host_memory_and_back(folder: Path, model: Any) -> None:
    async with serving(folder, device="cuda", max_tokens=300, host_kv_tokens=2000, kv_reuse=True) as client:
        waiting = [await dialogue(client, prompt(seed, 95)) for seed in (1, 2, 3)]
        await client.generate(prompt(6, 250), max_new_tokens=40)
        cache = client.server.engine._cache
        tensors = [cache._prefixes._holders[key] for key in cache._prefixes._host]
        assert len(tensors) == 3
        assert all(isinstance(rows, torch.Tensor) and rows.is_pinned() for rows in tensors)
        async with serving(folder, device="cuda", kv_reuse=True) as other:  # they can be given to others from there
            reply = await other.generate(waiting[0][1], kv_from=client.url, max_new_tokens=5)
            assert cached(reply) == 100
            assert exact(reply, model, waiting[0][1])
        for _, ids in waiting:
            reply = await client.generate([*ids, 7, 8], max_new_tokens=5)
            assert cached(reply) == 100
            assert exact(reply, model, [*ids, 7, 8])


async def test_a_flush_drops_all(client: Client) -> None:
    for path in ("/flush_cache", "/flush_cache?timeout=5"):
        await client.generate(prompt(1, 50), max_new_tokens=5)
        assert cached(await client.generate(prompt(1, 50), max_new_tokens=5)) == 49
        await client.post(path)
        assert cached(await client.generate(prompt(1, 50), max_new_tokens=5)) == 0


@pytest.mark.parametrize("flush", [True, False])
async def test_new_weights_never_meet_rows_of_old_ones(
    client: Client, other_folder: Path, other_model: Any, flush: bool
) -> None:
    _, ids = await dialogue(client, prompt(8, 50))
    await client.post("/update_weights_from_disk", {"model_path": str(other_folder), "flush_cache": flush})
    reply = await client.generate(ids, max_new_tokens=5)
    assert (cached(reply), exact(reply, other_model, ids)) == (0, True)


async def test_a_request_that_keeps_old_rows_over_an_update_lends_none(
    client: Client, other_folder: Path, other_model: Any
) -> None:
    """Neither while it runs nor when it has ended; those that begin after the update lend to each other."""
    ids = prompt(9, 50)
    async with asyncio.TaskGroup() as group:
        mixed = group.create_task(client.generate(ids, rid="mixed", max_new_tokens=LONG))
        await client.until_running(1)
        await client.post("/pause_generation", {"mode": "in_place"})
        await client.post("/update_weights_from_disk", {"model_path": str(other_folder), "flush_cache": False})
        await client.post("/continue_generation")
        reply = await client.generate(ids, max_new_tokens=5)
        assert (cached(reply), exact(reply, other_model, ids)) == (0, True)
        assert cached(await client.generate(ids, max_new_tokens=5)) == 49
        await client.post("/abort_request", {"rid": "mixed"})
        ended = ids + (await mixed)["output_ids"]
    reply = await client.generate(ended, max_new_tokens=5)
    assert cached(reply) <= 50 + 5
    assert exact(reply, other_model, ended)


# --- the same replies


async def test_replies_are_those_of_an_engine_that_keeps_nothing(folder: Path) -> None:
    """Sampled, one after another, from prompts that share what they may with those before; and room for about four."""
    rng = random.Random(0)
    seen: list[list[int]] = [[5]]
    reused = 0
    async with serving(folder, max_tokens=700) as keeps, serving(folder, max_tokens=700, prefix_cache=False) as plain:
        for _ in range(40):
            start, more = rng.choice(seen), rng.choice((0, 1, 30, 70))
            ids = start[: rng.randint(1, len(start))] + [rng.randrange(2, 90) for _ in range(more)]
            sampling = {"max_new_tokens": rng.randint(1, 40), "temperature": rng.choice((0.0, 1.0))}
            ours, theirs = await keeps.generate(ids, **sampling), await plain.generate(ids, **sampling)
            assert ours["output_ids"] == theirs["output_ids"]
            assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)
            assert cached(theirs) == 0
            reused += cached(ours)
            seen.append((ids + ours["output_ids"])[:300])
    assert reused > 1000


async def test_many_at_once_are_exact_whoever_lends_to_whom(folder: Path, model: Any) -> None:
    """Dialogues and groups that join, end, are aborted and are put back for lack of room, all at the same time."""
    rng = random.Random(1)
    stems = [prompt(seed, 90) for seed in range(3)]

    async def talk(client: Client, name: str, plan: random.Random) -> list[tuple[list[int], dict[str, Any]]]:
        ids, turns = plan.choice(stems)[: plan.randint(1, 90)], []
        for turn in range(4):
            ids = ids + [plan.randrange(2, 90) for _ in range(plan.randint(0, 30))]
            reply = await client.generate(ids, rid=f"{name}-{turn}", max_new_tokens=plan.randint(1, 60))
            turns.append((ids, reply))
            ids = ids + reply["output_ids"]
        return turns

    async with serving(folder, max_tokens=900, max_running=8) as client:
        async with asyncio.TaskGroup() as group:
            plans = [random.Random(rng.random()) for _ in range(10)]
            talks = [group.create_task(talk(client, f"{i:02}", plan)) for i, plan in enumerate(plans)]
            while not all(t.done() for t in talks):
                await client.post("/abort_request", {"rid": f"{rng.randrange(10):02}-{rng.randrange(4)}"})
                await asyncio.sleep(0.01)
        replies = [turn for t in talks for turn in t.result()]
    assert sum(cached(reply) for _, reply in replies) > 500
    assert all(exact(reply, model, ids) for ids, reply in replies if reply["output_ids"])
