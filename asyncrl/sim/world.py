"""The rest of the virtual world: tokenizer, trainer, weight transport, blocking work and an environment.

Each implements the port that its real counterpart does. Delays are drawn from the injected generator.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from asyncrl.core.advantage import Advantage
from asyncrl.core.types import Batch
from asyncrl.env import Action, Env, Step, Task
from asyncrl.ports import Engine, EngineError, StepResult, TrainerError
from asyncrl.sim.engine import GENERATED

T = TypeVar("T")


class SimTokenizer:
    """Bytes are ids; generated ids (≥ GENERATED) decode to nothing."""

    eos_ids: Sequence[int] = (GENERATED,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < GENERATED).decode(errors="replace")

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        text = "".join(f"<{m['role']}>{m['content']}\x00" for m in messages)
        return text + "<assistant>" if add_generation_prompt else text


class SimTrainer:
    """A step takes ``fixed_s`` plus its tokens at ``tokens_per_s``."""

    def __init__(self, *, tokens_per_s: float = 50_000.0, fixed_s: float = 1.0) -> None:
        self.version = 0
        self.batches: list[Batch] = []
        self._tokens_per_s = tokens_per_s
        self._fixed_s = fixed_s
        self._crash_at: int | None = None

    def crash_at(self, step: int) -> None:
        """Fault: the job dies while it trains ``step``."""
        self._crash_at = step

    async def connect(self) -> int:
        return self.version

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        if batch.step != self.version:
            raise TrainerError(f"the trainer is at version {self.version} and was asked to train step {batch.step}")
        if len(advantages) != len(batch.trajectories):
            raise TrainerError(f"{len(advantages)} advantages for {len(batch.trajectories)} trajectories")
        tokens = sum(g.tokens for g in batch.groups)
        await asyncio.sleep(self._fixed_s + tokens / self._tokens_per_s)
        if batch.step == self._crash_at:
            raise TrainerError(f"the trainer died in step {batch.step} (simulated)")
        self.batches.append(batch)
        self.version += 1
        return StepResult(version=self.version, metrics={"tokens": float(tokens)})

    async def save(self, path: str) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)


class SimTransport:
    """Weights by magic: ``prepare_s`` beside generation, then each server's own load time."""

    def __init__(self, *, prepare_s: float = 0.2) -> None:
        self._prepare_s = prepare_s

    async def connect(self, engines: Sequence[Engine]) -> None:
        await asyncio.sleep(0)

    async def prepare(self, version: int) -> None:
        await asyncio.sleep(self._prepare_s)

    async def deliver(self, engines: Sequence[Engine], version: int) -> None:
        failures: list[EngineError] = []

        async def load(engine: Engine) -> None:
            try:
                await engine.load_from_disk(f"version {version}", version)
            except EngineError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(load(engine))
        if failures:
            raise failures[0]

    async def close(self) -> None:
        await asyncio.sleep(0)


class SimBlocking:
    """Runs the call inline after a drawn delay."""

    def __init__(self, *, rng: random.Random, mean_s: float = 0.01) -> None:
        self._rng = rng
        self._mean_s = mean_s

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
        return fn(*args)

    async def close(self) -> None:
        await asyncio.sleep(0)


class SimEnv(Env):
    """``turns`` turns with latencies of ``latency(rng)`` seconds; the reward is 1 with probability ``success``.

    With probability ``crash`` a step raises, with probability ``hang`` it never answers.
    """

    def __init__(
        self,
        *,
        rng: random.Random,
        latency: Callable[[random.Random], float] = lambda rng: 0.0,
        turns: int = 1,
        success: float = 0.5,
        crash: float = 0.0,
        hang: float = 0.0,
    ) -> None:
        self._rng = rng
        self._latency = latency
        self._turns = turns
        self._success = success
        self._crash = crash
        self._hang = hang
        self._prompt = ""

    async def reset(self, task: Task) -> str:
        await asyncio.sleep(self._latency(self._rng))
        self._prompt = str(task.data.get("prompt", "task "))
        return self._prompt

    async def step(self, action: Action) -> Step:
        draw = self._rng.random()
        if draw < self._crash:
            raise RuntimeError("simulated crash of the environment")
        if draw < self._crash + self._hang:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._latency(self._rng))
        done = action.turn + 1 >= self._turns
        return Step(observation="next ", reward=float(done and self._rng.random() < self._success), done=done)
