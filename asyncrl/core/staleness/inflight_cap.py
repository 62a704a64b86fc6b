"""ROLL Flash's asynchronous ratio α (papers: ROLL Flash §4.3) as a cap on groups in flight, with a bound per sample.

Let B be groups a batch, n the step to be trained next (the version of the weights before it), v ≤ n the version on the
servers when a group starts (its V_traj), R the redundant groups allowed. Two rules:

* Admission. A group may start on version v iff  C + L < ⌊(v + 1 + α)·B⌋ + R  and  v + ⌈α⌉ ≥ n,  where C = n·B groups
  were consumed and L are live (started, neither consumed nor released). With v = n and R = 0: L < (1+α)·B, the paper's
  bound on the buffer. The second condition follows from the first where R = 0; redundant places must not let a group
  in whose deadline has passed. A released group gives its place back, so exactly what was filtered is refilled.
* Consumption. A group has the deadline d = v + ⌈α⌉. Step n takes B occupied groups, earliest deadline first, then
  in order of completion; it waits while more than R *unfinished* groups have a deadline ≤ n.

**Theorem (bound per sample).** Nothing is consumed with staleness n − v > ⌈α⌉.
Proof. Call a group due at n if its deadline is ≤ n, that is v ≤ n − ⌈α⌉. Consider the last due group to be admitted, on
version v ≤ n − ⌈α⌉. Rule 1 held just before, so consumed and live groups then were, itself included, at most
⌊(v+1+α)B⌋ + R ≤ (n+1)B + R. Releases only lower this, and every group admitted later is not due. n·B of the groups
counted are consumed before step n, so at most B + R due groups are live at step n. Step n takes due groups first, so
if U ≤ R of them are unfinished it takes min(B, due − U) of those finished; whatever is due and not taken is at most R
in number and leaves as surplus. Hence no group survives its deadline, and every consumed one has n ≤ d. ∎

**Theorem (mean).** With R = 0 the mean staleness over a run is at most α, also where α is not an integer.
Proof. At most ⌊(v+1+α)B⌋ groups start on versions ≤ v and are not released, and (v+1)B groups are consumed in steps
≤ v. So at most α·B groups cross from "started on ≤ v" to "consumed after v". A group of staleness s crosses s such
borders, so the staleness summed over all groups is at most α·B a step. ∎

α = 0: nothing starts beyond the current batch until the servers hold the new version. That is synchronous training.
"""

from __future__ import annotations

import heapq
import math

from asyncrl.core.staleness.base import StalenessSnapshot, StalenessViolation


class InflightCap:
    """``batch`` groups a step, ratio ``alpha`` ≥ 0 (real), ``redundant`` groups beyond the need. O(log live) a call."""

    def __init__(self, *, batch: int, alpha: float, redundant: int = 0, step: int = 0) -> None:
        if batch < 1 or alpha < 0 or redundant < 0:
            raise ValueError(f"need batch ≥ 1, alpha ≥ 0, redundant ≥ 0; got {batch}, {alpha}, {redundant}")
        self._batch = batch
        self._alpha = alpha
        self._slack = math.ceil(alpha)
        self._redundant = redundant
        self._step = step
        self._clock = 0
        self._reserved: dict[int, int] = {}
        """Unfinished group → deadline."""
        self._pending_by_deadline: dict[int, int] = {}
        """Deadline → number of unfinished groups."""
        self._occupied: dict[int, int] = {}
        """Finished group → deadline."""
        self._heap: list[tuple[int, int, int]] = []
        """(deadline, completion order, group) of finished groups; released ones are skipped lazily."""

    @property
    def bound(self) -> int:
        """Largest staleness that a consumed group can have: ⌈α⌉."""
        return self._slack

    @property
    def live(self) -> int:
        return len(self._reserved) + len(self._occupied)

    def admits(self, version: int) -> bool:
        limit = math.floor((version + 1 + self._alpha) * self._batch) + self._redundant
        return self._step * self._batch + self.live < limit and version + self._slack >= self._step

    def reserve(self, group_id: int, version: int) -> None:
        if version > self._step:
            raise StalenessViolation(f"group {group_id} starts on version {version}, but only {self._step} is trained")
        if not self.admits(version):
            raise StalenessViolation(f"group {group_id} on version {version} was not admitted at step {self._step}")
        if group_id in self._reserved or group_id in self._occupied:
            raise StalenessViolation(f"group {group_id} is reserved already")
        deadline = version + self._slack
        self._reserved[group_id] = deadline
        self._pending_by_deadline[deadline] = self._pending_by_deadline.get(deadline, 0) + 1

    def occupy(self, group_id: int) -> None:
        deadline = self._leave_reserved(group_id)
        self._occupied[group_id] = deadline
        heapq.heappush(self._heap, (deadline, self._clock, group_id))
        self._clock += 1

    def release(self, group_id: int) -> None:
        if self._occupied.pop(group_id, None) is None:
            self._leave_reserved(group_id)

    def consume(self) -> tuple[list[int], list[int]] | None:
        if len(self._occupied) < self._batch or self._unfinished_due() > self._redundant:
            return None
        batch: list[int] = []
        while len(batch) < self._batch:
            deadline, _, group_id = heapq.heappop(self._heap)
            if self._occupied.pop(group_id, None) is None:
                continue
            if deadline < self._step:
                raise StalenessViolation(
                    f"group {group_id} would be trained at step {self._step}, {self._step - deadline} beyond its bound"
                )
            batch.append(group_id)
        surplus = [g for table in (self._reserved, self._occupied) for g, d in table.items() if d <= self._step]
        if len(surplus) > self._redundant:
            raise StalenessViolation(f"{len(surplus)} groups miss step {self._step}, only {self._redundant} may")
        for group_id in surplus:
            self.release(group_id)
        self._step += 1
        return batch, surplus

    def snapshot(self) -> StalenessSnapshot:
        return StalenessSnapshot(
            step=self._step,
            reserved=len(self._reserved),
            occupied=len(self._occupied),
            due=self._unfinished_due(),
            capacity=math.floor((1 + self._alpha) * self._batch) + self._redundant,
        )

    def _unfinished_due(self) -> int:
        return sum(n for d, n in self._pending_by_deadline.items() if d <= self._step)

    def _leave_reserved(self, group_id: int) -> int:
        deadline = self._reserved.pop(group_id, None)
        if deadline is None:
            raise StalenessViolation(f"group {group_id} is not reserved")
        self._pending_by_deadline[deadline] -= 1
        if not self._pending_by_deadline[deadline]:
            del self._pending_by_deadline[deadline]
        return deadline

    def __repr__(self) -> str:
        s = self.snapshot()
        return f"<InflightCap step {s.step}: {s.reserved} reserved, {s.occupied} occupied, {s.due} due>"
