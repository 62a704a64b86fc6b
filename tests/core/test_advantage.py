"""Each estimator against NumPy in float64 or a case worked by hand; and what a batch gets, token by token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import algorithm as known
from asyncrl.core.advantage import (
    EPSILON,
    ESTIMATORS,
    Advantages,
    TurnRewards,
    gae,
    group_mean,
    group_norm,
    overlong,
    returns,
    rloo,
    split_rewards,
)
from asyncrl.core.types import Batch, Group, Task, Trajectory

rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16)
grouped = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=2, max_size=6)


def ones(rewards: Sequence[float]) -> list[list[float]]:
    """A group of trajectories of one step each."""
    return [[r] for r in rewards]


def flat(group: Sequence[Sequence[float]]) -> list[float]:
    return [value for steps in group for value in steps]


def test_the_recipe_knows_exactly_these_estimators() -> None:
    assert set(known.ADVANTAGES) == {*ESTIMATORS, "reinforce", "gae"}


# --- groups -----------------------------------------------------------------------------------------------------------


@given(rewards)
def test_group_norm_is_equation_2(rewards: list[float]) -> None:
    r = np.array(rewards, np.float64)
    expected = (r - r.mean()) / (r.std() + EPSILON) if r.max() > r.min() else 0 * r
    assert flat(group_norm(ones(rewards))) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(grouped)
def test_of_several_steps_the_groups_mean_and_deviation_are_those_of_all_its_steps(group: list[list[float]]) -> None:
    every = np.array(flat(group), np.float64)
    assert flat(group_mean(group)) == pytest.approx(every - every.mean(), abs=1e-9)
    if every.max() > every.min():
        expected = (every - every.mean()) / (every.std() + EPSILON)
        assert flat(group_norm(group)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(grouped)
def test_rloo_compares_with_the_steps_of_the_other_trajectories(group: list[list[float]]) -> None:
    for i, (steps, advantages) in enumerate(zip(group, rloo(group), strict=True)):
        baseline = np.mean(flat([*group[:i], *group[i + 1 :]]))
        assert advantages == pytest.approx(np.array(steps) - baseline, abs=1e-9)


@given(rewards.filter(lambda r: len(r) > 1))
def test_rloo_of_single_steps_is_the_group_mean_scaled(rewards: list[float]) -> None:
    n = len(rewards)
    expected = [a * n / (n - 1) for a in flat(group_mean(ones(rewards)))]
    assert flat(rloo(ones(rewards))) == pytest.approx(expected, abs=1e-9)


def test_by_hand() -> None:
    assert flat(group_mean(ones([0.0, 4.0]))) == [-2.0, 2.0]
    assert flat(group_norm(ones([0.0, 4.0]))) == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert flat(rloo(ones([0.0, 3.0, 6.0]))) == [-4.5, 0.0, 4.5]
    assert rloo([[1.0, 2.0], [9.0]]) == [[-8.0, -7.0], [7.5]]
    assert rloo([[5.0]]) == [[0.0]]


@given(st.sampled_from(sorted(ESTIMATORS)), st.floats(-1e6, 1e6), st.integers(1, 16))
def test_equal_rewards_give_zero(name: str, reward: float, size: int) -> None:
    assert flat(ESTIMATORS[name](ones([reward] * size))) == pytest.approx([0.0] * size, abs=1e-9 * abs(reward))
    assert flat(group_norm(ones([reward] * size))) == [0.0] * size  # exactly: their tokens are left out of the step


@given(st.sampled_from(sorted(ESTIMATORS)), rewards, st.floats(-10, 10))
def test_adding_a_constant_to_all_rewards_changes_nothing(name: str, rewards: list[float], constant: float) -> None:
    moved = flat(ESTIMATORS[name](ones([r + constant for r in rewards])))
    if max(rewards) - min(rewards) > 1e-3 or name != "group_norm":
        assert moved == pytest.approx(flat(ESTIMATORS[name](ones(rewards))), rel=1e-6, abs=1e-8)


# --- returns ----------------------------------------------------------------------------------------------------------


@given(rewards, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_gae_is_the_exponentially_weighted_sum_of_td_errors(
    r: list[float], gamma: float, lam: float, seed: int
) -> None:
    """Schulman et al. Eq. 16, summed out."""
    n = len(r)
    values = np.append(np.random.default_rng(seed).normal(size=n), 0.0)
    deltas = [r[t] + gamma * values[t + 1] - values[t] for t in range(n)]
    expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]
    assert gae(r, values[:n].tolist(), gamma, lam) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(rewards, st.floats(0, 1))
def test_with_lambda_one_gae_is_the_return_minus_the_value(r: list[float], gamma: float) -> None:
    values = [0.5 * i for i in range(len(r))]
    expected = np.array(returns(r, gamma)) - values
    assert gae(r, values, gamma, 1.0) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(rewards, min_size=2, max_size=4), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_gae_of_parts_is_that_of_the_whole(parts: list[list[float]], gamma: float, lam: float, seed: int) -> None:
    """From the last part to the first, each with what comes after it."""
    draw = np.random.default_rng(seed)
    values = [draw.normal(size=len(part)).tolist() for part in parts]
    found: list[float] = []
    after = 0.0
    for r, v in zip(reversed(parts), reversed(values), strict=True):
        found = gae(r, v, gamma, lam, after) + found
        after = gamma * (v[0] + lam * found[0])
    assert found == pytest.approx(gae(flat(parts), flat(values), gamma, lam), rel=1e-9, abs=1e-9)


def test_rewards_are_split_where_segments_end() -> None:
    mask = bytes([0, 1, 0, 1, 1, 0, 0, 1, 0])
    turns = TurnRewards(ends=(2, 5, 8, 8, 9), rewards=(1.0, 2.0, 4.0, 8.0, 16.0))
    assert split_rewards(turns, mask, (5, 9)) == [
        TurnRewards(ends=(2, 5), rewards=(1.0, 2.0)),
        TurnRewards(ends=(3, 3, 4), rewards=(28.0, 0.0, 0.0)),
    ]
    # The second turn lies across a border; the third has no token, and its segment none before it.
    turns = TurnRewards(ends=(2, 5, 6, 9), rewards=(1.0, 2.0, 4.0, 8.0))
    assert split_rewards(turns, mask, (4, 5, 7, 9)) == [
        TurnRewards(ends=(2, 4), rewards=(1.0, 0.0)),
        TurnRewards(ends=(1,), rewards=(6.0,)),
        TurnRewards(ends=(1, 2), rewards=(0.0, 0.0)),
        TurnRewards(ends=(2,), rewards=(8.0,)),
    ]


def test_returns_by_hand() -> None:
    assert returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert gae([0.0, 1.0], [0.5, 0.25], 1.0, 0.5) == [-0.25 + 0.5 * 0.75, 0.75]


# --- batches ----------------------------------------------------------------------------------------------------------


def trajectory(turns: Sequence[tuple[int, int, float]], finish_reason: str = "stop") -> Trajectory:
    """Turns of (observed tokens, generated tokens, reward)."""
    mask = array("b", flat([[0] * seen + [1] * made for seen, made, _ in turns]))
    ends = np.cumsum([seen + made for seen, made, _ in turns]).tolist()
    n = len(mask)
    return Trajectory(
        id=0,
        group_id=0,
        index=0,
        task_id="t",
        v_traj=0,
        tokens=array("i", range(n)),
        loss_mask=mask,
        logprobs=array("f", bytes(4 * n)),
        versions=array("i", bytes(4 * n)),
        turns=len(turns),
        reward=math.fsum(reward for *_, reward in turns),
        finish_reason=finish_reason,
        turn_ends=tuple(ends),
        turn_rewards=tuple(reward for *_, reward in turns),
    )


def batch(*groups: Sequence[Trajectory], step: int = 0) -> Batch:
    task = Task(id="t", data={})
    return Batch(
        step=step, groups=tuple(Group(id=i, task=task, v_traj=0, trajectories=tuple(g)) for i, g in enumerate(groups))
    )


def scored(*groups: Sequence[float], step: int = 0) -> Batch:
    """Single turns of ten tokens with these rewards."""
    return batch(*([trajectory([(2, 8, r)]) for r in rewards] for rewards in groups), step=step)


def columns(values: Sequence[Any]) -> list[list[float]]:
    assert all(isinstance(v, array) and v.typecode == "f" for v in values)
    return [v.tolist() for v in values]


def test_each_group_is_compared_by_itself_and_the_order_is_kept() -> None:
    found = Advantages().compute(scored([0.0, 2.0], [5.0, 5.0], [1.0, 0.0]))
    assert found == pytest.approx([-1, 1, 0, 0, 1, -1], abs=1e-5)
    assert all(isinstance(a, float) for a in found)


def test_reinforce_subtracts_what_the_baseline_says() -> None:
    one, two = scored([0.0, 2.0], [4.0, 6.0]), scored([10.0, 0.0], [0.0, 0.0], step=1)
    for baseline, expected in {"none": [0, 2, 4, 6], "batch": [-3, -1, 1, 3]}.items():
        assert Advantages(advantage="reinforce", baseline=baseline).compute(one) == expected
    running = Advantages(advantage="reinforce", baseline="running", baseline_decay=0.75)
    assert running.compute(one) == [-3, -1, 1, 3]  # nothing came before: its own mean
    assert running.compute(two) == [7, -3, -3, -3]  # the mean of the batch before, not its own of 2.5
    assert running.running(2) == 0.75 * 3 + 0.25 * 2.5


def test_the_running_baseline_of_a_step_is_known_whether_it_was_computed_or_not_and_goes_on_in_another_run() -> None:
    keys: dict[str, Any] = {"advantage": "reinforce", "baseline": "running", "baseline_decay": 0.5}
    one = Advantages(**keys)
    found = []
    for step in range(4):
        before = one.running(step)
        found.append(one.compute(scored([float(step), 9.0], step=step)))
        assert one.running(step) == before  # of the step that was computed but not trained
        assert one.compute(scored([float(step), 9.0], step=step)) == found[-1]
    other = Advantages(**keys, running=4.75)
    assert [other.compute(scored([float(step), 9.0], step=step)) for step in (2, 3)] == found[2:]


def test_for_a_critic_the_shaped_rewards_of_the_turns_are_all_that_is_made() -> None:
    import msgspec

    long, single = trajectory([(1, 3, 1.0), (1, 6, 1.0)]), trajectory([(1, 5, 2.0)])
    bare = msgspec.structs.replace(single, turn_ends=(), turn_rewards=())
    keys: dict[str, Any] = {"overlong_limit": 10, "overlong_buffer": 4, "overlong_penalty": 2.0}
    assert Advantages(advantage="gae", credit="token", **keys).compute(batch([long, bare])) == [
        TurnRewards(ends=(4, 11), rewards=(1.0, 1.0 - 2.0 * 0.75)),
        TurnRewards(ends=(6,), rewards=(2.0,)),
    ]


def test_turns_are_credited_with_what_follows_them() -> None:
    """Two turns with rewards 1 and 4, γ = 1/2: returns 3 and 4; the other trajectory's single turn: 2. Mean 3."""
    two, one = trajectory([(2, 2, 1.0), (1, 3, 4.0)]), trajectory([(1, 2, 2.0)])
    found = Advantages(advantage="group_mean", credit="turn", gamma=0.5).compute(batch([two, one]))
    assert columns(found) == [[0, 0, 0, 0, 0, 1, 1, 1], [0, -1, -1]]


def test_tokens_are_credited_with_what_follows_them() -> None:
    """A turn's reward comes with its last token; γ counts generated tokens."""
    two = trajectory([(2, 2, 1.0), (1, 2, 4.0)])
    found = Advantages(advantage="reinforce", baseline="none", credit="token", gamma=0.5).compute(batch([two]))
    assert columns(found) == [[0, 0, 0.5 + 0.5, 1 + 1, 0, 2, 4]]


def test_a_turn_without_tokens_credits_the_token_before_it() -> None:
    empty = trajectory([(1, 2, 1.0), (1, 0, 3.0)])
    found = Advantages(advantage="reinforce", baseline="none", credit="token", gamma=0.5).compute(batch([empty]))
    assert columns(found) == [[0, 2, 4, 0]]


def test_without_rewards_of_turns_the_whole_is_one_turn() -> None:
    import msgspec

    bare = msgspec.structs.replace(trajectory([(1, 2, 3.0)]), turn_ends=(), turn_rewards=())
    for credit in ("turn", "token"):
        found = Advantages(advantage="reinforce", baseline="none", credit=credit).compute(batch([bare]))
        assert columns(found) == [[0, 3, 3]]


@pytest.mark.parametrize("credit", ["turn", "token"])
@pytest.mark.parametrize("advantage", [*ESTIMATORS, "reinforce"])
def test_of_single_turns_without_discount_all_credits_are_the_same(advantage: str, credit: str) -> None:
    b = scored([0.0, 1.0, 1.0], [0.25, 0.5, 3.0])
    whole = Advantages(advantage=advantage).compute(b)
    parts = Advantages(advantage=advantage, credit=credit).compute(b)
    for each, column in zip(whole, columns(parts), strict=True):
        assert column == pytest.approx([0.0, 0.0, *[each] * 8], abs=1e-6)


def test_soft_overlong_punishment_is_equation_13() -> None:
    assert [overlong(n, 100, 20) for n in (1, 80, 85, 90, 100, 500)] == [0, 0, 0.25, 0.5, 1, 1]


def test_overlong_trajectories_lose_reward_with_their_last_turn() -> None:
    long, short = trajectory([(1, 3, 1.0), (1, 6, 1.0)]), trajectory([(1, 5, 2.0)])
    keys: dict[str, Any] = {"overlong_limit": 10, "overlong_buffer": 4, "overlong_penalty": 2.0}
    plain = Advantages(advantage="reinforce", baseline="none", **keys)
    assert plain.compute(batch([long, short])) == [2.0 - 2.0 * 0.75, 2.0]
    turns = Advantages(advantage="reinforce", baseline="none", credit="turn", gamma=0.0, **keys)
    assert columns(turns.compute(batch([long])))[0] == [0, 1, 1, 1, 0, *[-0.5] * 6]


def test_rewards_normalised_over_the_batch_have_mean_0_and_deviation_1() -> None:
    draw = np.random.default_rng(0)
    b = batch([trajectory([(1, 2, r), (1, 2, q)]) for r, q in draw.normal(3, 5, (50, 2))])
    totals = Advantages(advantage="reinforce", baseline="none", reward_norm="batch").compute(b)
    r = np.array([t.reward for t in b.trajectories])
    assert totals == pytest.approx((r - r.mean()) / r.std(), rel=1e-5)
    turns = Advantages(advantage="reinforce", baseline="none", reward_norm="batch", credit="turn").compute(b)
    assert [column[1] for column in columns(turns)] == pytest.approx(totals, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("unit", [1.0, 1e-5, 1e5])
def test_equal_rewards_that_are_normalised_stay_as_large_as_they_were(unit: float) -> None:
    """Also where they differ by rounding, as sums of float32 do. They come to 0, and no turn's reward explodes."""
    whole, parts = [(1, 2, 0.5 * unit)], [(1, 2, 0.1 * unit)] * 4 + [(1, 2, float(np.float32(0.1)) * unit)]
    b = batch([trajectory(whole), trajectory(parts)])
    assert 0 < abs(b.trajectories[0].reward - b.trajectories[1].reward) < 1e-7 * unit
    found = Advantages(advantage="gae", credit="turn", reward_norm="batch").compute(b)
    expected = [[0.0], [0.1 * unit] * 4 + [-0.4 * unit]]
    for one, rewards in zip(found, expected, strict=True):
        assert isinstance(one, TurnRewards) and one.rewards == pytest.approx(rewards, abs=1e-6 * unit)


def test_what_was_cut_off_is_left_out_but_counts_in_its_groups_mean() -> None:
    b = batch([trajectory([(1, 2, 0.0)], "length"), trajectory([(1, 2, 4.0)])])
    assert Advantages(advantage="group_mean", overlong_filter=True).compute(b) == [None, 2.0]
    assert Advantages(advantage="group_mean").compute(b) == [-2.0, 2.0]


def test_a_batch_of_which_everything_was_cut_off_teaches_nothing() -> None:
    b = batch([trajectory([(1, 2, 0.0)], "length"), trajectory([(1, 2, 4.0)], "length")])
    assert Advantages(overlong_filter=True).compute(b) == [0.0, 0.0]


def test_a_users_estimator_gets_shaped_rewards_and_gives_numbers_columns_or_none() -> None:
    b = batch([trajectory([(1, 9, 1.0)]), trajectory([(1, 2, 0.0)]), trajectory([(1, 1, 0.0)])])
    seen: list[float] = []

    def own(batch: Batch) -> list[Any]:
        seen.extend(t.reward for t in batch.trajectories)
        return [2, [0.0, 0.5, -0.5], None]

    found = Advantages(own=own, overlong_limit=10, overlong_buffer=2).compute(b)
    assert seen == [0.5, 0.0, 0.0]
    assert found == [2.0, array("f", [0, 0.5, -0.5]), None]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0], "returned 1 advantages for 2 trajectories; return one for each"),
        ([1.0, [0.0]], "returned 1 values for trajectory 1, which has 3 tokens"),
        ([1.0, math.nan], "not finite for trajectory 1"),
        ([[0.0, 0.0, math.inf], 1.0], "not finite for trajectory 0"),
    ],
)
def test_what_a_users_estimator_may_not_give_is_named(values: list[Any], says: str) -> None:
    b = batch([trajectory([(1, 2, 1.0)])] * 2)
    with pytest.raises(ValueError, match=says):
        Advantages(own=lambda _: values).compute(b)


@pytest.mark.parametrize(
    ("bad", "says"),
    [(batch([trajectory([(1, 1, 1.0)])], []), "group 1"), (scored([1.0, math.nan]), "group 0 .*reward")],
)
def test_what_cannot_be_computed_is_named(bad: Batch, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Advantages().compute(bad)


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown 'gea'; known are group_norm, group_mean, rloo, reinforce"):
        Advantages(advantage="gea")
