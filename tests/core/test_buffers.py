"""The staleness buffers against the paper's scans carried out entry by entry, and against every small state."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.staleness.buffers import BufferState, StalenessBuffers


@dataclass
class Entry:
    """One group in one entry of the model."""

    id: int
    version: int
    deadline: int
    finished: bool = False


class Model:
    """StaleFlow §4.2 and §4.3 word for word: buffers of entries, scanned and moved one by one.

    Which of a buffer's reserved entries moves is left to ``rng``, for the paper does not say: it must not matter.
    """

    def __init__(self, batch: int, bound: int, redundant: int, rng: random.Random) -> None:
        self.batch, self.bound, self.redundant, self.rng = batch, bound, redundant, rng
        self.step = 0
        self.buffers: dict[int, list[Entry | None]] = {}
        self.open_buffers()

    def open_buffers(self) -> None:
        for version in range(self.step, self.step + self.bound + 1):
            self.buffers.setdefault(version, [None] * (self.batch + self.redundant))

    def live(self) -> list[Entry]:
        return [e for version in sorted(self.buffers) for e in self.buffers[version] if e is not None]

    def finished(self) -> list[Entry]:
        return [e for e in self.live() if e.finished]

    def unfinished(self) -> list[Entry]:
        return [e for e in self.live() if not e.finished]

    def where(self, group_id: int) -> tuple[int, int]:
        return next((v, i) for v, b in self.buffers.items() for i, e in enumerate(b) if e and e.id == group_id)

    # --- the primitives

    def latest_empty(self, version: int) -> tuple[int, int] | None:
        """Reserve's scan: backward from V_traj + η to V_traj."""
        for v in range(version + self.bound, version - 1, -1):
            if v in self.buffers and None in self.buffers[v]:
                return v, self.buffers[v].index(None)
        return None

    def reserve(self, group_id: int, version: int) -> bool:
        if (place := self.latest_empty(version)) is None:
            return False
        self.buffers[place[0]][place[1]] = Entry(group_id, version, version + self.bound)
        return True

    def delete(self, group_id: int) -> Entry:
        """The entry is emptied; reserved ones move, each into the hole that the one before it left."""
        hole, i = self.where(group_id)
        deleted = self.buffers[hole][i]
        assert deleted is not None
        self.buffers[hole][i] = None
        moved = not deleted.finished  # what stood in an occupied entry was not in a reserved one's way
        while moved:
            moved = False
            for v in sorted(v for v in self.buffers if v < hole):
                fit = [k for k, e in enumerate(self.buffers[v]) if e and not e.finished and e.deadline >= hole]
                if fit:
                    k = self.rng.choice(fit)
                    self.buffers[hole][i], self.buffers[v][k] = self.buffers[v][k], None
                    hole, i, moved = v, k, True
                    break
        return deleted

    def earliest_empty(self) -> tuple[int, int] | None:
        return next(((v, b.index(None)) for v, b in sorted(self.buffers.items()) if None in b), None)

    def occupy(self, group_id: int) -> None:
        entry = self.delete(group_id)
        place = self.earliest_empty()
        assert place is not None and place[0] <= entry.deadline
        entry.finished = True
        # Behind what is occupied in its buffer already, so that the order in a buffer is that of completion.
        self.put_last(place[0], entry)

    def put_last(self, version: int, entry: Entry) -> None:
        buffer = self.buffers[version]
        buffer.remove(None)
        buffer.append(entry)

    def release(self, group_id: int) -> None:
        self.delete(group_id)
        while (hole := self.earliest_empty()) is not None:
            later = [(v, e) for v, b in sorted(self.buffers.items()) if v > hole[0] for e in b if e and e.finished]
            if not later:
                break
            v, entry = later[0]
            self.buffers[v][self.buffers[v].index(entry)] = None
            self.put_last(hole[0], entry)

    def ready(self) -> bool:
        return sum(e is not None and e.finished for e in self.buffers[self.step]) >= self.batch

    def consume(self) -> tuple[list[Entry], list[Entry]] | None:
        if not self.ready():
            return None
        # Entries are interchangeable within their deadlines: those due first are made to be in the buffer that ends.
        reserved = [(v, i) for v, b in sorted(self.buffers.items()) for i, e in enumerate(b) if e and not e.finished]
        order = {e.id: n for n, e in enumerate(sorted(self.unfinished(), key=lambda e: (e.deadline, e.id)))}
        by_deadline = sorted((self.buffers[v][i] for v, i in reserved), key=lambda e: order[e.id] if e else -1)
        for (v, i), entry in zip(reserved, by_deadline, strict=True):
            assert entry is not None and entry.deadline >= v
            self.buffers[v][i] = entry
        retired = [e for e in self.buffers.pop(self.step) if e is not None]
        self.step += 1
        self.open_buffers()
        occupied = [e for e in retired if e.finished]
        surplus = [e for e in retired if not e.finished]
        for extra in occupied[self.batch :]:
            place = self.earliest_empty()
            if place is not None and place[0] <= extra.deadline:
                self.put_last(place[0], extra)
            else:
                surplus.append(extra)
        return occupied[: self.batch], surplus

    def states(self) -> list[tuple[int, BufferState, int, int]]:
        views = []
        for version, buffer in sorted(self.buffers.items()):
            occupied = sum(e is not None and e.finished for e in buffer)
            reserved = sum(e is not None and not e.finished for e in buffer)
            if occupied >= self.batch:
                state = BufferState.READY
            elif None in buffer:
                state = BufferState.WAITING
            else:
                state = BufferState.STUCK
            views.append((version, state, reserved, occupied))
        return views


class Interleavings(RuleBasedStateMachine):
    """Any order of calls; groups start on any version that some server may hold, and the bound moves."""

    @initialize(
        batch=st.integers(1, 4), bound=st.integers(0, 4), redundant=st.sampled_from([0, 0, 1, 2]), seed=st.integers()
    )
    def start(self, batch: int, bound: int, redundant: int, seed: int) -> None:
        self.model = Model(batch, bound, redundant, random.Random(seed))
        self.buffers = StalenessBuffers(batch=batch, bound=bound, redundant=redundant)
        self.next_id = 0
        self.ended = 0

    @rule(behind=st.integers(0, 6), times=st.integers(1, 6))
    def reserve(self, behind: int, times: int) -> None:
        version = self.model.step - behind
        for _ in range(times):
            admitted = self.model.reserve(self.next_id, version)
            assert self.buffers.admits(version) is admitted
            if admitted:
                room = [self.buffers.room(self.model.step - i) for i in range(7)]
                self.buffers.reserve(self.next_id, version)
                after = [self.buffers.room(self.model.step - i) for i in range(7)]
                assert after[behind] == room[behind] - 1
                assert all(0 <= was - now <= 1 for was, now in zip(room, after, strict=True))
            else:
                self._refused(lambda: self.buffers.reserve(self.next_id, version))
            self.next_id += 1

    @rule(data=st.data(), times=st.integers(1, 6))
    def occupy(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            if unfinished := self.model.unfinished():
                group = data.draw(st.sampled_from(sorted(e.id for e in unfinished)))
                assert self.buffers.occupy(group) == {}
                self.model.occupy(group)

    @precondition(lambda self: self.model.live())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(e.id for e in self.model.live())))
        self.buffers.release(group)
        self.model.release(group)
        self.ended += 1

    @rule()
    def consume(self) -> None:
        step = self.model.step
        expected = self.model.consume()
        if expected is None:
            before = state(self.buffers)
            assert self.buffers.consume() is None
            assert state(self.buffers) == before
            return
        taken, surplus = expected
        assert self.buffers.consume() == ([e.id for e in taken], [e.id for e in surplus])
        assert len(taken) == self.model.batch
        assert all(step <= e.deadline for e in taken)
        assert len(surplus) <= self.model.redundant
        self.ended += len(taken) + len(surplus)

    @rule(bound=st.integers(0, 5))
    def set_bound(self, bound: int) -> None:
        self.model.bound = bound
        self.model.open_buffers()
        self.buffers.set_bound(bound)

    @rule(group_id=st.integers(-2, 40))
    def illegal_calls_change_nothing(self, group_id: int) -> None:
        live = {e.id: e for e in self.model.live()}
        if group_id not in live:
            self._refused(lambda: self.buffers.release(group_id))
        if group_id not in live or live[group_id].finished:
            self._refused(lambda: self.buffers.occupy(group_id))
        if group_id in live:
            self._refused(lambda: self.buffers.reserve(group_id, self.model.step))
        self._refused(lambda: self.buffers.reserve(10_000, self.model.step + 1))

    def _refused(self, call: Callable[[], None]) -> None:
        before = state(self.buffers)
        with pytest.raises(StalenessViolation):
            call()
        assert state(self.buffers) == before

    @invariant()
    def agrees_with_the_model(self) -> None:
        model, buffers = self.model, self.buffers
        assert [(b.version, b.state, b.reserved, b.occupied) for b in buffers.states()] == model.states()
        first = [e.id for e in model.buffers[model.step] if e is not None and e.finished]
        assert buffers.certain(model.batch) == first[: model.batch]
        snapshot = buffers.snapshot()
        assert snapshot.step == model.step
        assert snapshot.reserved == len(model.unfinished())
        assert snapshot.occupied == len(model.finished())
        assert snapshot.due == sum(e.deadline <= model.step for e in model.unfinished())
        assert snapshot.capacity == buffers.capacity == (model.bound + 1) * (model.batch + model.redundant)
        assert buffers.missing == model.batch - len(model.finished()) % model.batch + model.redundant
        for behind in range(7):
            version = model.step - behind
            empty = sum(b.count(None) for v, b in model.buffers.items() if v <= version + model.bound)
            assert buffers.room(version) == empty

    @invariant()
    def nothing_is_lost_and_every_entry_is_in_time(self) -> None:
        live = {e.id for e in self.model.live()}
        assert live == {*self.buffers._reserved, *self.buffers._buffer}
        assert all(v <= e.deadline for v, b in self.model.buffers.items() for e in b if e is not None)


def state(buffers: StalenessBuffers) -> str:
    """Everything that it holds, in order."""
    return repr(vars(buffers))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@cache
def placeable(groups: tuple[int, ...], entries: tuple[int, ...]) -> bool:
    """Has each of ``groups``, given by deadline, an entry in a buffer not after it? ``entries`` are those left of each
    buffer. By trying every placement."""
    if not groups:
        return True
    return any(
        placeable(groups[1:], (*entries[:i], entries[i] - 1, *entries[i + 1 :]))
        for i in range(min(groups[0] + 1, len(entries)))
        if entries[i]
    )


@cache
def could_be_ready(unfinished: tuple[int, ...], finished: tuple[int, ...], batch: int, entries: int, last: int) -> bool:
    """Is there a placement of all groups in time that has a batch of finished ones in the first buffer?"""
    for taken in set(combinations(finished, batch)):
        left = list(finished)
        for deadline in taken:
            left.remove(deadline)
        if placeable((*unfinished, *left), (entries - batch, *[entries] * last)):
            return True
    return False


Node = tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]


class SmallWorld:
    """Every state that is reachable with at most ``live`` groups at once, and what leads from one to another.

    Groups with the same deadline are alike, and deadlines are counted from the step, so there are finitely many states.
    Servers may hold any version: a group may start on each that is allowed.
    """

    def __init__(self, batch: int, bound: int, redundant: int, live: int, bounds: tuple[int, ...]) -> None:
        self.batch, self.entries, self.redundant, self.live = batch, batch + redundant, redundant, live
        self.bounds, self.last = bounds, max(bound, *bounds, 0)
        self.forward: dict[Node, set[Node]] = {}
        """Where reservations and completions lead: what needs no luck."""
        self.ready: set[Node] = set()
        start = StalenessBuffers(batch=batch, bound=bound, redundant=redundant)
        todo = [start]
        self.forward[node(start)] = set()
        while todo:
            buffers = todo.pop()
            here = node(buffers)
            self.check(buffers)
            for after, needs_no_luck in self.after(buffers):
                there = node(after)
                if needs_no_luck:
                    self.forward[here].add(there)
                if there not in self.forward:
                    self.forward[there] = set()
                    todo.append(after)

    def check(self, buffers: StalenessBuffers) -> None:
        step = buffers.snapshot().step
        unfinished = tuple(sorted(d - step for d in buffers._reserved.values()))
        finished = tuple(sorted(d - step for occupied in buffers._occupied for d in occupied.values()))
        assert placeable((*unfinished, *finished), (self.entries,) * (self.last + 1)), "a promise cannot be kept"
        views = buffers.states()
        assert all(d >= i + step for i, occupied in enumerate(buffers._occupied) for d in occupied.values())
        assert sum(v.reserved for v in views) == len(unfinished)
        assert sum(v.occupied for v in views) == len(finished)
        ready = views[0].state is BufferState.READY
        possible = could_be_ready(unfinished, finished, self.batch, self.entries, self.last)
        assert ready is possible, "some placement makes the first buffer ready, or none does"
        if ready:
            self.ready.add(node(buffers))

    def after(self, buffers: StalenessBuffers) -> Iterator[tuple[StalenessBuffers, bool]]:
        step = buffers.snapshot().step
        live = {*buffers._reserved, *buffers._buffer}
        was_ready = node(buffers) in self.ready
        if len(live) < self.live:
            new = min({*range(self.live)} - live)
            for version in range(step - self.last, step + 1):
                if buffers.admits(version):
                    after = copied(buffers)
                    after.reserve(new, version)
                    assert after._reserved[new] == version + buffers._bound, "the deadline that all below is held to"
                    assert not was_ready or after.states()[0].state is BufferState.READY
                    yield after, True
        alike = {d: g for g, d in buffers._reserved.items()}.values()
        for group in alike:
            after = copied(buffers)
            after.occupy(group)
            assert not was_ready or after.states()[0].state is BufferState.READY
            yield after, True
        for group in (*alike, *buffers._buffer):
            after = copied(buffers)
            after.release(group)
            assert {*after._reserved, *after._buffer} == live - {group}
            yield after, False
        for bound in self.bounds:
            after = copied(buffers)
            after.set_bound(bound)
            yield after, False
        after = copied(buffers)
        if (consumed := after.consume()) is not None:
            assert was_ready
            batch, surplus = consumed
            assert len(batch) == self.batch and len(surplus) <= self.redundant
            assert all(buffers._occupied[0][group] >= step for group in batch)
            assert {*after._reserved, *after._buffer} == live - {*batch, *surplus}
            assert len(live) - len(batch) - len(surplus) == after.snapshot().reserved + after.snapshot().occupied
            yield after, False
        else:
            assert not was_ready

    def leads_to_consume(self) -> set[Node]:
        """The states from which reservations and completions alone can make the first buffer ready."""
        backward: dict[Node, list[Node]] = {}
        for here, following in self.forward.items():
            for there in following:
                backward.setdefault(there, []).append(here)
        reached, todo = set(self.ready), list(self.ready)
        while todo:
            for before in backward.get(todo.pop(), ()):
                if before not in reached:
                    reached.add(before)
                    todo.append(before)
        return reached


def node(buffers: StalenessBuffers) -> Node:
    """The state, with the step and the names of the groups left out."""
    step = buffers._step
    occupied = tuple(tuple(d - step for d in deadlines.values()) for deadlines in buffers._occupied)
    return buffers._bound, tuple(map(len, buffers._by_deadline)), occupied


def copied(buffers: StalenessBuffers) -> StalenessBuffers:
    """``copy.deepcopy``, at a twentieth of its time."""
    twin = copy.copy(buffers)
    twin._reserved = dict(buffers._reserved)
    twin._empty, twin._passed = list(buffers._empty), list(buffers._passed)
    twin._by_deadline = deque(map(dict, buffers._by_deadline))
    twin._occupied = deque(map(OrderedDict, buffers._occupied))
    twin._buffer = dict(buffers._buffer)
    return twin


def explore(batch: int, bound: int, redundant: int, live: int, bounds: tuple[int, ...] = ()) -> int:
    world = SmallWorld(batch, bound, redundant, live, bounds)
    assert world.leads_to_consume() == world.forward.keys(), "from some state nothing leads to the next batch"
    return len(world.forward)


@pytest.mark.parametrize("redundant", [0, 1])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_small_state_keeps_the_bound_loses_nothing_and_leads_on(batch: int, bound: int, redundant: int) -> None:
    assert explore(batch, bound, redundant, live=7) > batch * (bound + 1)


def test_every_small_state_under_a_bound_that_moves() -> None:
    assert explore(2, 2, 0, live=6, bounds=(0, 1, 2)) > 2000
    assert explore(1, 2, 1, live=5, bounds=(0, 1, 2)) > 1000


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "redundant", "bounds"), [(3, 1, ()), (3, 0, (0, 1, 2)), (4, 0, ()), (2, 2, ())])
def test_every_state_of_full_buffers(batch: int, redundant: int, bounds: tuple[int, ...]) -> None:
    """Without a limit on the groups but that of the buffers themselves."""
    assert explore(batch, 2, redundant, live=3 * (batch + redundant), bounds=bounds) > 20_000


def views(buffers: StalenessBuffers) -> list[tuple[int, str, int, int]]:
    return [(b.version, str(b.state), b.reserved, b.occupied) for b in buffers.states()]


def test_reserve_takes_the_latest_entry_and_occupy_the_earliest() -> None:
    buffers = StalenessBuffers(batch=2, bound=1)
    for group in range(3):
        buffers.reserve(group, 0)
    assert views(buffers) == [(0, "waiting", 1, 0), (1, "stuck", 2, 0)]
    buffers.occupy(0)
    assert views(buffers) == [(0, "waiting", 0, 1), (1, "stuck", 2, 0)], "2 took the entry of 0, and 0 that of 2"
    buffers.occupy(2)
    assert views(buffers) == [(0, "ready", 0, 2), (1, "waiting", 1, 0)]
    assert buffers.certain(2) == [0, 2]
    assert buffers.consume() == ([0, 2], [])
    assert views(buffers) == [(1, "waiting", 1, 0), (2, "waiting", 0, 0)]


def test_an_old_version_finds_no_room_where_newer_ones_do() -> None:
    """Figure 7 (left), T2': the buffer that an instance with old weights could still use is stuck."""
    buffers = StalenessBuffers(batch=1, bound=1)
    buffers.reserve(0, 0)
    buffers.reserve(1, 0)
    buffers.occupy(0)
    assert buffers.consume() == ([0], [])
    assert views(buffers) == [(1, "stuck", 1, 0), (2, "waiting", 0, 0)]
    assert (buffers.room(0), buffers.room(1)) == (0, 1)
    buffers.reserve(2, 1)
    buffers.occupy(2)
    assert buffers.consume() is None, "1 is due, and training waits for it"
    assert views(buffers) == [(1, "stuck", 1, 0), (2, "ready", 0, 1)]
    buffers.release(1)
    assert buffers.consume() == ([2], []), "pulled forward into the place of the group that was aborted"


def test_what_a_full_batch_leaves_in_its_buffer_is_surplus_unless_it_finds_another_entry() -> None:
    buffers = StalenessBuffers(batch=1, bound=1, redundant=1)
    for group in range(4):
        buffers.reserve(group, 0)
    buffers.occupy(3)
    assert buffers.consume() == ([3], [0]), "one group more than the next buffer has entries"
    buffers.occupy(1)
    buffers.occupy(2)
    buffers.reserve(4, 1)
    assert buffers.consume() == ([1], [2]), "2 is due"
    buffers.occupy(4)
    buffers.reserve(5, 2)
    buffers.occupy(5)
    assert buffers.consume() == ([4], []), "5 has time and finds an entry in the next buffer"
    assert views(buffers) == [(3, "ready", 0, 1), (4, "waiting", 0, 0)]


def test_a_lower_bound_holds_for_new_groups_and_leaves_the_others_theirs() -> None:
    buffers = StalenessBuffers(batch=1, bound=2)
    buffers.reserve(0, 0)
    buffers.set_bound(0)
    assert buffers.capacity == 1
    buffers.reserve(1, 0)
    assert not buffers.admits(0), "buffer 0 is full, and no other is allowed any more"
    buffers.occupy(1)
    assert buffers.consume() == ([1], []), "nothing waits for 0, which has until step 2"
    buffers.set_bound(1)
    assert buffers.room(1) == 1, "buffer 1: raised at once"
    assert buffers.limit == 2


def test_a_run_can_start_at_a_later_step() -> None:
    buffers = StalenessBuffers(batch=2, bound=1, step=7)
    assert buffers.room(7) == 4
    assert buffers.room(6) == 2
    assert buffers.room(5) == 0
    with pytest.raises(StalenessViolation, match="starts on version 8, but only 7 is trained"):
        buffers.reserve(4, 8)


def test_a_group_beyond_its_bound_is_never_trained() -> None:
    buffers = StalenessBuffers(batch=1, bound=0, step=3)
    buffers.reserve(0, 3)
    buffers.occupy(0)
    buffers._occupied[0][0] = 1
    with pytest.raises(StalenessViolation, match="group 0 would be trained at step 3, 2 beyond its bound"):
        buffers.consume()


@pytest.mark.parametrize(("batch", "bound", "redundant"), [(0, 1, 0), (1, -1, 0), (1, 1, -1)])
def test_impossible_settings_are_refused(batch: int, bound: int, redundant: int) -> None:
    with pytest.raises(ValueError, match="need batch"):
        StalenessBuffers(batch=batch, bound=bound, redundant=redundant)
    with pytest.raises(ValueError, match="need bound"):
        StalenessBuffers(batch=1, bound=1).set_bound(-1)
