"""Inherent staleness: the control and a list do the same, and a group's staleness is what the docstring says."""

from __future__ import annotations

import random

import pytest

from asyncrl.core.staleness.base import UNBOUNDED, StalenessViolation
from asyncrl.core.staleness.inherent import InherentStaleness


@pytest.mark.parametrize("seed", range(150))
def test_it_is_a_list_of_finished_groups_and_staleness_is_the_inherent_one_and_the_turn(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.randint(1, 4)
    capacity = batch + rng.randint(0, 5)
    control = InherentStaleness(batch=batch, capacity=capacity)
    step = version = 0
    unfinished: dict[int, int] = {}
    finished: list[tuple[int, int, int, int]] = []
    """Group, version, step at its end, groups before it."""
    most = 0
    """Unfinished groups at any moment."""
    released = False
    for group in range(300):
        match rng.choice(["start", "start", "end", "end", "end", "release", "servers", "train"]):
            case "start":
                full = len(finished) >= capacity
                assert control.admits(version) is not full
                assert control.room(version) == (0 if full else UNBOUNDED)
                if full:
                    with pytest.raises(StalenessViolation, match="was not admitted"):
                        control.reserve(group, version)
                else:
                    control.reserve(group, version)
                    unfinished[group] = version
            case "end" if unfinished:
                ended = rng.choice(list(unfinished))
                assert control.occupy(ended) == {}
                finished.append((ended, unfinished.pop(ended), step, len(finished)))
            case "release" if unfinished or finished:
                gone = rng.choice([*unfinished, *(g for g, *_ in finished)])
                control.release(gone)
                unfinished.pop(gone, None)
                released = released or any(gone == g for g, *_ in finished)
                finished = [f for f in finished if f[0] != gone]
            case "servers":
                version = rng.randint(version, step)
            case "train":
                taken = control.consume()
                if len(finished) < batch:
                    assert taken is None
                else:
                    assert taken == ([g for g, *_ in finished[:batch]], [])
                    for _, v, ended_at, before in finished[:batch]:
                        assert step - v <= (ended_at - v) + before // batch
                        assert released or step - v == (ended_at - v) + before // batch
                    del finished[:batch]
                    step += 1
        most = max(most, len(unfinished))
        snapshot = control.snapshot()
        assert (snapshot.step, snapshot.reserved, snapshot.occupied) == (step, len(unfinished), len(finished))
        assert len(finished) <= capacity - 1 + most
        assert control.certain(batch) == [g for g, *_ in finished[:batch]]
        assert control.missing == batch - len(finished) % batch


def test_training_goes_on_whatever_its_capacity_and_it_has_no_bound() -> None:
    control = InherentStaleness(batch=2, capacity=2)
    control.reserve(0, 0)
    for step in range(9):
        for group in (2 * step + 1, 2 * step + 2):
            control.reserve(group, step)
            control.occupy(group)
        assert not control.admits(step)
        assert control.consume() == ([2 * step + 1, 2 * step + 2], [])
    control.occupy(0)
    control.reserve(99, 9)
    control.occupy(99)
    assert control.consume() == ([0, 99], []), "nine versions old"
    assert control.limit is None


def test_a_buffer_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="need capacity ≥ batch"):
        InherentStaleness(batch=3, capacity=2)
