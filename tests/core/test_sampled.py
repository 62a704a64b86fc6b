"""A sampler's batch of an in-flight cap: within the bound, and as near to the sampler's order as the bound allows."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from asyncrl.core.staleness.base import SampledControl
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.staleness.inherent import InherentStaleness
from asyncrl.core.staleness.queue import QueueDrop

PLAYS = 60
EVENTS = 100


def allowed(control: InflightCap, left: set[int]) -> bool:
    """May these finished groups stay? By the definition in the module's docstring."""
    batch, redundant, step = control._batch, control._redundant, control._step
    due = sum(d <= step for d in control._occupied.values())
    if sum(control._occupied.get(g, step + 99) <= step for g in left) > max(0, due - batch):
        return False
    for k in range(1, 12):
        stays = sum(control._occupied.get(g, step + 99) <= step + k for g in left)
        unfinished = sum(d <= step + k for d in control._reserved.values())
        if stays + unfinished > k * batch + redundant:
            return False
    return True


def best(control: InflightCap, order: list[int]) -> list[int]:
    """By trying all: the choice that leaves the last of the order, then the last but one, and so on."""
    many = len(order) - control._batch
    sets = [set(left) for left in combinations(order, many) if allowed(control, set(left))]
    left = max(sets, key=lambda left: sorted((order.index(g) for g in left), reverse=True))
    return [g for g in order if g not in left]


@pytest.mark.parametrize("reuse", [1, 3])
def test_the_batch_is_the_best_that_the_bound_allows(reuse: int) -> None:
    """Random plays; the servers lag, groups end in any order and are released, the bound moves, the order is drawn."""
    batches = reordered = reused = 0
    for seed in range(PLAYS):
        rng = random.Random(f"{reuse} {seed}")
        batch = rng.randint(1, 3)
        redundant = rng.choice([0, 0, 1])
        control = InflightCap(batch=batch, alpha=rng.choice([0, 1, 1.5, 2, 3]), redundant=redundant, reuse=reuse)
        assert isinstance(control, SampledControl)
        version = 0
        deadlines: dict[int, int] = {}
        unfinished: list[int] = []
        used: dict[int, int] = {}
        for number in range(EVENTS):
            step = control.snapshot().step
            match rng.choice(
                ["reserve", "reserve", "reserve", "occupy", "occupy", "release", "servers", "bound", "take"]
            ):
                case "reserve" if control.admits(version):
                    deadlines[number] = control.deadline(version)
                    control.reserve(number, version)
                    unfinished.append(number)
                case "occupy" if unfinished:
                    control.occupy(unfinished.pop(rng.randrange(len(unfinished))))
                case "release" if unfinished:
                    control.release(unfinished.pop(rng.randrange(len(unfinished))))
                case "servers":
                    version = rng.randint(version, step)
                case "bound":
                    control.set_bound(rng.choice([1, 1.5, 2, 3]))
                case "take":
                    used = {g: n for g, n in used.items() if deadlines[g] >= step}
                    order = [*control._occupied, *used]
                    rng.shuffle(order)
                    may = len(order) >= batch and control._later_steps_can_keep_up()
                    wanted = best(control, order) if may else None
                    taken = control.sample(lambda order=order: order, len(used))  # type: ignore[misc]
                    if taken is None:
                        assert wanted is None
                        continue
                    chosen, surplus = taken
                    assert chosen == wanted
                    assert all(step <= deadlines[g] for g in chosen)
                    assert len(surplus) <= redundant
                    unfinished = [g for g in unfinished if g not in surplus]
                    batches += 1
                    reordered += chosen == order[:batch] != [*sorted(order)][:batch]
                    reused += any(g in used for g in chosen)
                    for g in chosen:
                        used[g] = used.get(g, 0) + 1
                    used = {g: n for g, n in used.items() if n < reuse}
    assert batches > PLAYS and reordered > PLAYS / 4
    assert (reused > PLAYS / 4) == (reuse > 1)


def test_nothing_is_asked_of_the_sampler_before_there_is_a_batch() -> None:
    control = InflightCap(batch=2, alpha=1)
    for number in range(2):
        control.reserve(number, 0)
    control.occupy(1)
    assert control.sample(lambda: pytest.fail("asked"), 0) is None
    control.occupy(0)
    assert control.sample(lambda: [1, 0], 0) == ([1, 0], [])


def test_with_reuse_the_next_batch_can_always_be_had() -> None:
    for alpha in (1, 1.5, 2, 3.25):
        for reuse in (2, 3, 9):
            assert InflightCap(batch=4, alpha=alpha, reuse=reuse).room(0) >= 4
            assert InflightCap(batch=4, alpha=alpha, reuse=reuse).room(0) <= InflightCap(batch=4, alpha=alpha).room(0)


@pytest.mark.parametrize("control", [InherentStaleness(batch=2, capacity=4), QueueDrop(batch=2, capacity=4)], ids=repr)
def test_without_a_bound_the_order_alone_decides(control: SampledControl) -> None:
    for number in range(3):
        control.reserve(number, 0)
        control.occupy(number)
    assert control.sample(lambda: [2, 9, 0, 1], 1) == ([2, 9], [])
    assert control.sample(lambda: [1, 0], 0) == ([1, 0], [])
    assert control.sample(lambda: pytest.fail("asked"), 1) is None
    assert control.snapshot().step == 2
