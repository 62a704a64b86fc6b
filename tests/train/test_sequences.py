"""A trajectory of several segments is as many sequences, each with its part of the columns."""

from __future__ import annotations

from array import array

import msgspec

from asyncrl.core.advantage import TurnRewards
from asyncrl.core.types import Batch, Group, Task, Trajectory
from asyncrl.train.client import train_request, train_sequences

from .batches import make_batch

PLAIN = make_batch(0, seed=0).trajectories[0]


def segmented(id: int, *lengths: int) -> Trajectory:
    n = sum(lengths)
    ends = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    return Trajectory(
        id=id,
        group_id=0,
        index=id,
        task_id="t",
        v_traj=0,
        tokens=array("i", range(n)),
        loss_mask=array("b", [i % 2 for i in range(n)]),
        logprobs=array("f", [-i for i in range(n)]),
        versions=array("i", [0] * n),
        turns=len(lengths),
        reward=1.0,
        finish_reason="stop",
        segment_ends=ends if len(ends) > 1 else (),
    )


def test_each_segment_has_the_rewards_of_its_turns() -> None:
    one, several = segmented(0, 4), segmented(1, 4, 2)
    [sequence] = train_sequences(one, TurnRewards(ends=(4,), rewards=(1.0,)))
    assert (sequence.turn_ends, sequence.turn_rewards, sequence.continues) == ((4,), (1.0,), False)
    first, second = train_sequences(several, TurnRewards(ends=(2, 4, 6), rewards=(1.0, 2.0, 3.0)))
    assert (first.turn_ends, first.turn_rewards, first.continues) == ((2, 4), (1.0, 2.0), False)
    assert (second.turn_ends, second.turn_rewards, second.continues) == ((2,), (3.0,), True)


def test_each_segment_is_a_sequence_with_its_part_of_every_column() -> None:
    trajectory = segmented(0, 4, 2, 6)
    column = array("f", range(100, 112))
    sequences = train_sequences(trajectory, column)
    assert [len(s.loss_mask) for s in sequences] == [4, 2, 6]
    assert b"".join(s.tokens for s in sequences) == trajectory.tokens.tobytes()
    assert b"".join(s.loss_mask for s in sequences) == trajectory.loss_mask.tobytes()
    assert b"".join(s.logprobs for s in sequences) == trajectory.logprobs.tobytes()
    assert b"".join(s.versions for s in sequences) == trajectory.versions.tobytes()
    assert b"".join(s.advantages for s in sequences) == column.tobytes()
    assert [s.advantage for s in train_sequences(trajectory, 0.5)] == [0.5] * 3
    assert all(not any(s.loss_mask) for s in train_sequences(trajectory, None))
    assert len(train_sequences(PLAIN, 1.0)) == 1


def test_fed_places_count_sequences() -> None:
    trajectories = (segmented(0, 4), segmented(1, 4, 2), segmented(2, 6), segmented(3, 2, 2, 2))
    batch = Batch(step=0, groups=(Group(id=0, task=Task(id="t", data={}), v_traj=0, trajectories=trajectories),))
    request = train_request(batch, [1.0] * 4, fed=[3, 1])
    assert request.fed == [4, 5, 6, 1, 2]
    assert [len(s.loss_mask) for s in request.sequences] == [4, 6]
    whole = train_request(batch, [1.0] * 4)
    assert [len(s.loss_mask) for s in whole.sequences] == [4, 4, 2, 6, 2, 2, 2]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=type(whole)) == whole
