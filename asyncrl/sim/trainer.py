"""The simulated training job: a step takes ``fixed_s + tokens / (tokens_per_s · gpus^scaling)`` seconds. Of it, the
tokens that it is fed before take theirs then, once there are ``part_tokens`` of them.

train_step(), feed()   wait for: their seconds   woken by: the clock, crash_at()
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.config import TrainerModel
from asyncrl.core.advantage import Advantage
from asyncrl.core.types import Batch, Group
from asyncrl.ports import StepResult, TrainerError


def train_seconds(model: TrainerModel, tokens: int) -> float:
    """One step on ``tokens`` tokens, prompts and observations counted."""
    return model.fixed_s + tokens / (model.tokens_per_s * math.pow(model.gpus, model.scaling))


class SimTrainer:
    """Refuses what the real one refuses: a step out of turn, advantages that do not fit, a batch without what was fed
    for it."""

    def __init__(self, model: TrainerModel | None = None, part_tokens: int = 1) -> None:
        self.version = 0
        self._model = model or TrainerModel()
        self._part_tokens = part_tokens
        self._fed: list[Group] = []
        """For the next step; the last ``_waiting`` of them are still to be trained."""
        self._waiting = 0
        self._training: int | None = None
        self._crash_at: int | None = None
        self._dead = asyncio.Event()

    def crash_at(self, step: int) -> None:
        """Fault: the job dies while it trains ``step``; at once, if that is the step it is training."""
        self._crash_at = step
        if self._training == step:
            self._dead.set()

    def check_alive(self) -> None:
        """Raises ``TrainerError`` once the job has died."""
        if self._dead.is_set():
            raise TrainerError(f"the trainer died in step {self._crash_at} (simulated)")

    async def connect(self) -> int:
        self.check_alive()
        return self.version

    async def feed(self, part: Batch, advantages: Sequence[Advantage]) -> bool:
        self._check(part, advantages)
        self._fed += part.groups
        self._waiting += len(part.groups)
        tokens = sum(g.tokens for g in self._fed[len(self._fed) - self._waiting :])
        if tokens < self._part_tokens:
            return False
        self._waiting = 0
        await self._train(part.step, train_seconds(self._model, tokens) - self._model.fixed_s)
        return True

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        self._check(batch, advantages)
        fed, waiting, self._fed, self._waiting = self._fed, self._waiting, [], 0
        if missing := {g.id for g in fed} - {g.id for g in batch.groups}:
            raise TrainerError(f"step {batch.step}: groups {sorted(missing)} were fed, but are not in the batch")
        done = fed[: len(fed) - waiting]
        tokens, streamed = sum(g.tokens for g in batch.groups), sum(g.tokens for g in done)
        await self._train(batch.step, train_seconds(self._model, tokens - streamed))
        self.version += 1
        metrics = {"tokens": float(tokens)}
        if done:
            metrics["streamed_sequences"] = float(sum(len(g.trajectories) for g in done))
        return StepResult(version=self.version, metrics=metrics)

    def _check(self, batch: Batch, advantages: Sequence[Advantage]) -> None:
        self.check_alive()
        if batch.step != self.version:
            raise TrainerError(f"the trainer is at version {self.version} and was asked to train step {batch.step}")
        if len(advantages) != len(batch.trajectories):
            raise TrainerError(f"{len(advantages)} advantages for {len(batch.trajectories)} trajectories")

    async def _train(self, step: int, seconds: float) -> None:
        self._training = step
        if step == self._crash_at:
            self._dead.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._dead.wait()
        finally:
            self._training = None
        self.check_alive()

    async def save(self, folder: str) -> int:
        self.check_alive()
        await asyncio.sleep(0)
        return self.version

    async def saved(self) -> None:
        self.check_alive()

    async def close(self) -> None:
        await asyncio.sleep(0)

    def __repr__(self) -> str:
        doing = "dead" if self._dead.is_set() else "idle" if self._training is None else f"trains step {self._training}"
        return f"<SimTrainer v{self.version} {doing}>"
