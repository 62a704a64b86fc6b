"""The sliding window against a brute-force model written from its definition."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.staleness.window import SlidingWindow


@dataclass
class Live:
    id: int
    version: int
    ended: int | None = None
    """When; None: not yet."""


class Model:
    """The definition over one list. Whether what is live can be trained in time is tried, not counted."""

    def __init__(self, batch: int, bound: int) -> None:
        self.batch, self.bound = batch, bound
        self.step = self.moment = 0
        self.groups: list[Live] = []

    def fits(self, groups: list[Live], steps_from: int) -> bool:
        """Whether each group has a step from ``steps_from`` to its last one, ``batch`` of them a step."""
        room: dict[int, int] = {}
        for group in sorted(groups, key=lambda g: g.version):
            at = steps_from
            while room.get(at, 0) == self.batch:
                at += 1
            room[at] = room.get(at, 0) + 1
            if at > group.version + self.bound:
                return False
        return True

    def admits(self, version: int) -> bool:
        return self.fits([*self.groups, Live(-1, version)], self.step)

    def consume(self) -> list[int] | None:
        ended = sorted((g for g in self.groups if g.ended is not None), key=lambda g: (g.version, g.ended))
        taken = ended[: self.batch]
        left = [g for g in self.groups if g not in taken]
        if len(taken) < self.batch or not self.fits(left, self.step + 1):
            return None
        assert all(self.step - g.version <= self.bound for g in taken)
        self.groups = left
        self.step += 1
        return [g.id for g in taken]


@pytest.mark.parametrize("seed", range(200))
def test_it_does_what_the_definition_says(seed: int) -> None:
    """Servers of any versions of the window take groups, which end in any order."""
    rng = random.Random(seed)
    batch, bound = rng.randint(1, 4), rng.randint(0, 4)
    window, model = SlidingWindow(batch=batch, bound=bound), Model(batch, bound)
    for number in range(250):
        version = rng.randint(max(0, model.step - bound - 1), model.step)
        match rng.choice(["start", "start", "start", "end", "end", "end", "release", "train", "train"]):
            case "start":
                admitted = model.admits(version)
                assert window.admits(version) is admitted
                if admitted:
                    window.reserve(number, version)
                    model.groups.append(Live(number, version))
                else:
                    with pytest.raises(StalenessViolation, match="was not admitted"):
                        window.reserve(number, version)
            case "end" if unfinished := [g for g in model.groups if g.ended is None]:
                group = rng.choice(unfinished)
                group.ended = number
                assert window.occupy(group.id) == {}
            case "release" if model.groups:
                group = rng.choice(model.groups)
                model.groups.remove(group)
                window.release(group.id)
            case "train":
                promised = window.certain(batch)
                taken, expected = window.consume(), model.consume()
                assert taken == (None if expected is None else (expected, [])), "nothing is surplus"
                assert expected is None or expected[: len(promised)] == promised
        snapshot = window.snapshot()
        assert (snapshot.step, snapshot.reserved + snapshot.occupied) == (model.step, len(model.groups))
        assert len(model.groups) <= window.capacity == (bound + 1) * batch


def test_each_reservation_takes_at_most_one_from_the_room_of_every_version() -> None:
    rng = random.Random(0)
    window = SlidingWindow(batch=3, bound=3)
    unfinished: list[int] = []
    for number in range(400):
        before = {v: window.room(v) for v in range(window.snapshot().step + 1)}
        open_ = [v for v, room in before.items() if room]
        if open_ and rng.random() < 0.7:
            window.reserve(number, rng.choice(open_))
            unfinished.append(number)
            assert all(before[v] - 1 <= window.room(v) <= before[v] for v in before)
        elif unfinished:
            window.occupy(unfinished.pop(rng.randrange(len(unfinished))))
        window.consume()
    assert window.snapshot().step > 20


def test_the_window_slides_only_when_the_oldest_version_has_ended() -> None:
    window = SlidingWindow(batch=2, bound=1)
    window.reserve(0, 0)
    for group in (1, 2):
        window.reserve(group, 0)
        window.occupy(group)
    assert window.consume() == ([1, 2], [])
    for group in (3, 4):
        window.reserve(group, 1)
        window.occupy(group)
    assert window.consume() is None, "group 0 is of version 0, and step 1 the last that may train it"
    window.occupy(0)
    assert window.consume() == ([0, 3], []), "it goes first"
    assert not window.admits(0), "the window has passed it"


def test_more_than_later_steps_can_train_never_start() -> None:
    window = SlidingWindow(batch=2, bound=2)
    assert window.room(0) == 6
    for group in range(6):
        window.reserve(group, 0)
    assert not window.admits(0)
    for group in (0, 1):
        window.occupy(group)
    assert window.consume() == ([0, 1], [])
    assert (window.room(0), window.room(1)) == (0, 2), "steps 1 and 2 are taken by version 0"


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="need batch ≥ 1"):
        SlidingWindow(batch=0, bound=1)
