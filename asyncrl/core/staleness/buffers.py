"""Staleness buffers (papers: StaleFlow §4): a place for every group from its first token on, so that none is discarded.

Buffer b trains step b. At step n (the version of the weights before it) there are buffers n … n + η, each of E = B + R
entries: B groups a batch, R redundant ones (§4.3, batch level). An entry is empty, reserved or occupied. A group that
starts on version v ≤ n has the deadline d = v + η, the last step that may train it: all of its entries are in buffers
≤ d. The paper's primitives:

* Reserve scans backward from buffer d and takes the latest empty entry. ``room`` and ``admits`` simulate it.
* Occupy deletes the group's reserved entry; the earliest reserved entry that may move to the hole (its deadline is not
  before it) does, then the earliest that may fill its hole, and so on; then the group takes the earliest empty entry.
* Consume retires buffer n once B of its entries are occupied (Ready): the first B are the batch. Up to R others can be
  in it. An occupied one occupies anew, the earliest empty entry, if that is in time; the rest is surplus.
* Release deletes an entry, moves reserved ones as Occupy does, and pulls occupied ones of later buffers forward.

**Theorem (bound per sample).** Nothing is consumed with staleness n − v > η; at most R groups a step are surplus.
Proof. Reserve gives an entry in a buffer ≤ d, else it is refused. A reserved entry moves to a hole only where its
deadline allows. Occupied entries move to earlier ones, and Occupy finds an empty entry not later than the one that its
group had, for the last hole is one. So every live group has an entry in a buffer from n to d until it leaves, and the
batch is taken from buffer n ≤ d. What is surplus was among the E − B others of that buffer. ∎

**Invariants.** After every operation (1) no empty entry is in a buffer before an occupied one, and (2) no reserved
entry could move to a later buffer, up to its deadline, that has an entry which is not reserved.
Proof. Reserve: the buffers after the entry's, to d, have no empty entries, hence by (1) no occupied ones: (2). Occupy
and Release: the hole moves to earlier buffers until no reserved entry before it may fill it, which is (2) for it; and
behind a reserved entry that moved, all were reserved up to its deadline by (2), and are. If some entry before the last
hole was empty, nothing behind is occupied by (1), and the group takes the earliest; else it takes the hole (Occupy), or
the occupied entries behind move up into it (Release): (1). No reserved entry could use what those leave, by (2).
Consume: the first buffer goes, and no deadline reaches the one that comes. ∎

**Theorem (earliest).** Buffer n is Ready as soon as any placement within the deadlines makes it so.
Proof. Let m groups be reserved in buffers ≤ b. Follow (2) from those with a later deadline: up to it all entries are
reserved. Follow it from the groups of these, and so on, to the last buffer b' reached. All E·(b' − b) entries after b
up to b' are reserved, by groups that with the m have deadlines ≤ b'. So every placement has m of them, or more, in
buffers ≤ b. Thus in every prefix of the buffers the reserved entries are as few as can be. By (1), what is occupied
fills the rest from the front. ∎

So the counts of every buffer are a function of two things: how many unfinished groups have each deadline, and how many
groups are finished. Which unfinished group has which entry makes no difference, and is not held. Reserve passes full
buffers on its way back from the deadline, and each counts it; deletion goes the same way back, for while a buffer was
passed, a reserved entry before it may take the hole in it. Finished groups are held by buffer; one in buffer n stays
there, so the first of them are ``certain``.

**Theorem (no deadlock).** Some allowed action always leads to the next Consume.
Proof. Let every unfinished group end. No entry is reserved then, so with B finished, buffer n is Ready; with fewer, a
group on version n finds one of the E·(η + 1) entries empty. ∎

``set_bound`` changes η between any two operations. A deadline is fixed by Reserve, and the proofs use nothing but
deadlines and that no buffer is missing before the latest one, so they hold as they stand: each group keeps the bound
that it was reserved with, and is neither late nor lost.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from enum import StrEnum
from itertools import islice

from asyncrl.core.staleness.base import StalenessSnapshot, StalenessViolation, check_reserve
from asyncrl.core.types import Record


class BufferState(StrEnum):
    WAITING = "waiting"
    """Has empty entries."""
    READY = "ready"
    """Holds a batch of occupied entries."""
    STUCK = "stuck"
    """Full, but not ready: training and reservations wait for groups that are unfinished."""


class BufferView(Record, frozen=True, kw_only=True):
    """One buffer, its counts in groups."""

    version: int
    """V_buf: the step that trains it."""
    state: BufferState
    reserved: int
    occupied: int


class StalenessBuffers:
    """``batch`` groups a step, staleness at most ``bound``, ``redundant`` entries a buffer beyond the batch.

    A call costs O(bound) at most, in steps of some ten nanoseconds; ``consume`` and ``certain`` also pay for what they
    return.
    """

    evicts = False
    assigns_late = True

    def __init__(self, *, batch: int, bound: int, redundant: int = 0, step: int = 0) -> None:
        if batch < 1 or bound < 0 or redundant < 0:
            raise ValueError(f"need batch ≥ 1, bound ≥ 0, redundant ≥ 0; got {batch}, {bound}, {redundant}")
        self._batch = batch
        self._entries = batch + redundant
        self._bound = self._limit = bound
        self._step = step
        self._reserved: dict[int, int] = {}
        """Unfinished group → deadline."""
        self._buffer: dict[int, int] = {}
        """Finished group → buffer."""
        # The buffers, from the earliest on. Index: buffer, or deadline, less the step.
        self._empty: list[int] = []
        """Entries that are empty."""
        self._passed: list[int] = []
        """Unfinished groups that this buffer is early enough for, and full: an earlier one has them."""
        self._by_deadline: deque[dict[int, None]] = deque()
        """Unfinished groups with this deadline, in order of reservation."""
        self._occupied: deque[OrderedDict[int, int]] = deque()
        """Finished group → deadline, in the order in which they came to this buffer."""
        self._open_buffers()

    @property
    def limit(self) -> int | None:
        """The largest bound that was ever set."""
        return self._limit

    @property
    def missing(self) -> int:
        return self._entries - len(self._buffer) % self._batch

    @property
    def capacity(self) -> int:
        return (self._bound + 1) * self._entries

    def set_bound(self, bound: float) -> None:
        """⌊bound⌋ for what is reserved from now on; what is reserved already keeps its own."""
        if bound < 0:
            raise ValueError(f"need bound ≥ 0; got {bound}")
        self._bound = math.floor(bound)
        self._limit = max(self._limit, self._bound)
        self._open_buffers()

    def room(self, version: int) -> int:
        last = min(version, self._step) + self._bound - self._step
        return sum(self._empty[: last + 1]) if last >= 0 else 0

    def admits(self, version: int) -> bool:
        return self.room(version) > 0

    def reserve(self, group_id: int, version: int) -> None:
        live = group_id in self._reserved or group_id in self._buffer
        check_reserve(group_id, version, step=self._step, admitted=self.admits(version), live=live)
        self.restore(group_id, version, self.deadline(version))

    def deadline(self, version: int) -> int:
        return version + self._bound

    def restore(self, group_id: int, version: int, deadline: int | None) -> None:
        assert deadline is not None
        self._open_buffers(deadline)
        self._reserved[group_id] = deadline
        i = deadline - self._step
        self._by_deadline[i][group_id] = None
        while not self._empty[i]:
            self._passed[i] += 1
            i -= 1
        self._empty[i] -= 1

    def occupy(self, group_id: int) -> dict[int, str]:
        deadline = self._leave_reserved(group_id)
        self._place(group_id, deadline, self._earliest_empty())
        return {}

    def release(self, group_id: int) -> None:
        if (version := self._buffer.pop(group_id, None)) is not None:
            del self._occupied[version - self._step][group_id]
            self._empty[version - self._step] += 1
        else:
            self._leave_reserved(group_id)
        self._pull_forward()

    def consume(self) -> tuple[list[int], list[int]] | None:
        occupied = self._occupied[0]
        if len(occupied) < self._batch:
            return None
        batch = list(islice(occupied, self._batch))
        for group_id in batch:
            if (late := self._step - occupied[group_id]) > 0:
                raise StalenessViolation(
                    f"group {group_id} would be trained at step {self._step}, {late} beyond its bound"
                )
        # Those with the earliest deadline are taken as the ones in this buffer: all that are due, and nobody is who
        # could have another entry.
        in_order = (group_id for groups in self._by_deadline for group_id in groups)
        surplus = list(islice(in_order, self._entries - len(occupied) - self._empty[0]))
        for group_id in surplus:
            self._leave_reserved(group_id)
        for group_id in occupied:
            del self._buffer[group_id]
        self._step += 1
        del self._empty[0], self._passed[0]
        self._by_deadline.popleft()
        self._occupied.popleft()
        self._open_buffers()
        for group_id, deadline in islice(occupied.items(), self._batch, None):
            if (empty := self._earliest_empty()) <= deadline:
                self._place(group_id, deadline, empty)
            else:
                surplus.append(group_id)
        return batch, surplus

    def certain(self, count: int) -> list[int]:
        return list(islice(self._occupied[0], count))

    def states(self) -> list[BufferView]:
        """Every buffer from the earliest on (§4.2, figure 7)."""
        views = []
        for i, (occupied, empty) in enumerate(zip(map(len, self._occupied), self._empty, strict=True)):
            if occupied >= self._batch:
                state = BufferState.READY
            else:
                state = BufferState.WAITING if empty else BufferState.STUCK
            reserved = self._entries - occupied - empty
            views.append(BufferView(version=self._step + i, state=state, reserved=reserved, occupied=occupied))
        return views

    def snapshot(self) -> StalenessSnapshot:
        return StalenessSnapshot(
            step=self._step,
            reserved=len(self._reserved),
            occupied=len(self._buffer),
            due=len(self._by_deadline[0]),
            capacity=self.capacity,
        )

    def _earliest_empty(self) -> int:
        """The buffer of the earliest empty entry; where there is none, one beyond the last."""
        for version, empty in enumerate(self._empty, self._step):
            if empty:
                return version
        return self._step + len(self._empty)

    def _place(self, group_id: int, deadline: int, version: int) -> None:
        self._occupied[version - self._step][group_id] = deadline
        self._empty[version - self._step] -= 1
        self._buffer[group_id] = version

    def _pull_forward(self) -> None:
        """A hole before occupied entries takes the first of the next buffer that has any, and so does its hole."""
        hole = self._earliest_empty()
        for i in range(hole - self._step + 1, len(self._occupied)):
            if self._occupied[i]:
                group_id, deadline = self._occupied[i].popitem(last=False)
                self._empty[i] += 1
                self._place(group_id, deadline, hole)
                hole = self._step + i

    def _open_buffers(self, deadline: int = 0) -> None:
        """There is a buffer for every deadline up to the step's, and to ``deadline``."""
        while len(self._empty) <= max(self._bound, deadline - self._step):
            self._empty.append(self._entries)
            self._passed.append(0)
            self._by_deadline.append({})
            self._occupied.append(OrderedDict())

    def _leave_reserved(self, group_id: int) -> int:
        """Delete a reserved entry: the group's deadline."""
        deadline = self._reserved.pop(group_id, None)
        if deadline is None:
            raise StalenessViolation(f"group {group_id} is not reserved")
        i = deadline - self._step
        del self._by_deadline[i][group_id]
        while self._passed[i]:  # a reserved entry of an earlier buffer moves here, and leaves a hole there
            self._passed[i] -= 1
            i -= 1
        self._empty[i] += 1
        return deadline

    def __repr__(self) -> str:
        s = self.snapshot()
        return f"<StalenessBuffers step {s.step}: {s.reserved} reserved, {s.occupied} occupied, {s.due} due>"
