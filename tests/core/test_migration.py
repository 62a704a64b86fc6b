"""Which requests leave their server: against the literal algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.migration import Limits, by_throughput, stay
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot

from .fleets import COST, loads_of, server, servers
from .staleflow_model import migration_strategy, system


@given(instances=servers(), phi_wait=st.integers(0, 4), phi_throughput=st.sampled_from([1.1, 2.0, 5.0]))
def test_it_migrates_as_the_literal_algorithm_does(
    instances: list[InstanceSnapshot], phi_wait: int, phi_throughput: float
) -> None:
    found = by_throughput(loads_of(instances), COST, Limits(phi_wait=phi_wait, phi_throughput=phi_throughput))
    excess, gap = migration_strategy(COST, phi_wait, phi_throughput, system(instances))
    assert [(load.name, {r.id for r in requests}) for load, requests in found.excess] == excess
    assert (found.pair is not None) is (gap > phi_throughput)
    if found.pair is not None:
        slow, fast = found.pair
        assert fast.version >= slow.version and not slow.waiting and not fast.waiting
        steps = [load.slowness * COST.step(max(1, load.running), load.kv_tokens) for load in (slow, fast)]
        assert steps[0] / steps[1] == pytest.approx(gap)


def has(count: int, tokens: int = 100) -> list[RequestView]:
    return [RequestView(id=i, v_traj=0, tokens=tokens) for i in range(count)]


def names(instances: list[InstanceSnapshot], **limits: float) -> tuple[str, str] | None:
    pair = by_throughput(loads_of(instances), COST, Limits(**limits)).pair  # type: ignore[arg-type]
    return None if pair is None else (pair[0].name, pair[1].name)


def test_the_last_of_those_that_wait_are_cut() -> None:
    fleet = [server("a", 0, has(8), waiting=5), server("b", 0, has(3))]
    for phi_wait, cut in ((3, [{6, 7}]), (5, [])):
        excess = by_throughput(loads_of(fleet), COST, Limits(phi_wait=phi_wait)).excess
        assert [{r.id for r in requests} for _, requests in excess] == cut


def test_a_few_long_responses_make_a_slow_server_though_it_has_fewer() -> None:
    """Eight times 30,000 tokens take 30 ms a step, twenty of 100 13 ms."""
    fleet = [server("a", 0, has(8, 30_000)), server("b", 0, has(20)), server("c", 0, has(12, 100))]
    assert names(fleet) == ("a", "c")
    assert names(fleet, phi_throughput=3.0) is None
    assert names([server("a", 0), server("b", 0)]) is None
    assert names([server("a", 0, has(8, 30_000))]) is None


def test_requests_do_not_go_to_older_servers() -> None:
    slow = server("a", 1, has(8, 30_000))
    assert names([slow, server("b", 0), server("c", 1, has(8, 20_000))]) == ("a", "c")
    assert names([slow, server("b", 0)]) is None
    assert names([slow, server("b", 2)]) == ("a", "b")


def test_a_server_that_is_slow_of_itself_gives_to_others() -> None:
    fleet = [server("a", 0, has(8, 10_000), slowness=2.0), server("b", 0, has(9, 10_000))]
    assert names(fleet) == ("a", "b")


def test_vanilla_servers_keep_what_they_have() -> None:
    migration = stay(loads_of([server("a", 0, has(8), waiting=5), server("b", 0)]), COST, Limits())
    assert migration.pair is None and not migration.excess


def test_an_idle_server_whose_steps_take_no_time_by_the_model_is_given_work() -> None:
    """A model fitted to short steps may put all of them down to the tokens in the cache."""
    loads = loads_of([server("a", 0, [RequestView(v_traj=0, tokens=400, id=1)]), server("b", 0)])
    cost = CostModel(k1=1e-4, k2=0.0, k3=0.0, k4=0.0, k5=0.0)
    assert by_throughput(loads, cost, Limits()).pair == tuple(loads)
    assert cost.use(1, 0) == 0.0
