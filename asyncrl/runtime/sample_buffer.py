"""SampleBuffer: from admitted tasks to training batches (ROLL Flash §4.2), and the books of every trajectory.

Owns the ledger, the staleness control, the task cursor and the unfinished groups. Every state change is one synchronous
method, so atomic on the loop; only ``lease``, ``get_part`` and ``get_batch`` wait.

    lease()       waits for: admission of an episode       woken by: _admit() after consume, release, a new version
    get_batch()   waits for: a batch that is certain       woken by: the last occupy, or a release of a due group
    get_part()    waits for: groups certain of the batch   woken by: the same, and each occupy that makes one certain
    put()         never waits: the place was reserved

A group is admitted only when an EnvManager is free to begin it, so its V_traj is the version of that moment. A trainer
that waits gets its batch within the very call that completes it, so nothing that ends in the same tick can drop of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence

from asyncrl.core.experience import generated
from asyncrl.core.journal import NOTHING, Saved
from asyncrl.core.ledger import Ledger, State
from asyncrl.core.staleness.base import SampledControl, StalenessControl, StalenessSnapshot, StalenessViolation
from asyncrl.core.types import Batch, Group, Record, Trajectory
from asyncrl.ports import NoStore, Observer, RunStore
from asyncrl.runtime.accounts import Accounts
from asyncrl.runtime.experience import Entry, Experience
from asyncrl.runtime.lease import EpisodeLog, Lease
from asyncrl.runtime.leases import Leases
from asyncrl.runtime.open_group import OpenGroup, Slot
from asyncrl.runtime.task_source import TaskMixture, TaskSource
from asyncrl.runtime.trajectory_server import Start


class BufferSnapshot(Record, frozen=True, kw_only=True):
    """Counts of groups, and of episodes admitted that no EnvManager has taken yet."""

    staleness: StalenessSnapshot
    initial: int
    """Groups that no server has generated for yet: their place is held only once they have a V_traj."""
    version: int
    unclaimed: int
    filtered: int
    reused: int
    """Groups trained that had been before, each time counted."""
    retried: int
    failed_task: int
    failed_infra: int


class SampleBuffer:
    """``replicate`` is prompt replication (ROLL Flash §5.1.2): one lease an episode, else one lease a group.

    ``queue_scheduling`` off is batch rollout, with which ROLL Flash §5.1.1 (figure 6, left) compares itself: prompts
    go out in waves of as many groups as the next batch still misses, and the next wave only when every group of this
    one has ended; until then none of it counts as finished or filtered.

    ``group_size_redundancy`` members beside the ``group_size`` are begun in every group (ROLL Flash §5.2.2): the first
    ``group_size`` that end make it complete, and the rest is interrupted. It needs prompt replication.

    A failed episode is begun anew at most ``retries`` times: with a new trajectory, from the first token on. The k-th
    retry waits ``backoff_s`` · 2^(k-1), give or take half of it by ``rng``, so that what failed together does not come
    back together; the slot that played it goes on with other work meanwhile.

    ``total_groups`` is what the whole run consumes. Nothing is begun that no step could train, beside the
    ``redundant_groups`` that the control runs; but where groups may be evicted none is sure of its step, so there the
    slots stay busy until the last batch is taken.
    """

    def __init__(
        self,
        *,
        control: StalenessControl,
        tasks: TaskSource | TaskMixture,
        group_size: int,
        group_size_redundancy: int = 0,
        redundant_groups: int = 0,
        observer: Observer,
        version: int = 0,
        replicate: bool = True,
        queue_scheduling: bool = True,
        filter_zero_variance: bool = False,
        retries: int = 0,
        backoff_s: float = 0.0,
        rng: random.Random | None = None,
        total_groups: int | None = None,
        store: RunStore | None = None,
        saved: Saved = NOTHING,
        experience: Experience | None = None,
    ) -> None:
        self._experience = experience or Experience()
        self._accounts = Accounts(observer, store or NoStore(), saved, reuse=self._experience.reuse)
        self._control = control
        self._sampled = control if isinstance(control, SampledControl) else None
        if self._experience.sampler is not None and self._sampled is None:
            raise ValueError(f"{control!r} trains groups in an order of its own, and takes no sampler")
        self._tasks = tasks
        self._group_size = group_size
        self._redundancy = group_size_redundancy
        self._redundant_groups = redundant_groups
        self._version = version
        self._replicate = replicate
        self._filter = filter_zero_variance
        self._retries = retries
        self._backoff_s = backoff_s
        self._rng = rng or random.Random(0)
        self._unconsumed = math.inf if total_groups is None else total_groups
        self._next_group = saved.next_group
        self._next_trajectory = saved.next_trajectory
        self._batch_rollout = not queue_scheduling
        self._wave = 0 if self._batch_rollout else math.inf
        """Groups that this wave has still to begin; queue scheduling is one wave without end."""
        self._open: dict[int, OpenGroup] = {}
        self._ended: dict[int, OpenGroup] = {}
        """Those of ``_open`` that are complete and wait for the end of their wave."""
        self._leases = Leases(begin=self._begin, admit=self._admit)
        self._batch_waiter: asyncio.Future[None] | None = None
        self._wanted = False
        """The train loop waits for its batch, or trains parts of it: it is taken the moment it is complete."""
        self._head = 0
        """The train loop waits for a part of so many first groups of its batch; 0: only for the batch."""
        self._given: set[int] = set()
        """Groups of the next batch that the train loop has already."""
        self._taken: tuple[Group, ...] = () if saved.taken is None else saved.taken.groups
        """The batch that the train loop has been given and not picked up yet."""
        self._closed = ""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the control may admit what it did not before."""
        self.on_batch: Callable[[Sequence[Group]], None] = lambda groups: None
        """Called with each batch when it is complete."""
        self.on_rest: Callable[[int, int], None] = lambda group_id, playing: None  # a member of the group has ended
        self._restore(saved)

    @property
    def ledger(self) -> Ledger:
        return self._accounts.ledger

    def _restore(self, saved: Saved) -> None:
        """Groups as another process left them: members that have ended stay, the others are played again."""
        for was in saved.groups:
            if was.v_traj is not None and not was.uses:
                self._control.restore(was.id, was.v_traj, was.deadline)
        for was in saved.groups:
            group = OpenGroup.restored(was, self._group_size)
            if was.ready:
                self._experience.add(Entry.of(group, group.whole(), was.uses))
                if not was.uses:
                    for evicted, reason in self._control.occupy(group.id).items():
                        self._drop(evicted, reason)
                continue
            self._open[group.id] = group
            if not group.missing:
                self._ended[group.id] = group
                continue
            indices = [i for i, slot in enumerate(was.slots) if slot.live]
            for part in [[i] for i in indices] if self._replicate else [indices]:
                self._offer(group, part)
        self._accounts.spent(self._experience.expire(self._step))
        self._settle()

    @property
    def _step(self) -> int:
        """The next."""
        return self._control.snapshot().step

    # --- admission

    async def lease(self) -> Lease:
        """The next episode to run; waits until one is admitted."""
        return await self._leases.lease()

    def set_version(self, version: int) -> None:
        """Every server now holds ``version``: groups admitted from here on start from it."""
        if version < self._version:
            raise StalenessViolation(f"version would go back from {self._version} to {version}")
        self._version = version
        self._admit()

    def _admit(self) -> None:
        """Hand episodes to waiting lessees, and admit groups for them while the staleness control allows."""
        self.on_change()
        self._leases.hand_out()

    def keep_idle(self, slots: int) -> None:
        """Of the EnvManagers that wait for a lease, this many get none from now on. What runs goes on to its end."""
        self._leases.keep_idle(slots)

    def _may_open(self) -> bool:
        """May a group begin now? With batch rollout, this is where the next wave starts."""
        if self._closed or not self._has_place():
            return False
        room = self._unconsumed
        if room and not self._control.evicts:
            room += self._redundant_groups - len(self._open) - len(self._experience.fresh)
        if room > 0 and not self._wave and not self._open:
            self._wave = min(self._control.missing, room)
        return room > 0 and self._wave > 0

    def _has_place(self) -> bool:
        if self._control.assigns_late:
            return len(self._open) + len(self._experience.fresh) < self._control.capacity
        return self._control.admits(self._version)

    def _begin(self) -> bool:
        """Admit a group and offer its episodes, if one may begin."""
        if not self._may_open():
            return False
        slots = [Slot(self._next_trajectory + i) for i in range(self._group_size + self._redundancy)]
        group = OpenGroup(Start(group_id=self._next_group), self._tasks.next(), slots, self._group_size)
        self._accounts.opened(group)
        if not self._control.assigns_late:
            self._reserve(group, self._version)
        self._wave -= 1
        self._next_group += 1
        self._next_trajectory += len(group.slots)
        self._open[group.id] = group
        if self._replicate:
            for index in range(len(group.slots)):
                self._offer(group, [index])
        else:
            self._offer(group, range(len(group.slots)))
        return True

    def _reserve(self, group: OpenGroup, version: int) -> None:
        group.deadline = self._control.deadline(version)
        self._control.reserve(group.id, version)
        group.start.v_traj = version
        self._accounts.started(group)

    def room(self, version: int) -> int:
        """How many groups more may be given this V_traj now."""
        return self._control.room(version)

    def plays(self, group_id: int) -> bool:
        """Whether the group still misses trajectories. Of one that does not, requests may wait a moment longer."""
        return group_id in self._open and self._open[group_id].missing > 0

    def assign(self, group_id: int, version: int) -> bool:
        """A server that holds ``version`` is about to take the first request of a group: it is the group's V_traj, if
        the control admits that. False if it does not, or the group has left."""
        group = self._open.get(group_id)
        if group is None or not self._control.admits(version):
            return False
        self._reserve(group, version)
        return True

    def _release(self, group: OpenGroup) -> None:
        """A group that leaves before it had a V_traj was never reserved."""
        if group.start.v_traj is not None:
            self._control.release(group.id)

    def _offer(self, group: OpenGroup, indices: Sequence[int], *, after_s: float = 0.0) -> None:
        slots = [group.slots[i] for i in indices]
        lease = Lease(group.start, group.task, [s.trajectory_id for s in slots], indices)
        for slot in slots:
            slot.lease = lease
        self._leases.offer(lease, after_s=after_s)

    # --- the life of an episode

    def mark(self, lease: Lease, state: State) -> None:
        """The episode is now ``running`` on a server or ``waiting`` for one or for its environment."""
        if not lease.revoked:
            for trajectory_id in lease.trajectory_ids:
                if self.ledger.state(trajectory_id) not in (state, State.SCORED):
                    self.ledger.move(trajectory_id, state)

    def log(self, lease: Lease) -> EpisodeLog:
        """What is known of the lease's episode, and where it keeps what it comes to."""
        return self._accounts.log(lease)

    def put(self, lease: Lease, trajectory: Trajectory) -> None:
        """A scored trajectory. The last that its group misses makes the group ready, or filters or evicts it."""
        group = self._open[lease.group_id]
        slot = group.slots[trajectory.index]
        if slot.trajectory_id != trajectory.id or slot.trajectory is not None:
            raise StalenessViolation(f"trajectory {trajectory.id} was put twice or does not belong to {lease}")
        self._accounts.scored(trajectory)
        slot.trajectory = trajectory
        if self._experience.looks:
            slot.generated = generated(trajectory)
        self._rest(group)
        group.missing -= 1
        if not group.missing:
            self._interrupt(group, State.SURPLUS, "group complete")
            self._ended[group.id] = group
            self._settle()
            self._wake_batch()
            self._admit()

    def _settle(self) -> None:
        """Complete groups count from now on; with batch rollout, once all of their wave are complete."""
        if self._batch_rollout and (self._wave or len(self._ended) < len(self._open)):
            return
        ended, self._ended = self._ended, {}
        for group in ended.values():
            self._complete(group)

    def _complete(self, open_group: OpenGroup) -> None:
        whole = open_group.whole()
        group = self._experience.write(whole, open_group.generated, self._step)
        del self._open[whole.id]
        if group is None or (self._filter and len(set(group.rewards)) == 1):
            why = "buffer.writer" if group is None else "zero variance"
            self._control.release(whole.id)
            self._accounts.ended(whole.id, whole.trajectories, State.FILTERED, why)
            return
        self._accounts.ready(group, whole.trajectories)
        self._experience.add(Entry.of(open_group, group))
        for evicted, reason in self._control.occupy(group.id).items():
            self._drop(evicted, reason)
        while (least := self._experience.too_many(self._step)) is not None:
            if least in self._experience.used:
                self._accounts.spent([self._experience.used.pop(least)])
            else:
                self._control.release(least)
                self._drop(least, "buffer full")

    def fail(self, lease: Lease, reason: str, *, infra: bool = False) -> None:
        """The episode failed, of itself or of what it ran on (``infra``). Its group goes on without it while enough
        members are left. If not, as many start anew, those first that did so least often; a group that has used up its
        retries is given up, and another task takes its place."""
        group = self._open[lease.group_id]
        for slot in (group.slots[i] for i in lease.indices):
            if slot.trajectory is None:
                self._accounts.failed(slot.trajectory_id, reason, infra=infra)
                slot.lease = None
        self._rest(group)
        lost = sorted((s.attempt, i) for i, s in enumerate(group.slots) if s.lease is None and s.trajectory is None)
        again = lost[: max(0, len(lost) - self._redundancy)]
        if all(attempt < self._retries for attempt, _ in again):
            for _, i in again:
                slot = group.slots[i]
                slot.attempt += 1
                slot.trajectory_id = self._next_trajectory
                self._next_trajectory += 1
                self._accounts.retried_as(slot.trajectory_id, group, i)
            if again:
                attempt = max(group.slots[i].attempt for _, i in again)
                backoff = self._backoff_s * 2 ** (attempt - 1) * self._rng.uniform(0.5, 1.5)
                self._offer(group, [i for _, i in again], after_s=backoff)
        else:
            self._give_up(group, State.ABORTED, "group failed")
            self._release(group)
            self._settle()
            self._wake_batch()
        self._admit()

    def _drop(self, group_id: int, reason: str) -> None:
        """The control has let go of this group, finished or not."""
        if group_id in self._open:
            self._give_up(self._open[group_id], State.SURPLUS, reason)
        elif group_id in self._given:
            raise StalenessViolation(f"group {group_id} is being trained, but would leave its batch: {reason}")
        else:
            group = self._experience.fresh.pop(group_id).group
            self._accounts.ended(group_id, group.trajectories, State.SURPLUS, reason)

    def _give_up(self, group: OpenGroup, state: State, reason: str) -> None:
        """Every member that is not final ends as ``state``; running episodes are interrupted."""
        del self._open[group.id]
        self._ended.pop(group.id, None)
        self._accounts.ended(group.id, group.finished, state, reason)
        self._interrupt(group, state, reason)

    def _interrupt(self, group: OpenGroup, state: State, reason: str) -> None:
        """Every member that has not ended its episode ends as ``state``."""
        leases: dict[int, Lease] = {}
        for slot in group.slots:
            if slot.lease is not None and slot.trajectory is None:
                self._accounts.cut(slot.trajectory_id, state, reason)
                leases[id(slot.lease)] = slot.lease
                slot.lease = None
        self._rest(group)
        for lease in leases.values():
            lease.revoked = reason
            if lease.on_revoke is not None:
                lease.on_revoke()

    def _rest(self, group: OpenGroup) -> None:
        played = (s.lease is not None and s.lease.stage is not None and s.trajectory is None for s in group.slots)
        self.on_rest(group.id, sum(played))

    # --- batches

    async def get_batch(self, step: int) -> Batch:
        """The groups that train step ``step`` consumes; waits until they are certain. Asserts the staleness bound."""
        self._wanted = True
        try:
            if not self._taken and not self._take():
                await self._batch_event(head=0)
        finally:
            self._wanted = False
        await self._accounts.fill(self._taken)
        groups, self._taken = self._taken, ()
        return Batch(step=step, groups=groups)

    async def get_part(self, head: int) -> tuple[Group, ...]:
        """Groups that are certain to be among the first ``head`` of the next batch, each given once; waits until there
        are any. Empty when the batch is complete: ``get_batch`` has it. Until then they are the buffer's: they stay
        occupied, and what ends the run aborts them."""
        self._wanted = True
        while not self._taken and not self._take():
            if part := self._new_part(head):
                self._given.update(part)
                groups = tuple(self._experience.fresh[i].group for i in part)
                await self._accounts.fill(groups)
                return groups
            await self._batch_event(head)
        return ()

    def _new_part(self, head: int) -> list[int]:
        return [i for i in self._control.certain(head) if i not in self._given] if head else []

    def _batch_event(self, head: int) -> asyncio.Future[None]:
        """Done when the batch has been taken, or there is a part of its first ``head`` groups."""
        self._head = head
        self._batch_waiter = asyncio.get_running_loop().create_future()
        return self._batch_waiter

    def _take(self) -> bool:
        """Consume the next batch into ``_taken`` if it is certain; what can no longer be trained is surplus."""
        step, experience = self._step, self._experience
        if self._sampled is None or experience.sampler is None:
            consumed = self._control.consume()
        else:
            consumed = self._sampled.sample(experience.ranking(step), len(experience.used))
        if consumed is None:
            return False
        ids, surplus = consumed
        if lost := self._given.difference(ids):
            raise StalenessViolation(f"groups {sorted(lost)} are being trained, but are not in their batch")
        self._given.clear()
        entries = experience.take(ids, step)
        self._taken = tuple(entry.group for entry in entries)
        self._unconsumed -= len(ids)
        self._accounts.consumed(entries, experience.used)
        self._accounts.spent(experience.expire(step + 1))
        self.on_batch(self._taken)
        for group_id in surplus:
            self._drop(group_id, "batch complete")
        self._settle()
        self._admit()
        return True

    def _wake_batch(self) -> None:
        """Take the batch for the train loop if that wants it, and wake it for the batch or for a part of it."""
        if not self._wanted or self._taken:
            return
        taken, waiter = self._take(), self._batch_waiter
        if waiter is not None and not waiter.done() and (taken or self._new_part(self._head)):
            waiter.set_result(None)

    # --- the end

    def close(self, reason: str, *, resumable: bool = False) -> None:
        """Nothing more is admitted; every live trajectory becomes ``aborted(reason)``. ``resumable``: the run store
        does not hear of that, so that another process can go on with them."""
        if resumable:
            self._accounts.detach()
        self._closed = reason
        self._wanted = False
        self._given.clear()
        for group in list(self._open.values()):
            self._give_up(group, State.ABORTED, reason)
            self._release(group)
        for group_id, entry in self._experience.fresh.items():
            self._accounts.ended(group_id, entry.group.trajectories, State.ABORTED, reason)
            self._control.release(group_id)
        self._accounts.spent([*self._experience.used.values()])
        self._experience.clear()
        self._leases.clear()

    def unfinished(self) -> Iterator[tuple[Start, int, Lease | None]]:
        """Of each episode that an open group misses: its group's start, its trajectory, and its lease; None if it has
        failed for good."""
        for group in self._open.values():
            for slot in group.slots:
                if slot.trajectory is None:
                    yield group.start, slot.trajectory_id, slot.lease

    def snapshot(self) -> BufferSnapshot:
        return BufferSnapshot(
            staleness=self._control.snapshot(),
            initial=sum(1 for group in self._open.values() if group.start.v_traj is None),
            version=self._version,
            unclaimed=self._leases.unclaimed,
            filtered=self._accounts.filtered,
            reused=self._accounts.reused,
            retried=self._accounts.retried,
            failed_task=self._accounts.failed_task,
            failed_infra=self._accounts.failed_infra,
        )

    def __repr__(self) -> str:
        s = self.snapshot()
        return f"<SampleBuffer v{s.version}: {s.staleness.reserved} groups reserved, {s.staleness.occupied} occupied>"
