"""A sliding window of versions (papers: DORA §4.2): trajectories of several go on side by side, none is cut or dropped.

At step n, the version of the weights that it starts from, the window is n − τ … n. A group that starts on version v of
it has the deadline v + τ, the last step that may train it. The trainer takes B groups as soon as that many have ended,
and the window slides with each step: "only when all trajectories from the oldest version have been collected" (§4.2).

The paper does not say what keeps that wait short. Were more than B groups of a version unfinished, or more than 2B of
two neighbouring ones, they could not all be trained before the window has passed them. So admission keeps them few. Let
D(k) be the live groups (started, neither consumed nor released) with a deadline ≤ n + k, and U(k) the unfinished ones
among them.

* Admission. A group may start on version v ≤ n iff v + τ ≥ n and D(k) < (k + 1)·B for every k ≥ v + τ − n. Any version
  of the window may take it, not only the newest.
* Consumption. Step n takes B finished groups, the oldest version first, in order of completion within it. It waits
  while U(k) > k·B for some k ≥ 0. For k = 0 that is the paper's rule: nothing of the oldest version is unfinished.

**Theorem (C3, C2).** Nothing is consumed with staleness n − v > τ, and no group leaves but by consumption or release.
Proof. We show D(k) ≤ (k + 1)·B for all k ≥ 0, always. Admission asks for it where D(k) grows; a release lowers D. Of a
consumption at n, if B groups with a deadline ≤ n + k are taken, at most (k + 1)·B − B = k·B of D(k) stay; if fewer are,
then all that had ended, as the oldest go first, and U(k) ≤ k·B stay. That is D(k − 1) ≤ k·B at step n + 1, and for
k = 0: none is left behind the window. ∎ Consumption asserts both.

**Theorem (no deadlock).** Some allowed action always leads to the next step. Proof. Let all unfinished groups end: U is
0. If B have ended they are taken. If fewer have, D(k) < B for all k, and a group may start on n. ∎

**Theorem (certain).** A finished group with the deadline n stands in the next batch, behind those with this deadline
that ended before it and no others. Proof. None has an earlier deadline, what starts from now on ends later, and D(0) is
at most B. ∎ Nothing like it holds for later deadlines: versions with the deadline n may go on taking groups, up to B of
them, whatever has ended of newer ones. To close them before would win little: servers that are kept busy are ahead by
the whole window, and a batch is the oldest version's (mean staleness τ in bench/figures/dora_fig10.py).

C1, one version for all tokens of a trajectory, is what the servers see to (core/policy/streaming.py); it is asserted
where a trajectory ends.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.core.staleness.inflight_cap import InflightCap


class SlidingWindow(InflightCap):
    """``batch`` groups a step, staleness at most ``bound``. It trains as an in-flight cap does, but lets groups start
    on every version of the window. ``room`` counts the live groups."""

    assigns_late = True

    def __init__(self, *, batch: int, bound: int, step: int = 0) -> None:
        super().__init__(batch=batch, alpha=bound, step=step)

    def room(self, version: int) -> int:
        deadline = self.deadline(version)
        if deadline < self._step:
            return 0
        live = Counter(self._pending_by_deadline)
        live.update(self._occupied.values())
        live[deadline] += 0  # (k + 1)·B − D(k) is smallest here, or where D grows
        rooms, d = [], 0
        for last in sorted(live):
            d += live[last]
            if last >= deadline:
                rooms.append((last - self._step + 1) * self._batch - d)
        return min(rooms)

    def certain(self, count: int) -> list[int]:
        due = [group_id for group_id, deadline in self._occupied.items() if deadline <= self._step]
        return due[:count]
