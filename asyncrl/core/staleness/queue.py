"""Queue algorithms for servers that never wait (papers: Predicting and Controlling Staleness, "In-queue staleness").

Staleness does not limit admission: the environment slots, the paper's concurrency C, do. A finished group enters a
queue; the trainer takes the B groups that entered first as soon as B are there, and what it is too slow for is dropped.
Groups come to training in the order in which they ended, so fast ones overtake slow ones.

The paper's staleness of a group is the version at consumption less the version at the start of its generation. Ours is
the same number: ``reserve`` is called when a slot begins the group, with the version that the servers then hold, and
step n is consumed by version n. Version n being published before step n is consumed, a group that starts, ends and is
consumed between two updates has staleness 0 in both.

What is dropped has ended: an unfinished group is never cut, even where QueueMax could not take it any more. So the
paper has it: its queue-max discards from the queue, and leaves mean and maximum of the *sampled* lengths as queue-drop
has them (appendix, "Response length bias"), while cutting would end the longest samples unseen.

Memory: of the live groups all but those in the queue are held by a slot, so there are at most slots + 1 + queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.core.staleness.base import UNBOUNDED, StalenessSnapshot, StalenessViolation, check_reserve


class FirstInFirstOut:
    """What queues share: ``occupy`` enters the queue, ``consume`` takes the first ``batch`` of it. O(1) a group."""

    evicts = True
    assigns_late = False
    capacity = UNBOUNDED

    def __init__(self, *, batch: int, step: int) -> None:
        if batch < 1:
            raise ValueError(f"need batch ≥ 1; got {batch}")
        self._batch = batch
        self._step = step
        self._reserved: dict[int, int] = {}
        """Unfinished group → version."""
        self._occupied: dict[int, int] = {}
        """Finished group → version, in order of completion."""

    @property
    def missing(self) -> int:
        return self._batch - len(self._occupied) % self._batch

    def admits(self, version: int) -> bool:
        return True

    def room(self, version: int) -> int:
        return UNBOUNDED if self.admits(version) else 0

    def reserve(self, group_id: int, version: int) -> None:
        live = group_id in self._reserved or group_id in self._occupied
        check_reserve(group_id, version, step=self._step, admitted=self.admits(version), live=live)
        self._reserved[group_id] = version

    def deadline(self, version: int) -> int | None:
        return None

    def restore(self, group_id: int, version: int, deadline: int | None) -> None:
        self._reserved[group_id] = version

    def release(self, group_id: int) -> None:
        if self._occupied.pop(group_id, None) is None:
            self._leave_reserved(group_id)

    def consume(self) -> tuple[list[int], list[int]] | None:
        if len(self._occupied) < self._batch:
            return None
        batch = list(self._occupied)[: self._batch]
        for group_id in batch:
            self._check(group_id)
        for group_id in batch:
            del self._occupied[group_id]
        self._step += 1
        return batch, []

    def sample(self, ranking: Callable[[], Sequence[int]], used: int) -> tuple[list[int], list[int]] | None:
        """The front of the order, whatever it is. Without a bound no proof needs any; what is said of means and of
        positions in the queue is said of ``consume``."""
        if len(self._occupied) + used < self._batch:
            return None
        batch = list(ranking()[: self._batch])
        for group_id in batch:
            self._occupied.pop(group_id, None)
        self._step += 1
        return batch, []

    def certain(self, count: int) -> list[int]:
        """The first of the queue: it is taken as soon as it holds a batch, so until then nothing is dropped from it
        (both drop what is in it only beyond a batch), and what comes later stands behind."""
        return list(self._occupied)[:count]

    def _check(self, group_id: int) -> None:
        """Raises ``StalenessViolation`` if the next step must not train this group."""

    def _leave_reserved(self, group_id: int) -> int:
        version = self._reserved.pop(group_id, None)
        if version is None:
            raise StalenessViolation(f"group {group_id} is not reserved")
        return version

    def _snapshot(self, *, due: int, capacity: int) -> StalenessSnapshot:
        return StalenessSnapshot(
            step=self._step, reserved=len(self._reserved), occupied=len(self._occupied), due=due, capacity=capacity
        )

    def __repr__(self) -> str:
        name, reserved, occupied = type(self).__name__, len(self._reserved), len(self._occupied)
        return f"<{name} step {self._step}: {reserved} reserved, {occupied} occupied>"


class QueueDrop(FirstInFirstOut):
    """The queue holds ``capacity`` ≥ ``batch`` groups; one that arrives at a full queue drops the oldest in it.

    Staleness has no bound, only a mean: C·M/(ρB) + (2q + ρ − 1)/2ρ where rollout is ρ > 1 times as fast as training,
    C·M/B + ρ below, with q = ``capacity``/``batch``. Which groups are dropped depends on those that end after them, so
    (in a steady state) not on their own lengths.

    Training always goes on: a group is dropped only where ``capacity`` ≥ ``batch`` others stay, so a drop never takes a
    batch away, and below that every group that ends is one more.
    """

    def __init__(self, *, batch: int, capacity: int, step: int = 0) -> None:
        super().__init__(batch=batch, step=step)
        if capacity < batch:
            raise ValueError(f"need capacity ≥ batch, or no batch would ever be there; got {capacity} < {batch}")
        self._capacity = capacity

    @property
    def limit(self) -> int | None:
        return None

    def occupy(self, group_id: int) -> dict[int, str]:
        self._occupied[group_id] = self._leave_reserved(group_id)
        if len(self._occupied) <= self._capacity:
            return {}
        oldest = next(iter(self._occupied))
        del self._occupied[oldest]
        return {oldest: "queue full"}

    def snapshot(self) -> StalenessSnapshot:
        return self._snapshot(due=0, capacity=self._capacity)


class QueueMax(FirstInFirstOut):
    """Nothing is trained with a staleness above ``bound`` ≥ 0: what is staler, or would be at its turn, is dropped.

    The paper drops a group when it has become too stale. But in a queue that is served in order the turn of a group is
    known when it enters: behind p others it is consumed by step n + ⌊p/B⌋, n being the next. So the group is judged
    once, when it ends: it stays iff  n + ⌊p/B⌋ ≤ v + bound.

    **Theorem (bound per sample).** Nothing is consumed with staleness n − v > ``bound``.
    Proof. We show that n + ⌊p/B⌋ ≤ v + bound holds for each group of the queue at all times. It does on entry. Those
    that enter later stand behind, and a release only lowers p. A consumption raises n by 1 and lowers p by B, which
    leaves the sum as it is. The groups consumed have p < B, hence n ≤ v + bound. ∎

    **Theorem (nothing is lost).** The same steps train the same groups as if each stayed until it is too stale.
    Proof. Take a group g that ends behind p groups of our queue, and assume that those are exactly the ones before it
    that the other queue, Q, will train. While one of them is left, each step takes B of them, or the rest and g. So Q
    comes to g at step n + ⌊p/B⌋ and no other, and trains it iff n + ⌊p/B⌋ ≤ v + bound. The first B of Q that are not
    too stale are thus the first B of ours, and there are B here iff there are B there. ∎

    Memory: v ≤ n, so p < (bound + 1)·B; the queue needs no other limit.

    Training always goes on, also with ``bound`` = 0: while the trainer waits p < B and n stands still, so every group
    that starts on version n stays in the queue, and the B-th to end makes the batch. What is lost is time: groups that
    ran over more than ``bound`` updates were generated for nothing, and the longer ones are the likelier to do so (the
    paper's length bias).
    """

    def __init__(self, *, batch: int, bound: int, step: int = 0) -> None:
        super().__init__(batch=batch, step=step)
        if bound < 0:
            raise ValueError(f"need bound ≥ 0; got {bound}")
        self._bound = bound

    @property
    def limit(self) -> int | None:
        return self._bound

    def admits(self, version: int) -> bool:
        """False where no step could train what starts now (the servers lag behind by more than ``bound``)."""
        return version + self._bound >= self._step

    def occupy(self, group_id: int) -> dict[int, str]:
        version = self._leave_reserved(group_id)
        if self._step + len(self._occupied) // self._batch > version + self._bound:
            return {group_id: "too stale"}
        self._occupied[group_id] = version
        return {}

    def snapshot(self) -> StalenessSnapshot:
        due = sum(1 for version in self._reserved.values() if version + self._bound <= self._step)
        return self._snapshot(due=due, capacity=(self._bound + 1) * self._batch)

    def _check(self, group_id: int) -> None:
        if (late := self._step - self._occupied[group_id] - self._bound) > 0:
            raise StalenessViolation(f"group {group_id} would be trained at step {self._step}, {late} beyond its bound")
