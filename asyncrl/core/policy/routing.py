"""Which server takes a request: plain functions of the request and the servers' books. None: it waits for room.

A candidate is up, not older than the request's V_traj, and has room for it by count and by tokens. A request too long
for every server's KV cache is refused by the proxy before it comes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from asyncrl.core.types import Record


class RequestView(Record, frozen=True, kw_only=True):
    """What routing may know of a request. ``home`` is the server that holds its prefix, if any."""

    v_traj: int
    tokens: int
    """Prompt and partial output, plus what it may still generate."""
    slots: int = 1
    home: str | None = None


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
        and instance.version >= request.v_traj
        and (instance.running + request.slots <= instance.max_running or instance.running == 0)
        and instance.tokens + request.tokens <= instance.max_tokens
    )


def least_loaded(request: RequestView, instances: Sequence[I]) -> I | None:
    """The server with the fewest requests, then the fewest tokens, then the first by name (queue scheduling, ROLL Flash
    §5.1.1: a server that has room takes the next request at once)."""
    candidates = [i for i in instances if has_room(request, i)]
    return min(candidates, key=lambda i: (i.running, i.tokens, i.name), default=None)


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


ROUTING = {"least_loaded": least_loaded, "prefix_affine": prefix_affine}
