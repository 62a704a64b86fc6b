"""Batches of the servers' own, by hand: what the coordinator says of a fleet that generates as Laminar's does."""

from __future__ import annotations

from asyncrl.core.commands import Abort, Command, Interrupt, Pull, Route
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.policy.migration import Limits
from asyncrl.core.policy.own_batch import Batches
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot

from .fleets import COST, fleet, server


def anything(version: int) -> int:
    return 10**6


def nothing(version: int) -> int:
    return 0


def laminar(slots: int = 8, members: int = 2, migration: str = "none", most: int = 256) -> Coordinator:
    return Coordinator(
        routing="own_batch",
        synchronization="when_empty",
        migration=migration,
        cost=COST,
        limits=Limits(roofline_batch=8),
        most=most,
        one_version=Batches(slots=slots, members=members),
    )


def new(*groups: int) -> list[RequestView]:
    """Two initial requests of each group: 10, 11 of group 1."""
    return [
        RequestView(v_traj=None, tokens=100, id=10 * g + i, group=g, sequence=10 * g + i)
        for g in groups
        for i in (0, 1)
    ]


def begun(group: int, member: int, after: int, v_traj: int = 0, tokens: int = 100) -> RequestView:
    id = 10 * group + member
    return RequestView(v_traj=v_traj, tokens=tokens, id=id, group=group, sequence=id, after=after)


def shown(name: str, version: int, *requests: RequestView, routed: int, interrupted: int = 0) -> InstanceSnapshot:
    return server(name, version, requests, routed=routed, interrupted=interrupted)


def test_each_server_gets_its_share_of_the_slots_as_whole_groups_and_the_rest_waits() -> None:
    plan = laminar().plan(fleet([server("a"), server("b")], new(1, 2, 3, 4, 5)), anything)
    assert plan == [
        Route(instance="a", requests=(10, 11, 30, 31)),
        Route(instance="b", requests=(20, 21, 40, 41)),
    ]


def test_nothing_begins_without_room_though_what_has_begun_goes_on() -> None:
    c = laminar()
    c.plan(fleet([server("a")], new(1)), anything)
    a = shown("a", 0, begun(1, 0, 0), routed=2)
    plan = c.plan(fleet([a], [begun(1, 1, 0), *new(2)]), nothing)
    assert plan == [Route(instance="a", requests=(11,))]


def test_a_batch_that_has_begun_ends_before_the_server_pulls_and_begins_another() -> None:
    c = laminar(slots=2)
    assert c.plan(fleet([server("a")], new(1, 2)), anything) == [Route(instance="a", requests=(10, 11))]
    half = shown("a", 0, begun(1, 1, 0), routed=2)
    assert c.plan(fleet([half], new(2), newest=1), anything) == []
    empty = shown("a", 0, routed=2)
    assert c.plan(fleet([empty], new(2), newest=1), anything) == [], "a trajectory is with its environment"
    c.rests(1)
    assert c.plan(fleet([empty], new(2), newest=1), anything) == [
        Pull(instance="a"),
        Route(instance="a", requests=(20, 21)),
    ]


def test_a_batch_that_is_not_complete_when_newer_weights_come_stays_so() -> None:
    c = laminar()
    c.plan(fleet([server("a")], new(1)), anything)
    a = shown("a", 0, begun(1, 0, 0), begun(1, 1, 0), routed=2)
    assert c.plan(fleet([a], new(2), newest=1), anything) == []
    assert c.plan(fleet([a], new(2), newest=0), anything) == [Route(instance="a", requests=(20, 21))]


def test_a_server_without_newer_weights_begins_its_next_batch_on_the_same() -> None:
    c = laminar(slots=2)
    c.plan(fleet([server("a")], new(1)), anything)
    c.rests(1)
    assert c.plan(fleet([shown("a", 0, routed=2)], new(2)), anything) == [Route(instance="a", requests=(20, 21))]


def test_turns_go_to_the_server_that_has_their_group_whatever_it_is_told_besides() -> None:
    c = laminar()
    c.plan(fleet([server("a"), server("b")], new(1)), anything)
    late = shown("a", 0, routed=0)  # its books do not show the route yet
    assert c.plan(fleet([late, server("b")], [begun(1, 0, 0)]), anything) == [Route(instance="a", requests=(10,))]


def test_what_a_failed_server_has_begun_goes_on_elsewhere_on_its_version_or_waits_for_it() -> None:
    c = laminar(slots=4)
    c.plan(fleet([server("a"), server("b")], new(1)), anything)
    cut = [begun(1, 0, 0), begun(1, 1, 0)]
    down = server("a", 0, up=False)
    newer = shown("b", 1, routed=0)
    assert c.plan(fleet([down, newer], [*cut, *new(2)], newest=1), anything) == [
        Route(instance="b", requests=(20, 21))
    ], "what waits for the failed server is passed over"
    back = server("a", 0)
    assert c.plan(fleet([back, newer], cut, newest=1), anything) == [Route(instance="a", requests=(10, 11))]
    same = laminar(slots=4)
    same.plan(fleet([server("a"), server("b")], new(1)), anything)
    assert same.plan(fleet([down, server("b")], cut), anything) == [Route(instance="b", requests=(10, 11))]


def test_an_empty_server_does_not_pull_while_what_waits_needs_its_version() -> None:
    c = laminar(slots=4)
    c.plan(fleet([server("a"), server("b")], new(1)), anything)
    plan = c.plan(fleet([server("a", 0, up=False), server("b")], [begun(1, 0, 0)], newest=1), anything)
    assert plan == [Route(instance="b", requests=(10,))]


def test_what_no_server_can_go_on_with_is_given_up_but_not_what_has_no_token() -> None:
    c = laminar(slots=4)
    c.plan(fleet([server("a")], new(1)), anything)
    restarted = shown("a", 1, routed=0)
    waiting = [begun(1, 0, 0), begun(1, 1, after=-1)]
    assert c.plan(fleet([restarted], waiting, newest=1), anything) == [
        Route(instance="a", requests=(11,)),
        Abort(requests=(10,)),
    ]
    assert c.plan(fleet([server("a", -1, up=False)], waiting[:1], newest=1), anything) == [Abort(requests=(10,))]


def test_nothing_goes_on_where_a_pull_may_bring_newer_weights_than_its_own() -> None:
    c = laminar(slots=4)
    c.plan(fleet([server("a"), server("b", 1)], new(1), newest=1), anything)  # a pulls version 1
    plan = c.plan(fleet([server("a", pulling=True), server("b", 1, up=False)], [begun(2, 0, 1)], newest=1), anything)
    assert plan == []


def test_a_plan_routes_so_many_and_the_next_goes_on() -> None:
    c = laminar(slots=8, most=3)
    plan = c.plan(fleet([server("a")], new(1, 2)), anything)
    assert plan == [Route(instance="a", requests=(10, 11, 20))] and c.unfinished


def test_a_tail_whose_use_has_risen_since_the_last_look_is_packed_and_a_batch_that_begins_is_not() -> None:
    c = laminar(migration="repack")
    c.plan(fleet([server("a"), server("b")], new(1, 2, 3, 4)), anything)

    def look(a: InstanceSnapshot, b: InstanceSnapshot, *waiting: int) -> list[Command]:
        c.look = True
        return c.plan(fleet([a, b], new(*waiting)), anything)

    many = [begun(g, m, 0, tokens=3000) for g in (2, 4) for m in (0, 1)]
    full = shown("b", 0, *many, routed=4)
    assert look(shown("a", 0, *(begun(g, m, 0, tokens=3000) for g in (1, 3) for m in (0, 1)), routed=4), full, 5) == []
    c.rests(1, 1)
    c.rests(3)
    fell = shown("a", 0, begun(1, 0, 0, tokens=4000), routed=4)
    risen = shown("a", 0, begun(1, 0, 0, tokens=4500), routed=4)
    waits = server("b", 0, many, routed=4, waiting=1)
    assert look(fell, waits, 5) == []
    c.rests(2, 1)
    c.rests(4)
    tail = shown("b", 0, begun(2, 0, 0, tokens=5000), routed=4)
    assert look(risen, tail, 5) == [Interrupt(instance="a", requests=(10,)), Route(instance="b", requests=(10,))]
    c.plan(fleet([shown("a", 0, routed=4, interrupted=1), tail], new(5)), anything)
    begins = shown("a", 0, begun(5, 0, 0), begun(5, 1, 0), routed=6, interrupted=1)
    tails = shown("b", 0, begun(1, 0, 0, tokens=4500), begun(2, 0, 0, tokens=5000), routed=5)
    assert look(begins, tails, 6, 7) == [Route(instance="a", requests=(60, 61))]


def test_a_repack_gives_all_that_a_server_has_to_another_and_frees_it() -> None:
    c = laminar(migration="repack")
    fleet_ = [server("a"), server("b")]
    c.plan(fleet(fleet_, new(1, 2, 3, 4)), anything)
    full = [
        shown("a", 0, *(begun(g, m, 0, tokens=9000) for g in (1, 3) for m in (0, 1)), routed=4),
        shown("b", 0, *(begun(g, m, 0, tokens=9000) for g in (2, 4) for m in (0, 1)), routed=4),
    ]
    c.look = True
    assert c.plan(fleet(full, new(5)), anything) == [], "the first look compares with nothing"
    for group in (1, 2, 3, 4):
        c.rests(group, 1)
    tail = [
        shown("a", 0, begun(1, 0, 0, tokens=9000), routed=4),
        shown("b", 0, begun(2, 0, 0, tokens=9500), begun(4, 0, 0, tokens=9500), routed=4),
    ]
    assert c.plan(fleet(tail, new(5)), anything) == [], "not its time"
    assert c.plan(fleet(tail, newest=1), anything) == [], "nothing would begin on it"
    c.look = True
    assert c.plan(fleet(tail, new(5), newest=1), nothing) == [], "nothing may begin on it"
    c.look = True
    plan = c.plan(fleet(tail, new(5), newest=1), anything)
    assert plan == [Interrupt(instance="a", requests=(10,)), Route(instance="b", requests=(10,))]
    freed = shown("a", 0, routed=4, interrupted=1)
    moved = shown("b", 0, begun(1, 0, 0), begun(2, 0, 0), begun(4, 0, 0), routed=5)
    assert c.plan(fleet([freed, moved], [begun(3, 1, 0)], newest=1), anything) == [
        Pull(instance="a"),
        Route(instance="b", requests=(31,)),
    ], "a trajectory that was with its environment has moved too"


def test_trajectories_that_are_with_their_environments_keep_their_place() -> None:
    """By what runs, each server would look all but empty."""
    c = laminar(slots=16, migration="repack")
    c.plan(fleet([server("a"), server("b")], new(*range(1, 9))), anything)
    one, other = ([begun(g, m, 0, tokens=9000) for g in range(i, 9, 2) for m in (0, 1)] for i in (1, 2))
    c.look = True
    c.plan(fleet([shown("a", 0, *one, routed=8), shown("b", 0, *other, routed=8)], new(9)), anything)
    for group in range(1, 7):
        c.rests(group, 1)
    think = [shown("a", 0, *one[:1], routed=8), shown("b", 0, *other[:1], routed=8)]
    c.look = True
    assert c.plan(fleet(think, new(9)), anything) == [], "together they have ten, more than eight"
    for group in range(1, 5):
        c.rests(group)
    c.look = True
    plan = c.plan(fleet([shown("a", 0, routed=8), shown("b", 0, routed=8)], new(9)), anything)
    assert plan == [], "all that a had is b's, though no request shows it"
    assert not c.has_begun("a") and c.has_begun("b")
