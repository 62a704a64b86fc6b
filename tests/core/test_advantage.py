from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.advantage import EPSILON, compute, group_mean, group_norm

rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16)


@given(rewards)
def test_group_norm_is_equation_2(rewards: list[float]) -> None:
    mean, std = fmean(rewards), pstdev(rewards)
    expected = [(r - mean) / (std + EPSILON) for r in rewards] if max(rewards) > min(rewards) else [0.0] * len(rewards)
    assert group_norm(rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    assert math.fsum(group_mean(rewards)) == pytest.approx(0, abs=1e-9)
    assert math.fsum(group_norm(rewards)) == pytest.approx(0, abs=1e-6)


@given(rewards, st.floats(-10, 10))
def test_adding_a_constant_to_all_rewards_changes_nothing(rewards: list[float], constant: float) -> None:
    assert group_mean([r + constant for r in rewards]) == pytest.approx(group_mean(rewards), abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert group_norm([reward] * size) == [0.0] * size


def test_group_mean_keeps_the_scale() -> None:
    assert group_mean([0.0, 4.0]) == [-2.0, 2.0]
    assert group_norm([0.0, 4.0]) == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_compute_normalises_each_group_by_itself_and_keeps_the_order() -> None:
    assert compute("group_norm", [[0.0, 2.0], [5.0, 5.0], [1.0, 0.0]]) == pytest.approx([-1, 1, 0, 0, 1, -1], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "groups", "says"),
    [
        ("gae", [[1.0]], "group_mean, group_norm"),
        ("group_norm", [[1.0], []], "group 1"),
        ("group_norm", [[1.0, math.nan]], "group 0"),
    ],
)
def test_what_cannot_be_computed_is_named(name: str, groups: list[list[float]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compute(name, groups)
