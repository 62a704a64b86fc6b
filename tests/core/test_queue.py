"""The queues against models written from the paper's words, every interleaving drawn; and the statements proved."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.core.staleness import make_control
from asyncrl.core.staleness.base import StalenessControl, StalenessViolation
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.staleness.queue import QueueDrop, QueueMax


@dataclass(eq=False)
class Live:
    """One live group of the model."""

    id: int
    version: int


class Model:
    """What both models share: unfinished groups, and a queue in order of completion."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.step = 0
        self.running: list[Live] = []
        self.queue: list[Live] = []
        self.dropped: set[int] = set()
        """Every group that was ever dropped."""

    def purge(self) -> None:
        """Drop what the algorithm drops now."""

    def finish(self, group: Live) -> None:
        self.running.remove(group)
        self.queue.append(group)
        self.purge()

    def consume(self) -> list[Live] | None:
        """The oldest groups, "whenever a full training batch is available"."""
        self.purge()
        if len(self.queue) < self.batch:
            return None
        taken, self.queue = self.queue[: self.batch], self.queue[self.batch :]
        self.step += 1
        self.purge()
        return taken

    def _drop(self, groups: list[Live]) -> None:
        self.queue = [g for g in self.queue if g not in groups]
        self.dropped |= {g.id for g in groups}


class DropModel(Model):
    """ "If the queue is full when a new group arrives, the oldest queued group is dropped"."""

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__(batch)
        self.capacity = capacity

    def purge(self) -> None:
        if len(self.queue) > self.capacity:
            self._drop(self.queue[:1])


class MaxModel(Model):
    """ "Discards samples above a max staleness threshold", when they enter, when the step advances and at consumption;
    the queue is not limited otherwise."""

    def __init__(self, batch: int, bound: int) -> None:
        super().__init__(batch)
        self.bound = bound

    def purge(self) -> None:
        self._drop([g for g in self.queue if self.step - g.version > self.bound])


class Interleavings(RuleBasedStateMachine):
    """Any order of calls, with servers whose version lags behind the step by any amount but never goes back."""

    model: Model
    control: QueueDrop | QueueMax

    def begin(self) -> None:
        self.version = 0
        self.next_id = 0
        self.evicted: set[int] = set()

    def admitted(self) -> bool:
        raise NotImplementedError

    @rule()
    def update_servers(self) -> None:
        self.version = self.model.step

    @precondition(lambda self: self.version < self.model.step)
    @rule()
    def update_servers_by_one(self) -> None:
        self.version += 1

    @rule(times=st.integers(1, 5))
    def reserve(self, times: int) -> None:
        for _ in range(times):
            assert self.control.admits(self.version) is self.admitted()
            if self.admitted():
                self.control.reserve(self.next_id, self.version)
                self.model.running.append(Live(self.next_id, self.version))
            else:
                self._refused(lambda: self.control.reserve(self.next_id, self.version))
            self.next_id += 1

    @rule(data=st.data(), times=st.integers(1, 5))
    def occupy(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            if self.model.running:
                group = data.draw(st.sampled_from(self.model.running))
                self.model.finish(group)
                evicted = self.control.occupy(group.id)
                assert not self.evicted & evicted.keys(), "a group was evicted twice"
                self.evicted |= evicted.keys()

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def release_an_unfinished_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.running))
        self.control.release(group.id)
        self.model.running.remove(group)

    @rule()
    def consume(self) -> None:
        step, before = self.model.step, repr(vars(self.control))
        expected, got = self.model.consume(), self.control.consume()
        if expected is None:
            assert got is None
            assert repr(vars(self.control)) == before
            return
        assert got == ([g.id for g in expected], [])
        limit = self.control.limit
        assert all(g.version <= step for g in expected)
        assert limit is None or all(step - g.version <= limit for g in expected)

    @rule(group_id=st.integers(-2, 40))
    def illegal_calls_change_nothing(self, group_id: int) -> None:
        running, queue = {g.id for g in self.model.running}, set(self.control._occupied)
        if group_id not in running | queue:
            self._refused(lambda: self.control.release(group_id))
        else:
            self._refused(lambda: self.control.reserve(group_id, self.version))
        if group_id not in running:
            self._refused(lambda: self.control.occupy(group_id))
        self._refused(lambda: self.control.reserve(10_000, self.model.step + 1))

    def _refused(self, call: Callable[[], object]) -> None:
        before = repr(vars(self.control))
        with pytest.raises(StalenessViolation):
            call()
        assert repr(vars(self.control)) == before

    @invariant()
    def counts_are_right(self) -> None:
        snapshot = self.control.snapshot()
        assert snapshot.step == self.model.step
        assert snapshot.reserved == len(self.model.running)
        assert snapshot.occupied <= snapshot.capacity
        assert 1 <= self.control.missing <= self.model.batch
        assert (snapshot.occupied + self.control.missing) % self.model.batch == 0

    @invariant()
    def training_always_goes_on(self) -> None:
        """While the trainer waits, every group that starts on the newest version and ends is one more for its batch."""
        control, new = copy.deepcopy(self.control), 20_000
        while control.consume() is None:
            control.reserve(new, self.model.step)
            assert control.occupy(new) == {}
            new += 1
        assert new <= 20_000 + self.model.batch


class DropInterleavings(Interleavings):
    model: DropModel

    @initialize(batch=st.integers(1, 4), more=st.integers(0, 6))
    def start(self, batch: int, more: int) -> None:
        self.begin()
        self.model = DropModel(batch, batch + more)
        self.control = QueueDrop(batch=batch, capacity=batch + more)

    def admitted(self) -> bool:
        return True

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert list(self.control._occupied) == [g.id for g in self.model.queue]
        assert self.evicted == self.model.dropped
        assert self.control.snapshot().due == 0


class MaxInterleavings(Interleavings):
    model: MaxModel

    @initialize(batch=st.integers(1, 4), bound=st.integers(0, 3))
    def start(self, batch: int, bound: int) -> None:
        self.begin()
        self.model = MaxModel(batch, bound)
        self.control = QueueMax(batch=batch, bound=bound)

    def admitted(self) -> bool:
        return self.version + self.model.bound >= self.model.step

    @invariant()
    def drops_early_exactly_what_the_model_will_drop(self) -> None:
        """The model keeps a group until it is too stale; play it out without arrivals: what is left is trained."""
        future, kept = copy.deepcopy(self.model), []
        while future.queue:
            kept += [g.id for g in future.queue[: future.batch]]
            future.queue, future.step = future.queue[future.batch :], future.step + 1
            future.purge()
        assert list(self.control._occupied) == kept
        assert self.model.dropped <= self.evicted <= self.model.dropped | {g.id for g in self.model.queue}

    @invariant()
    def due_and_overdue_groups_are_counted(self) -> None:
        due = sum(g.version + self.model.bound <= self.model.step for g in self.model.running)
        assert self.control.snapshot().due == due


TestDrop = DropInterleavings.TestCase
TestDrop.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestMax = MaxInterleavings.TestCase
TestMax.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@given(batch=st.integers(1, 4), bound=st.integers(0, 3), seed=st.integers(0, 1000))
def test_a_group_released_from_the_queue_never_makes_another_too_stale(batch: int, bound: int, seed: int) -> None:
    rng, control, versions = random.Random(seed), QueueMax(batch=batch, bound=bound), dict[int, int]()
    for group in range(80):
        version = max(0, control.snapshot().step - rng.randint(0, bound))
        versions[group] = version
        control.reserve(group, version)
        control.occupy(group)
        if rng.random() < 0.3 and control._occupied:
            control.release(rng.choice(list(control._occupied)))
        step = control.snapshot().step
        if rng.random() < 0.4 and (taken := control.consume()) is not None:
            assert all(step - versions[i] <= bound for i in taken[0])


def test_the_queues_assertion_stops_a_group_beyond_its_bound() -> None:
    control = QueueMax(batch=1, bound=1, step=5)
    control.reserve(0, 4)
    control.occupy(0)
    control._occupied[0] = 3
    with pytest.raises(StalenessViolation, match="group 0 would be trained at step 5, 1 beyond its bound"):
        control.consume()
    assert control.snapshot().occupied == 1


def test_a_full_queue_drops_its_oldest_group_and_the_newest_batch_is_trained() -> None:
    control = QueueDrop(batch=2, capacity=3)
    for group in range(5):
        control.reserve(group, 0)
    assert [control.occupy(group) for group in (4, 0, 3, 1, 2)] == [{}, {}, {}, {4: "queue full"}, {0: "queue full"}]
    assert control.consume() == ([3, 1], [])
    assert control.consume() is None


def test_queue_max_drops_what_ended_too_late_and_what_would_wait_too_long() -> None:
    control = QueueMax(batch=2, bound=1)
    for group in range(8):
        control.reserve(group, 0)
    kept = [control.occupy(group) for group in range(5)]
    assert kept == [{}, {}, {}, {}, {4: "too stale"}], "two batches are all that may be trained on version 0"
    assert control.consume() == ([0, 1], [])
    assert control.occupy(5) == {5: "too stale"}, "the third batch that it would be in is the one of step 2"
    assert control.consume() == ([2, 3], [])
    assert control.occupy(6) == {6: "too stale"}
    assert not control.admits(0)
    assert control.admits(1)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_memory_of_queue_max_is_bounded_however_slow_the_trainer_is(bound: int) -> None:
    control = QueueMax(batch=4, bound=bound)
    for group in range(1000):
        control.reserve(group, 0)
        control.occupy(group)
    assert control.snapshot().occupied == control.snapshot().capacity == (bound + 1) * 4


def simulate(control: StalenessControl, *, slots: int, seconds: float, tail: float, steps: int) -> tuple[float, float]:
    """The paper's simulator for groups of one sample: ``slots`` that are never idle, a trainer that takes ``seconds``
    a step, capped lognormal lengths of mean 1. Mean staleness and mean length of what was trained."""
    rng, sigma = random.Random(0), 1.3 * tail / 100
    batch = control.missing
    now, busy_until, version, next_id = 0.0, 0.0, 0, 0
    lengths: dict[int, float] = {}
    versions: dict[int, int] = {}
    running: list[tuple[float, int]] = []
    staleness: list[int] = []
    trained: list[float] = []
    while version < steps:
        while len(running) < slots and control.admits(version):
            length = min(rng.lognormvariate(-sigma * sigma / 2, sigma), 8)
            control.reserve(next_id, version)
            lengths[next_id], versions[next_id] = length, version
            running.append((now + length * (rng.random() if next_id < slots else 1), next_id))
            next_id += 1
        if now >= busy_until and (taken := control.consume()) is not None:
            busy_until = now + seconds
            if version > steps // 4:
                staleness += [version - versions[i] for i in taken[0]]
                trained += [lengths[i] for i in taken[0]]
            continue
        ends, group = min(running, default=(float("inf"), -1))
        consumed = control.snapshot().step
        if consumed > version and busy_until <= ends:  # training ends, and its weights are with the servers at once
            now, version = busy_until, consumed
            continue
        now = ends
        running.remove((ends, group))
        control.occupy(group)
    assert len(trained) > 10 * batch
    return sum(staleness) / len(staleness), sum(trained) / len(trained)


@pytest.mark.parametrize(("q", "rho"), [(1, 0.6), (2, 0.6), (1, 1.6), (2, 1.6), (5, 1.6), (2, 2.5)])
def test_mean_staleness_of_queue_drop_is_the_papers_formula(q: int, rho: float) -> None:
    slots, batch = 48, 32
    control = QueueDrop(batch=batch, capacity=q * batch)
    measured, _ = simulate(control, slots=slots, seconds=rho * batch / slots, tail=70, steps=600)
    if rho < 1:
        predicted = slots / batch + rho
    else:
        predicted = slots / (rho * batch) + (2 * q + rho - 1) / (2 * rho)
    assert measured == pytest.approx(predicted, rel=0.08)


def test_queue_max_favours_short_groups_and_queue_drop_does_not() -> None:
    def mean_length(control: StalenessControl, rho: float) -> float:
        return simulate(control, slots=32, seconds=rho, tail=50, steps=400)[1]

    for rho in (0.8, 1.6):
        assert mean_length(QueueDrop(batch=32, capacity=32), rho) == pytest.approx(1, abs=0.02)
    biased = [mean_length(QueueMax(batch=32, bound=bound), 0.8) for bound in (1, 2, 3, 4)]
    assert biased == sorted(biased), "the tighter the bound, the shorter what is trained"
    assert biased[0] < 0.75 < 0.95 < biased[3]


@pytest.mark.parametrize(
    ("name", "control", "limit"),
    [("inflight_cap", InflightCap, 2), ("queue_drop", QueueDrop, None), ("queue_max", QueueMax, 1)],
)
def test_controls_are_made_by_name(name: str, control: type, limit: int | None) -> None:
    made = make_control(name, batch=10, bound=1.5, queue=1.1, redundant=3, step=7)
    assert isinstance(made, control)
    assert made.limit == limit
    assert made.evicts is (control is not InflightCap)
    assert made.snapshot().step == 7
    assert made.missing == (13 if control is InflightCap else 10)
    assert made.snapshot().capacity == {"inflight_cap": 28, "queue_drop": 11, "queue_max": 20}[name]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="need batch ≥ 1; got 0"):
        QueueDrop(batch=0, capacity=1)
    with pytest.raises(ValueError, match="need capacity ≥ batch, or no batch would ever be there; got 3 < 4"):
        QueueDrop(batch=4, capacity=3)
    with pytest.raises(ValueError, match="need bound ≥ 0; got -1"):
        QueueMax(batch=1, bound=-1)
    with pytest.raises(ValueError, match="unknown staleness control 'fifo'"):
        make_control("fifo", batch=1, bound=1, queue=1)
