"""The records that every part of asyncrl passes around: tasks, trajectories, groups, batches.

Owns nothing and decides nothing. Records that cross a component are frozen, slotted and keyword-only. The words are
those of DESIGN.md §2. Token data lives in ``array.array`` columns from the engine's adapter to the trainer (13 bytes a
token): appending, joining and sending them are memory copies, whatever their length.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

OBSERVED_VERSION = -1
"""Version column's value for a token that no policy generated (prompt, observation)."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the frozen records; ``msgspec.structs.replace`` makes a changed copy."""


class Task(Record, frozen=True, kw_only=True):
    """One row of a dataset; an episode starts from it.

    ``source`` is its name in the recipe's ``[sources]``, empty where there is only one.

    Example: ``Task(id="train/17", data={"prompt": "3492=", "answer": "3d 4h 9g 2i #i"})``
    """

    id: str
    data: Mapping[str, Any]
    source: str = ""


class Turn(Record, frozen=True, kw_only=True):
    """What one generation added to a conversation.

    ``prompt_ids`` are the tokens that were new before this generation (the whole prompt on the first turn, only the
    observation later); ``output_ids``, ``logprobs`` and ``versions`` are parallel, one entry a generated token, and
    versions never decrease. int32, int32, float32, int32. ``reward`` is what the environment gave for it, ``seconds``
    how long it waited for a server, was generated, and was in the environment. With ``new_segment`` the ``prompt_ids``
    begin a token sequence of their own, in place of extending the one before.
    """

    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: str
    reward: float = 0.0
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    new_segment: bool = False


class Trajectory(Record, frozen=True, kw_only=True):
    """One finished episode: flat per-token columns, all of the same length.

    ``loss_mask`` is 1 where the policy generated the token and 0 where it observed it. ``logprobs`` are the engine's,
    after temperature, 0.0 where the mask is 0. ``versions`` is the policy version that sampled each token, or
    ``OBSERVED_VERSION``. ``turn_ends`` is the number of tokens up to the end of each turn, ``turn_rewards`` what each
    brought; they sum to ``reward``. Both may be empty: then the reward belongs to the whole. ``turn_seconds`` has each
    turn's ``seconds``, ``reset_s`` is the environment's time before the first; both are for people. ``segment_ends`` is
    the number of tokens up to the end of each segment, where there are several: each is a token sequence of its own for
    the model.
    """

    id: int
    group_id: int
    index: int
    task_id: str
    v_traj: int
    tokens: array[int]
    loss_mask: array[int]
    logprobs: array[float]
    versions: array[int]
    turns: int
    reward: float
    finish_reason: str
    metrics: Mapping[str, float] = {}
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    turn_seconds: tuple[tuple[float, float, float], ...] = ()
    reset_s: float = 0.0
    segment_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not (len(self.loss_mask) == len(self.logprobs) == len(self.versions) == n):
            raise ValueError(
                f"trajectory {self.id}: columns differ in length (tokens {n}, loss_mask {len(self.loss_mask)}, "
                f"logprobs {len(self.logprobs)}, versions {len(self.versions)})"
            )
        if len(self.turn_ends) != len(self.turn_rewards):
            raise ValueError(
                f"trajectory {self.id}: {len(self.turn_rewards)} rewards of turns, but {len(self.turn_ends)} turns"
            )
        if n and self.segment_ends and self.segment_ends[-1] != n:  # with 0 its tokens wait on the disk
            raise ValueError(f"trajectory {self.id}: the segments end at {self.segment_ends[-1]}, not at {n} tokens")

    @property
    def generated(self) -> int:
        """Number of tokens that the policy generated."""
        return self.loss_mask.tobytes().count(1)

    def rewarded(self, reward: float) -> Trajectory:
        """With this reward; what it is more or less than before comes with the last turn."""
        turns = list(self.turn_rewards)
        if turns:
            turns[-1] += reward - self.reward
        return msgspec.structs.replace(self, reward=reward, turn_rewards=tuple(turns))


class Group(Record, frozen=True, kw_only=True):
    """The finished trajectories of one task: the unit of admission and of a batch."""

    id: int
    task: Task
    v_traj: int
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories]

    @property
    def tokens(self) -> int:
        return sum(len(t.tokens) for t in self.trajectories)


class Batch(Record, frozen=True, kw_only=True):
    """What train step ``step`` consumes; training it produces version ``step + 1``."""

    step: int
    groups: tuple[Group, ...]

    @property
    def staleness(self) -> list[int]:
        """Version being trained minus V_traj, one entry a group (DESIGN.md §2)."""
        return [self.step - g.v_traj for g in self.groups]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for g in self.groups for t in g.trajectories]


def flatten(turns: Sequence[Turn]) -> tuple[array[int], array[int], array[float], array[int]]:
    """Columns (tokens, loss_mask, logprobs, versions) of a conversation, in the order that the engine saw them."""
    tokens, mask, logprobs, versions = array("i"), array("b"), array("f"), array("i")
    for turn in turns:
        n, m = len(turn.prompt_ids), len(turn.output_ids)
        tokens += turn.prompt_ids
        mask.frombytes(bytes(n))
        logprobs.frombytes(bytes(logprobs.itemsize * n))
        versions += array("i", [OBSERVED_VERSION]) * n
        tokens += turn.output_ids
        mask.frombytes(b"\x01" * m)
        logprobs += turn.logprobs
        versions += turn.versions
    return tokens, mask, logprobs, versions
