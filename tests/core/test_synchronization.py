"""Which servers pull: against the literal algorithm, and the rule that was added to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.core.policy.load import Admission, Load, Queue
from asyncrl.core.policy.router import EachByItself, Router
from asyncrl.core.policy.routing import RequestView, least_loaded
from asyncrl.core.policy.synchronization import MakeRouter, all_at_once, selective
from asyncrl.core.policy.waterfall import Waterfall
from asyncrl.core.snapshot import InstanceSnapshot
from tests.core.fleets import COST, levels, loads_of, requests, rooms, server, servers
from tests.core.staleflow_model import Staleness, synchronization_strategy, system

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


@given(instances=servers(slots=3), waiting=requests(0, 12, slots=3), room=rooms(), mu=st.sampled_from([0.01, 0.3, 1.0]))
def test_it_pulls_as_the_papers_algorithm_does(
    instances: list[InstanceSnapshot], waiting: list[RequestView], room: dict[int, int], mu: float
) -> None:
    head = next(iter(Queue(levels(waiting))), None)
    able = [i.version for i in instances if i.up and head is not None and i.max_tokens >= head.tokens]
    assume(head is None or head.v_traj is None or any(v >= head.oldest for v in able))  # else the rule that was added
    model = synchronization_strategy(COST, mu, system(instances), waiting, Staleness(dict(room)), ps_version=3)
    assert chosen(instances, waiting, room, 3, partial(waterfall, mu=mu)) == model


def test_a_server_pulls_only_if_it_gets_new_work_by_it() -> None:
    initial = [RequestView(id=i, sequence=i, v_traj=None, group=i, tokens=100) for i in range(3)]
    busy = [RequestView(id=900 + i, v_traj=0, tokens=1_000) for i in range(100)]
    assert chosen([server("a", 1)], initial, {1: 0, 2: 3}, 2) == ["a"]
    assert chosen([server("a", 1)], [], {1: 0, 2: 3}, 2) == [], "nothing waits"
    assert chosen([server("a", 1)], initial, {1: 1, 2: 3}, 2) == [], "it may still take some"
    assert chosen([server("a", 1)], initial, {1: 0, 2: 0}, 2) == [], "not with new weights either"
    assert chosen([server("a", 1, busy, max_running=128)], initial, {1: 0, 2: 3}, 2) == [], "it is busy"
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


@given(instances=servers(), waiting=requests(0, 12), room=rooms())
def test_with_routing_by_load_each_server_is_tried_by_itself_too(
    instances: list[InstanceSnapshot], waiting: list[RequestView], room: dict[int, int]
) -> None:
    """Only servers that would get something, one at a time, pull."""

    def router(loads: Sequence[Load], admission: Admission) -> Router:
        return EachByItself(least_loaded, loads, admission)

    for name in chosen(instances, waiting, room, 3, router):
        updated = [server_at(i, 3) if i.name == name else i for i in instances]
        loads, admission = loads_of(updated), Admission(lambda v: room.get(v, 0))
        at_work = router(loads, admission)
        got = set()
        for request in Queue(levels(waiting)):
            load = at_work.choose(request)
            if load is None:
                break
            admission.routed(request, load.version)
            load.take(request)
            got.add(load.name)
        assert name in got


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
        waiting=instance.waiting,
    )
