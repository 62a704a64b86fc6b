"""The cache against random joins, growth and leaves: every row keeps exactly its own keys, and hides the rest."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.serve.kv_cache import MIN_WIDTH, KVCache
from asyncrl.serve.scheduler import Sequence
from asyncrl.serve.spec import ModelSpec, read_spec

CONTEXT = 4 * MIN_WIDTH


def mark(sequence: Sequence, column: int) -> float:
    return float(int(sequence.rid) * 1000 + column)


def prefill(cache: KVCache, sequences: list[Sequence]) -> None:
    by_arena: dict[int, list[Sequence]] = {}
    for s in sequences:
        by_arena.setdefault(cache.arena_index(s.tokens), []).append(s)
    for group in by_arena.values():
        arena, start, _ = cache.place(group)
        for row, s in enumerate(group, start):
            for column in range(s.tokens):
                arena.kv[:, row, :, :, column] = mark(s, column)


def decode(cache: KVCache) -> int:
    """One step: write each row's last token, then check all that attention would see; number of rows."""
    order, positions, groups = cache.batch()
    assert positions.tolist() == [s.tokens - 1 for s in order]
    assert sum(g.stop - g.start for g in groups) == len(order)
    for group in groups:
        members = order[group.start : group.stop]
        marks = torch.tensor([mark(s, s.tokens - 1) for s in members])
        for layer in group.kv:
            layer[group.rows, :, :, group.positions] = marks[:, None, None, None].expand(
                -1, *layer.shape[1:3], layer.shape[4]
            )
        assert group.longest == max(s.tokens for s in members) <= group.kv.shape[4]
        for row, s in enumerate(members):
            expected = torch.tensor([mark(s, column) for column in range(s.tokens)])
            assert torch.equal(group.kv[-1, row, 1, 0, : s.tokens, 0], expected)
            assert torch.equal(group.kv[0, row, 0, -1, : s.tokens, -1], expected)
            bias = group.bias[row, 0, 0]
            assert bias[: s.tokens].eq(0).all()
            assert bias[s.tokens :].isneginf().all()
    return len(order)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_keep_their_own_keys(folder: Path, data: st.DataObject) -> None:
    spec: ModelSpec = read_spec(folder)
    cache = KVCache(spec, context_length=CONTEXT, max_tokens=200, dtype=torch.float32, device=torch.device("cpu"))
    live: list[Sequence] = []
    made = 0
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["join", "leave", "steps", "steps"])):
            case "join":
                lengths = data.draw(st.lists(st.integers(1, CONTEXT - 40), min_size=1, max_size=4))
                new = [Sequence(rid=str(made + i), prompt=[0] * n, max_new=99) for i, n in enumerate(lengths)]
                made += len(new)
                prefill(cache, new)
                for s in new:
                    s.output.append(0)
                live += new
            case "leave" if live:
                s = live.pop(data.draw(st.integers(0, len(live) - 1)))
                cache.remove(s)
                cache.remove(s)  # harmless
            case _:
                for _ in range(data.draw(st.integers(1, 5))):
                    assert decode(cache) == len(live) == len(cache)
                    for s in [s for s in live if s.tokens == CONTEXT]:
                        live.remove(s)
                        cache.remove(s)
                    for s in live:
                        s.output.append(0)


def test_memory_of_an_empty_cache_is_bounded(folder: Path) -> None:
    cache = KVCache(
        read_spec(folder), context_length=CONTEXT, max_tokens=1000, dtype=torch.float32, device=torch.device("cpu")
    )
    for width in (64, 128, 256):
        batch = [Sequence(rid=str(i), prompt=[0] * width, max_new=1) for i in range(1000 // width)]
        prefill(cache, batch)
        for s in batch:
            cache.remove(s)
    assert len(cache) == 0
    assert sum(arena.capacity for arena in cache.arenas) <= 2 * 1000


def test_rows_that_another_server_took_are_the_first_to_go(folder: Path) -> None:
    cache = KVCache(
        read_spec(folder), context_length=CONTEXT, max_tokens=1000, dtype=torch.float32, device=torch.device("cpu")
    )
    first, second = ([i] * 8 for i in range(2))
    for ids in (first, second):
        cache.insert(ids, torch.zeros(1, 2, 1, 8, 1))
    assert cache.rows_of([*second[:4], 9, 9], 0) is not None, "a part of them, which is needed here as well"
    cache.trim(8)
    assert (cache.held([*first, 9]), cache.held([*second, 9])) == (0, 8)
    cache.insert(first, torch.zeros(1, 2, 1, 8, 1))
    assert cache.rows_of([*first, 9], 0) is not None
    cache.trim(8)
    assert (cache.held([*first, 9]), cache.held([*second, 9])) == (0, 8)
