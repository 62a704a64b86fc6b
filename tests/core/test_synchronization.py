"""Which servers pull: against the literal algorithm, and the rule that was added to it."""

from __future__ import annotations

from functools import partial

from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.core.policy.load import Admission, Queue
from asyncrl.core.policy.router import EachByItself, MakeRouter, route
from asyncrl.core.policy.routing import RequestView, least_loaded
from asyncrl.core.policy.synchronization import all_at_once, selective
from asyncrl.core.policy.waterfall import Waterfall
from asyncrl.core.snapshot import InstanceSnapshot

from .fleets import COST, levels, loads_of, requests, rooms, server, servers
from .staleflow_model import Staleness, synchronization_strategy, system

waterfall = partial(Waterfall, cost=COST, mean_new_tokens=float("inf"))
by_default = partial(waterfall, mu=0.3)


def chosen(
    instances: list[InstanceSnapshot],
    waiting: list[RequestView],
    room: dict[int, int],
    newest: int,
    router: MakeRouter = by_default,
) -> list[str]:
    loads, admission = loads_of(instances), Admission(lambda v: room.get(v, 0))
    pulls = selective(loads, newest, Queue(levels(waiting)), admission, router)
    assert [(load.running, load.version) for load in loads] == [(i.running, i.version) for i in instances], "on trial"
    return [load.name for load in pulls]


@given(
    instances=servers(slots=3),
    waiting=requests(0, 12, slots=3),
    room=rooms(),
    mu=st.sampled_from([0.01, 0.3, 1.0]),
    mean_new_tokens=st.sampled_from([1.0, 300.0, float("inf")]),
)
def test_it_pulls_as_the_literal_algorithm_does(
    instances: list[InstanceSnapshot],
    waiting: list[RequestView],
    room: dict[int, int],
    mu: float,
    mean_new_tokens: float,
) -> None:
    head = next(iter(Queue(levels(waiting))), None)
    able = [i.version for i in instances if i.up and head is not None and i.max_tokens >= head.tokens]
    assume(head is None or head.v_traj is None or any(v >= head.oldest for v in able))  # else the rule that was added
    staleness, spread = Staleness(dict(room)), 1.0 / mean_new_tokens
    model = synchronization_strategy(COST, mu, system(instances), waiting, staleness, 3, spread)
    router = partial(Waterfall, cost=COST, mean_new_tokens=mean_new_tokens, mu=mu)
    assert chosen(instances, waiting, room, 3, router) == model


def test_a_server_pulls_only_if_it_gets_new_work_by_it() -> None:
    initial = [RequestView(id=i, sequence=i, v_traj=None, group=i, tokens=100) for i in range(3)]
    busy = [RequestView(id=900 + i, v_traj=0, tokens=1_000) for i in range(100)]
    assert chosen([server("a", 1)], initial, {1: 0, 2: 3}, 2) == ["a"]
    assert chosen([server("a", 1)], [], {1: 0, 2: 3}, 2) == [], "nothing waits"
    assert chosen([server("a", 1)], initial, {1: 1, 2: 3}, 2) == [], "it may still take some"
    assert chosen([server("a", 1)], initial, {1: 0, 2: 0}, 2) == [], "not with new weights either"
    assert chosen([server("a", 1, busy[:64])], initial, {1: 0, 2: 3}, 2) == [], "it is full"
    assert chosen([server("a", 1), server("b", 2)], initial, {1: 0, 2: 3}, 2) == ["a"], "an idle one gains more"
    assert chosen([server("a", 1, busy, max_running=128), server("b", 2)], initial, {1: 0, 2: 3}, 2) == []
    assert chosen([server("a", 1, pinned=True)], initial, {1: 0, 2: 3}, 2) == []


def test_a_request_that_can_run_nowhere_lets_servers_pull_that_might_take_others() -> None:
    """The only server of version 2 has failed. In the paper's algorithm all would wait until it is back."""
    waiting = [
        RequestView(id=0, sequence=0, v_traj=2, tokens=100),
        RequestView(id=1, sequence=1, v_traj=None, group=1, tokens=100),
    ]
    fleet = [server("a", 1), server("b", 2, up=False)]
    room = {1: 4, 2: 4}
    assert synchronization_strategy(COST, 0.3, system(fleet), waiting, Staleness(room), ps_version=2) == []
    assert chosen(fleet, waiting, room, 2) == ["a"]
    pulls = [server("a", 1), server("b", 2, pulling=True)]
    assert chosen(pulls, waiting, room, 2) == [], "it is back soon"


def test_the_vanilla_strategy_updates_every_server_that_is_behind() -> None:
    fleet = [server("a", 1), server("b", 2), server("c", 0, up=False), server("d", 0, pinned=True), server("e", 0)]
    pulls = all_at_once(loads_of(fleet), 2, Queue({}), Admission(lambda v: 0), by_default)
    assert [load.name for load in pulls] == ["a", "e"]


def test_no_more_servers_pull_than_the_waiting_work_needs() -> None:
    """What a pull cuts is prefilled again. The paper's rule has all eight busy servers pull for one request."""
    fleet = [
        server(name, 1, [RequestView(id=100 * i, v_traj=1, tokens=4_000)] * 16) for i, name in enumerate("abcdefgh")
    ]
    fleet[5] = server("f", 1, [RequestView(id=900, v_traj=1, tokens=4_000)])
    idle = [server(name, 1) for name in "xyz"]
    router = partial(Waterfall, cost=COST, mu=0.3, mean_new_tokens=1_000.0)
    for make in (router, partial(EachByItself, least_loaded)):
        for count in (1, 5):
            initial = [RequestView(id=i, sequence=i, v_traj=None, group=i, tokens=100) for i in range(count)]
            room = {1: 0, 2: count}
            assert chosen(fleet, initial, room, 2, make) == ["f"]
            assert chosen([*fleet, *idle], initial, room, 2, make) == [i.name for i in idle[:count]], (
                "these lose nothing"
            )


@given(instances=servers(), waiting=requests(0, 12), room=rooms())
def test_with_routing_by_load_too_a_server_that_pulls_gets_work(
    instances: list[InstanceSnapshot], waiting: list[RequestView], room: dict[int, int]
) -> None:
    pulls = chosen(instances, waiting, room, 3, partial(EachByItself, least_loaded))
    updated = [server_at(i, 3) if i.name in pulls else i for i in instances]
    loads, admission = loads_of(updated), Admission(lambda v: room.get(v, 0))
    got = {
        load.name for _, load in route(EachByItself(least_loaded, loads, admission), Queue(levels(waiting)), admission)
    }
    assert not pulls or got & set(pulls)


def server_at(instance: InstanceSnapshot, version: int) -> InstanceSnapshot:
    return server(
        instance.name,
        version,
        list(instance.requests.values()),
        max_running=instance.max_running,
        max_tokens=instance.max_tokens,
        up=instance.up,
        running=instance.running,
        kv_tokens=instance.kv_tokens,
        waiting=0,  # a pull cuts what waits
    )
