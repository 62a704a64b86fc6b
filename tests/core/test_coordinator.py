"""The coordinator: plans worked by hand, and a world in which commands take effect late and in any order."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.commands import Command, Interrupt, Pull, Route
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.policy.migration import Limits
from asyncrl.core.policy.routing import ROUTING, RequestView
from asyncrl.core.snapshot import FleetSnapshot, InstanceSnapshot

from .fleets import COST, fleet, levels, server, servers

MIXES = list(itertools.product(["waterfall", "least_loaded"], ["all", "selective"], ["none", "throughput"]))
"""Figure 16's eight."""


def coordinator(
    routing: str = "waterfall",
    synchronization: str = "selective",
    migration: str = "throughput",
    phi: float = 1.1,
    phi_wait: int = 3,
    most: int = 256,
) -> Coordinator:
    return Coordinator(
        routing=routing,
        synchronization=synchronization,
        migration=migration,
        cost=COST,
        limits=Limits(phi_wait=phi_wait, phi_throughput=phi),
        most=most,
    )


def initial(count: int, first: int = 0) -> list[RequestView]:
    return [RequestView(v_traj=None, tokens=100, id=i, group=i, sequence=i) for i in range(first, first + count)]


def running(count: int, first: int = 100, v_traj: int = 0, tokens: int = 100) -> list[RequestView]:
    return [RequestView(v_traj=v_traj, tokens=tokens, id=i, sequence=i) for i in range(first, first + count)]


def test_requests_go_to_the_older_version_first_and_a_stuck_server_pulls() -> None:
    plan = coordinator().plan(fleet([server("a", 1), server("b", 2)], initial(3), 2), lambda v: 2 if v == 1 else 5)
    assert plan == [Route(instance="a", requests=(0, 1)), Route(instance="b", requests=(2,))]
    plan = coordinator().plan(fleet([server("a", 1)], initial(3), 2), lambda v: 0 if v == 1 else 5)
    assert plan == [Pull(instance="a"), Route(instance="a", requests=(0, 1, 2))]


def test_what_a_pull_cuts_is_routed_in_the_same_plan_older_versions_first() -> None:
    has = running(2, v_traj=1)
    plan = coordinator(synchronization="all").plan(
        fleet([server("a", 1, has), server("b", 1)], initial(1), 2), lambda v: v - 1
    )
    assert plan == [
        Pull(instance="a"),
        Pull(instance="b"),
        Route(instance="a", requests=(100, 0)),
        Route(instance="b", requests=(101,)),
    ]


def test_a_snapshot_without_the_effects_of_commands_is_not_decided_on_figure_12a() -> None:
    c, a, b = coordinator(), server("a", 0), server("b", 0)
    assert c.plan(fleet([a], initial(1)), lambda v: 9) == [Route(instance="a", requests=(0,))]
    later = initial(1, first=1)
    assert c.plan(fleet([a], later), lambda v: 9) == [], "its books do not show the first route yet"
    assert c.plan(fleet([a, b], later), lambda v: 9) == [Route(instance="b", requests=(1,))], (
        "another server may be told"
    )
    done = server("a", 0, routed=1)  # the request came and has already ended
    assert c.plan(fleet([done], initial(1, first=2)), lambda v: 9) == [Route(instance="a", requests=(2,))]


def test_a_route_and_an_interrupt_that_are_both_under_way_do_not_cancel_out() -> None:
    """The paper's accum_traj_num of ``a`` is the same before and after."""
    c = coordinator(phi=1e9, phi_wait=0)
    a, b = server("a", 0, running(3), waiting=1), server("b", 0, running(2, first=200))
    plan = c.plan(fleet([b, a], initial(1)), lambda v: 9)
    assert plan == [
        Interrupt(instance="a", requests=(102,)),
        Route(instance="b", requests=(102,)),
        Route(instance="a", requests=(0,)),
    ]
    assert c.plan(fleet([b, a], initial(1, first=1)), lambda v: 9) == []


def test_a_server_that_failed_is_taken_as_it_comes_back() -> None:
    c, a = coordinator(), server("a", 0)
    c.plan(fleet([a], initial(1)), lambda v: 9)
    assert c.plan(fleet([server("a", 0, up=False)], initial(1)), lambda v: 9) == []
    assert c.plan(fleet([a], initial(1)), lambda v: 9) == [Route(instance="a", requests=(0,))]
    c.forget("a")
    assert c.plan(fleet([a], initial(1)), lambda v: 9) == [Route(instance="a", requests=(0,))]


def test_nothing_is_decided_while_the_fleet_is_suspended() -> None:
    snapshot = msgspec.structs.replace(fleet([server("a", 0)], initial(1)), suspended=True)
    assert coordinator().plan(snapshot, lambda v: 9) == []


def test_half_of_what_the_slowest_server_runs_moves_to_an_idle_one() -> None:
    snapshot = fleet([server("a", 0, running(8, tokens=10_000)), server("b", 0)])
    interrupt, route = coordinator().plan(snapshot, lambda v: 0)
    assert isinstance(interrupt, Interrupt) and isinstance(route, Route)
    assert (interrupt.instance, route.instance) == ("a", "b")
    assert interrupt.requests == route.requests and len(route.requests) == 4


def test_what_could_only_come_back_is_not_cut() -> None:
    """The idle server is too old. In the paper's loop all eight would be cut and come back, at every plan."""
    snapshot = fleet([server("a", 1, running(8, v_traj=1)), server("b", 0)], newest=1)
    assert coordinator().plan(snapshot, lambda v: 0) == []


@pytest.mark.parametrize("routing", ["waterfall", *ROUTING])
def test_what_waits_inside_a_server_does_not_go_to_wait_inside_another(routing: str) -> None:
    """It would be cut there too, and so on, without ever getting a token."""
    full = [server("a", 0, running(10), waiting=6), server("b", 0, running(8, 200), waiting=3)]
    assert coordinator(routing=routing).plan(fleet(full), lambda v: 0) == [], "and not outside, without its prefix"
    interrupt, *routes = coordinator(routing=routing).plan(fleet([*full, server("c", 0)]), lambda v: 0)
    assert interrupt == Interrupt(instance="a", requests=(109, 108, 107))
    assert [route.instance for route in routes if isinstance(route, Route)] == ["c"]


def test_a_server_that_pulls_is_not_taken_for_an_idle_one() -> None:
    snapshot = fleet([server("a", 2, running(8, v_traj=2)), server("b", 1, running(8, 200, v_traj=1))], initial(1), 2)
    plan = coordinator(synchronization="all").plan(snapshot, lambda v: 0)
    assert plan[0] == Pull(instance="b") and not any(isinstance(c, Interrupt) for c in plan)


def test_a_move_must_be_worth_its_prefill() -> None:
    has = running(16, tokens=20_000)
    for mean_new_tokens, moves in ((2.0, False), (10_000.0, True)):
        snapshot = fleet([server("a", 0, has, max_tokens=1_000_000), server("b", 0, max_tokens=1_000_000)])
        snapshot = msgspec.structs.replace(snapshot, mean_new_tokens=mean_new_tokens)
        assert bool(coordinator().plan(snapshot, lambda v: 0)) is moves


class World:
    """Books of a fleet in which commands take effect late. Checks each command as it is issued."""

    def __init__(
        self, instances: list[InstanceSnapshot], mix: tuple[str, str, str], seed: int, most: int = 256
    ) -> None:
        self.random = random.Random(seed)
        self.coordinator = coordinator(*mix, phi=2.0, most=most)
        self.newest = 3
        self.instances = {
            i.name: msgspec.structs.replace(i, waiting=0, kv_tokens=i.tokens, requests=dict(i.requests), pulling=False)
            for i in instances
        }
        self.waiting: dict[int, RequestView] = {}
        self.under_way: list[Command] = []
        self.promised: dict[int, RequestView] = {}
        """Requests of routes that are under way."""
        self.next_id = 5_000
        self.groups: dict[int, int] = {}
        self.rooms = dict.fromkeys(range(50), 3)

    def snapshot(self) -> FleetSnapshot:
        return fleet(
            list(self.instances.values()), sorted(self.waiting.values(), key=lambda r: r.sequence), self.newest
        )

    def arrive(self) -> None:
        self.waiting[self.next_id] = RequestView(
            v_traj=None,
            tokens=self.random.choice([10, 500]),
            id=self.next_id,
            sequence=self.next_id,
            group=self.next_id // 2,
        )
        if (v := self.groups.get(self.next_id // 2)) is not None:
            self.waiting[self.next_id] = msgspec.structs.replace(self.waiting[self.next_id], v_traj=v)
        self.next_id += 1

    def end(self) -> None:
        having = [i for i in self.instances.values() if i.requests]
        if having:
            instance = self.random.choice(having)
            instance.requests.pop(self.random.choice(list(instance.requests)))
            self._book(instance.name)

    def push(self) -> None:
        self.newest += 1
        self.rooms[self.newest] = 3

    def _book(self, name: str, **fields: object) -> None:
        i = self.instances[name]
        tokens = sum(r.tokens for r in i.requests.values())
        self.instances[name] = msgspec.structs.replace(
            i, running=sum(r.slots for r in i.requests.values()), tokens=tokens, kv_tokens=tokens, **fields
        )

    def fail_or_return(self) -> None:
        instance = self.random.choice(list(self.instances.values()))
        name = instance.name
        if instance.up:
            for command in [c for c in self.under_way if c.instance == name]:  # void
                self.under_way.remove(command)
                if isinstance(command, Route):
                    for id in command.requests:
                        if id in self.promised:
                            self._back(self.promised.pop(id))
            for request in instance.requests.values():
                self._back(request)
            instance.requests.clear()
            self.coordinator.forget(name)
            self._book(name, up=False, pulling=False)
        else:
            self._book(name, up=True, version=max(instance.version, self.newest))

    def _back(self, request: RequestView) -> None:
        if request.id in self.promised:  # its route is under way and waits for it
            self.promised[request.id] = request
        else:
            self.waiting[request.id] = request

    def plan(self) -> list[Command]:
        before = self.snapshot()
        rooms = dict(self.rooms)
        commands = self.coordinator.plan(before, lambda v: rooms[v])
        by_name = {i.name: i for i in before.instances}
        versions = {i.name: i.version for i in before.instances}
        busy = {c.instance for c in self.under_way}
        cut: dict[int, RequestView] = {}
        for command in commands:
            instance = by_name[command.instance]
            assert instance.up and command.instance not in busy, "it was told something that has no effect yet"
            match command:
                case Pull():
                    assert self.newest > instance.version and not instance.pinned
                    versions[command.instance] = self.newest
                    cut.update(instance.requests)
                case Interrupt(requests=ids):
                    assert not instance.pinned
                    assert command.instance not in {c.instance for c in commands if isinstance(c, Pull)}
                    cut.update((id, instance.requests[id]) for id in ids)
        routed = [id for c in commands if isinstance(c, Route) for id in c.requests]
        assert len(routed) == len(set(routed)), "routed twice"
        for command in commands:
            if isinstance(command, Route):
                version = versions[command.instance]
                for id in command.requests:
                    request = self.waiting.pop(id, None) or cut[id]
                    if request.v_traj is None:
                        v_traj = self.groups.get(request.group)
                        if v_traj is None:
                            v_traj = self.groups[request.group] = version
                            for v in self.rooms:  # the worst that a reservation may do
                                self.rooms[v] -= 1
                            assert self.rooms[version] >= 0, "more groups than there is room for"
                            for other in [r for r in self.waiting.values() if r.group == request.group]:
                                self.waiting[other.id] = msgspec.structs.replace(other, v_traj=v_traj)
                        request = msgspec.structs.replace(request, v_traj=v_traj)
                    assert version >= request.oldest
                    self.promised[id] = request
        self.under_way += commands
        return commands

    def take_effect(self) -> bool:
        """One command, if any can."""
        pulls = {c.instance for c in self.under_way if isinstance(c, Pull)}
        on_servers = {id for i in self.instances.values() for id in i.requests}
        able = [
            c
            for c in self.under_way
            if not isinstance(c, Route) or (c.instance not in pulls and not on_servers.intersection(c.requests))
        ]
        if not able:
            return False
        command = self.random.choice(able)
        self.under_way.remove(command)
        instance = self.instances[command.instance]
        match command:
            case Pull():
                for request in instance.requests.values():
                    self._back(request)
                instance.requests.clear()
                self._book(command.instance, version=self.newest)
            case Interrupt(requests=ids):
                for id in ids:
                    if id in instance.requests:
                        self._back(instance.requests.pop(id))
                    elif id in self.promised:  # it ended before it was cut; its route is void
                        del self.promised[id]
                self._book(command.instance, interrupted=instance.interrupted + len(ids))
            case Route(requests=ids):
                for id in ids:
                    if id in self.promised:
                        instance.requests[id] = self.promised.pop(id)
                self._book(command.instance, routed=instance.routed + len(ids))
        return True

    def settle(self) -> None:
        """Nothing else happens: plans end, and then nobody waits without a reason."""
        for _ in range(200):
            while self.take_effect():
                pass
            assert not self.under_way
            if not self.plan():
                return
        raise AssertionError("plans do not end")


@given(
    instances=servers(),
    mix=st.sampled_from(MIXES),
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 60),
    most=st.sampled_from([1, 3, 256]),
)
def test_no_plan_builds_on_an_effect_that_has_not_happened(
    instances: list[InstanceSnapshot], mix: tuple[str, str, str], seed: int, steps: int, most: int
) -> None:
    world = World(instances, mix, seed, most)
    for _ in range(steps):
        kind = world.random.random()
        if kind < 0.3:
            world.arrive()
        elif kind < 0.45:
            world.end()
        elif kind < 0.5:
            world.push()
        elif kind < 0.55:
            world.fail_or_return()
        elif kind < 0.75:
            world.take_effect()
        else:
            world.plan()
    world.settle()
    head = next(iter(sorted(world.waiting.values(), key=lambda r: (r.v_traj is None, r.v_traj or 0, r.sequence))), None)
    for i in world.instances.values() if head is not None else []:
        idle = i.up and not i.requests and i.max_tokens >= head.tokens
        if head.v_traj is None:
            assert not (idle and world.rooms[i.version] > 0), "an idle server may start a group"
            assert not (idle and world.rooms[world.newest] > 0 and not i.pinned and not by_others(world)), "it may pull"
        else:
            assert not (idle and (i.version >= head.oldest)), "an idle server may serve the first that waits"


def by_others(world: World) -> bool:
    """Whether something else may run on a server of an old version: then ``selective`` leaves it as it is."""
    return any(r.v_traj is not None for r in world.waiting.values())


@given(instances=servers(), count=st.integers(0, 20), most=st.integers(1, 4))
def test_plans_that_stop_at_their_limit_route_together_as_one_does(
    instances: list[InstanceSnapshot], count: int, most: int
) -> None:
    def plans(most: int) -> list[list[int]]:
        world = World(instances, ("waterfall", "selective", "none"), 0, most)
        world.newest = 0
        for _ in range(count):
            world.arrive()
            world.next_id += 1  # each is of a group of its own
        while True:
            routed = sum(len(c.requests) for c in world.plan() if isinstance(c, Route))
            assert routed <= most and world.coordinator.unfinished is (routed == most)
            while world.take_effect():
                pass
            if not world.coordinator.unfinished:
                return [sorted(i.requests) for i in world.instances.values()]

    assert plans(most) == plans(256)


@given(
    has=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    tokens=st.sampled_from([100, 3_000]),
    ages=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=6, max_size=6),
    mix=st.sampled_from([m for m in MIXES if m[2] == "throughput"]),
)
def test_migration_ends_and_never_lowers_the_use_of_the_fleet(
    has: list[int], tokens: int, ages: list[tuple[int, int]], mix: tuple[str, str, str]
) -> None:
    """φ_throughput is so small that the paper's loop would migrate for ever."""
    instances = [
        server(name, max(ages[i]), running(count, 1000 * i, min(ages[i]), tokens))
        for i, (name, count) in enumerate(zip("abcdef", has, strict=False))
    ]
    world = World(instances, mix, 0)
    world.coordinator = coordinator(*mix, phi=1.01)
    world.newest = max(i.version for i in instances)
    speed = -1.0
    for _ in range(40):
        now = sum(COST.use(i.running, i.kv_tokens) for i in world.instances.values())
        assert now > speed
        plan = world.plan()
        speed = -1.0 if any(isinstance(c, Pull) for c in plan) else now
        if not plan:
            return
        while world.take_effect():
            pass
    raise AssertionError("migrations do not end")


def test_every_routing_function_serves_the_queue() -> None:
    for routing in ["waterfall", *ROUTING]:
        plan = coordinator(routing).plan(fleet([server("a", 1), server("b", 2)], initial(4), 2), lambda v: 9)
        assert sorted(id for c in plan if isinstance(c, Route) for id in c.requests) == [0, 1, 2, 3], routing


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(KeyError):
        coordinator(migration="sometimes")


def test_levels_are_read_in_order() -> None:
    mixed = [*running(1, 50, v_traj=2), *running(1, 60, v_traj=0), *initial(1, 70)]
    plan = coordinator().plan(fleet([server("a", 2)], mixed), lambda v: 9)
    assert plan == [Route(instance="a", requests=(60, 50, 70))]
    assert list(levels(mixed)) == [2, 0, None]
