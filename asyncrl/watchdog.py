"""A user's environment that blocks the event loop is interrupted, and becomes a failed episode like any other hang.

A deadline cannot fire while ``time.sleep`` or an endless loop inside an ``async def`` holds the only thread. So a
watching thread misses the loop's heartbeat and signals the main thread (SIGUSR1), whose handler raises ``LoopBlocked``
in the very frame that blocks, provided that this is code below an EpisodePlayer or a Scorer: asyncrl's own code is
never cut in the middle. POSIX, main thread only.

``LoopLag`` measures how late the loop is.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType

SIGNAL = signal.SIGUSR1


class LoopBlocked(Exception):
    """User code held the event loop too long; it must await, or be a plain reward function, which runs on a worker."""


class LoopWatchdog:
    """``entries`` are the code objects of the functions that call user code; ``limit_s`` is how long that may block.
    What blocks for longer than twice that cannot be interrupted: ``hangs`` is called, on a thread, with where every
    thread is, once each time."""

    def __init__(
        self, entries: frozenset[CodeType], *, limit_s: float, hangs: Callable[[str], None] = lambda text: None
    ) -> None:
        self._entries = entries
        self._limit_s = limit_s
        self._hangs = hangs
        self._beat = 0.0
        self._stop = threading.Event()

    async def run(self) -> None:
        """Beat and watch until cancelled."""
        before = signal.signal(SIGNAL, self._interrupt)
        self._beat = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(threading.main_thread().ident,), daemon=True)
        thread.start()
        try:
            while not self._stop.is_set():
                await asyncio.sleep(self._limit_s / 8)
                self._beat = time.monotonic()
        finally:
            self._stop.set()
            signal.signal(SIGNAL, before)

    def _watch(self, main_thread: int) -> None:
        told = 0.0
        while not self._stop.wait(self._limit_s / 4):
            silent_s = time.monotonic() - self._beat
            if silent_s > self._limit_s:
                signal.pthread_kill(main_thread, SIGNAL)
            if silent_s > 2 * self._limit_s and told != self._beat:
                told = self._beat
                self._hangs(f"the event loop does not answer for {silent_s:.0f} s\n{_where_threads_are()}")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        blocked_s = time.monotonic() - self._beat
        if blocked_s < self._limit_s or frame is None or frame.f_code in self._entries:
            return
        at: FrameType | None = frame
        while at is not None and at.f_code not in self._entries:
            at = at.f_back
        if at is not None:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise LoopBlocked(f"blocked the event loop for {blocked_s:.0f} s at {where}; await instead")


def _where_threads_are() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in stacks)


class LoopLag:
    """How late the event loop comes to what is due: measured by a timer, over the last ``samples`` of it."""

    def __init__(self, *, every_s: float = 0.05, samples: int = 1200) -> None:
        self._every_s = every_s
        self._lags: deque[float] = deque(maxlen=samples)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._every_s
            await asyncio.sleep(self._every_s)
            self._lags.append(max(0.0, loop.time() - due))

    @property
    def p99(self) -> float:
        """In seconds; 0 before anything was measured."""
        lags = sorted(self._lags)
        return lags[math.ceil(0.99 * len(lags)) - 1] if lags else 0.0
