"""The scheduler against random joins, steps, aborts, pauses and holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.serve.scheduler import MODES, Scheduler, Sequence

MAX_RUNNING, MAX_TOKENS = 4, 90


def sequence(name: str, prompt: int = 3, max_new: int = 5, **options: object) -> Sequence:
    return Sequence(rid=name, prompt=list(range(prompt)), max_new=max_new, **options)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """Plays the engine: every admitted sequence gets a token at once, then all running ones one a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_running=MAX_RUNNING, max_tokens=MAX_TOKENS)
        self.added: list[Sequence] = []
        self.answered: Counter[str] = Counter()
        self.frozen: dict[str, int] = {}

    def answer(self, *finished: Sequence) -> None:
        for s in finished:
            assert s.finish is not None
            self.answered[s.rid] += 1

    @rule(prompt=st.integers(1, 40), max_new=st.integers(1, 50), stop=st.booleans())
    def add(self, prompt: int, max_new: int, stop: bool) -> None:
        s = sequence(f"r{len(self.added)}", prompt, max_new, stop_ids=frozenset({7} if stop else ()))
        if self.scheduler.fits(prompt, max_new):
            self.added.append(s)
            self.scheduler.add(s)
        else:
            with pytest.raises(ValueError, match="never fit"):
                self.scheduler.add(s)

    @rule(budget=st.integers(1, 60), stops=st.sets(st.integers(0, 5)))
    def step(self, budget: int, stops: set[int]) -> None:
        scheduler = self.scheduler
        queue, ran = list(scheduler.waiting), list(scheduler.running)
        admitted = scheduler.admit(budget)
        assert admitted == queue[: len(admitted)], "first in, first out"
        if scheduler.frozen or scheduler.holding:
            assert not admitted
        elif queue and not ran:
            assert admitted, "an empty engine always takes the head of the queue"
        assert len(admitted) < 2 or sum(s.tokens for s in admitted) <= budget
        if scheduler.frozen:
            return
        self.push(admitted, set())
        ran = list(scheduler.running)
        retracted = scheduler.make_room()
        assert retracted == ran[len(ran) - len(retracted) :][::-1], "the youngest go first"
        assert not ran or len(retracted) < len(ran), "the oldest stays"
        assert list(scheduler.waiting)[: len(retracted)] == retracted[::-1]
        self.push(list(scheduler.running), stops)

    def push(self, sequences: list[Sequence], stops: set[int]) -> None:
        for i, s in enumerate(sequences):
            done = self.scheduler.append(s, 7 if i in stops else 0, -1.0, "v")
            assert done == (s.finish is not None)
            if done:
                self.answer(s)
            assert self.scheduler.used <= MAX_TOKENS

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = {s.rid for s in data.draw(st.lists(st.sampled_from(self.added), max_size=3))} if self.added else set()
        live = {s.rid for s in self.scheduler.live()}
        running, waiting = self.scheduler.abort(lambda s: s.rid in names)
        assert {s.rid for s in running + waiting} == names & live
        self.answer(*running, *waiting)

    @precondition(lambda self: not self.scheduler.frozen)
    @rule(mode=st.sampled_from(MODES))
    def pause(self, mode: str) -> None:
        if mode == "abort":
            running, waiting = self.scheduler.abort(lambda s: True)
            self.answer(*running, *waiting)
        order = [s.rid for s in self.scheduler.live()]
        lost = self.scheduler.pause(mode)
        assert [s.rid for s in self.scheduler.live()] == order, "the order is kept"
        assert bool(self.scheduler.running) <= (mode == "in_place" and not lost)

    @rule()
    def resume(self) -> None:
        self.scheduler.resume()

    @rule(hold=st.booleans())
    def hold(self, hold: bool) -> None:
        self.scheduler.holding = hold

    @invariant()
    def every_sequence_is_in_one_place(self) -> None:
        live = [s.rid for s in self.scheduler.live()]
        assert len(live) == len(set(live))
        assert all(count == 1 for count in self.answered.values()), "answered exactly once"
        assert set(live) | set(self.answered) == {s.rid for s in self.added}
        assert not set(live) & set(self.answered)

    @invariant()
    def budgets_hold(self) -> None:
        assert self.scheduler.used == sum(s.tokens for s in self.scheduler.running) <= MAX_TOKENS
        assert len(self.scheduler.running) <= MAX_RUNNING

    def teardown(self) -> None:
        """Left alone, the engine answers everything: no sequence starves."""
        self.scheduler.resume()
        self.scheduler.holding = False
        for _ in range(60 * len(self.added)):
            self.step(30, set())
        assert set(self.answered) == {s.rid for s in self.added}


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_stop_token_is_kept_and_counts_only_after_min_new() -> None:
    scheduler = Scheduler(max_running=1, max_tokens=100)
    s = sequence("a", max_new=9, min_new=2, stop_ids=frozenset({7}))
    scheduler.add(s)
    scheduler.admit(100)
    assert [scheduler.append(s, token, -1.0, "0") for token in (7, 7, 7)] == [False, False, True]
    assert s.output == [7, 7, 7]
    assert s.finish is not None
    assert (s.finish.type, s.finish.matched) == ("stop", 7)


def test_length_finish_names_the_limit() -> None:
    scheduler = Scheduler(max_running=1, max_tokens=100)
    s = sequence("a", max_new=1)
    scheduler.add(s)
    scheduler.admit(100)
    assert scheduler.append(s, 5, -1.0, "0")
    assert s.finish is not None
    assert (s.finish.type, s.finish.length) == ("length", 1)


def test_spans_follow_the_version_of_each_token() -> None:
    scheduler = Scheduler(max_running=1, max_tokens=100)
    s = sequence("a", max_new=5)
    scheduler.add(s)
    scheduler.admit(100)
    for version in ("4", "4", "5", "5", "4"):
        scheduler.append(s, 0, -1.0, version)
    assert [(span.version, span.start, span.end) for span in s.weight_spans()] == [
        ("4", 0, 2),
        ("5", 2, 4),
        ("4", 4, 5),
    ]


def test_abort_says_whether_it_ran() -> None:
    scheduler = Scheduler(max_running=1, max_tokens=100)
    a, b = sequence("a"), sequence("b")
    scheduler.add(a)
    scheduler.add(b)
    scheduler.admit(100)
    assert scheduler.abort(lambda s: True) == ([a], [b])
    assert a.finish is not None and a.finish.message == "Aborted"
    assert b.finish is not None and b.finish.message == "Abort in waiting queue"
