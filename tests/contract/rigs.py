"""The engines that the contract suite runs on: how each is started, reached and killed.

To add one: subclass ``Rig``, say in ``can`` what it is able to do, and list it in ``RIGS``. A test that needs an
ability (``@pytest.mark.needs("reference")``) is made for those engines only that have it.

    reference    computes with a real model, so that transformers can say what is right
    group        receives weights by a collective
    http         is a process that serves SGLang's API
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.config import EngineConfig
from asyncrl.core.cost_model import CostModel
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.leftovers import Leftovers
from asyncrl.ports import Engine
from asyncrl.sim.engine import SimEngine

from .tiny_model import CONTEXT

MAX_RUNNING = 8
MAX_TOKENS = 32768
STREAM_INTERVAL = 4
START_TIMEOUT_S = 240.0
SGLANG_PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON", "")
SGLANG_START = Path(__file__).parents[2] / "launch" / "sglang_cpu.py"


PROMPT = tuple(range(65, 85))
"""Bytes, below every id that a simulated engine generates."""


class Models(NamedTuple):
    """Model folders: the servers start with ``first``. ``stops`` is ``first``, except that it ends after ``PROMPT``."""

    first: Path
    second: Path
    stops: Path


class Rig(ABC):
    """One kind of engine. ``start`` makes a server of the model folder, ``engine`` a fresh client of it."""

    kind: str
    can: frozenset[str] = frozenset()
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @abstractmethod
    def start(self, model: Path, log: Path) -> None: ...

    @abstractmethod
    def engine(self, *, stream_interval: int = STREAM_INTERVAL) -> Engine: ...

    @abstractmethod
    def kill(self) -> None:
        """The server dies without a word."""

    @abstractmethod
    def stop(self) -> None:
        """End the server in good order; harmless after ``kill``."""


class SimulatedRig(Rig):
    """Each client is a server of its own, with a model that knows nothing but lengths."""

    kind = "simulated"

    def start(self, model: Path, log: Path) -> None:
        self.current: SimEngine | None = None

    def engine(self, *, stream_interval: int = STREAM_INTERVAL) -> SimEngine:
        self.current = SimEngine(
            "simulated",
            rng=random.Random(0),
            lengths=lambda rng, ids: CONTEXT,
            cost=CostModel(k1=0.0, k2=0.0, k3=0.0, k4=0.002, k5=0.0),
            max_running=MAX_RUNNING,
            max_tokens=MAX_TOKENS,
            context_length=CONTEXT,
            load_s=0.01,
            stream_interval=stream_interval,
        )
        return self.current

    def kill(self) -> None:
        assert self.current is not None
        self.current.kill()

    def stop(self) -> None:
        """Nothing outlives its client."""


class HttpRig(Rig):
    """A server process that speaks SGLang's API."""

    can = frozenset({"reference", "group", "http"})

    @abstractmethod
    def command(self, model: Path, port: int) -> list[str]: ...

    def start(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "ASYNCRL_PARENT_PID": str(os.getpid()),
            "TMPDIR": (folder := tempfile.mkdtemp()),
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(model, self.port),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.leftovers = Leftovers()
        self.leftovers.session(self.process.pid, folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the {self.kind} server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def engine(self, *, stream_interval: int = STREAM_INTERVAL) -> SGLangEngine:
        config = EngineConfig(stream_interval=stream_interval, connect_timeout_s=30.0, idle_timeout_s=60.0, retries=2)
        url = f"http://127.0.0.1:{self.port}"
        return SGLangEngine(url, self.kind, config, rng=random.Random(0), model_type="qwen3")

    def kill(self) -> None:
        # The group: SGLang's scheduler and detokenizer are processes of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.leftovers.close()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.kill()


class EmbeddedRig(HttpRig):
    kind = "embedded"

    def command(self, model: Path, port: int) -> list[str]:
        limits = ["--max-running-requests", str(MAX_RUNNING), "--max-total-tokens", str(MAX_TOKENS)]
        return [sys.executable, "-m", "asyncrl.serve", str(model), "--port", str(port), "--device", "cpu", *limits]


class SGLangRig(HttpRig):
    kind = "sglang"
    marks = (pytest.mark.sglang,)

    def command(self, model: Path, port: int) -> list[str]:
        limits = ["--max-running-requests", str(MAX_RUNNING), "--max-total-tokens", str(MAX_TOKENS)]
        start = [SGLANG_PYTHON, str(SGLANG_START), "--model-path", str(model), "--port", str(port)]
        return [*start, "--dtype", "float32", *limits]


class SGLangTwoRanksRig(SGLangRig):
    kind = "sglang-tp2"

    def command(self, model: Path, port: int) -> list[str]:
        return [*super().command(model, port), "--tp-size", "2"]


RIGS: list[type[Rig]] = [SimulatedRig, EmbeddedRig, *([SGLangRig, SGLangTwoRanksRig] if SGLANG_PYTHON else [])]
