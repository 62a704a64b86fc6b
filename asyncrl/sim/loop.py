"""An asyncio event loop on virtual time: when nothing is ready, the clock jumps to the next timer.

A day of a run takes seconds, and the same seed gives the same trace, since nothing depends on the machine. What would
break that is refused: threads and sockets raise ``RealWorldError``. When nothing is ready and no timer is set, every
task would wait for ever: ``DeadlockError`` names what each of them waits for. Leans on ``BaseEventLoop``'s private
``_ready`` and ``_scheduled`` (tests/sim/test_loop.py guards them per Python version).
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Every task waits and nothing can wake any of them."""


class VirtualTimeLimit(Exception):
    """The simulation ran past the virtual time it was given."""


class RealWorldError(Exception):
    """Code under simulation touched a thread or a socket."""


class _NoIO(selectors.BaseSelector):
    """A selector that never waits; ``VirtualLoop`` moves the clock instead."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Any:
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual seconds since the start. ``limit`` bounds it."""

    def __init__(self, *, limit: float = float("inf")) -> None:
        self._now = 0.0
        self._limit = limit
        self._failure: BaseException | None = None
        super().__init__(_NoIO())
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback that raises ends the simulation, where asyncio would log it and go on with a broken world."""
        if self._failure is None:
            self._failure = context.get("exception") or RuntimeError(context.get("message", "a callback failed"))

    def _run_once(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self._ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump()
        super()._run_once()  # type: ignore[misc]

    def _jump(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(scheduled)._scheduled = False
        if not scheduled:
            raise DeadlockError(f"nothing can happen any more at {self._now:.3f} s; {who_waits(self)}")
        if scheduled[0]._when > self._limit:
            raise VirtualTimeLimit(f"virtual time passed {self._limit:g} s; {who_waits(self)}")
        self._now = max(self._now, scheduled[0]._when)

    # --- the real world is out of reach

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RealWorldError("threads and sockets are not available under virtual time; go through a port")

    run_in_executor = _refuse  # type: ignore[assignment]
    create_connection = _refuse
    create_server = _refuse
    subprocess_exec = _refuse
    subprocess_shell = _refuse

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""


def who_waits(loop: asyncio.AbstractEventLoop) -> str:
    """How many coroutines wait, by what they wait in: the task's own function, and the innermost one that is not
    asyncio's."""
    waits: dict[str, int] = {}
    for task in asyncio.all_tasks(loop):
        where = _where(task.get_coro())
        waits[where] = waits.get(where, 0) + 1
    return "waiting: " + ", ".join(f"{where} ×{n}" for where, n in sorted(waits.items()))


def _where(coroutine: Any) -> str:
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and not frame.f_globals["__name__"].startswith("asyncio."):
            frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    if not frames:
        return "asyncio"
    inner, outer = frames[-1], frames[0].f_code.co_qualname
    where = f"{inner.f_code.co_qualname}:{inner.f_lineno}"
    return where if inner is frames[0] else f"{outer} in {where}"


def run(main: Coroutine[Any, Any, T], *, limit: float = float("inf")) -> T:
    """Like ``asyncio.run`` on virtual time. ``limit`` is in virtual seconds."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit=limit)) as runner:
        return runner.run(main)
