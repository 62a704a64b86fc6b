"""The torchrun job as a child process: start it, learn why it ended. Imports no torch.

torchrun starts its ranks in sessions of their own; they end with torchrun or with this process (``lifetime.py``),
whichever dies first.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from asyncrl import config
from asyncrl.access import VARIABLE, gloo_interface
from asyncrl.ports import TrainerDied, TrainerError
from asyncrl.processes import Child
from asyncrl.shield import unless
from asyncrl.train.lifetime import PARENT_VARIABLE

T = TypeVar("T")

FATAL = re.compile(r"(trainer rank \d+): fatal: (.+)")
"""What a rank says that a new one would say again."""

STOP_S = 5.0
"""How long torchrun may take, after SIGTERM, to end its ranks."""


class TorchrunJob:
    """One launch of the worker on this machine. ``log_start`` is where its words begin in the log."""

    def __init__(self, child: Child, log_start: int) -> None:
        self._child = child
        self._log_start = log_start

    @classmethod
    async def start(
        cls, recipe: config.Recipe, model: str, port: int, run_dir: Path, log: Path, resume: Path | None, token: str
    ) -> TorchrunJob:
        """Returns as soon as torchrun runs. Raises ``OSError`` or ``ChildError``."""
        path = _write_recipe(recipe, run_dir)
        command = [sys.executable, "-m", "asyncrl.train.launch", "--rdzv-backend", "one-node"]
        command += ["--log-dir", str(run_dir / "torchrun")]  # else it leaves a folder of its own in TMPDIR, each time
        command += ["--nproc-per-node", str(recipe.trainer.ranks), "-m", "asyncrl.train.worker"]
        command += ["--recipe", str(path), "--model", model, "--port", str(port)]
        command += ["--resume", str(resume)] if resume else []
        environment = {
            PARENT_VARIABLE: str(os.getpid()),
            VARIABLE: token,
            "OMP_NUM_THREADS": str(recipe.trainer.threads),
            "MKL_NUM_THREADS": str(recipe.trainer.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        environment |= gloo_interface(recipe.weights.address)
        if recipe.trainer.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = recipe.trainer.gpus
        log.parent.mkdir(parents=True, exist_ok=True)
        start = log.stat().st_size if log.exists() else 0
        return cls(await Child.start("trainer", command, log=log, env=environment), start)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.exit_code is None

    async def unless_ended(self, work: Awaitable[T]) -> T:
        """``work``'s result; given up with ``TrainerDied`` as soon as the job ends, or with another ``TrainerError`` if
        one that is started in its place would end in the same way."""
        return await unless(self._ended(), work)

    async def _ended(self) -> None:
        code, log = await self._child.wait(), self._child.log
        words = self._words()
        kind = TrainerError if FATAL.search(words) else TrainerDied
        raise kind(f"trainer: the job ended with exit code {code}: {explain(words)} (see {log})")

    async def wait(self) -> None:
        await self._child.wait()

    async def stop(self) -> None:
        """SIGTERM, on which torchrun ends its ranks; then SIGKILL, after which they end by themselves."""
        await self._child.stop(STOP_S)

    def _words(self) -> str:
        with self._child.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")


def explain(log: str) -> str:
    """The one line of a failed job's log that says why: a rank's own word, else how torchrun says a rank died, else the
    last line. Of several dead ranks the one that was killed is the cause; the others lost contact with it."""
    if own := FATAL.search(log) or re.search(r"(trainer rank \d+): error: (.+)", log):
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


def _write_recipe(recipe: config.Recipe, run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "trainer.json"
    path.write_bytes(config.dumps(recipe))
    return path
