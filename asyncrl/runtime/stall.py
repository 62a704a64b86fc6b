"""StallWatch: a run in which nothing happens any more says who holds it up, and goes on or ends.

    run()    waits for: the next look    woken by: the clock

A look compares the books with those of the look before (``Books.progress``); nothing is done in between. When they are
the same for ``stall_s``, the holders are named; with ``mend`` those that can be cut are: a request is taken from its
server, which is killed if it was started here, an episode fails, the trainer is started again. When that long again
nothing happens, the run ends with one line, unless what holds it has a deadline of its own that is still to come.
Beside that each look names who starves, and capacity that nobody holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from asyncrl.ports import Observer
from asyncrl.runtime.status import Books, Status, shown

LOOKS = 4
"""Looks within ``stall_s``; a stall is found at most one of them late."""


class RunStalled(Exception):
    """Nothing happened for too long. One line that names the holder."""


class StallWatch:
    """``keep`` keeps a report, and says where, as the end of a sentence."""

    def __init__(
        self,
        books: Books,
        *,
        stall_s: float,
        remedy: Literal["mend", "report", "end"],
        keep: Callable[[str], Awaitable[str]] | None,
        note: Callable[[str], None],
        observer: Observer,
    ) -> None:
        self._books = books
        self._stall_s = stall_s
        self._remedy = remedy
        self._keep = keep
        self._note = note
        self._observer = observer

    async def run(self) -> None:
        """Until cancelled. Raises ``RunStalled``."""
        loop = asyncio.get_running_loop()
        before: tuple[object, ...] = ()
        since, reports = loop.time(), 0
        leaks: set[str] = set()
        told: set[str] = set()
        while True:
            await asyncio.sleep(self._stall_s / LOOKS)
            doing = await self._books.doing()
            mark = (*self._books.progress(), doing)
            if mark != before:
                before, since, reports = mark, loop.time(), 0
            faults = set(self._books.faults())
            for line in [*sorted(faults & leaks), *self._books.starved(2 * self._stall_s)]:
                if (what := line.partition(" has waited")[0]) not in told:
                    told.add(what)
                    self._say(line)
            leaks = faults
            if loop.time() - since >= (reports + 1) * self._stall_s:
                reports += 1
                status = self._books.status(doing, silent=await self._books.silent(), whole=True)
                await self._stalled(status, loop.time() - since, reports)

    async def _stalled(self, status: Status, seconds: float, reports: int) -> None:
        lines = [f"no progress for {seconds:.0f} s: {status.gate}", *status.lines()[1:]]
        where = "" if self._keep is None else await self._keep("\n".join(lines) + "\n")
        for line in lines:
            self._say(line)
        if self._remedy == "report":
            return
        cuts = [h for h in status.holders if h.cut is not None]
        if self._remedy == "mend" and reports == 1 and cuts:
            for line in shown(cuts, "cut: "):
                self._say(line)
            for holder in cuts:
                assert holder.cut is not None
                holder.cut(f"cut after {seconds:.0f} s in which the run made no progress")
        elif all(h.cut is not None or h.left_s is None or h.left_s <= 0 for h in status.holders):
            first = status.holders[0].line if status.holders else "nothing that can be named holds it"
            raise RunStalled(f"no progress for {seconds:.0f} s (run.stall_s): {status.gate}; {first}{where}")

    def _say(self, line: str) -> None:
        self._note(line)
        self._observer.instant("controller", "watchdog", asyncio.get_running_loop().time(), {"says": line})
