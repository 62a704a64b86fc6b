"""ROLL Flash's propositions: against list scheduling of random tasks and numeric minimisation; where they are loose."""

from __future__ import annotations

import heapq
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.theory import completion
from asyncrl.core.theory.completion import Step

times = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60)
steps = st.builds(
    lambda tail, **fields: Step(max_gen=fields["mean_gen"] * tail, **fields),
    tail=st.floats(1.0, 30.0),
    samples=st.integers(1, 4096),
    workers=st.integers(2, 1024),
    mean_gen=st.floats(0.1, 100),
    mean_train=st.floats(0.01, 100),
    reuse=st.integers(1, 4),
)
ratios = st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0])


def list_schedule(tasks: list[float], workers: int) -> float:
    """When the last task ends, if a worker takes the next one as soon as it is free."""
    free = [0.0] * workers
    for task in tasks:
        heapq.heappush(free, heapq.heappop(free) + task)
    return max(free)


# --- proposition 1 ----------------------------------------------------------------------------------------------------


@given(tasks=times, workers=st.integers(1, 20))
def test_queue_scheduling_ends_within_the_bound(tasks: list[float], workers: int) -> None:
    done = list_schedule(tasks, workers)
    mean, longest = fmean(tasks), max(tasks)
    bound = completion.completion_bound(samples=len(tasks), workers=workers, mean_gen=mean, max_gen=longest)
    assert done <= bound * (1 + 1e-9)
    # Graham's bound, tighter by L/K, holds too; and nothing ends before the work is done.
    assert done <= (bound - longest / workers) * (1 + 1e-9)
    assert done >= max(len(tasks) * mean / workers, longest) * (1 - 1e-9)
    per_sample = completion.sample_bound(samples=len(tasks), workers=workers, mean_gen=mean, max_gen=longest)
    assert done / len(tasks) <= per_sample * (1 + 1e-9)


def test_grahams_bound_is_met() -> None:
    # K·(K − 1) short tasks keep all workers busy, then one long one runs alone.
    for workers in (2, 3, 8):
        tasks = [1.0] * (workers * (workers - 1)) + [float(workers)]
        bound = completion.completion_bound(
            samples=len(tasks), workers=workers, mean_gen=fmean(tasks), max_gen=float(workers)
        )
        assert list_schedule(tasks, workers) == pytest.approx(bound - 1.0)


@given(step=steps, alpha=ratios)
def test_a_sample_of_a_larger_pool_takes_less(step: Step, alpha: float) -> None:
    inputs = {"samples": step.samples, "workers": step.workers, "mean_gen": step.mean_gen, "max_gen": step.max_gen}
    per_sample = completion.sample_bound(**inputs, alpha=alpha)
    # Eq. 7, term by term.
    tail = step.max_gen / ((alpha + 1) * step.samples)
    assert per_sample == pytest.approx(step.mean_gen / step.workers + tail, rel=1e-9)
    assert completion.sample_bound(**inputs, alpha=1e12) == pytest.approx(step.mean_gen / step.workers, rel=1e-6)
    limit = completion.sample_bound(**inputs) / (step.mean_gen / step.workers)
    assert completion.generation_speedup_limit(step) == pytest.approx(limit, rel=1e-9)


def test_the_maximum_speed_up_cannot_be_reached_where_every_worker_has_one_sample() -> None:
    step = Step(samples=64, workers=64, mean_gen=10.0, max_gen=50.0, mean_train=1.0)
    assert completion.generation_speedup_limit(step) == pytest.approx((50.0 + 10.0) / 10.0)  # as printed
    rng = Random(1)
    for _ in range(50):
        tasks = [rng.uniform(0.0, 50.0) for _ in range(64)]
        assert list_schedule(tasks, 64) / fmean(tasks) <= 50.0 / fmean(tasks)  # T_sync over μ·N/K is at most L/μ


# --- proposition 2 ----------------------------------------------------------------------------------------------------


def least(bound, step: Step, alpha: float) -> tuple[float, float]:
    """(minimum, where) of a unimodal function of the train share, by ternary search."""
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if bound(step, alpha=alpha, train_share=a) <= bound(step, alpha=alpha, train_share=b):
            high = b
        else:
            low = a
    middle = (low + high) / 2
    return bound(step, alpha=alpha, train_share=middle), middle


@given(step=steps, alpha=ratios)
def test_best_share_is_the_numeric_minimum_of_the_printed_bound(step: Step, alpha: float) -> None:
    bound, where = least(completion.async_bound, step, alpha)
    best = completion.best_train_share(step, alpha=alpha)
    assert best == pytest.approx(where, rel=1e-6)
    assert completion.async_bound(step, alpha=alpha, train_share=best) == pytest.approx(bound, rel=1e-6)
    assert completion.best_async_bound(step, alpha=alpha) == pytest.approx(bound, rel=1e-6)


@given(step=steps, alpha=ratios)
def test_best_share_as_printed_in_equation_10(step: Step, alpha: float) -> None:
    train = step.reuse * step.samples * step.mean_train
    rest = step.samples * step.mean_gen + step.workers * step.max_gen / (alpha + 1)
    assert completion.best_train_share(step, alpha=alpha) == pytest.approx(train / (rest + train), rel=1e-9)


@given(step=steps, alpha=ratios)
def test_tight_share_is_the_numeric_minimum_of_the_tight_bound(step: Step, alpha: float) -> None:
    bound, where = least(completion.tight_async_bound, step, alpha)
    best = completion.tight_train_share(step, alpha=alpha)
    assert best == pytest.approx(where, rel=1e-6)
    assert completion.tight_async_bound(step, alpha=alpha, train_share=best) == pytest.approx(bound, rel=1e-6)
    assert best >= completion.best_train_share(step, alpha=alpha) * (1 - 1e-9)
    assert bound <= completion.best_async_bound(step, alpha=alpha) * (1 + 1e-9)


@given(tasks=times, workers=st.integers(2, 20), alpha=st.integers(0, 3), data=st.data())
def test_proposition_1_needs_no_longer_tail_for_fewer_workers(
    tasks: list[float], workers: int, alpha: int, data: st.DataObject
) -> None:
    """Equation 9's division of the tail by 1 − β is not needed: a pool of (α + 1)·N samples on (1 − β)K workers."""
    generating = data.draw(st.integers(1, workers - 1))
    pool = tasks * (alpha + 1)
    step = Step(
        samples=len(tasks),
        workers=workers,
        mean_gen=fmean(tasks) + 1e-9,
        max_gen=max(tasks) + 1e-9,
        mean_train=1e-9,
    )
    share = 1 - generating / workers
    per_batch = list_schedule(pool, generating) / (alpha + 1)
    tight = completion.tight_async_bound(step, alpha=alpha, train_share=share)
    assert per_batch <= tight * (1 + 1e-9)
    assert tight <= completion.async_bound(step, alpha=alpha, train_share=share) * (1 + 1e-9)


def test_without_overlap_split_workers_exceed_equation_9() -> None:
    # α = 0: a batch is trained after it was generated, the next one starts after that. Equation 9 says the maximum.
    step = Step(samples=64, workers=16, mean_gen=4.0, max_gen=4.0, mean_train=4.0)
    stages = list_schedule([4.0] * 64, 8), list_schedule([4.0] * 64, 8)
    assert stages == (32.0, 32.0)
    assert sum(stages) > completion.async_bound(step, alpha=0.0, train_share=0.5) == 40.0


@given(step=steps, alpha=ratios)
def test_speed_up_grows_with_alpha_to_its_limit(step: Step, alpha: float) -> None:
    assert completion.speedup(step, alpha=0.0) == pytest.approx(1.0)
    assert completion.speedup(step, alpha=alpha) <= completion.speedup(step, alpha=alpha + 1) * (1 + 1e-12)
    limit = completion.speedup_limit(step)
    assert completion.speedup(step, alpha=1e12) == pytest.approx(limit, rel=1e-6)
    printed = 1 + step.workers * step.max_gen / (step.samples * (step.mean_gen + step.reuse * step.mean_train))
    assert limit == pytest.approx(printed, rel=1e-9)


def test_equations_8_to_11_by_hand() -> None:
    step = Step(samples=256, workers=32, mean_gen=2.0, max_gen=12.0, mean_train=1.0, reuse=2)
    assert completion.sync_bound(step) == 256 / 32 * (2 + 2 * 1) + 12  # 44
    assert completion.best_async_bound(step, alpha=2.0) == 32 + 4
    assert completion.best_train_share(step, alpha=2.0) == pytest.approx(512 / (512 + 32 * 12 / 3 + 512))
    assert completion.async_bound(step, alpha=2.0, train_share=0.5) == max(32 + 8, 32)
    assert completion.tight_async_bound(step, alpha=2.0, train_share=0.5) == max(32 + 4, 32)
    assert completion.speedup_limit(step) == 44 / 32


def test_nonsense_is_refused() -> None:
    step = Step(samples=8, workers=4, mean_gen=1.0, max_gen=2.0, mean_train=1.0)
    for nonsense in (
        lambda: Step(samples=0, workers=4, mean_gen=1.0, max_gen=2.0, mean_train=1.0),
        lambda: Step(samples=8, workers=4, mean_gen=3.0, max_gen=2.0, mean_train=1.0),
        lambda: completion.async_bound(step, alpha=-1.0, train_share=0.5),
        lambda: completion.async_bound(step, alpha=1.0, train_share=1.0),
        lambda: completion.tight_async_bound(step, alpha=1.0, train_share=0.0),
        lambda: completion.completion_bound(samples=1, workers=0, mean_gen=1.0, max_gen=1.0),
    ):
        with pytest.raises(ValueError):
            nonsense()
