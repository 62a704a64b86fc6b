"""The cost model: StaleFlow's figures worked by hand, and closed forms against step-by-step sums."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.cost_model import CostModel

models = st.builds(
    CostModel,
    k1=st.floats(0, 1e-5),
    k2=st.floats(1e-5, 1e-2),
    k3=st.floats(0, 1e-3),
    k4=st.floats(1e-5, 1e-1),
    k5=st.floats(0, 1e-4),
)


def test_figures_of_staleflow_table_4_by_hand() -> None:
    model = CostModel()
    # One sequence of 1,000 tokens: 7.28e-8·1000 + max(1.72e-3, 1.25e-4) + 1.07e-2 = 7.28e-5 + 1.72e-3 + 1.07e-2.
    assert model.step(1, 1000) == pytest.approx(0.0124928, rel=1e-12)
    assert model.throughput(1, 1000) == pytest.approx(80.04611, rel=1e-6)
    # 64 sequences of 10,000 tokens each: 7.28e-8·640000 + 1.25e-4·64 + 1.07e-2 = 0.046592 + 0.008 + 0.0107.
    assert model.step(64, 640_000) == pytest.approx(0.065292, rel=1e-12)
    assert model.throughput(64, 640_000) == pytest.approx(980.21197, rel=1e-6)
    # The bottleneck of the matrix products shifts from memory to computation at n = k2/k3 = 13.76.
    assert model.step(13, 0) == pytest.approx(1.72e-3 + 1.07e-2)
    assert model.step(14, 0) == pytest.approx(1.75e-3 + 1.07e-2)
    assert model.throughput(0, 0) == 0.0

    # A prefill of 1,000 tokens on its own, and beside one sequence.
    assert model.step(0, 0, 1000) == pytest.approx(0.02)
    assert model.step(1, 1000, 1000) == pytest.approx(0.0324928, rel=1e-12)
    assert model.step(0, 0) == 0.0


@given(
    model=models,
    steps=st.integers(0, 300),
    n=st.integers(0, 200),
    per_sequence=st.integers(1, 1000),
    prefill=st.integers(0, 4096),
)
def test_time_of_is_the_sum_of_the_single_steps(
    model: CostModel, steps: int, n: int, per_sequence: int, prefill: int
) -> None:
    kv = n * per_sequence
    one_by_one = math.fsum(model.step(n, kv + n * i, prefill) for i in range(steps))
    assert model.time_of(steps, n, kv, prefill) == pytest.approx(one_by_one, rel=1e-9, abs=1e-12)


@given(
    model=models,
    steps=st.integers(0, 100_000),
    n=st.integers(1, 1000),
    per_sequence=st.integers(1, 10_000),
    prefill=st.integers(0, 4096),
)
def test_steps_in_is_the_inverse_of_time_of(
    model: CostModel, steps: int, n: int, per_sequence: int, prefill: int
) -> None:
    kv = n * per_sequence
    assert model.steps_in(model.time_of(steps, n, kv, prefill), n, kv, prefill) == steps


@given(steps=st.integers(0, 10_000), prefill=st.integers(1, 4096))
def test_prefill_on_its_own_takes_the_same_for_each_token(steps: int, prefill: int) -> None:
    model = CostModel()
    assert model.time_of(steps, 0, 0, prefill) == pytest.approx(steps * prefill * model.k5)
    assert model.steps_in(model.time_of(steps, 0, 0, prefill), 0, 0, prefill) == steps


@given(model=models, seconds=st.floats(0, 100), n=st.integers(1, 1000), per_sequence=st.integers(1, 10_000))
def test_steps_in_is_the_largest_number_that_fits(model: CostModel, seconds: float, n: int, per_sequence: int) -> None:
    kv = n * per_sequence
    steps = model.steps_in(seconds, n, kv)
    slack = 1e-8 * (1 + seconds)
    assert model.time_of(steps, n, kv) <= seconds + slack
    assert model.time_of(steps + 1, n, kv) > seconds - slack


def test_more_sequences_of_the_same_total_length_never_slow_a_server_down() -> None:
    rates = [CostModel().throughput(n, 100_000) for n in range(200)]
    assert rates == sorted(rates)
