"""What the shipped samplers put first, and what is said of a user's that gives nonsense."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from asyncrl.core.experience import (
    SAMPLERS,
    Finished,
    Generated,
    Sampler,
    checked_rewards,
    checked_scores,
    generated,
    ranked,
)
from asyncrl.core.types import Task

from .test_advantage import trajectory

STEP = 10


def group(number: int, **values: Any) -> Finished:
    """As it stands before step 10; of one version and with equal rewards, unless told otherwise."""
    v_traj = values.setdefault("v_traj", STEP)
    told = {"rewards": (0.0, 0.0), "lengths": (5, 5), "versions": (float(v_traj),) * 2, "uses": 0, **values}
    return Finished(id=number, task=Task(id=f"t{number}", data={}), staleness=STEP - v_traj, **told)


FIRST: dict[str, tuple[list[Finished], list[int]]] = {
    "fifo": ([group(1, uses=1), group(2), group(3, uses=2), group(4)], [2, 4, 1, 3]),
    "staleness": (
        [group(1, v_traj=8), group(2, v_traj=9, uses=1), group(3, v_traj=9), group(4, v_traj=7)],
        [3, 2, 1, 4],
    ),
    "advantage": (
        [group(1), group(2, rewards=(1.0, -1.0)), group(3, rewards=(0.0, 1.0)), group(4, rewards=(5.0, 5.0))],
        [2, 3, 1, 4],
    ),
    "importance_ratio": (
        [
            group(1, v_traj=9),
            group(2, v_traj=8, versions=(9.8, 9.8)),  # begun earlier, but most of it is newer
            group(3, v_traj=8, lengths=(1, 99), versions=(10.0, 8.0)),
            group(4, v_traj=8, lengths=(99, 1), versions=(10.0, 8.0)),
        ],
        [4, 2, 1, 3],
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_puts_first_what_it_is_named_after(name: str) -> None:
    groups, order = FIRST[name]
    assert ranked(SAMPLERS[name], groups) == order


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_of_equal_groups_the_one_used_least_is_first_then_the_one_that_came_first(sampler: Sampler) -> None:
    assert ranked(sampler, [group(7, uses=1), group(5), group(6), group(4, uses=1)]) == [5, 6, 7, 4]
    assert ranked(sampler, []) == []


def test_observed_tokens_have_no_version() -> None:
    mixed = msgspec.structs.replace(trajectory([(2, 2, 0.0), (1, 1, 1.0)]), versions=array("i", [-1, -1, 3, 4, -1, 8]))
    assert generated(mixed) == Generated(tokens=3, version=5.0)
    nothing = msgspec.structs.replace(trajectory([(1, 0, 0.0)]), v_traj=3, versions=array("i", [-1]))
    assert generated(nothing) == Generated(tokens=0, version=3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "gave NoneType; give a list with a score for each group"),
        ("ab", "gave str;"),
        ({1: 2.0, 2: 3.0}, "gave dict;"),
        ([1.0], "gave 1 scores; give one for each group, 2 here"),
        ([1.0, float("nan")], "gave the score nan; give finite numbers"),
        ([1.0, float("inf")], "gave the score inf;"),
        ([1.0, "2"], "gave the score '2';"),
        ([1.0, True], "gave the score True;"),
    ],
)
def test_scores_are_a_finite_number_for_each_group(answer: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_scores(answer, [group(1), group(2)])


def test_a_writer_says_yes_or_no_or_gives_rewards() -> None:
    assert checked_rewards(True, group(1)) is True
    assert checked_rewards(False, group(1)) is False
    assert checked_rewards((1, 0.5), group(1)) == [1.0, 0.5]
    with pytest.raises(ValueError, match="gave 1 rewards; give one for each trajectory, 2 here"):
        checked_rewards([1.0], group(1))
    with pytest.raises(ValueError, match="gave NoneType; give a list with a reward for each trajectory"):
        checked_rewards(None, group(1))


def test_a_new_reward_comes_with_the_last_turn() -> None:
    turned = trajectory([(1, 1, 0.25), (1, 1, 0.75)])
    changed = turned.rewarded(3.0)
    assert (changed.reward, changed.turn_rewards) == (3.0, (0.25, 2.75))
    whole = msgspec.structs.replace(turned, turn_ends=(), turn_rewards=())
    assert (whole.rewarded(2.0).reward, whole.rewarded(2.0).turn_rewards) == (2.0, ())
