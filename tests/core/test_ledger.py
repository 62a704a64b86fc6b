"""The ledger against a dict of histories, and the transition table against every pair of states."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.core.ledger import FINAL, TRANSITIONS, Ledger, LedgerError, State

# How a trajectory gets into each state, written by hand from DESIGN.md §1.
PATHS: dict[State, list[State]] = {
    State.RESERVED: [],
    State.RUNNING: [State.RUNNING],
    State.WAITING: [State.WAITING],
    State.SCORED: [State.RUNNING, State.SCORED],
    State.OCCUPIED: [State.RUNNING, State.SCORED, State.OCCUPIED],
    State.CONSUMED: [State.RUNNING, State.SCORED, State.OCCUPIED, State.CONSUMED],
    State.FILTERED: [State.RUNNING, State.SCORED, State.FILTERED],
    State.SURPLUS: [State.SURPLUS],
    State.FAILED: [State.FAILED],
    State.ABORTED: [State.ABORTED],
}
R, N, W, S, O = State.RESERVED, State.RUNNING, State.WAITING, State.SCORED, State.OCCUPIED  # noqa: E741
LEGAL = {
    *((R, N), (R, W), (N, W), (W, N), (N, S), (W, S), (S, O), (S, State.FILTERED), (O, State.CONSUMED)),
    *((s, State.SURPLUS) for s in (R, N, W, S, O)),
    *((s, State.ABORTED) for s in (R, N, W, S, O)),
    *((s, State.FAILED) for s in (R, N, W, S)),
}


def contents(ledger: Ledger) -> tuple[object, ...]:
    return dict.fromkeys(ledger.live), [ledger.state(i) for i in ledger.live], ledger.counts(), ledger.reasons()


@pytest.mark.parametrize(("start", "to"), [(a, b) for a in State for b in State])
def test_only_the_legal_transitions_happen_and_the_others_change_nothing(start: State, to: State) -> None:
    ledger = Ledger()
    ledger.reserve(0)
    for state in PATHS[start]:
        ledger.move(0, state)
    before = contents(ledger)
    if (start, to) in LEGAL:
        ledger.move(0, to)
        assert ledger.state(0) is (None if to in FINAL else to)
        assert ledger.counts() == {**dict.fromkeys(State, 0), to: 1, "reserved_ever": 1}
    else:
        with pytest.raises(LedgerError, match="trajectory 0"):
            ledger.move(0, to)
        assert contents(ledger) == before


def test_the_table_knows_every_state_and_no_way_out_of_a_final_one() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {s for s, ways in TRANSITIONS.items() if not ways} == FINAL


class Histories(RuleBasedStateMachine):
    """Random calls, legal and not, beside a dict of each trajectory's states so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.histories: dict[int, list[State]] = {}
        self.reasons: Counter[tuple[State, str]] = Counter()

    @rule(trajectory_id=st.integers(0, 30))
    def reserve(self, trajectory_id: int) -> None:
        if trajectory_id > max(self.histories, default=-1):
            self.ledger.reserve(trajectory_id)
            self.histories[trajectory_id] = [State.RESERVED]
        else:
            before = contents(self.ledger)
            with pytest.raises(LedgerError, match=f"trajectory {trajectory_id} was reserved before"):
                self.ledger.reserve(trajectory_id)
            assert contents(self.ledger) == before

    @rule(data=st.data(), to=st.sampled_from(State), reason=st.sampled_from(["", "timeout", "batch complete"]))
    def move(self, data: st.DataObject, to: State, reason: str) -> None:
        trajectory_id = data.draw(st.sampled_from([*self.histories, 99]))
        history = self.histories.get(trajectory_id)
        if history is not None and (history[-1], to) in LEGAL:
            self.ledger.move(trajectory_id, to, reason)
            history.append(to)
            if to in FINAL and reason:
                self.reasons[to, reason] += 1
        else:
            before = contents(self.ledger)
            with pytest.raises(LedgerError, match=f"trajectory {trajectory_id}"):
                self.ledger.move(trajectory_id, to, reason)
            assert contents(self.ledger) == before

    @invariant()
    def books_agree_with_the_histories(self) -> None:
        now = {i: history[-1] for i, history in self.histories.items()}
        assert self.ledger.live == [i for i, state in now.items() if state not in FINAL]
        assert all(self.ledger.state(i) is (None if s in FINAL else s) for i, s in now.items())
        counts = Counter(now.values())
        assert self.ledger.counts() == {**{s: counts[s] for s in State}, "reserved_ever": len(now)}
        assert {(s, r): n for s, row in self.ledger.reasons().items() for r, n in row.items()} == self.reasons

    @invariant()
    def conserved_always_and_balanced_only_without_live_ones(self) -> None:
        self.ledger.check_conserved()
        live = [i for i, history in self.histories.items() if history[-1] not in FINAL]
        if live:
            with pytest.raises(LedgerError, match=f"{len(live)} trajectories never reached a final state"):
                self.ledger.check_balanced()
        else:
            self.ledger.check_balanced()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_lost_trajectory_is_noticed() -> None:
    ledger = Ledger()
    ledger.reserve(0)
    del ledger._live[0]
    with pytest.raises(LedgerError, match="1 trajectories were reserved but 0 are accounted for"):
        ledger.check_conserved()


def test_reasons_are_counted_by_final_state() -> None:
    ledger = Ledger()
    for i, (to, reason) in enumerate(
        [(State.FAILED, "step: boom"), (State.FAILED, "step: boom"), (State.ABORTED, "end"), (State.SURPLUS, "")]
    ):
        ledger.reserve(i)
        ledger.move(i, to, reason)
    assert ledger.reasons() == {"aborted": {"end": 1}, "failed": {"step: boom": 2}}
    assert repr(ledger) == "<Ledger surplus 1, failed 2, aborted 1, reserved_ever 4>"


class Uses(RuleBasedStateMachine):
    """Trajectories that are trained up to three times, against a count of each."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(reuse=3)
        self.uses: dict[int, int] = {}
        self.spent: set[int] = set()

    @rule()
    def consume(self) -> None:
        number = len(self.uses)
        self.ledger.reserve(number)
        for state in PATHS[State.CONSUMED]:
            self.ledger.move(number, state)
        self.uses[number] = 1

    @rule(pick=st.integers(0, 9), spend=st.booleans())
    def use(self, pick: int, spend: bool) -> None:
        may = pick in self.uses and pick not in self.spent
        act = self.ledger.spend if spend else self.ledger.use_again
        if may and (spend or self.uses[pick] < 3):
            act(pick)
            if spend:
                self.spent.add(pick)
            else:
                self.uses[pick] += 1
        else:
            with pytest.raises(LedgerError):
                act(pick)

    @rule()
    def go_on(self) -> None:
        """As another process does."""
        restored = Ledger(reuse=3)
        again = {number: n for number, n in self.uses.items() if number not in self.spent}
        final = {("consumed", ""): len(self.uses)} if self.uses else {}
        restored.restore(final, {}, len(self.uses) - 1, uses=sum(self.uses.values()), again=again)
        self.ledger = restored

    @invariant()
    def each_use_counts_and_each_trajectory_is_consumed_once(self) -> None:
        assert self.ledger.uses == sum(self.uses.values())
        assert self.ledger.counts()["consumed"] == self.ledger.counts()["reserved_ever"] == len(self.uses)
        self.ledger.check_conserved()
        if self.spent == set(self.uses):
            self.ledger.check_balanced()
        else:
            with pytest.raises(LedgerError, match="still wait to be used again"):
                self.ledger.check_balanced()


TestUses = Uses.TestCase
TestUses.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_uses_that_the_consumed_ones_cannot_have_had_are_found() -> None:
    for uses in (1, 5):
        ledger = Ledger(reuse=2)
        ledger.restore({("consumed", ""): 2}, {}, 1, uses=uses)
        with pytest.raises(LedgerError, match=f"2 trajectories were consumed, but used {uses} times"):
            ledger.check_conserved()
