"""Which requests leave their server: against the literal algorithm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.policy.migration import Limits, by_throughput, stay
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot

from .fleets import COST, loads_of, server, servers
from .staleflow_model import migration_strategy, system


def migrated(instances: list[InstanceSnapshot], limits: Limits) -> list[tuple[str, set[int]]]:
    migration = by_throughput(loads_of(instances), COST, limits)
    moved = [(load.name, {r.id for r in requests}) for load, requests in migration.excess]
    if migration.fastest is not None:
        cut = {id for name, ids in moved if name == migration.fastest.name for id in ids}
        rest = {r for r in migration.fastest.requests if r not in cut}
        moved += [(migration.fastest.name, rest)] if rest else []
    return moved


@given(instances=servers(), phi_wait=st.integers(0, 4), phi_throughput=st.sampled_from([1.0, 2.0, 5.0]))
def test_it_migrates_as_the_papers_algorithm_does(
    instances: list[InstanceSnapshot], phi_wait: int, phi_throughput: float
) -> None:
    limits = Limits(phi_wait=phi_wait, phi_throughput=phi_throughput)
    assert migrated(instances, limits) == migration_strategy(COST, phi_wait, phi_throughput, system(instances))


def test_the_last_of_those_that_wait_are_cut() -> None:
    has = [RequestView(id=i, v_traj=0, tokens=100) for i in range(8)]
    fleet = [server("a", 0, has, waiting=5), server("b", 0, has[:3])]
    assert migrated(fleet, Limits()) == [("a", {6, 7})]
    assert migrated(fleet, Limits(phi_wait=5)) == []


def test_an_idle_server_is_infinitely_slower_than_any_that_runs() -> None:
    has = [RequestView(id=i, v_traj=0, tokens=100) for i in range(8)]
    assert migrated([server("a", 0, has), server("b", 0)], Limits()) == [("a", set(range(8)))]
    assert migrated([server("a", 0, has), server("b", 0, has[:2])], Limits()) == []
    assert migrated([server("a", 0), server("b", 0)], Limits()) == []
    assert migrated([server("a", 0, has)], Limits()) == []
    assert stay(loads_of([server("a", 0, has), server("b", 0)]), COST, Limits()).fastest is None
