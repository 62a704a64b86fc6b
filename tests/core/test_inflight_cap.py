"""The in-flight cap against a brute-force model written from its definition, and against every small state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.staleness.inflight_cap import InflightCap

ALPHAS = ["0", "0.5", "1", "1.5", "2", "3.25"]


@dataclass
class Live:
    """One live group of the model."""

    id: int
    version: int
    deadline: int
    finished: bool = False


class Model:
    """The definition over one list: groups in order of admission, moved to the end when they finish."""

    def __init__(self, batch: int, alpha: Fraction, redundant: int) -> None:
        self.batch, self.alpha, self.redundant = batch, alpha, redundant
        self.next_alpha = alpha
        self.step = 0
        self.groups: list[Live] = []

    def admits(self, version: int) -> bool:
        if version + math.ceil(self.alpha) < self.step:
            return False  # it could never be trained in time
        consumed_and_live = self.step * self.batch + len(self.groups)
        return consumed_and_live < math.floor((version + 1 + self.alpha) * self.batch) + self.redundant

    def consume(self) -> tuple[list[Live], list[Live]] | None:
        finished = [g for g in self.groups if g.finished]
        if len(finished) < self.batch:
            return None
        batch: list[Live] = []
        while len(batch) < self.batch:  # earliest deadline first; among equals the one that finished first
            batch.append(min((g for g in finished if g not in batch), key=lambda g: g.deadline))
        left = [g for g in self.groups if g not in batch]
        for more in range(10):  # all that must be trained within so many further steps must fit into them
            urgent = sum(g.deadline <= self.step + more for g in left)
            if urgent > more * self.batch + self.redundant:
                return None
        surplus = [g for g in left if g.deadline <= self.step]
        self.groups = [g for g in left if g not in surplus]
        self.step += 1
        self.alpha = self.next_alpha
        return batch, surplus


class Interleavings(RuleBasedStateMachine):
    """Any order of calls, with servers whose version lags behind the step by any amount but never goes back."""

    @initialize(alpha=st.sampled_from(ALPHAS), batch=st.integers(1, 4), redundant=st.integers(0, 3))
    def start(self, alpha: str, batch: int, redundant: int) -> None:
        self.model = Model(batch, Fraction(alpha), redundant)
        self.cap = InflightCap(batch=batch, alpha=float(alpha), redundant=redundant)
        self.version = 0
        self.next_id = 0
        self.freed: list[int] = []
        self.total_staleness = 0
        self.largest = Fraction(alpha)

    @rule()
    def update_servers(self) -> None:
        self.version = self.model.step

    @precondition(lambda self: self.version < self.model.step)
    @rule()
    def update_servers_by_one(self) -> None:
        self.version += 1

    def _reserve(self, group_id: int) -> None:
        admitted = self.model.admits(self.version)
        assert self.cap.admits(self.version) is admitted
        if admitted:
            self.cap.reserve(group_id, self.version)
            self.model.groups.append(Live(group_id, self.version, self.version + math.ceil(self.model.alpha)))
        else:
            self._refused(lambda: self.cap.reserve(group_id, self.version))

    @rule(times=st.integers(1, 5))
    def reserve(self, times: int) -> None:
        for _ in range(times):
            self._reserve(self.next_id)
            self.next_id += 1

    @precondition(lambda self: self.freed)
    @rule()
    def reserve_an_id_again_after_it_left(self) -> None:
        if self.model.admits(self.version):
            self._reserve(self.freed.pop())

    @rule(data=st.data(), times=st.integers(1, 5))
    def occupy(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            unfinished = [g for g in self.model.groups if not g.finished]
            if unfinished:
                group = data.draw(st.sampled_from(unfinished))
                self.cap.occupy(group.id)
                group.finished = True
                self.model.groups.remove(group)
                self.model.groups.append(group)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def release_frees_exactly_one_place(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.groups))
        live = self.cap.live
        self.cap.release(group.id)
        self.model.groups.remove(group)
        self.freed.append(group.id)
        assert self.cap.live == live - 1

    @rule()
    def consume(self) -> None:
        step, batch = self.model.step, self.model.batch
        expected = self.model.consume()
        if expected is None:
            before = state(self.cap)
            assert self.cap.consume() is None
            assert state(self.cap) == before
            return
        taken, surplus = expected
        got = self.cap.consume()
        assert got is not None
        assert got[0] == [g.id for g in taken]
        assert sorted(got[1]) == sorted(g.id for g in surplus)
        self.freed += [g.id for g in taken + surplus]
        assert len(taken) == batch
        assert all(g.version <= step <= g.deadline for g in taken)
        assert len(surplus) <= self.model.redundant
        self.total_staleness += sum(step - g.version for g in taken)
        if not self.model.redundant:
            assert self.total_staleness <= self.largest * batch * (step + 1), "the mean staleness is above α"

    @rule(alpha=st.sampled_from(ALPHAS))
    def set_bound(self, alpha: str) -> None:
        """At once if it rises, with the next step if it falls."""
        self.cap.set_bound(float(alpha))
        self.model.next_alpha = Fraction(alpha)
        self.model.alpha = max(self.model.alpha, self.model.next_alpha)
        self.largest = max(self.largest, self.model.alpha)

    @rule(group_id=st.integers(-2, 40))
    def illegal_calls_change_nothing(self, group_id: int) -> None:
        live = {g.id: g for g in self.model.groups}
        if group_id not in live:
            self._refused(lambda: self.cap.release(group_id))
        if group_id not in live or live[group_id].finished:
            self._refused(lambda: self.cap.occupy(group_id))
        if group_id in live:
            self._refused(lambda: self.cap.reserve(group_id, self.version))
        self._refused(lambda: self.cap.reserve(10_000, self.model.step + 1))

    def _refused(self, call: Callable[[], None]) -> None:
        before = state(self.cap)
        with pytest.raises(StalenessViolation):
            call()
        assert state(self.cap) == before

    @invariant()
    def agrees_with_the_model(self) -> None:
        snapshot, model = self.cap.snapshot(), self.model
        unfinished = [g for g in model.groups if not g.finished]
        assert snapshot.step == model.step
        assert snapshot.reserved == len(unfinished)
        assert snapshot.occupied == len(model.groups) - len(unfinished)
        assert snapshot.due == sum(g.deadline <= model.step for g in unfinished)
        assert snapshot.capacity == math.floor((1 + model.alpha) * model.batch) + model.redundant
        assert self.cap.live == len(model.groups)
        assert self.cap.capacity == snapshot.capacity
        assert self.cap.room(self.version) >= self.cap.admits(self.version)
        assert self.cap.limit == math.ceil(self.largest)

    @invariant()
    def never_stuck(self) -> None:
        """Once every live group has finished and the servers are up to date, a batch or an admission is possible."""
        cap = copy.deepcopy(self.cap)
        for group in self.model.groups:
            if not group.finished:
                cap.occupy(group.id)
        assert cap.admits(self.model.step) or cap.consume() is not None


def state(cap: InflightCap) -> str:
    """Everything that it holds, in order."""
    return repr(vars(cap))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("redundant", [0, 1])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("alpha", [0, 0.5, 1, 1.5, 2])
def test_no_reachable_state_of_a_small_cap_breaks_the_bound(alpha: float, batch: int, redundant: int) -> None:
    """Every interleaving, not a sample: states are compared relative to the step, so there are finitely many."""
    bound = math.ceil(alpha)
    start: tuple[InflightCap, int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    start = (InflightCap(batch=batch, alpha=alpha, redundant=redundant), 0, (), ())
    # A state is the cap, the servers' version, and (version, id) of unfinished and of finished groups.
    todo, seen, consumed = [start], set(), 0
    while todo:
        cap, version, running, done = todo.pop()
        step = cap.snapshot().step
        relative = tuple(sorted(step - v for v, _ in running)), tuple(step - v for v, _ in done), step - version
        if relative in seen:
            continue
        seen.add(relative)
        assert len(seen) < 20_000
        if cap.admits(version):
            after = copy.deepcopy(cap)
            free = min({*range(99)} - {i for _, i in running + done})
            after.reserve(free, version)
            todo.append((after, version, (*running, (version, free)), done))
        for group in {v: (v, i) for v, i in running}.values():  # groups of one version are alike
            after = copy.deepcopy(cap)
            after.occupy(group[1])
            todo.append((after, version, tuple(g for g in running if g != group), (*done, group)))
        for group in (*running, *done):
            after = copy.deepcopy(cap)
            after.release(group[1])
            left = tuple(g for g in running if g != group), tuple(g for g in done if g != group)
            todo.append((after, version, *left))
        if version < step:
            todo.append((cap, version + 1, running, done))
        after = copy.deepcopy(cap)
        if (taken := after.consume()) is not None:
            consumed += 1
            batch_ids, surplus = taken
            versions = {i: v for v, i in (*running, *done)}
            assert len(batch_ids) == batch and len(surplus) <= redundant
            assert all(step - versions[i] <= bound for i in batch_ids)
            gone = {*batch_ids, *surplus}
            left = tuple(g for g in running if g[1] not in gone), tuple(g for g in done if g[1] not in gone)
            # A lag behind which nothing is ever admitted is one state, however long it lasts.
            if step + 1 - version <= bound + 2:
                todo.append((after, version, *left))
    assert consumed


def test_alpha_zero_starts_one_batch_and_then_waits_for_the_new_version() -> None:
    cap = InflightCap(batch=3, alpha=0)
    for group in range(3):
        assert cap.admits(0)
        cap.reserve(group, 0)
    assert not cap.admits(0)
    for group in range(3):
        cap.occupy(group)
    assert cap.consume() == ([0, 1, 2], [])
    assert not cap.admits(0), "the servers still hold version 0"
    assert cap.admits(1)


def test_a_run_can_start_at_a_later_step() -> None:
    cap = InflightCap(batch=2, alpha=1, step=7)
    for group in range(4):
        cap.reserve(group, 7)
    assert not cap.admits(7)
    with pytest.raises(StalenessViolation, match="starts on version 8, but only 7 is trained"):
        cap.reserve(4, 8)


def test_a_batch_takes_the_oldest_version_first_then_the_order_of_completion() -> None:
    cap = InflightCap(batch=2, alpha=1)
    for group in range(4):
        cap.reserve(group, 0)
    for group in (3, 1):
        cap.occupy(group)
    assert cap.consume() == ([3, 1], [])
    cap.reserve(4, 1)
    for group in (4, 2, 0):
        cap.occupy(group)
    assert cap.consume() == ([2, 0], [])


def test_redundant_groups_that_did_not_finish_in_time_are_surplus() -> None:
    cap = InflightCap(batch=2, alpha=0, redundant=1)
    for group in range(3):
        cap.reserve(group, 0)
    cap.occupy(2)
    assert cap.consume() is None
    cap.occupy(0)
    assert cap.consume() == ([2, 0], [1])
    assert cap.live == 0


@given(hundredths=st.integers(0, 400), batch=st.integers(1, 64), step=st.integers(0, 1000), redundant=st.integers(0, 3))
def test_capacity_is_the_same_at_every_step_for_decimal_alphas(
    hundredths: int, batch: int, step: int, redundant: int
) -> None:
    cap = InflightCap(batch=batch, alpha=hundredths / 100, redundant=redundant, step=step)
    while cap.admits(step):
        cap.reserve(cap.live, step)
    assert cap.live == batch + hundredths * batch // 100 + redundant == cap.snapshot().capacity


@pytest.mark.parametrize(("batch", "alpha", "redundant"), [(0, 1, 0), (1, -0.1, 0), (1, 1, -1)])
def test_impossible_settings_are_refused(batch: int, alpha: float, redundant: int) -> None:
    with pytest.raises(ValueError, match="need batch"):
        InflightCap(batch=batch, alpha=alpha, redundant=redundant)
    with pytest.raises(ValueError, match="need alpha"):
        InflightCap(batch=1, alpha=1).set_bound(-0.5)


def test_a_lower_ratio_holds_from_the_next_step_on_and_leaves_groups_their_deadlines() -> None:
    cap = InflightCap(batch=1, alpha=2)
    for group in range(3):
        cap.reserve(group, 0)
    cap.set_bound(0)
    assert cap.capacity == 3
    cap.occupy(0)
    assert cap.consume() == ([0], [])
    assert (cap.capacity, cap.room(1)) == (1, 0), "two are still live"
    cap.occupy(1)
    cap.occupy(2)
    assert cap.consume() == ([1], [])
    assert cap.consume() == ([2], []), "with staleness 2, as it was promised"
    cap.set_bound(1)
    assert cap.room(3) == 2, "a higher one at once"
