"""The simulated training job: a step takes ``fixed_s + tokens / (tokens_per_s · gpus^scaling)`` seconds.

train_step()   waits for: the step's seconds   woken by: the clock, crash_at()
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.config import TrainerModel
from asyncrl.core.advantage import Advantage
from asyncrl.core.types import Batch
from asyncrl.ports import StepResult, TrainerError


def train_seconds(model: TrainerModel, tokens: int) -> float:
    """One step on ``tokens`` tokens, prompts and observations counted."""
    return model.fixed_s + tokens / (model.tokens_per_s * math.pow(model.gpus, model.scaling))


class SimTrainer:
    """Refuses what the real one refuses: a step out of turn, advantages that do not fit."""

    def __init__(self, model: TrainerModel | None = None) -> None:
        self.version = 0
        self._model = model or TrainerModel()
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

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        self.check_alive()
        if batch.step != self.version:
            raise TrainerError(f"the trainer is at version {self.version} and was asked to train step {batch.step}")
        if len(advantages) != len(batch.trajectories):
            raise TrainerError(f"{len(advantages)} advantages for {len(batch.trajectories)} trajectories")
        tokens = sum(g.tokens for g in batch.groups)
        self._training = batch.step
        if batch.step == self._crash_at:
            self._dead.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(train_seconds(self._model, tokens)):
                    await self._dead.wait()
        finally:
            self._training = None
        self.check_alive()
        self.version += 1
        return StepResult(version=self.version, metrics={"tokens": float(tokens)})

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
