"""What the run store is told of a run, and what it tells the run that goes on from there.

The runtime puts a record for each change that must outlive it, in the order in which things happen. What is durable is
always a prefix of them, so whoever is told a record may rely on all before it. A trajectory that was being generated
goes on from its last record: a finished turn, or a piece of one.

The states of a group::

    open ──▶ ready ──▶ consumed | surplus | aborted      ready ──▶ used ──▶ consumed    (where samples are reused)
      └────▶ filtered | surplus | aborted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from asyncrl.core.advantage import Advantage
from asyncrl.core.experience import Generated
from asyncrl.core.types import Batch, Record, Task, Trajectory, Turn

# --- told -------------------------------------------------------------------------------------------------------------


class GroupOpened(Record, frozen=True, kw_only=True):
    """``tasks_done`` tasks were given out up to this one. ``trajectories`` are those of its slots."""

    group: int
    task: Task
    tasks_done: int
    trajectories: tuple[int, ...]


class GroupStarted(Record, frozen=True, kw_only=True):
    """The group has its V_traj. ``deadline`` is the last step that may train it, None without a bound."""

    group: int
    v_traj: int
    deadline: int | None


class GroupReady(Record, frozen=True, kw_only=True):
    """Complete: it waits for its batch, behind those that were ready before. ``rewards`` are what the writer made of
    those of these trajectories."""

    group: int
    rewards: Mapping[int, float] = {}


class GroupEnded(Record, frozen=True, kw_only=True):
    """The group has left untrained, and with it what was left of its trajectories."""

    group: int
    state: str
    reason: str


class Retried(Record, frozen=True, kw_only=True):
    """``trajectory`` is begun in the place of one that failed."""

    group: int
    index: int
    trajectory: int


class TurnPiece(Record, frozen=True, kw_only=True):
    """Turn ``number`` of a live trajectory, when its generation has ended (``piece`` is None), or the tokens that its
    generation has brought since the piece before. It takes the place of what was told of this turn and later ones, but
    a piece beyond the first only adds."""

    trajectory: int
    number: int
    piece: int | None = None
    turn: Turn


class Scored(Record, frozen=True, kw_only=True):
    """The episode has ended."""

    trajectory: Trajectory


class Ended(Record, frozen=True, kw_only=True):
    """A single trajectory reached its final state, and its group goes on. ``infra``: it failed of what it ran on."""

    trajectory: int
    state: str
    reason: str
    infra: bool = False


class BatchTaken(Record, frozen=True, kw_only=True):
    """Step ``step`` is trained on these groups. Those ``again`` of them may be used once more: they wait, in this
    order, behind all that do."""

    step: int
    groups: tuple[int, ...]
    again: tuple[int, ...] = ()


class Spent(Record, frozen=True, kw_only=True):
    """These groups were used, and are not used again."""

    groups: tuple[int, ...]


class Given(Record, frozen=True, kw_only=True):
    """The trainer is about to be given the batch of ``step`` (``part`` is None), or a part of it before that."""

    step: int
    part: int | None = None
    groups: tuple[int, ...]
    advantages: Sequence[Advantage]
    baseline: float | None = None
    """The running mean that the step subtracts."""


class Trained(Record, frozen=True, kw_only=True):
    """``step`` has made the weights of version ``step + 1``, with this checksum."""

    step: int
    checksum: int


class Checkpointed(Record, frozen=True, kw_only=True):
    """A checkpoint of ``version`` is complete: what was trained before it need not be trained again."""

    version: int


class Noted(Record, frozen=True, kw_only=True):
    """The newest value of what has one value only."""

    key: str
    value: float | str


Entry = (
    GroupOpened
    | GroupStarted
    | GroupReady
    | GroupEnded
    | Retried
    | TurnPiece
    | Scored
    | Ended
    | BatchTaken
    | Spent
    | Given
    | Trained
    | Checkpointed
    | Noted
)

# --- what a run goes on from ------------------------------------------------------------------------------------------


class SavedSlot(Record, frozen=True, kw_only=True):
    """One place in a group that is not consumed. ``attempt`` counts the trajectories before this one. It has ended with
    ``trajectory``, of which ``generated`` tells when its tokens are not in memory, or it has failed (not ``live``), or
    it goes on after ``turns`` with the tokens of ``partial``."""

    trajectory_id: int
    attempt: int
    live: bool
    trajectory: Trajectory | None = None
    generated: Generated | None = None
    turns: tuple[Turn, ...] = ()
    partial: Turn | None = None


class SavedGroup(Record, frozen=True, kw_only=True):
    """``v_traj`` is None where no server had generated for it. ``ready``: it is complete, and was trained on ``uses``
    times."""

    id: int
    task: Task
    v_traj: int | None
    deadline: int | None
    ready: bool
    uses: int = 0
    slots: tuple[SavedSlot, ...]


class Work(Record, frozen=True, kw_only=True):
    """Groups to be trained on: a batch, or a part of one that is fed before."""

    batch: Batch
    advantages: Sequence[Advantage]


class SavedStep(Record, frozen=True, kw_only=True):
    """A step that was trained: the parts that were fed first, then the batch. The same batch in other parts would give
    other weights, by rounding."""

    fed: Sequence[Work]
    work: Work
    checksum: int


class Saved(Record, frozen=True, kw_only=True):
    """Where a run stands. ``groups`` are the open ones, by number, then the ready ones and then the used ones in their
    order. ``final`` counts trajectories by final state and reason, ``uses`` how often any was trained on."""

    life: int = 0
    """How often the run was begun before."""
    version: int = 0
    """Of the newest weights that were made."""
    consumed: int = 0
    """Steps whose batch was taken."""
    taken: Batch | None = None
    """The batch that was taken and is not known to be trained."""
    groups: Sequence[SavedGroup] = ()
    tasks_done: int = 0
    next_group: int = 0
    next_trajectory: int = 0
    final: Mapping[tuple[str, str], int] = {}
    uses: int = 0
    filtered: int = 0
    retried: int = 0
    failed_task: int = 0
    failed_infra: int = 0
    baseline: float | None = None
    """The running mean of returns that the next step subtracts."""
    notes: Mapping[str, float | str] = {}


NOTHING = Saved()
"""A run that begins."""


def joined(pieces: Sequence[Turn]) -> Turn:
    """The pieces of a turn as one."""
    first, *rest = pieces
    output_ids, logprobs, versions = first.output_ids[:], first.logprobs[:], first.versions[:]
    for piece in rest:
        output_ids += piece.output_ids
        logprobs += piece.logprobs
        versions += piece.versions
    return msgspec.structs.replace(first, output_ids=output_ids, logprobs=logprobs, versions=versions)
