"""Lease: what the SampleBuffer gives to an EnvManager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.core.types import Task
from asyncrl.runtime.trajectory_server import Start


class Lease:
    """The right to run one episode (or, with prompt replication off, a whole group's episodes at once).

    ``revoked`` names the reason once the runtime does not want it any more; the holder is then interrupted through
    ``on_revoke`` and must not report anything: its trajectories are in their final state already.
    """

    __slots__ = ("indices", "on_revoke", "revoked", "start", "task", "trajectory_ids")

    def __init__(self, start: Start, task: Task, trajectory_ids: Sequence[int], indices: Sequence[int]):
        self.start = start
        self.task = task
        self.trajectory_ids = tuple(trajectory_ids)
        self.indices = tuple(indices)
        self.revoked = ""
        self.on_revoke: Callable[[], None] | None = None

    @property
    def group_id(self) -> int:
        return self.start.group_id

    @property
    def v_traj(self) -> int:
        """Of an episode that a server has generated for."""
        assert self.start.v_traj is not None, f"{self} was not routed"
        return self.start.v_traj

    def __repr__(self) -> str:
        return f"<Lease group {self.group_id} trajectories {list(self.trajectory_ids)}>"
