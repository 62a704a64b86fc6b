"""The staleness paper's simulator (its appendix, "Building an efficient staleness simulator"), with a queue that drops
its oldest group, or under this runtime's in-flight cap.

Slots generate one rollout each, a token a second; a group is live from its first rollout's start and finished with its
last rollout. The trainer takes the oldest groups when it can, is busy for ``train_s``, and then the version goes up.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from random import Random

from asyncrl.core.distributions import Distribution
from asyncrl.core.staleness.inflight_cap import InflightCap


@dataclass(frozen=True)
class Outcome:
    """Means over the second half of the steps, and sums over all of them."""

    staleness: float
    period: float
    staleness_sum: int
    live_at_switches: int
    """Groups started and not trained yet, summed over the moments at which the version goes up."""
    untrained_age_sum: int
    """Version at the end minus own version, summed over the groups that are live then (in-flight cap only)."""


@dataclass
class _Group:
    id: int
    version: int
    waiting: int
    unfinished: int


def simulate(
    *,
    lengths: Distribution,
    slots: int,
    group_size: int,
    groups: int,
    train_s: float,
    steps: int,
    seed: int = 0,
    queue: int | None = None,
    alpha: float | None = None,
) -> Outcome:
    """``groups`` a batch; give ``queue`` (capacity in groups: queue-drop) or ``alpha`` (in-flight cap)."""
    assert (queue is None) != (alpha is None)
    rng = Random(seed)
    cap = InflightCap(batch=groups, alpha=alpha) if alpha is not None else None
    events: list[tuple[float, int, _Group | None]] = []
    """(time, serial, group whose rollout ends; None: the trainer's step ends)."""
    ready: deque[_Group] = deque()
    by_id: dict[int, _Group] = {}
    filling: _Group | None = None
    free, serial, version, started, live = slots, 0, 0, 0, 0
    training = False
    now = 0.0
    trained: list[list[int]] = []
    switches: list[float] = []
    live_at_switches = 0

    def take() -> list[_Group] | None:
        if cap is None:
            return [ready.popleft() for _ in range(groups)] if len(ready) >= groups else None
        batch = cap.consume()
        return None if batch is None else [by_id.pop(g) for g in batch[0]]

    while len(switches) < steps:
        # Whatever can start, starts: first the trainer, then the slots.
        if not training and (batch := take()) is not None:
            trained.append([version - g.version for g in batch])
            live -= groups
            training = True
            serial += 1
            heapq.heappush(events, (now + train_s, serial, None))
        while free:
            if filling is None or not filling.waiting:
                if cap is not None and not cap.admits(version):
                    break
                filling = _Group(started, version, group_size, group_size)
                if cap is not None:
                    cap.reserve(started, version)
                    by_id[started] = filling
                started += 1
                live += 1
            filling.waiting -= 1
            free -= 1
            serial += 1
            heapq.heappush(events, (now + lengths.sample(rng), serial, filling))
        now, _, group = heapq.heappop(events)
        if group is None:
            training = False
            version += 1
            switches.append(now)
            live_at_switches += live
        else:
            free += 1
            group.unfinished -= 1
            if group.unfinished == 0:
                if cap is not None:
                    cap.occupy(group.id)
                else:
                    assert queue is not None
                    if len(ready) == queue:
                        ready.popleft()
                        live -= 1
                    ready.append(group)
    half = steps // 2
    tail = [s for step in trained[half:] for s in step]
    return Outcome(
        staleness=sum(tail) / len(tail),
        period=(switches[-1] - switches[half]) / (len(switches) - 1 - half),
        staleness_sum=sum(map(sum, trained)),
        live_at_switches=live_at_switches,
        untrained_age_sum=sum(version - g.version for g in by_id.values()),
    )
