"""How ``asyncrl env check`` sees what user code does: how long it holds the loop, whether it hangs, what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Awaitable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any


class Hang(BaseException):
    """Raised by the alarm in code that holds the loop."""


class Watched:
    """Awaits ``inner``; ``held_s`` is the longest it ran without giving the loop back."""

    def __init__(self, inner: Awaitable[Any]) -> None:
        self._inner = inner
        self.held_s = 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._inner.__await__()
        thrown: BaseException | None = None
        while True:
            began = time.perf_counter()
            try:
                waits_for = next(inner) if thrown is None else inner.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                self.held_s = max(self.held_s, time.perf_counter() - began)
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                thrown = error


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise ``Hang`` in whatever holds the thread for so long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    others = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, before)


def left_behind(scratch: Path) -> dict[str, float]:
    """What this process holds now; ``scratch`` is where its temporary files are."""
    gc.collect()
    held = {"temporary files": float(sum(1 for _ in scratch.rglob("*")))}
    held["asyncio tasks"] = float(len(asyncio.all_tasks()))
    proc = Path("/proc/self")
    if proc.is_dir():
        held["open files"] = float(len(list((proc / "fd").iterdir())))
        held["threads"] = float(len(list((proc / "task").iterdir())))
        held["child processes"] = float(len(_children()))
        held["MB of memory"] = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return held


def _children() -> list[str]:
    """Processes that this one started and that are still there, also as zombies."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if file.read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid()):
                found.append(file.parent.name)
    return found
