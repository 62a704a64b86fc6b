"""Repack: what is left of several servers' batches goes to few of them, and the others begin anew (Laminar §5).

A decode step of few sequences takes about as long as one of many, as memory bounds it. So a server that has only the
long tail of its batch left wastes most of its time, and keeps old weights. Servers of one version that ramp down are
packed, best fit first, onto as few of them as hold their KV cache and their sequences.

Trajectories that are with their environments count as if they ran: they come back. Else servers whose episodes all
think look empty, one is given more than it can run, and the others have nothing.

Algorithm 1 releases as many servers as it can, since the paper's prompts never end: a server that is released begins a
batch. Here it releases no more than the groups that wait to begin would fill. One more would idle, while what it had is
prefilled again and decodes more slowly on another.

Ramping down shows in the KV cache (§5.2, figure 9): while requests wait for room it stays full, and when the last of
them runs it begins to fall, "and we consider the rollout idle from this time on". So a use is compared with the peak of
the server's batch. Algorithm 1 compares it with the look before. But what the last few sequences use grows with every
token and falls only when one of them ends: of two looks 5 s apart most would find it risen, and the longer the tail,
the less of it would be packed. A use equal to the peak counts, as in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.policy.load import Load


def ramps_down(load: Load, kv_threshold: float, roofline_batch: int) -> bool:
    """Line 3, of a server that has something and that this plan may command."""
    return (
        load.up
        and not load.pinned
        and not load.cold
        and not load.waiting
        and (load.sequences > 0 or load.groups > 0)
        and load.held < kv_threshold * load.max_tokens
        and load.held <= load.kv_peak
        and load.sequences < roofline_batch
    )


def best_fit(
    candidates: Sequence[Load], kv_threshold: float, roofline_batch: int, most: int
) -> list[tuple[Load, Load]]:
    """Algorithm 1 from line 4 on: (source, destination) pairs, each server among the sources or the destinations only.
    It releases ``most`` servers, beside those that drain.

    Line 7 lets a server be a source that was given something before, and looks at its own load alone. Then what it was
    given would be on a server that is emptied. Here all that it would have must fit, and goes on with it.
    """
    moves: dict[int, Load] = {}
    """Source → destination, in the order of release."""
    tokens = {load.index: load.held for load in candidates}
    running = {load.index: load.sequences for load in candidates}
    for source in sorted(candidates, key=lambda load: (load.held, load.index)):
        fitting = [
            load
            for load in candidates
            if load is not source
            and not load.draining
            and load.index not in moves
            and tokens[load.index] + tokens[source.index] <= kv_threshold * load.max_tokens
            and running[load.index] + running[source.index] <= min(roofline_batch, load.max_running)
        ]
        if fitting and (source.draining or most > 0):
            most -= not source.draining
            best = max(fitting, key=lambda load: (tokens[load.index], -load.index))
            tokens[best.index] += tokens[source.index]
            running[best.index] += running[source.index]
            moves = {index: best if load is source else load for index, load in moves.items()}
            moves[source.index] = best
    by_index = {load.index: load for load in candidates}
    return [(by_index[index], load) for index, load in moves.items()]


def repack(loads: Sequence[Load], kv_threshold: float, roofline_batch: int, most: int) -> list[tuple[Load, Load]]:
    """Algorithm 1 for each version's servers by themselves, the oldest first: (source, destination) pairs. ``most``
    servers are released, beside those that drain."""
    by_version: dict[int, list[Load]] = {}
    for load in loads:
        if ramps_down(load, kv_threshold, roofline_batch):
            by_version.setdefault(load.version, []).append(load)
    pairs: list[tuple[Load, Load]] = []
    for version in sorted(by_version):
        left = most - sum(not source.draining for source, _ in pairs)
        pairs += best_fit(by_version[version], kv_threshold, roofline_batch, left)
    return pairs
