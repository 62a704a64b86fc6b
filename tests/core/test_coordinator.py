"""The coordinator."""

from __future__ import annotations

from asyncrl.core.commands import Pull, Route
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.policy.routing import RequestView
from tests.core.fleets import COST, fleet, server


def coordinator(
    routing: str = "waterfall", synchronization: str = "selective", migration: str = "throughput"
) -> Coordinator:
    return Coordinator(routing=routing, synchronization=synchronization, migration=migration, cost=COST)


def test_requests_go_to_the_older_version_first_and_a_stuck_server_pulls() -> None:
    waiting = [RequestView(v_traj=None, tokens=100, id=i, group=i, sequence=i) for i in range(3)]
    plan = coordinator().plan(fleet([server("a", 1), server("b", 2)], waiting, newest=2), lambda v: 2 if v == 1 else 5)
    assert plan == [Route(instance="a", requests=(0, 1)), Route(instance="b", requests=(2,))]
    plan = coordinator().plan(fleet([server("a", 1)], waiting, newest=2), lambda v: 0 if v == 1 else 5)
    assert plan == [Pull(instance="a"), Route(instance="a", requests=(0, 1, 2))]
