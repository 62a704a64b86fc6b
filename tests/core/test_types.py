"""The records: flattening a dialogue into columns, and what a trajectory refuses."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.types import OBSERVED_VERSION, Batch, Group, Task, Trajectory, Turn, flatten

ids = st.integers(0, 2**31 - 1)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    output = draw(st.lists(ids, max_size=5))
    return Turn(
        prompt_ids=array("i", draw(st.lists(ids, max_size=5))),
        output_ids=array("i", output),
        logprobs=array("f", draw(st.lists(st.floats(-50, 0, width=32), min_size=len(output), max_size=len(output)))),
        versions=array("i", sorted(draw(st.lists(st.integers(0, 9), min_size=len(output), max_size=len(output))))),
        finish_reason="stop",
    )


@given(st.lists(turns(), max_size=4))
def test_flatten_keeps_every_token_in_order_with_its_mask_logprob_and_version(dialogue: list[Turn]) -> None:
    rows = [
        row
        for turn in dialogue
        for row in [
            *((token, 0, 0.0, OBSERVED_VERSION) for token in turn.prompt_ids),
            *((t, 1, lp, v) for t, lp, v in zip(turn.output_ids, turn.logprobs, turn.versions, strict=True)),
        ]
    ]
    columns = flatten(dialogue)
    assert list(zip(*columns, strict=True)) == rows
    assert [c.typecode for c in columns] == ["i", "b", "f", "i"]


def trajectory(index: int = 0, reward: float = 0.0, generated: int = 2) -> Trajectory:
    n = generated + 1
    return Trajectory(
        id=index,
        group_id=0,
        index=index,
        task_id="t",
        v_traj=3,
        tokens=array("i", range(n)),
        loss_mask=array("b", [0] + [1] * generated),
        logprobs=array("f", [0.0] * n),
        versions=array("i", [-1] + [3] * generated),
        turns=1,
        reward=reward,
        finish_reason="stop",
    )


@pytest.mark.parametrize("column", ["tokens", "loss_mask", "logprobs", "versions"])
def test_a_trajectory_with_columns_of_different_length_cannot_be_made(column: str) -> None:
    whole = trajectory()
    with pytest.raises(ValueError, match="trajectory 0: columns differ in length"):
        msgspec.structs.replace(whole, **{column: getattr(whole, column)[:-1]})


def test_every_turn_has_a_reward() -> None:
    with pytest.raises(ValueError, match="trajectory 0: 1 rewards of turns, but 2 turns"):
        msgspec.structs.replace(trajectory(), turn_ends=(1, 3), turn_rewards=(1.0,))


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        trajectory().reward = 1.0  # type: ignore[misc]


def test_group_and_batch_add_up_their_trajectories() -> None:
    task = Task(id="t", data={})
    old = Group(id=0, task=task, v_traj=3, trajectories=(trajectory(0, 0.5), trajectory(1, 1.0, generated=4)))
    new = Group(id=1, task=task, v_traj=4, trajectories=(trajectory(2),))
    batch = Batch(step=4, groups=(old, new))
    assert old.rewards == [0.5, 1.0]
    assert old.tokens == 3 + 5
    assert [t.generated for t in old.trajectories] == [2, 4]
    assert batch.staleness == [1, 0]
    assert [t.id for t in batch.trajectories] == [0, 1, 2]
