"""Which rank trains which sequences, in which packed forward passes.

Pure and deterministic. FSDP makes two demands that a plain bin packing does not: every rank must run the same number of
micro-batches (each forward and backward is a collective), and the ranks advance in lockstep, so the k-th micro-batches
should cost about the same everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

ATTENTION_COST = 1 / (12 * 1024)
"""Default weight of the quadratic term: 1 / (12 × hidden size) is the ratio of a transformer's attention FLOPs per
token and position to its matrix FLOPs per token, here for hidden size 1,024."""


def cost(length: int, attention_cost: float = ATTENTION_COST) -> float:
    """Estimated work of one sequence, in tokens' worth of matrix multiplications."""
    return length + attention_cost * length * length


def plan(
    lengths: Sequence[int], ranks: int, micro_batch_tokens: int, attention_cost: float = ATTENTION_COST
) -> list[list[list[int]]]:
    """Partition sequences over ``ranks`` and into micro-batches: ``result[rank][k]`` is a list of indices.

    * Every index appears exactly once.
    * Every rank has the same number of micro-batches, at least one; one may be empty (train a dummy with zero loss).
    * A micro-batch holds at most ``micro_batch_tokens`` tokens, unless it is a single longer sequence.
    * The costliest rank costs at most ``4/3 − 1/(3·ranks)`` of the best partition's (Graham's bound for longest
      processing time first); within a rank the micro-batches are evened out the same way and ordered by falling cost.

    Raises ``ValueError`` for no ranks, an empty budget or a sequence without tokens.
    """
    if ranks < 1 or micro_batch_tokens < 1:
        raise ValueError(
            f"cannot pack for {ranks} ranks with {micro_batch_tokens} tokens a micro-batch: both must be ≥ 1"
        )
    if any(n < 1 for n in lengths):
        raise ValueError("cannot pack a sequence without tokens")
    costs = [cost(n, attention_cost) for n in lengths]
    # Longest first; ties by index, so that the same lengths always give the same plan.
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))

    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for i in order:
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + costs[i], rank))

    packed = [_first_fit(share, lengths, micro_batch_tokens) for share in shares]
    count = max(1, *(len(bins) for bins in packed))
    return [
        _even_out(share, lengths, costs, micro_batch_tokens, count) or bins + [[] for _ in range(count - len(bins))]
        for share, bins in zip(shares, packed, strict=True)
    ]


def _first_fit(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: at most 11/9 of the fewest bins, plus one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in share:
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def _even_out(
    share: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """``share`` (longest first) in exactly ``count`` bins of similar cost, or None where that breaks the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    loads = [0.0] * count
    for i in share:
        fits = [b for b in range(count) if not bins[b] or tokens[b] + lengths[i] <= budget]
        if not fits:
            return None
        b = min(fits, key=lambda b: (loads[b], b))
        bins[b].append(i)
        tokens[b] += lengths[i]
        loads[b] += costs[i]
    return [bins[b] for b in sorted(range(count), key=lambda b: (-loads[b], b))]
