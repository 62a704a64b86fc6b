"""A group between its admission and its end, and its places: what the SampleBuffer keeps of each."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.experience import Generated
from asyncrl.core.journal import SavedGroup
from asyncrl.core.types import Group, Task, Trajectory
from asyncrl.runtime.lease import Lease
from asyncrl.runtime.trajectory_server import Start


class Slot:
    """One member of an unfinished group."""

    __slots__ = ("attempt", "generated", "lease", "trajectory", "trajectory_id")

    def __init__(
        self,
        trajectory_id: int,
        attempt: int = 0,
        trajectory: Trajectory | None = None,
        generated: Generated | None = None,
    ) -> None:
        self.trajectory_id = trajectory_id
        self.attempt = attempt
        self.lease: Lease | None = None
        """None once the episode failed or is not wanted any more."""
        self.trajectory = trajectory
        self.generated = generated
        """Of the trajectory, where anybody looks at it: its tokens may be on the disk by now."""


class OpenGroup:
    """``missing`` trajectories until it is complete, of ``size``; there may be more ``slots`` than that. ``deadline``
    is the last step that may train it."""

    __slots__ = ("deadline", "id", "missing", "slots", "start", "task")

    def __init__(self, start: Start, task: Task, slots: Sequence[Slot], size: int) -> None:
        self.id = start.group_id
        self.task = task
        self.start = start
        self.slots = slots
        self.deadline: int | None = None
        self.missing = size - sum(slot.trajectory is not None for slot in slots)

    @classmethod
    def restored(cls, saved: SavedGroup, size: int) -> OpenGroup:
        slots = [Slot(slot.trajectory_id, slot.attempt, slot.trajectory, slot.generated) for slot in saved.slots]
        group = cls(Start(saved.v_traj, saved.id), saved.task, slots, size)
        group.deadline = saved.deadline
        return group

    @property
    def finished(self) -> tuple[Trajectory, ...]:
        return tuple(slot.trajectory for slot in self.slots if slot.trajectory is not None)

    @property
    def generated(self) -> tuple[Generated, ...]:
        return tuple(slot.generated for slot in self.slots if slot.generated is not None)

    def whole(self) -> Group:
        """It is complete."""
        trajectories = self.finished
        return Group(id=self.id, task=self.task, v_traj=trajectories[0].v_traj, trajectories=trajectories)
