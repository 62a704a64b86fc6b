"""What ``asyncrl status`` prints, on both ends: a run writes ``status.json`` every few seconds, and anybody reads it.

A file and no socket: it needs no port and no token, other hosts of a shared file system read it too, and it is still
there when the controller is dead or hangs. How old it is tells which. It goes when the run has ended in order.

    StatusFile.run()    waits for: the next look    woken by: the clock
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.build.assemble import Run
from asyncrl.core.types import Record
from asyncrl.observe.run_dir import METRICS, RECIPE, STALLS, STATUS, RunDirError, read_lines, write_atomic
from asyncrl.observe.summary import duration, read_summary
from asyncrl.ports import Blocking
from asyncrl.runtime.stage import Stage
from asyncrl.shield import to_the_end
from asyncrl.watchdog import LoopLag

EVERY_S = 2.0
SILENT_S = 20.0
"""A controller that has not written for so long hangs; or its disk does."""
KEEP_S = 10.0
"""How long a write may take."""


class Written(Record, frozen=True, kw_only=True):
    """``status.json``. ``at`` is seconds since the host was booted, ``born`` that of the process in the kernel's ticks,
    so that neither another process of that id nor a clock that is set misleads anybody."""

    pid: int
    born: int
    host: str
    boot: str
    at: float
    time: str
    lines: Sequence[str]


class StatusFile:
    """Of the run in ``run_dir``. ``gate`` is what it waits for where there is no ``run`` yet, or no more."""

    def __init__(self, run_dir: Path, gate: Stage, lag: LoopLag, blocking: Blocking) -> None:
        self._run_dir = run_dir
        self._gate = gate
        self._lag = lag
        self._blocking = blocking
        self.run: Run | None = None

    async def keep(self) -> None:
        """Write it until cancelled. A disk that cannot take it is others' to complain of."""
        while True:
            data = msgspec.json.encode(await self._now())
            with suppress(RunDirError, TimeoutError):
                # To its end, or it might come after ``remove``.
                await to_the_end(self._blocking.run(write_atomic, self._run_dir / STATUS, data), KEEP_S)
            await asyncio.sleep(EVERY_S)

    def remove(self) -> None:
        (self._run_dir / STATUS).unlink(missing_ok=True)

    async def keep_report(self, text: str) -> str:
        """The report of a stall, into a file of its own; where, as the end of a sentence."""
        try:
            async with asyncio.timeout(KEEP_S):
                return f"; see {await self._blocking.run(self._write_report, text)}"
        except (TimeoutError, OSError, RunDirError):
            return ""

    def hangs(self, text: str) -> None:
        """The same, on a thread, for an event loop that does not answer."""
        with suppress(OSError, RunDirError):
            self._write_report(text)

    def _write_report(self, text: str) -> Path:
        folder = self._run_dir / STALLS
        folder.mkdir(exist_ok=True)
        path = folder / f"{datetime.now():%Y%m%d-%H%M%S}.txt"
        write_atomic(path, text.encode())
        return path

    async def _now(self) -> Written:
        gate, run = self._gate, self.run
        if run is not None:
            lines = run.books.status(await run.books.doing()).lines()
        else:
            seconds = asyncio.get_running_loop().time() - gate.since
            limit = f", deadline {gate.limit_s:g} s ({gate.key})" if gate.limit_s is not None else ""
            lines = [f"{gate.who} waits for {gate.what}, {seconds:.0f} s{limit}"]
        lines.append(f"event loop: p99 of its lag {1000 * self._lag.p99:.0f} ms")
        return Written(
            pid=os.getpid(),
            born=_born(os.getpid()) or 0,
            host=socket.gethostname(),
            boot=_boot(),
            at=time.clock_gettime(time.CLOCK_MONOTONIC),
            time=datetime.now().astimezone().isoformat(timespec="seconds"),
            lines=lines,
        )


def show(run_dir: Path, out: Callable[[str], object]) -> int:
    """Say how the run in ``run_dir`` stands; 0 if it runs or has finished, else 1. Raises ``RunDirError``."""
    if not (run_dir / RECIPE).exists():
        raise RunDirError(f"{run_dir}: no run is there (no {RECIPE}); name the folder of --run-dir")
    try:
        written = msgspec.json.decode((run_dir / STATUS).read_bytes(), type=Written)
    except FileNotFoundError:
        written = None
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{run_dir / STATUS}: cannot be read ({error}); try again") from None
    code = _running(run_dir, written, out) if written is not None else _ended(run_dir, out)
    if reports := sorted((run_dir / STALLS).glob("*.txt")):
        out(f"it stood still {len(reports)} times; the newest report: {reports[-1]}")
    return code


def _running(run_dir: Path, written: Written, out: Callable[[str], object]) -> int:
    here = (written.host, written.boot) == (socket.gethostname(), _boot())
    if not here:
        out(f"as it was at {written.time} on {written.host}, process {written.pid}:")
    elif _born(written.pid) != written.born:
        steps = _steps(run_dir)
        out(f"killed: process {written.pid} is gone and left no summary, {steps}; the same command goes on")
        out(f"what it said last, at {written.time}:")
        for line in written.lines:
            out(f"  {line}")
        return 1
    age = time.clock_gettime(time.CLOCK_MONOTONIC) - written.at
    silent = here and age > SILENT_S
    if silent:
        out(f"process {written.pid} has said nothing for {age:.0f} s: it is stopped, or its event loop or disk hangs")
        out("what it said last:")
    elif here:
        out(f"running, process {written.pid}, {_steps(run_dir)}; {age:.0f} s ago:")
    for line in written.lines:
        out(f"  {line}")
    return int(silent)


def _ended(run_dir: Path, out: Callable[[str], object]) -> int:
    if (summary := read_summary(run_dir)) is None:
        out(f"it was killed before it could write a status or a summary, {_steps(run_dir)}")
        return 1
    out(f"{summary.exit} after {duration(summary.seconds)}, {_steps(run_dir)}")
    return int(summary.exit != "finished")


def _steps(run_dir: Path) -> str:
    newest: dict[str, Any] | None = None
    for line in read_lines(run_dir / METRICS):
        newest = line
    if newest is None:
        return "before its first step"
    return f"{newest['version']} steps, the last one {duration(newest['time/at'])} after its start"


def _born(pid: int) -> int | None:
    """When a process began, in ticks since the host was booted; None if there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
