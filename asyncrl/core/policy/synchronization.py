"""Which servers pull the newest weights, and when: plain functions of the plan's loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.core.policy.load import Admission, Load, Queue
from asyncrl.core.policy.router import Router, place

MakeRouter = Callable[[Sequence[Load], Admission], Router]
"""The routing strategy, set to work on these servers."""
Synchronization = Callable[[Sequence[Load], int, Queue, Admission, MakeRouter], list[Load]]
"""Servers that are to pull version ``newest`` (second argument), in the fleet's order."""


def all_at_once(
    loads: Sequence[Load], newest: int, queue: Queue, admission: Admission, router: MakeRouter
) -> list[Load]:
    """Every server that is behind, whatever it runs (the vanilla strategy of figure 16)."""
    return _behind(loads, newest)


def selective(loads: Sequence[Load], newest: int, queue: Queue, admission: Admission, router: MakeRouter) -> list[Load]:
    """Servers that are behind, may serve nothing that waits, and would get something of it if they had the newest
    weights (StaleFlow algorithm 4). Each is tried by itself, as it is loaded now.

    The paper runs the routing strategy once for each of them. Here it runs once for all: no routing reaches a server
    that may serve nothing, so each of these runs goes as the one without any pull, up to the first request for which
    the server, were it updated, is chosen in place of the one chosen.

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
    updated = {load.index: load.copy() for load in candidates}
    for load in updated.values():
        load.version = newest
    admission = admission.copy()
    at_work = router([load.copy() for load in loads], admission)
    at_work.shadow(updated.values())
    chosen: set[int] = set()
    for request in queue:
        best = at_work.choose(request)
        chosen.update(load.index for load in at_work.winners(request, best))
        if best is None or len(chosen) == len(candidates):
            break
        place(at_work, request, best, admission)
    return [load for load in candidates if load.index in chosen]


def _behind(loads: Sequence[Load], newest: int) -> list[Load]:
    return [load for load in loads if load.up and not load.pinned and load.version < newest]


SYNCHRONIZATION: dict[str, Synchronization] = {"all": all_at_once, "selective": selective}
