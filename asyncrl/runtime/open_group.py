"""A group between its admission and its end, and its places: what the SampleBuffer keeps of each."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.journal import SavedGroup
from asyncrl.core.types import Group, Task, Trajectory
from asyncrl.runtime.lease import Lease
from asyncrl.runtime.trajectory_server import Start


class Slot:
    """One member of an unfinished group."""

    __slots__ = ("attempt", "lease", "trajectory", "trajectory_id")

    def __init__(self, trajectory_id: int, attempt: int = 0, trajectory: Trajectory | None = None) -> None:
        self.trajectory_id = trajectory_id
        self.attempt = attempt
        self.lease: Lease | None = None
        """None once the episode failed or is not wanted any more."""
        self.trajectory = trajectory


class OpenGroup:
    """``missing`` trajectories until it is complete, of ``size``; there may be more ``slots`` than that."""

    __slots__ = ("id", "missing", "slots", "start", "task")

    def __init__(self, start: Start, task: Task, slots: Sequence[Slot], size: int) -> None:
        self.id = start.group_id
        self.task = task
        self.start = start
        self.slots = slots
        self.missing = size - sum(slot.trajectory is not None for slot in slots)

    @classmethod
    def restored(cls, saved: SavedGroup, size: int) -> OpenGroup:
        slots = [Slot(slot.trajectory_id, slot.attempt, slot.trajectory) for slot in saved.slots]
        return cls(Start(saved.v_traj, saved.id), saved.task, slots, size)

    @property
    def finished(self) -> tuple[Trajectory, ...]:
        return tuple(slot.trajectory for slot in self.slots if slot.trajectory is not None)

    def whole(self) -> Group:
        """It is complete."""
        trajectories = self.finished
        return Group(id=self.id, task=self.task, v_traj=trajectories[0].v_traj, trajectories=trajectories)
