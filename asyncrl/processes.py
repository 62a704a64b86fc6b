"""Child processes: started with a log file each, watched, and never left behind.

A child runs in a session of its own, so Ctrl-C in the terminal reaches only the controller, which ends its children in
order. If the controller is killed, the kernel kills them (PR_SET_PDEATHSIG, Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildError(Exception):
    """A child process could not be started or ended by itself; one line naming it and its log."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process signal ``number`` when its parent's thread ends. No effect elsewhere than on
    Linux."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)


def give_way(niceness: int) -> None:
    """Let the session of this process come after others where cores are short: Linux shares them out among sessions."""
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a kernel that does not
        Path("/proc/self/autogroup").write_text(str(niceness))


class Child:
    """One running child. Make it with ``start``."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self.began = asyncio.get_running_loop().time()
        """When it was started, in loop time."""
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        stdin: int = asyncio.subprocess.DEVNULL,
        cwd: str | Path | None = None,
    ) -> Child:
        """Start ``argv`` with ``env`` on top of this process's environment; output goes to ``log``, appended. ``stdin``
        is a file descriptor."""
        try:
            output = log.open("ab")
        except OSError as error:
            raise ChildError(f"{name}: cannot write its log {log} ({error.strerror})") from None
        try:
            with output:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **env},
                    cwd=cwd,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise ChildError(f"{name}: cannot start {argv[0]} ({error.strerror})") from None
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """Until it ends; its exit code (negative: the signal that killed it). Processes that it leaves are killed."""
        code = await self._process.wait()
        _signal_group(self.pid, signal.SIGKILL)
        return code

    def death(self) -> str:
        """One line on how it ended: exit code, the last line it wrote, and where the log is."""
        code = self.exit_code
        how = "is running" if code is None else f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        return f"{self.name} {how}: {last_line(self.log)} (log: {self.log})"

    def kill(self) -> None:
        """At once, with all in its group."""
        _signal_group(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """It is asked to end, with all in its group; does not wait for it."""
        _signal_group(self.pid, signal.SIGTERM)

    async def stop(self, grace_s: float = 10.0) -> None:
        """See ``end_group``."""
        await end_group(self._process, grace_s)


async def end_group(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """SIGTERM to a child that leads a session and to all in its group; SIGKILL to who is left when the child has ended,
    after ``grace_s``, or when this is cancelled. Returns when the child is gone."""
    if process.returncode is not None:
        return
    _signal_group(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def last_line(log: Path) -> str:
    """The last line of a log that says something; of a Python traceback, its error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no log"
    return lines[-1][:300] if lines else "it wrote nothing"


_drawn: deque[int] = deque(maxlen=1000)
"""Ports that were given out last: perhaps nobody listens there yet."""


def free_port() -> int:
    """A TCP port that is free on loopback now, and most likely still when a process has started: none of those from
    which systems take the local ports of connections (Linux: 32,768 on), nor one that was given out lately."""
    while True:
        port = random.randrange(16384, 32768)
        if port in _drawn:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _drawn.append(port)
        return port
