"""What a process leaves in shared memory and among temporary files is removed after it, however it ended.

Who is killed tidies nothing up, and SGLang ends its own processes by SIGKILL even in order: each of its servers leaves
sockets in the folder for temporary files, and in ``/dev/shm`` a semaphore, its load and, with tensor parallelism,
message queues. So a small process outlives them and does it. It reads from a pipe what to look after, and ends when
whoever made it is gone:

    folder PATH          is removed in the end
    session PID PATH     when process PID and its session are gone, the folder PATH is removed, and what they had mapped
                         of the files in /dev/shm that nobody else maps
    look                 now: the sessions are about to be ended
    end                  nothing follows

The pipe may stay open after that: a process that was forked meanwhile, by user code for instance, holds it too. So it
is told of the end, or sees its parent's.

What a session maps is looked up soon after its start, then less often, and can be known only while it lives.
Folders in ``/dev/shm`` are others', but for those that are named. Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FIRST_LOOK_S = 0.5
MOST_S = 10.0
"""Between two looks, each of which waits twice as long as the one before."""
GONE_S = 10.0
"""How long the rest of a session may take to end after its first process, and who uses a folder after the end."""
MEMORY = "/dev/shm"
_FILE = re.compile(rb" (\d+) +/dev/shm/[^/\n]+$", re.MULTILINE)
"""The inode: a semaphore is mapped before it has its name."""


class Leftovers:
    """The process that removes them, and the pipe to it. ``close`` it, or just end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def folder(self, path: Path | str) -> None:
        self._tell(f"folder {path}")

    def session(self, pid: int, folder: Path | str) -> None:
        """``pid`` leads it."""
        self._tell(f"session {pid} {folder}")

    def look(self) -> None:
        self._tell("look")

    def close(self) -> None:
        """What is left of processes that have ended is removed before this returns. Once is enough."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._tell("end")
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: what is left then stays
            self._process.stdin.write(os.fsencode(line) + b"\n")
            self._process.stdin.flush()


class _Session:
    def __init__(self, pid: int, folder: str) -> None:
        self.pid = pid
        self.folder = folder
        self.shared: dict[str, int] = {}
        """Files in shared memory, and the inode of each."""
        self.wait_s = FIRST_LOOK_S
        self.look()

    def look(self) -> None:
        self.next_look = time.monotonic() + self.wait_s
        self.wait_s = min(MOST_S, 2 * self.wait_s)
        inodes = set[int]().union(*map(_mapped, self._members()))
        with contextlib.suppress(FileNotFoundError), os.scandir(MEMORY) as files:  # a machine without
            self.shared |= {file.path: file.inode() for file in files if file.inode() in inodes}

    def remove(self) -> None:
        """After its first process. Waits for the others."""
        deadline = time.monotonic() + GONE_S
        while any(self._members()) and time.monotonic() < deadline:
            self.look()
            time.sleep(0.02)
        others = set[int]().union(*map(_mapped, _processes())) if self.shared else ()
        for path, inode in self.shared.items():
            with contextlib.suppress(OSError):
                if inode not in others and os.stat(path).st_ino == inode:
                    os.unlink(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _members(self) -> Iterator[Path]:
        for process in _processes():
            with contextlib.suppress(OSError):
                state, _, _, session = (process / "stat").read_bytes().rpartition(b") ")[2].split()[:4]
                if int(session) == self.pid and state not in b"ZX":
                    yield process


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _mapped(process: Path) -> set[int]:
    """Inodes of files, not of those in folders, of shared memory."""
    try:
        return {int(inode) for inode in _FILE.findall((process / "maps").read_bytes())}
    except OSError:  # it has ended, or is somebody else's
        return set()


class _Keeper:
    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._folders: list[str] = []
        self._sessions: dict[int, _Session] = {}
        """By a file descriptor that can be read when its first process has ended."""

    def run(self) -> None:
        ears = [0]
        with contextlib.suppress(OSError, AttributeError):  # it has ended, or the system cannot tell
            ears.append(os.pidfd_open(self._parent))
        for ear in ears:
            self._selector.register(ear, selectors.EVENT_READ)
        data = b""
        while ears or self._sessions:
            alone = os.getppid() != self._parent
            wait_s = 0.0 if ears and alone else self._until_look()
            ready = {key.fd for key, _ in self._selector.select(wait_s)}
            ended = alone and 0 not in ready  # nothing is left in the pipe
            if 0 in ready:
                part = os.read(0, 65536)
                *lines, data = (data + part).split(b"\n")
                ended = not part or b"end" in lines
                for line in lines:
                    self._obey(os.fsdecode(line))
            while ended and ears:
                self._selector.unregister(ears.pop())
            for end in ready & self._sessions.keys():
                self._selector.unregister(end)
                os.close(end)
                self._sessions.pop(end).remove()
            for session in self._sessions.values():
                if session.next_look <= time.monotonic():
                    session.look()
        deadline = time.monotonic() + GONE_S
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
            while os.path.exists(folder) and time.monotonic() < deadline:  # who writes there is only about to end
                time.sleep(0.02)
                shutil.rmtree(folder, ignore_errors=True)

    def _until_look(self) -> float | None:
        looks = [session.next_look for session in self._sessions.values()]
        return max(0.0, min(looks) - time.monotonic()) if looks else None

    def _obey(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "folder":
            self._folders.append(rest)
            return
        if kind == "end":
            return
        if kind == "look":
            for session in self._sessions.values():
                session.look()
            return
        pid, _, folder = rest.partition(" ")
        session = _Session(int(pid), folder)
        try:
            end = os.pidfd_open(session.pid)
        except ProcessLookupError:
            session.remove()
        else:
            self._selector.register(end, selectors.EVENT_READ)
            self._sessions[end] = session


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _Keeper(int(sys.argv[1])).run()
