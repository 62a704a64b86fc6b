"""A real run whose processes are found, killed, stopped and started again: what soak.py and chaos.py share. Linux."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.observe.run_dir import METRICS

COMMANDS = {
    "server": ("asyncrl.serve", "sglang"),
    "trainer": ("asyncrl.train.worker",),
    "env": ("env_workers.nursery",),
    "relay": ("weights.relay_main",),
}
"""What the command line of such a process holds. Workers of the environments are forks of a nursery."""
ALWAYS = (
    "run.steps=1000000",
    "run.eval_tasks=1",
    "run.trace_requests=false",
    "run.checkpoint_every=20",
    "engine.restarts=1000000",
    "engine.restart_backoff_s=0.2",
    "trainer.restarts=1000000",
    "trainer.restart_backoff_s=0.2",
)
STARTED_S = 600.0
MARK = "ASYNCRL_BENCH_RUN"


class Run:
    """``asyncrl train`` in a process of its own; all of its processes carry its mark in their environment, and have a
    folder for temporary files and, where that is allowed, one that they see as /dev/shm: what is left in them shows."""

    def __init__(self, recipe: Path, run_dir: Path, settings: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.output = run_dir.with_suffix(".log")
        self._mark = f"{MARK}={run_dir}".encode()
        self._temporary, self._shared = run_dir.with_suffix(".tmp"), run_dir.with_suffix(".shm")
        for folder in (self._temporary, self._shared):
            folder.mkdir()
        overrides = [word for setting in settings for word in ("--set", setting)]
        self._command = [*_seen_as_shm(self._shared), sys.executable, "-m", "asyncrl.cli", "train", str(recipe)]
        self._command += ["--run-dir", str(run_dir), *overrides]
        self.start()

    def start(self, *settings: str) -> None:
        """Also a second time: the same command again, with ``settings`` on top."""
        more = [word for setting in settings for word in ("--set", setting)]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*self._command, *more],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), MARK: str(self.run_dir)},
                start_new_session=True,
            )

    def start_again(self, timeout_s: float) -> None:
        """After the controller was killed, and the kernel has ended all that it had started."""
        self.process.wait()
        deadline = time.monotonic() + timeout_s
        while left := list(self.processes()):
            if time.monotonic() > deadline:
                sys.exit(f"{timeout_s:g} s after the controller was killed there still is {left[0][1]}")
            time.sleep(0.05)
        self.start()

    def processes(self) -> Iterator[tuple[int, str]]:
        """Every other process of the run: its number and command line."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.process.pid:
                try:
                    if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:  # it has just ended
                    continue

    def leftovers(self) -> list[str]:
        """What is left of it: command lines of processes, files in shared memory and temporary ones."""
        files = (path for folder in (self._shared, self._temporary) for path in folder.rglob("*"))
        left = (str(path) for path in files if not path.name.startswith("torchinductor_"))  # torch's cache, one a user
        return [*(command for _, command in self.processes()), *left]

    def of(self, kind: str) -> list[int]:
        found = sorted(pid for pid, command in self.processes() if any(word in command for word in COMMANDS[kind]))
        return [pid for pid in found if _parent(pid) in found] if kind in ("env", "trainer") else found

    def steps(self) -> int:
        file = self.run_dir / METRICS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def controller_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + STARTED_S
        while self.steps() < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run did not come to step {count}:\n{self.output.read_text()[-2000:]}")
            time.sleep(0.2)

    def interrupt(self, timeout_s: float) -> int:
        """As by Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """All that is left of it."""
        for pid in [self.process.pid, *(pid for pid, _ in self.processes())]:
            kill(pid)
        self.process.wait()


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _seen_as_shm(folder: Path) -> list[str]:
    """A command before another's that lets it see ``folder`` as /dev/shm; none where that is not allowed."""
    unshare = ["unshare", "--mount"]
    allowed = shutil.which("unshare") and not subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode
    return [*unshare, "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)] if allowed else []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
