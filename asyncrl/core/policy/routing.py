"""Which server takes a request: plain functions of the request and the servers' books.

A candidate is up, not older than the request allows, and has room for it by count and by tokens. A request too long
for every server's KV cache is refused by the proxy before it comes here. Two answers make a request wait: None, until
any server has room; a server that has none (``round_robin``), until that one has, while those behind it go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from asyncrl.core.types import Record


class RequestView(Record, frozen=True, kw_only=True):
    """What routing may know of a request. ``home`` is the server that holds the first ``prefix`` of its tokens, if any,
    as long as its version is ``after``: new weights empty its cache. ``sequence`` counts the requests as they arrive,
    and stays the same when one that was cut off goes on. Of a ``pinned`` one, only the servers of its evaluation are
    offered."""

    v_traj: int | None
    """Oldest version that may generate for its group; None until the group's first request is routed."""
    tokens: int
    """Prompt and partial output."""
    slots: int = 1
    home: str | None = None
    prefix: int = 0
    sequence: int = 0
    pinned: bool = False
    id: int = 0
    group: int = -1
    """Of those with the same group, the first to be routed sets V_traj for all."""
    after: int = -1
    """Version of the last token that it has: its tokens' versions never decrease."""

    @property
    def oldest(self) -> int:
        """Oldest version that may serve it now."""
        return self.after if self.v_traj is None else max(self.v_traj, self.after)


class InstanceView(Protocol):
    """What routing reads of a server; the proxy's own book entry has these fields."""

    name: str
    version: int
    up: bool
    running: int
    tokens: int
    max_running: int
    max_tokens: int


I = TypeVar("I", bound=InstanceView)  # noqa: E741


def has_room(request: RequestView, instance: InstanceView) -> bool:
    """True if the server may take the request now. An idle server takes a request of any number of slots."""
    return (
        instance.up
        and instance.version >= request.oldest
        and (instance.running + request.slots <= instance.max_running or instance.running == 0)
        and instance.tokens + request.tokens <= instance.max_tokens
    )


def least_loaded(request: RequestView, instances: Sequence[I]) -> I | None:
    """The server with the fewest requests, then the fewest tokens, then the first by name (queue scheduling, ROLL Flash
    §5.1.1: a server that has room takes the next request at once)."""
    slots, tokens, oldest = request.slots, request.tokens, request.oldest
    best: I | None = None
    least: float = math.inf
    fewest: float = math.inf
    for instance in instances:  # has_room and min in one pass: this runs for every request, over the whole fleet
        running = instance.running
        if running > least or (running + slots > instance.max_running and running):
            continue
        used = instance.tokens
        if running == least and (used > fewest or (used == fewest and best is not None and instance.name > best.name)):
            continue
        if used + tokens <= instance.max_tokens and instance.up and instance.version >= oldest:
            best, least, fewest = instance, running, used
    return best


def prefix_affine(request: RequestView, instances: Sequence[I]) -> I | None:
    """The server that holds the request's prefix, unless it runs more than twice the least loaded's requests and one
    more; else the least loaded."""
    best = least_loaded(request, instances)
    if best is None or request.home is None or best.name == request.home:
        return best
    for instance in instances:
        if instance.name == request.home and has_room(request, instance) and instance.running <= 2 * best.running + 1:
            return instance
    return best


def round_robin(request: RequestView, instances: Sequence[I]) -> I | None:
    """The servers in turn, by arrival and whatever their load: what splitting a batch over workers does, the baseline
    that queue scheduling is compared with. The server given may have no room; then the request waits for it."""
    candidates = [i for i in instances if i.up and i.version >= request.oldest]
    return candidates[request.sequence % len(candidates)] if candidates else None


ROUTING = {"least_loaded": least_loaded, "prefix_affine": prefix_affine, "round_robin": round_robin}
