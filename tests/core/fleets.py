"""Snapshots of fleets, drawn or written by hand, for the tests of the coordinator's strategies."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

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
        found.setdefault(None if request.v_traj is None else request.oldest, []).append(request)
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


@st.composite
def requests(draw: st.DrawFn, first: int, most: int, *, started: bool = False, slots: int = 1) -> list[RequestView]:
    """Requests with ids from ``first``; of those without V_traj some share a group."""
    found = []
    for id in range(first, first + draw(st.integers(0, most))):
        v_traj = draw(st.integers(0, 3) if started else st.one_of(st.none(), st.integers(0, 3)))
        tokens = draw(st.sampled_from([1, 10, 11, 400, 5_000, 60_000]))
        found.append(
            RequestView(
                id=id,
                sequence=id,
                v_traj=v_traj,
                group=draw(st.integers(0, 4)) if v_traj is None else 100 + id,
                tokens=tokens,
                slots=draw(st.integers(1, slots)),
                home=draw(st.sampled_from([None, *"abcd"])),
                prefix=draw(st.integers(0, tokens)),
                after=-1 if v_traj is None else draw(st.integers(v_traj - 1, min(3, v_traj + 1))),
            )
        )
    return found


@st.composite
def servers(draw: st.DrawFn, slots: int = 1) -> list[InstanceSnapshot]:
    """Each of a version that may serve what it has."""
    found = []
    for index, name in enumerate("abcd"[: draw(st.integers(1, 4))]):
        has = draw(requests(1000 * (index + 1), 8, started=True, slots=slots))
        found.append(
            server(
                name,
                draw(st.integers(max((r.oldest for r in has), default=0), 3)),
                has,
                draw(st.integers(0, len(has))) if draw(st.integers(0, 3)) == 0 else 0,
                up=draw(st.integers(0, 7)) > 0,
                pulling=draw(st.integers(0, 7)) == 0,
                pinned=draw(st.integers(0, 7)) == 0,
                max_running=draw(st.sampled_from([1, 4, 64])),
                slowness=draw(st.sampled_from([1.0, 1.0, 1.0, 2.0])),
                max_tokens=draw(st.sampled_from([60_000, 100_000, 400_000])),
            )
        )
    return found


def rooms() -> st.SearchStrategy[dict[int, int]]:
    """Groups that may start on each version; a newer one never has less room."""
    return st.lists(st.integers(0, 4), min_size=4, max_size=4).map(lambda r: dict(enumerate(sorted(r))))
