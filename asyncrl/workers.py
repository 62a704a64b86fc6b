"""The Blocking port on threads: user code that blocks runs off the loop, and a call that hangs costs one thread.

A worker is a daemon thread that takes calls from one queue. When the wait for a call is cancelled (a missed deadline),
a call that has not begun is dropped, and a worker that is stuck in it is written off and replaced; it ends with its
call, if that ever returns. Too many stuck workers end the run: threads cannot be killed, so a function that hangs often
belongs into a process of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from asyncrl.ports import TooManyStuck

T = TypeVar("T")


class _Call:
    """One call; ``lock`` guards the race between a worker that begins or ends it and a waiter that gives it up."""

    __slots__ = ("abandoned", "args", "fn", "future", "lock", "loop", "started")

    def __init__(self, loop: asyncio.AbstractEventLoop, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.fn = fn
        self.args = args
        self.lock = threading.Lock()
        self.started = False
        self.abandoned = False

    def begin(self) -> bool:
        """Worker: True if somebody still waits for it."""
        with self.lock:
            self.started = not self.abandoned
            return self.started

    def end(self) -> bool:
        """Worker: True if it was not written off meanwhile."""
        with self.lock:
            self.started = False
            return not self.abandoned

    def abandon(self) -> bool:
        """Waiter: True if a worker is in it now."""
        with self.lock:
            self.abandoned = True
            return self.started


class ThreadBlocking:
    """``workers`` threads, started on demand, beside at most ``max_stuck`` that hang."""

    def __init__(self, *, workers: int = 8, max_stuck: int = 32) -> None:
        self._max_workers = workers
        self._max_stuck = max_stuck
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = 0
        self._pending = 0
        self._stuck = 0

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        if self._stuck > self._max_stuck:
            raise TooManyStuck(f"{self._stuck} calls of user code hang in worker threads; find what blocks in {fn!r}")
        call = _Call(asyncio.get_running_loop(), fn, args)
        self._pending += 1
        self._queue.put(call)
        self._start_workers()
        try:
            result: T = await call.future
            return result
        except asyncio.CancelledError:
            if call.abandon():
                self._stuck += 1
                self._workers -= 1
            raise
        finally:
            self._pending -= 1
            self._start_workers()

    async def close(self) -> None:
        """Let idle workers end; stuck ones are daemons and end with the process."""
        for _ in range(self._workers):
            self._queue.put(None)
        self._workers = 0

    def _start_workers(self) -> None:
        """As many as there are calls, up to the limit."""
        while self._workers < min(self._pending, self._max_workers):
            self._workers += 1
            threading.Thread(target=self._work, name="asyncrl-blocking", daemon=True).start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if not call.begin():
                continue
            settle: Callable[[Any], None]
            value: Any
            try:
                settle, value = call.future.set_result, call.fn(*call.args)
            except StopIteration as error:  # which no future takes
                settle, value = call.future.set_exception, RuntimeError(f"StopIteration: {error}")
                value.__cause__ = error
            except BaseException as error:  # whatever user code raises belongs to its caller
                settle, value = call.future.set_exception, error
            written_off = not call.end()
            try:
                if written_off:
                    call.loop.call_soon_threadsafe(self._returned)
                    return  # another worker has taken its place
                call.loop.call_soon_threadsafe(_settle, call.future, settle, value)
            except RuntimeError:
                return  # the loop is closed: the run is over

    def _returned(self) -> None:
        self._stuck -= 1


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)
