"""Which servers pull the newest weights, and when: plain functions of the plan's loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.core.policy.load import Admission, Load, Queue
from asyncrl.core.policy.router import MakeRouter, place

Synchronization = Callable[[Sequence[Load], int, Queue, Admission, MakeRouter], list[Load]]
"""Servers that are to pull version ``newest`` (second argument), in the fleet's order."""


def all_at_once(
    loads: Sequence[Load], newest: int, queue: Queue, admission: Admission, router: MakeRouter
) -> list[Load]:
    """Every server that is behind, whatever it runs (the vanilla strategy of figure 16)."""
    return _behind(loads, newest)


def selective(loads: Sequence[Load], newest: int, queue: Queue, admission: Admission, router: MakeRouter) -> list[Load]:
    """Servers that are behind, may serve nothing that waits, and get something of it by the newest weights (StaleFlow
    algorithm 4): as few as the waiting work needs.

    The paper tries each server alone, so that one request makes all of them pull that would get it. Here the routing
    strategy runs once, and a server that pulls for one request is there for those behind it. It pulls if the request
    can go nowhere else, or gains more by it although all that the server runs is prefilled again, a cost that it has in
    common with the others that wait.

    One rule is added. If the first request can run nowhere, as no server that is up is of its version or newer (the one
    that was has failed), every server that is behind may be updated for it, though it may serve others that wait: they
    stand behind that request, and all would wait for ever.
    """
    head = next(iter(queue), None)
    if head is None:
        return []
    behind = _behind(loads, newest)
    oldest = next(iter(queue.keys))
    nowhere = oldest is not None and not any(
        load.promised >= head.oldest and load.max_tokens >= head.tokens for load in loads
    )
    initial = None in queue.keys
    candidates = [
        load
        for load in behind
        if nowhere
        or not ((oldest is not None and load.version >= oldest) or (initial and admission.open(load.version)))
    ]
    if not candidates:
        return []
    offered = [load.copy() for load in candidates]
    for load in offered:
        load.version = newest
    admission = admission.copy()
    waiting = list(queue)
    at_work = router([load.copy() for load in loads], admission, offered, len(waiting))
    pulls: set[int] = set()
    for request in waiting:
        chosen = at_work.choose(request)
        updated = at_work.pull(request, chosen)
        if updated is not None:
            pulls.add(updated.index)
            chosen = updated
        if chosen is None or len(pulls) == len(candidates):
            break
        place(at_work, request, chosen, admission)
    return [load for load in candidates if load.index in pulls]


def when_empty(
    loads: Sequence[Load], newest: int, queue: Queue, admission: Admission, router: MakeRouter
) -> list[Load]:
    """Every server that is behind and whose batch has ended, of itself or as a repack has freed it (Laminar §3.1, §5):
    none of its trajectories runs or is with its environment. One stays whose version is ``needed`` for what a failed
    server has begun."""
    return [load for load in _behind(loads, newest) if not load.running and not load.groups and not load.needed]


def _behind(loads: Sequence[Load], newest: int) -> list[Load]:
    return [load for load in loads if load.up and not (load.pinned or load.draining) and load.version < newest]


SYNCHRONIZATION: dict[str, Synchronization] = {
    "all": all_at_once,
    "selective": selective,
    "when_empty": when_empty,
}
