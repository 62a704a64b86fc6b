"""Experience: the finished groups, those that wait for their first batch and, with reuse, those that wait for another.

It applies the recipe's writer and sampler (core/experience.py). The staleness control has the last word on what is
trained; the SampleBuffer, which owns this, carries it out. Synchronous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec

from asyncrl.core.experience import Finished, Generated, Sampler, Writer, least_wanted, ranked
from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.types import Group
from asyncrl.runtime.open_group import OpenGroup


class Entry(msgspec.Struct, kw_only=True, eq=False):
    """A group in the buffer. ``deadline`` is the last step that may train it, None without a bound."""

    group: Group
    deadline: int | None
    generated: Sequence[Generated]
    uses: int = 0

    @classmethod
    def of(cls, members: OpenGroup, group: Group, uses: int = 0) -> Entry:
        """``group`` is what became of its members."""
        return cls(group=group, deadline=members.deadline, generated=members.generated, uses=uses)

    def seen(self, step: int) -> Finished:
        return finished(self.group, self.generated, self.uses, step)


def finished(group: Group, generated: Sequence[Generated], uses: int, step: int) -> Finished:
    """What a sampler or writer is told of the group before ``step``."""
    return Finished(
        id=group.id,
        task=group.task,
        v_traj=group.v_traj,
        staleness=step - group.v_traj,
        uses=uses,
        rewards=tuple(group.rewards),
        lengths=tuple(g.tokens for g in generated),
        versions=tuple(g.version for g in generated),
    )


class Experience:
    """A group may be trained ``reuse`` times, at different steps, none after its deadline. At most ``capacity`` groups
    wait. Without a ``sampler`` the control's own order decides alone; that needs ``reuse`` = 1 and no capacity."""

    def __init__(
        self,
        *,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        reuse: int = 1,
        capacity: float = math.inf,
    ) -> None:
        if sampler is None and (reuse > 1 or capacity < math.inf):
            raise ValueError("reuse and capacity need a sampler")
        self.sampler = sampler
        self.reuse = reuse
        self._writer = writer
        self._capacity = capacity
        self.fresh: dict[int, Entry] = {}
        """Not trained yet, in the order in which they came."""
        self.used: dict[int, Entry] = {}
        """Trained, and to be trained again; behind the others, in the order of their last use."""

    @property
    def looks(self) -> bool:
        """Whether anybody looks at what was generated."""
        return self.sampler is not None or self._writer is not None

    def add(self, entry: Entry) -> None:
        """It waits behind all that are as fresh."""
        (self.used if entry.uses else self.fresh)[entry.group.id] = entry

    def write(self, group: Group, generated: Sequence[Generated], step: int) -> Group | None:
        """The group as the writer lets it in; None if it does not."""
        if self._writer is None:
            return group
        answer = self._writer(finished(group, generated, 0, step))
        if isinstance(answer, bool):
            return group if answer else None
        members = tuple(t.rewarded(r) for t, r in zip(group.trajectories, answer, strict=True))
        return msgspec.structs.replace(group, trajectories=members)

    def ranking(self, step: int) -> Callable[[], list[int]]:
        """What gives the groups that ``step`` may be trained on, those to be trained first at the front."""
        sampler = self.sampler
        assert sampler is not None
        return lambda: ranked(sampler, self._seen(step))

    def too_many(self, step: int) -> int | None:
        """The group that leaves, as more wait than may before ``step``; None if not."""
        if self.sampler is None or len(self.fresh) + len(self.used) <= self._capacity:
            return None
        return least_wanted(self.sampler, self._seen(step))

    def take(self, ids: Sequence[int], step: int) -> list[Entry]:
        """They are trained by ``step``; in ``used`` are then those that have uses left."""
        entries = [self.fresh.pop(i) if i in self.fresh else self.used.pop(i) for i in ids]
        for entry in entries:
            if not _in_time(entry, step) or entry.uses >= self.reuse:
                raise StalenessViolation(
                    f"group {entry.group.id}, used {entry.uses} times, would be trained at step {step}: it may be used "
                    f"{self.reuse} times, up to step {entry.deadline}"
                )
            entry.uses += 1
            if entry.uses < self.reuse:
                self.add(entry)
        return entries

    def expire(self, step: int) -> list[Entry]:
        """Used groups leave that ``step`` must not train."""
        gone = [entry for entry in self.used.values() if not _in_time(entry, step)]
        for entry in gone:
            del self.used[entry.group.id]
        return gone

    def clear(self) -> None:
        self.fresh.clear()
        self.used.clear()

    def _seen(self, step: int) -> list[Finished]:
        return [entry.seen(step) for entry in chain(self.fresh.values(), self.used.values())]


def _in_time(entry: Entry, step: int) -> bool:
    return entry.deadline is None or step <= entry.deadline
