"""The staleness buffers against the paper's scans carried out entry by entry, and against every small state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

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
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
