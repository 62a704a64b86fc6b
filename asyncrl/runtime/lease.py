"""Lease: what the SampleBuffer gives to an EnvManager; and EpisodeLog, what is known of the episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.core.types import Task, Turn
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.trajectory_server import Start


class Lease:
    """The right to run one episode (or, with prompt replication off, a whole group's episodes at once).

    ``revoked`` names the reason once the runtime does not want it any more; the holder is then interrupted through
    ``on_revoke`` and must not report anything: its trajectories are in their final state already.
    """

    __slots__ = ("due", "indices", "on_revoke", "revoked", "stage", "start", "task", "trajectory_ids")

    def __init__(self, start: Start, task: Task, trajectory_ids: Sequence[int], indices: Sequence[int]):
        self.start = start
        self.task = task
        self.trajectory_ids = tuple(trajectory_ids)
        self.indices = tuple(indices)
        self.revoked = ""
        self.on_revoke: Callable[[], None] | None = None
        self.due = 0.0
        """Loop time before which nobody begins it: it failed and is begun anew."""
        self.stage: Stage | None = None
        """How far the holder is; None until there is one."""

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


class EpisodeLog:
    """The turns of one episode: those that it goes on from, and where it keeps what it comes to, so that it can go on
    from there when this process has died. ``keep`` is called as ``journal.TurnPiece`` says: number, piece, turn."""

    __slots__ = ("keep", "partial", "turns")

    def __init__(
        self,
        keep: Callable[[int, int | None, Turn], None] = lambda number, piece, turn: None,
        turns: Sequence[Turn] = (),
        partial: Turn | None = None,
    ) -> None:
        self.keep = keep
        self.turns = turns
        """Finished ones."""
        self.partial = partial
        """What the generation after them had brought."""

    def turn(self, number: int) -> Turn | None:
        """What is known of this turn: all of it, or where it goes on."""
        return self.turns[number] if number < len(self.turns) else self.partial if number == len(self.turns) else None
