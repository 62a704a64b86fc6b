"""A staleness control that is made anew from what is known of its groups decides as the one before."""

from __future__ import annotations

import copy
import random

import pytest

from asyncrl.core.staleness import make_control
from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.core.staleness.inflight_cap import InflightCap


class Groups:
    """A control, and the live groups in order: version and deadline; the ready ones in the order of their end."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.numbers = {
            "batch": rng.randint(1, 4),
            "queue": rng.choice([1.0, 2.0]),
            "redundant": rng.choice([0, 0, 1, 3]),
        }
        self.name = name
        self.rng = rng
        self.bound = rng.choice([0, 1, 2, 3]) if name != "inflight_cap" else rng.choice([0, 0.5, 1, 1.5, 2])
        self.control = make_control(name, bound=self.bound, **self.numbers)  # type: ignore[arg-type]
        self.open: dict[int, tuple[int, int | None]] = {}
        self.ready: dict[int, tuple[int, int | None]] = {}
        self.step = self.version = self.next = 0

    def act(self) -> None:
        self.version = self.rng.randint(self.version, self.step)
        match self.rng.choice(["reserve", "reserve", "occupy", "occupy", "release", "consume", "bound"]):
            case "reserve" if self.control.admits(self.version):
                self.open[self.next] = self.version, self.control.deadline(self.version)
                self.control.reserve(self.next, self.version)
                self.next += 1
            case "occupy" if self.open:
                group = self.rng.choice(list(self.open))
                self.ready[group] = self.open.pop(group)
                for gone in self.control.occupy(group):
                    self.ready.pop(gone, None)
            case "release" if self.open:
                group = self.rng.choice(list(self.open))
                del self.open[group]
                self.control.release(group)
            case "consume" if (taken := self.control.consume()) is not None:
                for group in (*taken[0], *taken[1]):
                    self.open.pop(group, None)
                    self.ready.pop(group, None)
                self.step += 1
            case "bound" if isinstance(self.control, InflightCap | StalenessBuffers) and self.rng.random() < 0.2:
                self.bound = self.rng.choice([self.bound, self.bound + 1, max(0, self.bound - 1)])
                self.control.set_bound(self.bound)

    def restored(self) -> StalenessControl:
        control = make_control(self.name, bound=self.bound, step=self.step, **self.numbers)  # type: ignore[arg-type]
        for group, (version, deadline) in (*self.open.items(), *self.ready.items()):
            control.restore(group, version, deadline)
        for group in self.ready:
            assert control.occupy(group) == {}
        return control


@pytest.mark.parametrize("name", ["inflight_cap", "buffers", "window", "inherent", "queue_drop", "queue_max"])
def test_a_restored_control_decides_as_the_one_before(name: str) -> None:
    for seed in range(40):
        groups = Groups(name, random.Random(seed))
        for _ in range(60):
            groups.act()
            old, new = copy.deepcopy(groups.control), groups.restored()
            if isinstance(old, InflightCap) and old.snapshot().capacity != new.snapshot().capacity:
                continue  # a lower bound is in force only after the next consumption
            assert new.snapshot() == old.snapshot()
            for version in range(max(0, groups.step - 3), groups.step + 1):
                assert new.room(version) == old.room(version)
            assert set(new.certain(99)) <= set(old.certain(99)) or name == "buffers"
            taken, expected = new.consume(), old.consume()
            assert (taken is None) == (expected is None)
            if taken is not None and expected is not None:
                if name == "buffers":  # which has its own mind of who is in which buffer, but not of how many
                    assert len(taken[0]) == len(expected[0]) and len(taken[1]) <= groups.numbers["redundant"]
                else:
                    assert taken == expected
