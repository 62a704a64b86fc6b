"""Accounts: what becomes of every trajectory, told to all that must know it: the ledger, the run store, the observer.

Synchronous; owned by the SampleBuffer, which decides.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from asyncrl.core import journal
from asyncrl.core.journal import Saved
from asyncrl.core.ledger import Ledger, State
from asyncrl.core.types import Group, Trajectory, Turn
from asyncrl.ports import NoStore, Observer, RunStore
from asyncrl.runtime.experience import Entry
from asyncrl.runtime.lease import EpisodeLog, Lease
from asyncrl.runtime.open_group import OpenGroup


class Accounts:
    """``saved`` is what they were when another process kept them. A group may be trained on ``reuse`` times."""

    def __init__(self, observer: Observer, store: RunStore, saved: Saved, *, reuse: int = 1) -> None:
        self.ledger = Ledger(reuse)
        self._observer = observer
        self._store = store
        self.filtered, self.retried = saved.filtered, saved.retried
        self.failed_task, self.failed_infra = saved.failed_task, saved.failed_infra
        self._tasks_done = saved.tasks_done
        self._consumed = saved.consumed
        """Steps whose batch was taken."""
        self._reuse = reuse
        slots = [(slot, group.ready) for group in saved.groups if not group.uses for slot in group.slots]
        self._known = {slot.trajectory_id: slot for slot, _ in slots if slot.live and (slot.turns or slot.partial)}
        """Live trajectories that go on from what another process had of them."""
        live = {slot.trajectory_id: State.RESERVED for slot, _ in slots if slot.live}
        done = State.OCCUPIED, State.SCORED
        live |= {slot.trajectory_id: done[not ready] for slot, ready in slots if slot.trajectory is not None}
        again = {
            s.trajectory_id: group.uses for group in saved.groups if group.uses for s in group.slots if s.trajectory
        }
        self.ledger.restore(saved.final, live, saved.next_trajectory - 1, uses=saved.uses, again=again)
        self.reused = 0
        """Groups trained that had been before, each time counted; of this process."""

    def opened(self, group: OpenGroup) -> None:
        trajectories = tuple(slot.trajectory_id for slot in group.slots)
        for number in trajectories:
            self.ledger.reserve(number)
        self._tasks_done += 1
        self._store.put(
            journal.GroupOpened(group=group.id, task=group.task, tasks_done=self._tasks_done, trajectories=trajectories)
        )

    def started(self, group: OpenGroup) -> None:
        """It has its V_traj."""
        assert group.start.v_traj is not None
        self._store.put(journal.GroupStarted(group=group.id, v_traj=group.start.v_traj, deadline=group.deadline))

    def log(self, lease: Lease) -> EpisodeLog:
        """What is known of the lease's episode, and where it keeps what it comes to. Only single ones keep any."""
        if len(lease.trajectory_ids) > 1:
            return EpisodeLog()
        [trajectory] = lease.trajectory_ids

        def keep(number: int, piece: int | None, turn: Turn) -> None:
            if not lease.revoked:
                self._store.put(journal.TurnPiece(trajectory=trajectory, number=number, piece=piece, turn=turn))

        known = self._known.pop(trajectory, None)
        return EpisodeLog(keep) if known is None else EpisodeLog(keep, known.turns, known.partial)

    def scored(self, trajectory: Trajectory) -> None:
        self.ledger.move(trajectory.id, State.SCORED)
        self._store.put(journal.Scored(trajectory=trajectory))

    def failed(self, trajectory_id: int, reason: str, *, infra: bool) -> None:
        if infra:
            self.failed_infra += 1
        else:
            self.failed_task += 1
        self.cut(trajectory_id, State.FAILED, reason, infra=infra)

    def retried_as(self, trajectory_id: int, group: OpenGroup, index: int) -> None:
        self.retried += 1
        self.ledger.reserve(trajectory_id)
        self._store.put(journal.Retried(group=group.id, index=index, trajectory=trajectory_id))

    def cut(self, trajectory_id: int, state: State, reason: str, *, infra: bool = False) -> None:
        """A single episode ends without a score; its group may go on."""
        self.ledger.move(trajectory_id, state, reason)
        self._known.pop(trajectory_id, None)
        self._store.put(journal.Ended(trajectory=trajectory_id, state=state, reason=reason, infra=infra))

    def ready(self, group: Group, was: Sequence[Trajectory]) -> None:
        """It is complete. ``was`` are its trajectories before the writer gave them the rewards that they have."""
        rewards = {t.id: t.reward for t, before in zip(group.trajectories, was, strict=True) if t is not before}
        for trajectory in group.trajectories:
            self.ledger.move(trajectory.id, State.OCCUPIED)
        self._store.put(journal.GroupReady(group=group.id, rewards=rewards))

    def ended(self, group_id: int, trajectories: Sequence[Trajectory], state: State, reason: str) -> None:
        """The group leaves untrained. ``trajectories`` are those of it that were scored."""
        self.filtered += state is State.FILTERED
        self._end(trajectories, state, reason)
        self._store.put(journal.GroupEnded(group=group_id, state=state, reason=reason))

    def consumed(self, entries: Sequence[Entry], again: Container[int]) -> None:
        """They are the next batch; those ``again`` may be trained once more."""
        for entry in entries:
            trajectories = entry.group.trajectories
            if entry.uses == 1:
                self._end(trajectories, State.CONSUMED)
            else:
                self.reused += 1
                for trajectory in trajectories:
                    self.ledger.use_again(trajectory.id)
        ids = tuple(entry.group.id for entry in entries)
        waiting = tuple(group_id for group_id in ids if group_id in again)
        self._store.put(journal.BatchTaken(step=self._consumed, groups=ids, again=waiting))
        self._consumed += 1
        self._forget(entry for entry in entries if entry.group.id not in again)

    def spent(self, entries: Sequence[Entry]) -> None:
        """These were trained, and are not any more."""
        if entries:
            self._store.put(journal.Spent(groups=tuple(entry.group.id for entry in entries)))
            self._forget(entries)

    def _forget(self, entries: Iterable[Entry]) -> None:
        if self._reuse > 1:
            for entry in entries:
                for trajectory in entry.group.trajectories:
                    self.ledger.spend(trajectory.id)

    async def fill(self, groups: Sequence[Group]) -> None:
        """Their tokens are about to be needed."""
        await self._store.fill([t for group in groups for t in group.trajectories])

    def detach(self) -> None:
        """The store keeps what there is; what comes is of these books only."""
        self._store = NoStore()

    def _end(self, trajectories: Sequence[Trajectory], state: State, reason: str = "") -> None:
        for trajectory in trajectories:
            self.ledger.move(trajectory.id, state, reason)
            self._observer.trajectory(trajectory, str(state))
