"""Snapshots of fleets, drawn or written by hand, for the tests of the coordinator's strategies."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Load
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import FleetSnapshot, InstanceSnapshot

COST = CostModel()


def server(
    name: str, version: int = 0, requests: Sequence[RequestView] = (), waiting: int = 0, **fields: object
) -> InstanceSnapshot:
    """A server that has these requests, the last ``waiting`` of which wait inside it."""
    decoding = requests[: len(requests) - waiting]
    known = {
        "name": name,
        "version": version,
        "up": True,
        "running": sum(r.slots for r in requests),
        "tokens": sum(r.tokens for r in requests),
        "kv_tokens": sum(r.tokens for r in decoding),
        "waiting": sum(r.slots for r in requests) - sum(r.slots for r in decoding),
        "max_running": 64,
        "max_tokens": 100_000,
        "requests": {r.id: r for r in requests},
        "routed": len(requests),
    }
    return InstanceSnapshot(**{**known, **fields})  # type: ignore[arg-type]


def levels(requests: Sequence[RequestView]) -> dict[int | None, list[RequestView]]:
    """The multi-level queue of these requests, which are in order of arrival."""
    found: dict[int | None, list[RequestView]] = {}
    for request in requests:
        found.setdefault(request.v_traj, []).append(request)
    return found


def fleet(instances: Sequence[InstanceSnapshot], waiting: Sequence[RequestView] = (), newest: int = 0) -> FleetSnapshot:
    return FleetSnapshot(
        instances=tuple(instances),
        waiting=len(waiting),
        suspended=False,
        newest=newest,
        waiting_requests=levels(waiting),
    )


def loads_of(instances: Sequence[InstanceSnapshot]) -> list[Load]:
    return [Load(i, s, up=s.up and not s.pulling, promised=s.version if s.up else -1) for i, s in enumerate(instances)]
