"""The process that forks workers: it has the user's module imported, so that a killed worker is replaced in a moment.

    ASYNCRL_ENV_SPEC='{"target": …, "kwargs": …, "path": …}' python -m asyncrl.env_workers.nursery SCRATCH

Whoever sees the command line need not see the arguments, which may hold a key.

Its standard input is a socket to the controller: ``START n`` with the worker's socket attached, ``KILL n``; it answers
``ENDED n status``. It never runs threads, so forking is safe. A module that starts threads when it is imported is
imported in each worker instead. Workers lead sessions of their own, whose remains are killed with them, and have a
folder for temporary files in ``SCRATCH``, removed after them; ``SCRATCH`` itself is removed in the end, also after a
controller that was killed.
"""

from __future__ import annotations

import gc
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.config import EnvConfig
from asyncrl.env import SyncEnv
from asyncrl.env_workers.worker import CLOSE_S, Worker
from asyncrl.loading import load_environment
from asyncrl.processes import die_with_parent, give_way

RECORD = struct.Struct("<cxxxii")
"""What is asked or told, the worker's number, and its exit status."""
START, KILL, ENDED = b"s", b"k", b"e"
SPEC_VARIABLE = "ASYNCRL_ENV_SPEC"

NICENESS = 5
"""Many busy workers must not keep the controller, which all of them wait for, from a core."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The class to run, as the recipe names it, and the controller's ``sys.path``."""

    target: str
    kwargs: dict[str, object]
    path: list[str]
    late: bool = False
    """Import it in each worker, not here."""

    def load(self) -> Callable[[], SyncEnv]:
        make = load_environment(EnvConfig(target=self.target, kwargs=self.kwargs)).make_sync
        assert make is not None
        return make


class Nursery:
    """``scratch`` is where the workers' temporary folders are."""

    def __init__(self, control: socket.socket, scratch: Path) -> None:
        self._control = control
        self._scratch = scratch
        self._pids: dict[int, int] = {}
        self._stop = False

    def run(self) -> socket.socket | None:
        """Serve until the controller is gone or SIGTERM; returns a connection in each worker, and None at the end."""
        wakeup, waker = socket.socketpair()
        for end in (wakeup, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_term)
        die_with_parent(signal.SIGTERM)  # until here it was SIGKILL, which leaves no time to tidy up
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while not self._stop:
                for key, _ in selector.select():
                    if key.fileobj is wakeup:
                        wakeup.recv(4096)
                        self._reap()
                    elif (connection := self._obey()) is not None:
                        signal.set_wakeup_fd(-1)
                        for inherited in (wakeup, waker, self._control):
                            inherited.close()
                        return connection
        self._end()
        return None

    def _on_term(self, number: int, frame: object) -> None:
        self._stop = True

    def _obey(self) -> socket.socket | None:
        """Carry out one request; in a new worker, its connection."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, RECORD.size, 1)
        except OSError:
            data, fds = b"", []
        if len(data) < RECORD.size:
            self._stop = True
            return None
        kind, number, _ = RECORD.unpack(data)
        if kind == START:
            connection = socket.socket(fileno=fds[0])
            try:
                pid = os.fork()
            except OSError as error:  # no memory, or too many processes, for now
                print(f"asyncrl: cannot fork a worker ({error.strerror})", file=sys.stderr)
                connection.close()
                self._tell(number, 1)
                return None
            if not pid:
                self._become_worker(number)
                return connection
            connection.close()
            self._pids[number] = pid
        elif number in self._pids:
            _kill(self._pids[number])
        return None

    def _become_worker(self, number: int) -> None:
        os.setsid()
        give_way(NICENESS)
        die_with_parent()
        for caught in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(caught, signal.SIG_DFL)
        folder = self._scratch / str(number)
        folder.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        random.seed()
        if (numpy := sys.modules.get("numpy")) is not None:  # else every worker draws the same
            numpy.random.seed()

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[number]
                _kill(pid)
                shutil.rmtree(self._scratch / str(number), ignore_errors=True)
                self._tell(number, os.waitstatus_to_exitcode(status))

    def _tell(self, number: int, code: int) -> None:
        try:
            self._control.sendall(RECORD.pack(ENDED, number, code))
        except OSError:
            self._stop = True

    def _end(self) -> None:
        """Workers see their sockets close and end by themselves; those that do not are killed."""
        deadline = time.monotonic() + CLOSE_S
        while self._pids and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)
        for pid in self._pids.values():
            _kill(pid)
        for pid in self._pids.values():
            os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    """The worker, and what it started."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def main() -> None:
    spec = msgspec.json.decode(os.environ.pop(SPEC_VARIABLE), type=Spec)
    sys.path[:] = spec.path
    scratch = Path(sys.argv[1])
    make = None
    if not spec.late:
        make = spec.load()
        if _has_threads():
            os.environ[SPEC_VARIABLE] = msgspec.json.encode(msgspec.structs.replace(spec, late=True)).decode()
            os.execv(sys.executable, [sys.executable, "-m", "asyncrl.env_workers.nursery", str(scratch)])
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    gc.collect()
    gc.freeze()  # so that a worker's collections do not touch, and copy, the pages it shares
    connection = Nursery(control, scratch).run()
    if connection is None:
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        Worker(connection, make or spec.load()).serve()


def _has_threads() -> bool:
    tasks = Path("/proc/self/task")
    return threading.active_count() > 1 or (tasks.is_dir() and len(list(tasks.iterdir())) > 1)


if __name__ == "__main__":
    main()
