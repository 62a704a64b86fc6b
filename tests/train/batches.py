"""Batches to train on, drawn from a seed."""

from __future__ import annotations

import random
from array import array

import msgspec

from asyncrl.core.advantage import TurnRewards
from asyncrl.core.types import Batch, Group, Task, Trajectory

VOCABULARY = 64


def make_batch(step: int, *, seed: int, groups: int = 4, group_size: int = 4) -> Batch:
    """Trajectories of two turns, of very different lengths; engine logprobs that make clipping and capping happen."""
    draw = random.Random(seed)
    made = []
    for g in range(groups):
        trajectories = []
        for i in range(group_size):
            mask = array("b")
            for _ in range(draw.randint(1, 2)):
                mask.extend([0] * draw.randint(1, 6) + [1] * draw.choice([1, 3, 10, 25]))
            mask.extend([0] * draw.randint(0, 3))
            trajectories.append(
                Trajectory(
                    id=g * group_size + i,
                    group_id=g,
                    index=i,
                    task_id=f"t/{g}",
                    v_traj=step,
                    tokens=array("i", [draw.randrange(VOCABULARY) for _ in mask]),
                    loss_mask=mask,
                    logprobs=array("f", [-draw.uniform(0.1, 9.0) if m else 0.0 for m in mask]),
                    versions=array("i", [step if m else -1 for m in mask]),
                    turns=1,
                    reward=draw.random(),
                    finish_reason="stop",
                )
            )
        task = Task(id=f"t/{g}", data={})
        made.append(Group(id=g, task=task, v_traj=step, trajectories=tuple(trajectories)))
    return Batch(step=step, groups=tuple(made))


def make_advantages(batch: Batch, seed: int) -> list[float]:
    """Normal, with every fourth exactly 0."""
    draw = random.Random(seed)
    return [0.0 if i % 4 == 3 else draw.gauss(0, 1) for i in range(len(batch.trajectories))]


def make_rewards(batch: Batch, seed: int) -> list[TurnRewards]:
    """Of turns that end where their generated tokens do, but for the last; every third has one without tokens too."""
    draw = random.Random(seed)
    made = []
    for i, trajectory in enumerate(batch.trajectories):
        mask = trajectory.loss_mask
        ends = [t + 1 for t in range(len(mask) - 1) if mask[t] and not mask[t + 1]]
        ends = [*ends[:-1], len(mask)]
        if i % 3 == 0:
            ends.insert(draw.randint(0, 1), ends[0])
        made.append(TurnRewards(ends=tuple(ends), rewards=tuple(draw.gauss(0, 1) for _ in ends)))
    return made


def in_segments(batch: Batch, rewards: list[TurnRewards]) -> Batch:
    """Each trajectory cut where its turns end, and behind its last generated token: the last segment may have none."""
    replace = msgspec.structs.replace
    turns = iter(rewards)

    def cut(t: Trajectory) -> Trajectory:
        borders = {*next(turns).ends, t.loss_mask.tobytes().rfind(1) + 1, len(t.tokens)}
        return replace(t, segment_ends=tuple(sorted(borders)) if len(borders) > 1 else ())

    groups = tuple(replace(g, trajectories=tuple(map(cut, g.trajectories))) for g in batch.groups)
    return replace(batch, groups=groups)
