"""Routing by waterfall: the paper's example, the literal algorithm as a model, and that nothing waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Admission, Queue
from asyncrl.core.policy.router import route
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.policy.waterfall import Waterfall
from asyncrl.core.snapshot import InstanceSnapshot

from .fleets import COST, levels, loads_of, requests, rooms, server, servers
from .staleflow_model import Staleness, routing_strategy, system


def routed(
    instances: list[InstanceSnapshot],
    waiting: list[RequestView],
    room: dict[int, int],
    *,
    mu: float = 0.3,
    mean_new_tokens: float = float("inf"),
    cost: CostModel = COST,
    pace: float = float("inf"),
) -> list[tuple[str, int]]:
    loads, admission = loads_of(instances), Admission(lambda v: room.get(v, 0))
    router = Waterfall(loads, admission, cost=cost, mu=mu, mean_new_tokens=mean_new_tokens, pace=pace)
    return [(load.name, request.id) for request, load in route(router, Queue(levels(waiting)), admission)]


models = st.sampled_from(
    [COST, CostModel(k1=1e-6, k2=1e-3, k3=1e-3, k4=0.0, k5=1e-4), CostModel(k1=0.0, k2=0.0, k3=0.0, k4=1e-2, k5=0.0)]
)


@given(
    instances=servers(slots=3),
    waiting=requests(0, 12, slots=3),
    room=rooms(),
    mu=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    mean_new_tokens=st.sampled_from([1.0, 300.0, float("inf")]),
    cost=models,
)
def test_it_routes_as_the_papers_algorithm_does(
    instances: list[InstanceSnapshot],
    waiting: list[RequestView],
    room: dict[int, int],
    mu: float,
    mean_new_tokens: float,
    cost: CostModel,
) -> None:
    model = routing_strategy(cost, mu, system(instances), waiting, Staleness(dict(room)), 1.0 / mean_new_tokens)
    assert routed(instances, waiting, room, mu=mu, mean_new_tokens=mean_new_tokens, cost=cost) == model


def test_figure_12c_old_versions_first_then_where_it_gains_most() -> None:
    """Three versions; the queue's levels go from the oldest V_traj to those that have none."""
    long = [RequestView(id=900 + i, v_traj=0, tokens=90_000 // 30) for i in range(30)]
    fleet = [server("old", 1), server("mid a", 2, long[:2]), server("mid b", 2, long[2:3]), server("new", 3)]
    waiting = [
        RequestView(id=0, sequence=0, v_traj=None, group=0, tokens=100),
        RequestView(id=1, sequence=1, v_traj=2, tokens=100),
        RequestView(id=2, sequence=2, v_traj=1, tokens=100),
        RequestView(id=3, sequence=3, v_traj=3, tokens=100),
    ]
    # V_traj 1 first, on the oldest server; 2 on the less loaded of its version; 3 on the only one that is new enough;
    # the one without V_traj may start on version 3 only.
    assert routed(fleet, waiting, {3: 1}) == [("old", 2), ("mid b", 1), ("new", 3), ("new", 0)]
    # On the oldest server it would gain less than μ of what it does on the newest: the waterfall goes on.
    fleet[0] = server("old", 1, long)
    assert routed(fleet, waiting, {3: 1}, mu=0.5)[0] == ("mid b", 2)
    assert routed(fleet, waiting, {3: 1}, mu=0.01)[0] == ("old", 2)


def test_a_group_starts_once_and_its_members_may_go_to_newer_servers() -> None:
    waiting = [RequestView(id=i, sequence=i, v_traj=None, group=7, tokens=100) for i in range(4)]
    fleet = [server("a", 1, max_running=1), server("b", 2)]
    assert routed(fleet, waiting, {1: 1, 2: 1}) == [("a", 0), ("b", 1), ("b", 2), ("b", 3)]
    other = RequestView(id=9, sequence=9, v_traj=None, group=8, tokens=100)
    assert routed(fleet, [*waiting, other], {1: 1, 2: 1})[4:] == []
    assert routed(fleet, [*waiting, other], {1: 1, 2: 2})[4:] == [("b", 9)]


def test_a_conversation_stays_where_its_prefix_is_until_that_costs_more_than_prefill() -> None:
    """``b`` runs ten of 4,000 tokens: one more adds less there than on an idle server, which prefills it first."""
    turn = RequestView(id=1, v_traj=0, after=0, tokens=4_000, home="b", prefix=3_990)
    busy = [RequestView(id=900 + i, v_traj=0, tokens=4_000) for i in range(20)]
    for load, mean, expected in ((10, 10.0, "b"), (10, 100.0, "a"), (10, float("inf"), "a"), (20, 10.0, "a")):
        fleet = [server("a", 0), server("b", 0, busy[:load])]
        assert routed(fleet, [turn], {}, mu=0.01, mean_new_tokens=mean) == [(expected, 1)], (load, mean)


def test_new_weights_have_emptied_the_prefix_cache() -> None:
    """As above, but ``b`` has pulled since it generated the last token: both would prefill all of it."""
    turn = RequestView(id=1, v_traj=0, after=0, tokens=4_000, home="b", prefix=3_990)
    busy = [RequestView(id=900 + i, v_traj=0, tokens=4_000) for i in range(10)]
    for version, expected in ((0, "b"), (1, "a")):
        fleet = [server("a", version), server("b", version, busy)]
        assert routed(fleet, [turn], {}, mu=0.01, mean_new_tokens=10.0) == [(expected, 1)], version


def test_groups_start_up_to_the_pace_and_what_has_started_goes_on() -> None:
    """With 31 sequences of 100 tokens a step takes 14.8 ms."""
    busy = [RequestView(id=900 + i, v_traj=0, tokens=100) for i in range(30)]
    fleet = [server("a", 0, busy)]
    first, second = (RequestView(id=i, sequence=i, v_traj=None, group=0, tokens=100) for i in range(2))
    turn = RequestView(id=2, v_traj=0, tokens=100)
    assert routed(fleet, [first], {0: 1}, pace=0.0147) == []
    assert routed(fleet, [first, second], {0: 1}, pace=0.0149) == [("a", 0), ("a", 1)], "a group is not torn apart"
    assert routed(fleet, [turn], {}, pace=0.0001) == [("a", 2)]
    assert routed([server("a", 0)], [first], {0: 1}, pace=0.0001) == [("a", 0)], "an idle server takes any"


def test_a_server_that_is_slower_gets_less_work() -> None:
    waiting = [RequestView(id=i, sequence=i, v_traj=0, tokens=4_000) for i in range(40)]
    shares = []
    for slowness in (1.0, 2.0, 4.0):
        fleet = [server("a", 0, slowness=slowness, max_tokens=10**6), server("b", 0, max_tokens=10**6)]
        shares.append(sum(name == "a" for name, _ in routed(fleet, waiting, {})))
    assert shares[0] == 20 > shares[1] > shares[2] > 0


@given(
    instances=servers(slots=3),
    waiting=requests(0, 12, slots=3),
    room=rooms(),
    mu=st.sampled_from([0.3, 1.0]),
    mean_new_tokens=st.sampled_from([1.0, 300.0, float("inf")]),
)
def test_what_waits_waits_for_staleness_or_for_servers_that_are_busy(
    instances: list[InstanceSnapshot],
    waiting: list[RequestView],
    room: dict[int, int],
    mu: float,
    mean_new_tokens: float,
) -> None:
    """No server that has room and may serve the first of those that wait."""
    loads, admission = loads_of(instances), Admission(lambda v: room.get(v, 0))
    router = Waterfall(loads, admission, cost=COST, mu=mu, mean_new_tokens=mean_new_tokens)
    gone = {request.id for request, _ in route(router, Queue(levels(waiting)), admission)}
    left = [r for r in Queue(levels(waiting)) if r.id not in gone]
    for load in loads if left else []:
        assert not (
            load.up
            and not load.waiting
            and (load.running == 0 or load.running + left[0].slots <= load.max_running)
            and load.max_tokens >= load.kv_tokens + left[0].tokens
            and admission.routable(left[0], load.version)
        )


@pytest.mark.parametrize("mu", [-0.1, 1.01])
def test_a_threshold_that_is_no_share_is_refused(mu: float) -> None:
    with pytest.raises(ValueError, match="mu"):
        Waterfall([], Admission(lambda v: 0), cost=COST, mu=mu, mean_new_tokens=1.0)
