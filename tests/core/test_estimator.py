"""The cost model fitted at work: on a simulated server whose coefficients drift, against the one it started from."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from asyncrl.core.cost_model import CostModel
from asyncrl.core.estimator import Estimator

START = CostModel()


def slower(factor: float) -> CostModel:
    return CostModel(**{k: factor * getattr(START, k) for k in ("k1", "k2", "k3", "k4", "k5")})


def observe(
    estimator: Estimator,
    truth: Callable[[int], CostModel],
    count: int,
    seed: int = 0,
    noise: float = 0.05,
    least: int = 1,
) -> None:
    """A server whose load wanders, as requests come and end; a second each."""
    rng = random.Random(seed)
    n, length = 40.0, 2_000.0
    for i in range(count):
        n = min(128.0, max(least, n + rng.gauss(0.0, 6.0)))
        length = min(8_000.0, max(200.0, length + rng.gauss(0.0, 300.0)))
        prefill = rng.choice([0, 0, 500, 5_000])
        cost = truth(i)
        steps = max(1, int((1.0 - cost.k5 * prefill) / cost.step(round(n), round(n * length))))
        seconds = cost.time_of(steps, round(n), round(n * length)) + cost.k5 * prefill
        mean_kv = n * length + n * steps / 2
        estimator.add(
            n=n, kv=mean_kv, tokens=n * steps, prefill=prefill, seconds=seconds * (1 + rng.uniform(-noise, noise))
        )


def worst(cost: CostModel, truth: CostModel, lengths: tuple[int, ...] = (500, 2_000, 8_000)) -> float:
    """Largest relative error, also for loads that were never seen."""
    loads = [(n, n * length) for n in (1, 8, 32, 128) for length in lengths]
    return max(abs(cost.step(*load) / truth.step(*load) - 1.0) for load in loads)


def test_before_anything_is_seen_it_is_the_starting_model() -> None:
    estimator = Estimator(START)
    assert worst(estimator.cost, START) < 1e-12 and estimator.cost.k5 == START.k5
    assert estimator.error is None and estimator.count == 0


def test_it_says_how_much_longer_than_foretold_something_took() -> None:
    step = START.step(10, 10_000)
    for factor in (1.0, 3.0):
        estimator = Estimator(START)
        seen = estimator.add(n=10, kv=10_000, tokens=1_000, prefill=0, seconds=factor * 100 * step)
        assert seen == pytest.approx(factor)


def test_it_finds_a_server_that_is_unlike_the_starting_model() -> None:
    truth = CostModel(k1=2e-7, k2=1.72e-3, k3=1.25e-4, k4=2e-2, k5=6e-5)
    estimator = Estimator(START)
    observe(estimator, lambda i: truth, 400)
    assert worst(START, truth) > 0.4 > 0.08 > worst(estimator.cost, truth)
    assert estimator.cost.k5 == pytest.approx(truth.k5, rel=0.25)


def test_it_follows_coefficients_that_drift_and_says_how_far_off_it_is() -> None:
    estimator = Estimator(START)
    observe(estimator, lambda i: slower(1.0 + i / 2_000), 2_000)
    assert worst(START, slower(2.0)) > 0.45 and worst(estimator.cost, slower(2.0), (2_000, 8_000)) < 0.15
    error = estimator.error
    assert error is not None and 0.02 < error < 0.08  # 0.025 of it is the noise


def test_a_sudden_change_shows_in_the_error_and_is_learnt() -> None:
    estimator = Estimator(START, memory=50.0)
    observe(estimator, lambda i: START, 200)
    observe(estimator, lambda i: slower(2.0), 20, seed=1)
    assert estimator.error is not None and estimator.error > 0.1
    observe(estimator, lambda i: slower(2.0), 400, seed=2)
    assert estimator.error < 0.05 and worst(estimator.cost, slower(2.0)) < 0.1


def test_what_one_load_does_not_tell_stays_as_it_was() -> None:
    """A server that always runs the same says only how long its steps are: right there, and sane elsewhere."""
    truth, estimator = slower(1.3), Estimator(START)
    for _ in range(500):
        estimator.add(n=64, kv=64_000, tokens=64, prefill=0, seconds=truth.step(64, 64_000))
    assert estimator.cost.step(64, 64_000) == pytest.approx(truth.step(64, 64_000), rel=1e-3)
    assert worst(estimator.cost, truth) < 0.3
    assert estimator.cost.k5 == START.k5, "no prefill was seen"


def test_coefficients_are_never_negative_and_may_come_from_nothing() -> None:
    start = CostModel(k1=0.0, k2=0.0, k3=3e-5, k4=5e-4, k5=2e-5)
    estimator = Estimator(start)
    observe(estimator, lambda i: msgspec.structs.replace(start, k1=5e-8), 400, noise=0.0)
    assert estimator.cost.k1 == pytest.approx(5e-8, rel=0.15)
    rng, estimator = random.Random(0), Estimator(start)
    for _ in range(500):  # steps get shorter with the load
        n = rng.randrange(1, 100)
        estimator.add(n=n, kv=100 * n, tokens=n, prefill=0, seconds=0.01 - 5e-5 * n)
        cost = estimator.cost
        assert min(cost.k1, cost.k2, cost.k3, cost.k4, cost.k5) >= 0.0
    without_compute = Estimator(CostModel(k3=0.0))
    assert without_compute.cost.step(9, 1_000) == pytest.approx(CostModel(k3=0.0).step(9, 1_000))


def test_what_cannot_be_is_refused_and_idle_time_says_nothing() -> None:
    estimator = Estimator(START)
    for n, seconds in ((1.0, 0.0), (-1.0, 1.0), (1.0, float("nan"))):
        with pytest.raises(ValueError, match="observation"):
            estimator.add(n=n, kv=1, tokens=1, prefill=0, seconds=seconds)
    estimator.add(n=0, kv=0, tokens=0, prefill=0, seconds=1.0)
    assert estimator.count == 0
    with pytest.raises(ValueError, match="memory"):
        Estimator(START, memory=1.0)
