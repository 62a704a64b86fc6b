"""ROLL Flash's asynchronous ratio α (papers: ROLL Flash §4.3) as a cap on groups in flight, with a bound per sample.

Let B be groups a batch, n the step to be trained next (the version of the weights before it), v ≤ n the version on the
servers when a group starts (its V_traj), R the redundant groups allowed. While a step is trained v is n − 1; while new
weights are on their way beside it, n − 2. No proof below needs more than v ≤ n. Two rules:

* Admission. A group may start on version v iff  C + L < ⌊(v + 1 + α)·B⌋ + R  and  v + ⌈α⌉ ≥ n,  where C = n·B groups
  were consumed and L are live (started, neither consumed nor released). With v = n and R = 0: L < (1+α)·B, the paper's
  bound on the buffer. The second condition follows from the first where R = 0; redundant places must not let a group
  in whose deadline has passed. A released group gives its place back, so exactly what was filtered is refilled.
* Consumption. A group has the deadline d = v + ⌈α⌉. Step n takes B finished groups, earliest deadline first, then in
  order of completion; what is due at n (d ≤ n) and not taken leaves as surplus. The step waits while for some k ≥ 0
  more than k·B + R *unfinished* groups have a deadline ≤ n + k: the k steps after it could not take them all. (Looking
  at k = 0 alone is not enough: while α > 1, fast young groups could use up the places of slow old ones.)

**Theorem (bound per sample).** Nothing is consumed with staleness n − v > ⌈α⌉, and at most R groups a step are surplus.
Proof. Let D(n, k) be the live groups with deadline ≤ n + k. We show D(n, k) ≤ (k+1)·B + R for all k ≥ 0, always.
Admission on v at step n: the deadline is n + j with j = v + ⌈α⌉ − n ≥ 0, and all live groups together are at most
⌊(v+1+α)B⌋ + R − nB ≤ (j+1)B + R; this bounds D(n, k) for k ≥ j, and other k do not change. A release only lowers D.
Consumption at n: of the F finished groups with deadline ≤ n + k, min(B, F) are taken. If B are, at most kB + R of
D(n, k) stay; if all F are, the unfinished stay, at most kB + R by rule 2. For k = 0 these, at most R, are the surplus,
so no group lives past its deadline; for k ≥ 1 it says D(n+1, k−1) ≤ kB + R. ∎

**Theorem (mean).** With R = 0 the mean staleness over a run is at most α, also where α is not an integer.
Proof. At most ⌊(v+1+α)B⌋ groups start on versions ≤ v and are not released, and (v+1)B groups are consumed in steps
≤ v. So at most α·B groups cross from "started on ≤ v" to "consumed after v". A group of staleness s crosses s such
borders, so the staleness summed over all groups is at most α·B a step. ∎

**Theorem (certain).** A finished group g is among the first c ≤ B of the next batch if fewer than c groups are finished
and before it in the order of rule 2, or unfinished with an earlier deadline.
Proof. What is before g at the consumption was live and before g now, or unfinished and due earlier: what starts later
has no earlier deadline than g, versions not going back, and ends later. So fewer than c ≤ B are before it. It stays
so: a group due earlier that ends goes from the second kind to the first, and a release lowers their number. ∎

``set_bound`` changes α. A deadline is fixed at admission, so each group keeps the bound that it started with. The first
proof takes α only from the admission at hand, and D(n, k) counts deadlines whatever α gave them: it holds as it stands.
So does the second, with the largest α that was in force; more closely, what crosses the border after v is at most the α
of the last admission on a version ≤ v. For the third, "no earlier deadline" could fail once ⌈α⌉ falls. So a lower α is
in force only after the next consumption, and only groups due no later than one that started on the newest version seen
are called certain: until that consumption, none that starts is due before them.

``sample`` takes another batch than rule 2's: a sampler's, and groups among it that were trained before (reuse). Let F_k
and U_k of the finished and the unfinished groups have a deadline ≤ n + k. Of the finished ones it leaves at most
max(0, F_0 − B) that are due, and for each k > 0 at most kB + R − U_k with a deadline ≤ n + k; of those trained before,
any. Within that it leaves what is last in the sampler's order.

**Theorem (bound, sampled).** The first theorem holds for ``sample``, as does the second for first uses where nothing is
reused; and there is always a batch where ``consume`` has one, or where groups trained before make one up.
Proof. After it, D(n+1, k−1) ≤ kB + R for k > 0, and D(n, 0) less what is taken is U_0 ≤ R by the waiting, or at most
U_0 + F_0 − B ≤ R: that is all that the first proof uses. The second counts admissions and consumptions only, whichever
groups are consumed. What ``consume`` leaves, with all those trained before that the batch has no place for, is allowed:
of F_k ≤ (k+1)B + R − U_k it leaves max(0, F_k − B). Sets that are allowed to stay, with a limit for each prefix of the
deadlines, are the independent sets of a laminar matroid, and so are those of at most as many as are too many for the
batch. So the greedy choice from the end of the order leaves exactly so many, and of all choices the last ones. ∎

With ``reuse`` = E a group may make up E batches, so fewer are admitted: L < ⌊(⌊(v + 1 + α)·B⌋ − n·B) / E'⌋ + R with
E' = min(E, ⌊α⌋ + 1), for between its version and its deadline a group has ⌈α⌉ + 1 steps. Else rule 2 would make every
step wait for B new ones. What is divided is at least 0 by v + ⌈α⌉ ≥ n, so this is stricter than rule 1, and the first
proof holds. With all servers on v = n it is at least B, so the next batch can always be had. The mean over all uses may
exceed an α that is no integer, but not ⌈α⌉.

α = 0: nothing starts beyond the current batch until the servers hold the new version. That is synchronous training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from asyncrl.core.staleness.base import StalenessSnapshot, StalenessViolation, check_reserve


class InflightCap:
    """``batch`` groups a step, ratio ``alpha`` ≥ 0 (real), ``redundant`` groups beyond the need; each is trained up to
    ``reuse`` times.

    A call costs O(1), but for those that look at the order: they sort the finished groups.
    """

    evicts = False
    assigns_late = False

    def __init__(self, *, batch: int, alpha: float, redundant: int = 0, reuse: int = 1, step: int = 0) -> None:
        if batch < 1 or alpha < 0 or redundant < 0 or reuse < 1:
            raise ValueError(
                f"need batch ≥ 1, alpha ≥ 0, redundant ≥ 0, reuse ≥ 1; got {batch}, {alpha}, {redundant}, {reuse}"
            )
        self._batch = batch
        self._reuse = reuse
        self._limit = 0
        self._use(alpha)
        self._next_alpha = alpha
        self._newest = -1
        """The newest version that a group started on."""
        self._redundant = redundant
        self._step = step
        self._reserved: dict[int, int] = {}
        """Unfinished group → deadline."""
        self._pending_by_deadline: dict[int, int] = {}
        """Deadline → number of unfinished groups."""
        self._occupied: dict[int, int] = {}
        """Finished group → deadline, in order of completion."""

    @property
    def limit(self) -> int | None:
        """⌈α⌉ of the largest α that was ever in force."""
        return self._limit

    @property
    def missing(self) -> int:
        return self._batch - len(self._occupied) % self._batch + self._redundant

    @property
    def live(self) -> int:
        return len(self._reserved) + len(self._occupied)

    @property
    def capacity(self) -> int:
        return (self._batch + self._ahead) // self._uses + self._redundant

    def set_bound(self, bound: float) -> None:
        """α from now on if it rises; if it falls, from the next step on."""
        if bound < 0:
            raise ValueError(f"need alpha ≥ 0; got {bound}")
        self._next_alpha = bound
        if bound > self._alpha:
            self._use(bound)

    def room(self, version: int) -> int:
        if version + self._slack < self._step:
            return 0
        ahead = (version + 1 - self._step) * self._batch + self._ahead
        return max(0, ahead // self._uses + self._redundant - self.live)

    def admits(self, version: int) -> bool:
        return self.room(version) > 0

    def reserve(self, group_id: int, version: int) -> None:
        live = group_id in self._reserved or group_id in self._occupied
        check_reserve(group_id, version, step=self._step, admitted=self.admits(version), live=live)
        self.restore(group_id, version, self.deadline(version))

    def deadline(self, version: int) -> int:
        return version + self._slack

    def restore(self, group_id: int, version: int, deadline: int | None) -> None:
        assert deadline is not None
        self._newest = max(self._newest, version)
        self._reserved[group_id] = deadline
        self._pending_by_deadline[deadline] = self._pending_by_deadline.get(deadline, 0) + 1

    def occupy(self, group_id: int) -> dict[int, str]:
        self._occupied[group_id] = self._leave_reserved(group_id)
        return {}

    def release(self, group_id: int) -> None:
        if self._occupied.pop(group_id, None) is None:
            self._leave_reserved(group_id)

    def consume(self) -> tuple[list[int], list[int]] | None:
        if len(self._occupied) < self._batch or not self._later_steps_can_keep_up():
            return None
        return self._taken(self._in_order()[: self._batch])

    def sample(self, ranking: Callable[[], Sequence[int]], used: int) -> tuple[list[int], list[int]] | None:
        if len(self._occupied) + used < self._batch or not self._later_steps_can_keep_up():
            return None
        order = ranking()
        last = max([*self._occupied.values(), *self._pending_by_deadline], default=self._step)
        may_stay: dict[int, int] = {}
        unfinished = 0
        for deadline in range(self._step, last + 1):
            unfinished += self._pending_by_deadline.get(deadline, 0)
            may_stay[deadline] = (deadline - self._step) * self._batch + self._redundant - unfinished
        due = sum(1 for deadline in self._occupied.values() if deadline <= self._step)
        may_stay[self._step] = max(0, due - self._batch)
        stay: set[int] = set()
        for group_id in reversed(order):
            if len(stay) == len(order) - self._batch:
                break
            deadlines = range(self._occupied.get(group_id, last + 1), last + 1)
            if all(may_stay[deadline] > 0 for deadline in deadlines):
                stay.add(group_id)
                for deadline in deadlines:
                    may_stay[deadline] -= 1
        return self._taken([group_id for group_id in order if group_id not in stay])

    def _taken(self, batch: list[int]) -> tuple[list[int], list[int]]:
        """The step is trained on ``batch``: groups that are finished, or that were trained before."""
        for group_id in batch:
            if (late := self._step - self._occupied.get(group_id, self._step)) > 0:
                raise StalenessViolation(
                    f"group {group_id} would be trained at step {self._step}, {late} beyond its bound"
                )
        due = [g for table in (self._reserved, self._occupied) for g, d in table.items() if d <= self._step]
        taken = set(batch)
        surplus = [g for g in due if g not in taken]
        if len(surplus) > self._redundant:
            raise StalenessViolation(f"{len(surplus)} groups miss step {self._step}, only {self._redundant} may")
        for group_id in batch:
            self._occupied.pop(group_id, None)
        for group_id in surplus:
            self.release(group_id)
        self._step += 1
        self._use(self._next_alpha)
        return batch, surplus

    def certain(self, count: int) -> list[int]:
        unfinished = sorted(self._pending_by_deadline.items())
        certain: list[int] = []
        earlier = seen = 0
        for group_id in self._in_order()[:count]:
            while seen < len(unfinished) and unfinished[seen][0] < self._occupied[group_id]:
                earlier += unfinished[seen][1]
                seen += 1
            if len(certain) + earlier >= count or self._occupied[group_id] > self._newest + self._slack:
                break
            certain.append(group_id)
        return certain

    def snapshot(self) -> StalenessSnapshot:
        return StalenessSnapshot(
            step=self._step,
            reserved=len(self._reserved),
            occupied=len(self._occupied),
            due=sum(n for deadline, n in self._pending_by_deadline.items() if deadline <= self._step),
            capacity=self.capacity,
        )

    def _use(self, alpha: float) -> None:
        self._alpha = alpha
        # ⌊(v + 1 + α)·B⌋ = (v + 1)·B + ⌊αB⌋; α is decimal in a recipe, so 0.29 × 100 must give 29 at every version.
        self._ahead = math.floor(alpha * self._batch + 1e-9)
        self._slack = math.ceil(alpha)
        self._uses = min(self._reuse, math.floor(alpha) + 1)
        """E'."""
        self._limit = max(self._limit, self._slack)

    def _in_order(self) -> list[int]:
        """The finished groups by deadline, then as completed (sorting is stable)."""
        return sorted(self._occupied, key=self._occupied.__getitem__)

    def _later_steps_can_keep_up(self) -> bool:
        """Rule 2: no deadline n + k has more than k·B + R unfinished groups before it."""
        unfinished = 0
        for deadline in sorted(self._pending_by_deadline):
            unfinished += self._pending_by_deadline[deadline]
            if unfinished > (deadline - self._step) * self._batch + self._redundant:
                return False
        return True

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
        return f"<{type(self).__name__} step {s.step}: {s.reserved} reserved, {s.occupied} occupied, {s.due} due>"
