"""Fitting: known coefficients come back from exact and from noisy points, and nonsense is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel
from asyncrl.core.fitting import (
    GROWTH_RESERVE,
    KV_SHARE,
    FitError,
    Load,
    PrefillPoint,
    StepPoint,
    fit_cost,
    plan_loads,
)

NS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 512, 4096)
TABLE4 = CostModel(k1=7.28e-8, k2=1.72e-3, k3=1.25e-4, k4=1.07e-2, k5=2e-5)


def steps_of(cost: CostModel, ns: tuple[int, ...] = NS, noise: float = 0.0, seed: int = 0) -> list[StepPoint]:
    rng = random.Random(seed)
    return [
        StepPoint(
            load=Load(n=n, prompt=context, new=32),
            n=n,
            kv=n * (context + 15.5),
            seconds=(cost.k1 * n * (context + 15.5) + max(cost.k2, cost.k3 * n) + cost.k4)
            * (1 + rng.uniform(-noise, noise)),
        )
        for n in ns
        for context in CONTEXTS
    ]


def prefills_of(cost: CostModel, latency: float = 0.004, request: float = 0.0) -> list[PrefillPoint]:
    return [
        PrefillPoint(
            load=Load(n=n, prompt=context, new=1),
            n=n,
            tokens=n * context,
            kv=n * context,
            seconds=latency + request * n + cost.k5 * n * context + cost.step(n, n * context),
        )
        for n in (1, 16)
        for context in CONTEXTS
    ]


def predictions(cost: CostModel, ns: tuple[int, ...] = NS) -> list[float]:
    return [point.seconds for point in steps_of(cost, ns)]


@given(
    k1=st.floats(1e-9, 1e-5),
    breakpoint=st.floats(1.5, 60.0),
    k3=st.floats(1e-5, 1e-2),
    k4=st.floats(1e-4, 1e-1),
    k5=st.floats(1e-7, 1e-3),
)
@settings(deadline=None, max_examples=150)
def test_coefficients_come_back_from_exact_points(
    k1: float, breakpoint: float, k3: float, k4: float, k5: float
) -> None:
    true = CostModel(k1=k1, k2=breakpoint * k3, k3=k3, k4=k4, k5=k5)
    fit = fit_cost(steps_of(true), prefills_of(true), prompt_tokens=512)
    for name in ("k1", "k2", "k3", "k4", "k5"):
        # What a millionth of a step hides cannot be found to a thousandth.
        assert getattr(fit.cost, name) == pytest.approx(getattr(true, name), rel=1e-3, abs=1e-9 * k4), name
    assert fit.decode.max < 1e-6 and fit.prefill.max < 1e-6 and fit.decode.r2 == pytest.approx(1.0)
    assert fit.latency_s == pytest.approx(0.004, rel=1e-3)


@given(seed=st.integers(0, 10_000), breakpoint=st.floats(1.5, 60.0))
@settings(deadline=None, max_examples=60)
def test_noise_of_a_few_percent_leaves_predictions_as_good(seed: int, breakpoint: float) -> None:
    true = CostModel(k1=TABLE4.k1, k2=breakpoint * TABLE4.k3, k3=TABLE4.k3, k4=TABLE4.k4, k5=TABLE4.k5)
    fit = fit_cost(steps_of(true, noise=0.03, seed=seed), prefills_of(true), prompt_tokens=512)
    for predicted, exact in zip(predictions(fit.cost), predictions(true), strict=True):
        assert predicted == pytest.approx(exact, rel=0.04)
    assert fit.decode.mean < 0.03 and fit.decode.max < 0.07
    assert fit.cost.k1 == pytest.approx(true.k1, rel=0.25)


def test_errors_are_those_of_the_predictions_it_makes() -> None:
    points = steps_of(TABLE4, noise=0.1, seed=3)
    fit = fit_cost(points, prefills_of(TABLE4), prompt_tokens=512)
    cost = fit.cost
    relative = [(cost.k1 * p.kv + max(cost.k2, cost.k3 * p.n) + cost.k4) / p.seconds - 1 for p in points]
    assert fit.decode.points == pytest.approx(relative)
    assert fit.decode.mean == pytest.approx(sum(map(abs, relative)) / len(relative))
    assert fit.decode.max == pytest.approx(max(map(abs, relative)))
    assert 0.01 < fit.decode.mean < 0.1 and 0.5 < fit.decode.r2 < 1.0


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=25)
def test_no_other_coefficients_are_better(seed: int) -> None:
    """The search is global: no random change of the result, small or large, lowers the squared relative error."""
    rng = random.Random(seed)
    points = steps_of(TABLE4, noise=0.3, seed=seed)

    def error(k1: float, k2: float, k3: float, k4: float) -> float:
        return sum(((k1 * p.kv + max(k2, k3 * p.n) + k4) / p.seconds - 1) ** 2 for p in points)

    cost = fit_cost(points, prefills_of(TABLE4), prompt_tokens=512).cost
    found = (cost.k1, cost.k2, cost.k3, cost.k4)
    for _ in range(300):
        size = 10 ** rng.uniform(-4, 0.5)
        start = rng.choice([found, (TABLE4.k1, TABLE4.k2, TABLE4.k3, TABLE4.k4)])
        other = [max(0.0, k + size * rng.gauss(0, 1) * t) for k, t in zip(start, (1e-7, 2e-3, 1e-4, 1e-2), strict=True)]
        assert error(*other) >= error(*found) * (1 - 1e-9)


def test_without_a_breakpoint_in_reach_the_constants_are_one() -> None:
    memory = fit_cost(steps_of(TABLE4, ns=(1, 2, 4, 8)), prefills_of(TABLE4), prompt_tokens=512)  # n* is 13.8
    assert (memory.cost.k2, memory.cost.k3) == (0.0, 0.0)
    assert memory.cost.k4 == pytest.approx(TABLE4.k2 + TABLE4.k4)
    assert any("no breakpoint within n = 1 … 8" in note for note in memory.notes)
    compute = fit_cost(steps_of(TABLE4, ns=(16, 32, 64)), prefills_of(TABLE4), prompt_tokens=512)
    assert compute.cost.k2 == 0.0
    assert (compute.cost.k3, compute.cost.k4) == (pytest.approx(TABLE4.k3), pytest.approx(TABLE4.k4))


def test_one_concurrency_above_the_breakpoint_is_predicted_though_its_coefficients_are_not_known() -> None:
    ns = (1, 4, 12, 64)
    fit = fit_cost(steps_of(TABLE4, ns=ns), prefills_of(TABLE4), prompt_tokens=512)
    assert fit.decode.max < 1e-9
    assert sum(k > 0 for k in (fit.cost.k1, fit.cost.k2, fit.cost.k3, fit.cost.k4)) == 3


def test_a_server_whose_steps_do_not_feel_the_context_has_no_k1() -> None:
    flat = CostModel(k1=0.0, k2=0.0, k3=1e-3, k4=5e-3, k5=1e-5)
    fit = fit_cost(steps_of(flat), prefills_of(flat), prompt_tokens=512)
    assert (fit.cost.k1, fit.cost.k2) == (0.0, 0.0)
    assert fit.cost.k3 == pytest.approx(1e-3) and fit.cost.k4 == pytest.approx(5e-3)
    assert any(note.startswith("k1 is 0") for note in fit.notes)


@given(request=st.floats(1e-5, 1e-2), prompt=st.integers(1, 10_000))
@settings(deadline=None, max_examples=40)
def test_what_a_request_costs_is_told_apart_and_spread_over_its_prompt(request: float, prompt: int) -> None:
    fit = fit_cost(steps_of(TABLE4), prefills_of(TABLE4, request=request), prompt_tokens=prompt)
    assert fit.request_s == pytest.approx(request, rel=1e-3)
    assert fit.latency_s == pytest.approx(0.004, rel=1e-3) and fit.prefill.max < 1e-6
    # A request with such a prompt takes what it takes.
    assert fit.cost.k5 * prompt == pytest.approx(TABLE4.k5 * prompt + request, rel=1e-3)
    assert any(f"prompts of {prompt:g} tokens" in note for note in fit.notes)


def test_prefill_that_costs_nothing_has_no_k5() -> None:
    points = [
        PrefillPoint(load=p.load, n=p.n, tokens=p.tokens, kv=p.kv, seconds=0.5 * TABLE4.step(1, 0))
        for p in prefills_of(TABLE4)
    ]
    fit = fit_cost(steps_of(TABLE4), points, prompt_tokens=512)
    assert (fit.cost.k5, fit.latency_s) == (0.0, 0.0)
    assert "a token of prefill costs nothing measurable" in fit.notes


# --- nonsense ---------------------------------------------------------------------------------------------------------


def refused(steps: list[StepPoint], prefills: list[PrefillPoint] | None = None) -> str:
    with pytest.raises(FitError) as error:
        fit_cost(steps, prefills_of(TABLE4) if prefills is None else prefills, prompt_tokens=512)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nonsense_is_refused_in_one_line() -> None:
    points = steps_of(TABLE4)
    assert refused(points[:3]).startswith("3 decode points for 4 coefficients")
    assert "depend on each other" in refused([p for p in points if p.load.prompt == 64])
    assert "depend on each other" in refused(2 * steps_of(TABLE4, ns=(1,)))
    falling = [
        StepPoint(load=p.load, n=p.n, kv=p.kv, seconds=q.seconds) for p, q in zip(points, points[::-1], strict=True)
    ]
    assert "shorter with more load" in refused(falling)
    still = [*points[1:], StepPoint(load=points[0].load, n=1, kv=1.0, seconds=0.0)]
    assert "took no time" in refused(still)


def test_prefill_nonsense_is_refused_in_one_line() -> None:
    points = prefills_of(TABLE4)
    assert "at least two numbers of prompt tokens" in refused(steps_of(TABLE4), points[:1])
    falling = [
        PrefillPoint(load=p.load, n=p.n, tokens=p.tokens, kv=p.kv, seconds=q.seconds)
        for p, q in zip(points, points[::-1], strict=True)
    ]
    assert "longer prompts have their first token earlier" in refused(steps_of(TABLE4), falling)


# --- what to measure --------------------------------------------------------------------------------------------------


@given(
    max_running=st.integers(2, 512),
    max_kv=st.integers(256, 2_000_000),
    context=st.integers(16, 40_960),
    quick=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_loads_fit_the_server_and_are_different(max_running: int, max_kv: int, context: int, quick: bool) -> None:
    steps, prefills = plan_loads(max_running=max_running, max_kv=max_kv, context_length=context, quick=quick)
    for load in steps:
        assert 1 <= load.n <= max_running and load.prompt >= 1 and load.new >= 8
        assert load.prompt + load.new <= context
        assert load.n * (load.prompt + load.new + GROWTH_RESERVE) <= KV_SHARE * max_kv + load.n
    assert len(set(steps)) == len(steps) and len(set(prefills)) == len(prefills)
    assert {load.n for load in steps} >= {load.n for load in prefills} and all(load.new == 1 for load in prefills)


def test_a_roomy_server_gives_a_grid_that_determines_everything() -> None:
    for quick in (False, True):
        steps, _ = plan_loads(max_running=100, max_kv=100_000, context_length=4096, quick=quick)
        assert sorted({load.n for load in steps}) == ([1, 4, 16, 64, 100] if quick else [1, 2, 4, 8, 16, 32, 64, 100])
        assert max(load.prompt for load in steps) > 3500
        exact = [
            StepPoint(
                load=load, n=load.n, kv=float(load.n * load.prompt), seconds=TABLE4.step(load.n, load.n * load.prompt)
            )
            for load in steps
        ]
        cost = fit_cost(exact, prefills_of(TABLE4), prompt_tokens=512).cost
        assert cost.k2 == pytest.approx(TABLE4.k2) and cost.k3 == pytest.approx(TABLE4.k3)


def test_a_server_without_room_is_refused_in_one_line() -> None:
    with pytest.raises(FitError, match=r"rollout\.max_tokens"):
        plan_loads(max_running=8, max_kv=1000, context_length=15)
    with pytest.raises(FitError, match=r"engine\.max_total_tokens"):
        plan_loads(max_running=8, max_kv=40, context_length=100)
