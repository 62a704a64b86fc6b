"""The loss against an independent float64 NumPy reference, and its gradient against finite differences of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.train.loss import SUMS, ppo, token_weights

Column = NDArray[np.float64]
TOKENS = 50


def reference(
    new: Column, old: Column, engine: Column, advantage: Column, weight: Column, low: float, high: float, cap: float
) -> float:
    """Equation by equation as in the module's docstring, token by token, without a tensor in sight."""
    total = 0.0
    for n, o, e, a, w in zip(new, old, engine, advantage, weight, strict=True):
        truncated = min(np.exp(o - e), cap)
        s = truncated * np.exp(n - o)
        clipped = min(max(s, 1 - low), 1 + high)
        total += w * -min(s * a, clipped * a)
    return total


def columns(seed: int, spread: float = 1.5) -> dict[str, Column]:
    draw = np.random.default_rng(seed)
    new = -draw.exponential(2.0, TOKENS) - 0.01
    return {
        "new": new,
        "engine": new + draw.normal(0, spread, TOKENS),
        "advantage": draw.normal(0, 1, TOKENS),
        "weight": draw.uniform(0, 2 / TOKENS, TOKENS),
    }


def run(c: dict[str, Column], **options: Any) -> tuple[float, Column, dict[str, float], float]:
    new = torch.tensor(c["new"], requires_grad=True)
    rest = [torch.tensor(c[name]) for name in ("engine", "advantage", "weight")]
    loss, sums, largest = ppo(new, *rest, **options)
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.numpy(), dict(zip(SUMS, sums.tolist(), strict=False)), largest


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("low", "high", "cap"), [(0.2, 0.2, 5.0), (0.2, 0.28, 2.0), (0.1, 0.5, 1.2), (0.5, 0.1, 1.0)])
def test_value_and_gradient_equal_the_reference(seed: int, low: float, high: float, cap: float) -> None:
    c = columns(seed)
    loss, gradient, _, _ = run(c, clip_low=low, clip_high=high, cap=cap)
    old = c["new"].copy()  # one update a batch: the step's start is where the gradient is taken

    def at(new: Column) -> float:
        return reference(new, old, c["engine"], c["advantage"], c["weight"], low, high, cap)

    assert loss == pytest.approx(at(c["new"]), rel=1e-12)
    h = 1e-6
    for t in range(TOKENS):
        nudge = np.zeros(TOKENS)
        nudge[t] = h
        numeric = (at(c["new"] + nudge) - at(c["new"] - nudge)) / (2 * h)
        assert gradient[t] == pytest.approx(numeric, rel=1e-5, abs=1e-9)


def test_further_updates_from_a_batch_keep_the_weight_of_its_start() -> None:
    c = columns(9)
    old = c["new"] + np.random.default_rng(1).normal(0, 0.3, TOKENS)
    loss, _, _, _ = run(c, clip_low=0.2, clip_high=0.3, cap=3.0, proximal=torch.tensor(old))
    expected = reference(c["new"], old, c["engine"], c["advantage"], c["weight"], 0.2, 0.3, 3.0)
    assert loss == pytest.approx(expected, rel=1e-12)


def test_without_a_cap_it_is_ppo_around_the_engines_policy() -> None:
    c = columns(2)
    loss, _, _, _ = run(c, clip_low=0.2, clip_high=0.2, cap=float("inf"))
    ratio = np.exp(c["new"] - c["engine"])
    surrogate = np.minimum(ratio * c["advantage"], np.clip(ratio, 0.8, 1.2) * c["advantage"])
    assert loss == pytest.approx(-(c["weight"] * surrogate).sum(), rel=1e-12)


def test_without_clipping_it_is_truncated_importance_sampling() -> None:
    c = columns(3)
    _, gradient, _, _ = run(c, clip_low=float("inf"), clip_high=float("inf"), cap=2.0)
    truncated = np.minimum(np.exp(c["new"] - c["engine"]), 2.0)
    assert gradient == pytest.approx(-c["weight"] * truncated * c["advantage"], rel=1e-12)


def test_on_policy_it_is_the_policy_gradient() -> None:
    c = columns(4, spread=0.0)
    loss, gradient, sums, largest = run(c, clip_low=0.2, clip_high=0.2, cap=5.0)
    assert loss == pytest.approx(-(c["weight"] * c["advantage"]).sum())
    assert gradient == pytest.approx(-c["weight"] * c["advantage"])
    assert largest == pytest.approx(1)
    assert sums["kl"] == pytest.approx(0, abs=1e-12)
    assert sums["clipped"] == sums["capped"] == sums["gap"] == 0


def test_an_absurd_engine_logprob_moves_a_token_by_no_more_than_the_cap() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    one = torch.ones(1)
    loss, _, _ = ppo(new, torch.tensor([-1e4]), -one, one, clip_low=0.2, clip_high=0.2, cap=5.0)
    loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(5.0)


def test_statistics_are_sums_over_tokens() -> None:
    c = columns(5)
    _, _, sums, largest = run(c, clip_low=0.2, clip_high=0.3, cap=2.0)
    log_ratio = c["new"] - c["engine"]
    ratio = np.exp(log_ratio)
    s = np.minimum(ratio, 2.0)
    up, down = c["advantage"] > 0, c["advantage"] < 0
    assert sums["tokens"] == TOKENS
    assert sums["ratio"] == pytest.approx(ratio.sum())
    assert sums["clipped"] == ((up & (s > 1.3)) | (down & (s < 0.8))).sum()
    assert sums["capped"] == (ratio > 2.0).sum()
    assert sums["kl"] == pytest.approx((ratio - 1 - log_ratio).sum())
    assert sums["gap"] == pytest.approx(np.abs(log_ratio).sum())
    assert largest == pytest.approx(ratio.max())


def test_no_tokens_give_no_loss() -> None:
    empty = torch.zeros(0)
    loss, _, largest = ppo(empty, empty, empty, empty, clip_low=0.2, clip_high=0.2, cap=5.0)
    assert (loss.item(), largest) == (0.0, 0.0)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any), st.sampled_from(["token_mean", "sequence_mean"])
)
def test_weights_of_all_tokens_sum_to_one(generated: list[int], aggregation: str) -> None:
    weights = token_weights(generated, aggregation)
    assert sum(n * w for n, w in zip(generated, weights, strict=True)) == pytest.approx(1)


def test_token_mean_weighs_tokens_alike_and_sequence_mean_sequences() -> None:
    assert token_weights([1, 3, 0], "token_mean") == [0.25, 0.25, 0.0]
    assert token_weights([1, 3, 0], "sequence_mean") == [0.5, pytest.approx(1 / 6), 0.0]
