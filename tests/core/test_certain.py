"""What a control calls certain of the next batch is in it, whatever happens until then."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from asyncrl.core.staleness import make_control
from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.staleness.queue import QueueDrop

PLAYS = 120
EVENTS = 120


@pytest.mark.parametrize("name", ["inflight_cap", "buffers", "window", "inherent", "queue_drop", "queue_max"])
def test_certain_groups_are_in_the_very_next_batch(name: str) -> None:
    """Random plays: servers lag, groups end in any order, some are released, the bound moves; the trainer waits, or has
    not asked."""
    early = 0
    for seed in range(PLAYS):
        rng = random.Random(f"{name} {seed}")
        batch = rng.randint(1, 5)
        control = make_control(
            name,
            batch=batch,
            bound=rng.choice([0, 0.5, 1, 1.5, 2, 3]),
            queue=rng.choice([1, 1.5, 3]),
            redundant=rng.choice([0, 0, 1, 3]),
        )
        early += play(control, rng, batch)
    assert early > PLAYS, "hardly anything was certain before its batch was complete: the test shows nothing"


def play(control: StalenessControl, rng: random.Random, batch: int) -> int:
    """The number of groups that were certain before their batch was complete."""
    version = step = early = 0
    unfinished: set[int] = set()
    occupied: set[int] = set()
    promised: dict[int, int] = {}  # group → the smallest count that it was certain for

    def promise() -> None:
        for count in range(1, batch + 1):
            certain = control.certain(count)
            assert len(certain) <= count
            now = set(certain)
            assert now <= occupied
            assert all(g in now for g, first in promised.items() if first <= count), (
                "a certain group is not so any more"
            )
            for group in certain:
                promised.setdefault(group, count)

    waiting = False  # the trainer waits: from then on every change is followed by consume, and promises count
    for number in range(EVENTS):
        match rng.choice(["reserve", "reserve", "occupy", "occupy", "occupy", "release", "servers", "ask", "bound"]):
            case "reserve" if control.admits(version):
                control.reserve(number, version)
                unfinished.add(number)
            case "occupy" if unfinished:
                group = rng.choice(sorted(unfinished))
                unfinished.remove(group)
                occupied.add(group)
                occupied -= control.occupy(group).keys()
            case "release" if unfinished:
                group = rng.choice(sorted(unfinished))
                unfinished.remove(group)
                control.release(group)
            case "servers":
                version = rng.randint(version, step)
            case "bound" if isinstance(control, InflightCap | StalenessBuffers):
                control.set_bound(rng.choice([0, 1, 1.5, 2, 3]))
            case "ask":
                waiting = True
        if not waiting:
            continue
        if (taken := control.consume()) is None:
            promise()
            continue
        groups, surplus = taken
        early += len(promised)
        for group, count in promised.items():
            assert group in groups[:count], f"{group} was certain to be among the first {count} of {groups}"
        step += 1
        unfinished -= set(surplus)
        occupied -= {*groups, *surplus}
        promised.clear()
        waiting = False
    return early


def test_only_as_many_are_certain_as_unfinished_groups_with_an_earlier_deadline_leave_room_for() -> None:
    cap = InflightCap(batch=3, alpha=1)
    reserve(cap, range(3), 0)
    for group in range(3):
        cap.occupy(group)
    assert cap.certain(3) == [0, 1, 2]
    assert cap.consume() == ([0, 1, 2], [])
    reserve(cap, range(3, 6), 0)  # due at step 1
    reserve(cap, range(6, 9), 1)  # due at step 2
    for group in (7, 8, 4, 6):
        cap.occupy(group)
    # 3 and 5 are due before 6, 7 and 8: only 4 cannot lose its place.
    assert cap.certain(3) == [4]
    cap.occupy(3)
    assert (cap.certain(3), cap.certain(2), cap.certain(1)) == ([4, 3], [4, 3], [4])
    cap.release(5)
    assert cap.certain(3) == [4, 3, 7], "a place that a released group gave up"


def test_one_straggler_of_an_old_version_leaves_all_places_but_one() -> None:
    cap = InflightCap(batch=3, alpha=1)
    reserve(cap, [0], 0)
    reserve(cap, [1, 2, 3], 0)
    for group in (1, 2, 3):
        cap.occupy(group)
    assert cap.consume() == ([1, 2, 3], [])
    reserve(cap, [4, 5, 6], 1)
    for group in (4, 5, 6):
        cap.occupy(group)
    assert cap.consume() is None, "0 is due"
    assert cap.certain(3) == [4, 5]


@pytest.mark.parametrize(
    "make", [lambda: QueueDrop(batch=2, capacity=5), lambda: make_control("queue_max", batch=2, bound=1, queue=1)]
)
def test_of_a_queue_the_first_are_certain(make: Callable[[], StalenessControl]) -> None:
    queue = make()
    reserve(queue, range(3), 0)
    assert queue.certain(2) == []
    queue.occupy(1)
    assert queue.certain(2) == [1]
    queue.occupy(0)
    queue.occupy(2)
    assert queue.certain(2) == [1, 0]


def reserve(control: StalenessControl, groups: Iterable[int], version: int) -> None:
    for group in groups:
        control.reserve(group, version)
