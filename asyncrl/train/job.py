"""The torchrun job as processes: start it, learn why it ended, end it without orphans. Imports no torch.

Owns one process group and one log file. torchrun starts its ranks in sessions of their own; they end with torchrun or
with this process (``lifetime.py``), whichever dies first.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from asyncrl import config
from asyncrl.ports import TrainerError
from asyncrl.train.lifetime import PARENT_VARIABLE

T = TypeVar("T")

TERMINATE_S = 5.0
"""How long SIGTERM, and then SIGKILL, may take."""


class TorchrunJob:
    """One launch of the worker on this machine."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_start: int) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start

    @classmethod
    async def start(cls, recipe: config.Recipe, model: str, port: int, run_dir: Path, log: Path) -> TorchrunJob:
        """Returns as soon as torchrun runs. Raises ``OSError``."""
        path = _write_recipe(recipe, run_dir)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(recipe.trainer.ranks), "-m", "asyncrl.train.worker"]
        command += ["--recipe", str(path), "--model", model, "--port", str(port)]
        environment = os.environ | {
            PARENT_VARIABLE: str(os.getpid()),
            "OMP_NUM_THREADS": str(recipe.trainer.threads),
            "MKL_NUM_THREADS": str(recipe.trainer.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            start = os.fstat(descriptor).st_size
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        return cls(process, log, start)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def unless_ended(self, work: Awaitable[T]) -> T:
        """``work``'s result; given up with a ``TrainerError`` as soon as the job ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._ended())
                result = await work
                watch.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return result

    async def _ended(self) -> None:
        code = await self._process.wait()
        raise TrainerError(f"trainer: the job ended with exit code {code}: {explain(self._tail())} (see {self._log})")

    async def wait(self) -> None:
        await self._process.wait()

    async def kill(self) -> None:
        """SIGTERM, on which torchrun ends its ranks; then SIGKILL, after which they end by themselves."""
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self.running:
                    self._signal(number)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(TERMINATE_S):
                            await self._process.wait()
        finally:
            if self.running:  # cancelled meanwhile
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")


def explain(log: str) -> str:
    """The one line of a failed job's log that says why: a rank's own word, else how torchrun says a rank died, else the
    last line. Of several dead ranks the one that was killed is the cause; the others lost contact with it."""
    if own := re.search(r"(trainer rank \d+): error: (.+)", log):
        return f"{own[1]}: {own[2]}"
    report = re.findall(r"^ *rank *: (\d+) .*?^ *exitcode *: (-?\d+)", log, re.MULTILINE | re.DOTALL)
    deaths = [(rank, int(code)) for rank, code in report]
    for rank, code in deaths:
        if code < 0 and code != -signal.SIGTERM:  # which torchrun itself sends to the rest
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
    if deaths:
        rank, code = deaths[-1]  # torchrun puts the one that it saw first at the end
        return f"rank {rank} ended with exit code {code}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it left no word in its log"


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _write_recipe(recipe: config.Recipe, run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "trainer.json"
    path.write_bytes(config.dumps(recipe))
    return path
