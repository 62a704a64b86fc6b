"""The simulated training job: a step takes ``fixed_s + tokens / (tokens_per_s · gpus^scaling)`` seconds. Of it, the
tokens that it is fed before take theirs then, once there are ``part_tokens`` of them.

Its weights are a checksum of all it was trained on, in order, so that a step that is lost, doubled, or trained on
something else shows.

    feed(), train_step(), while_alive()   wait for: their seconds                 woken by: the clock, crash()
    saved()                               waits for: the seconds of a checkpoint  woken by: the clock, crash()
    watch()                               waits for: a death                      woken by: crash()
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.config import TrainerModel
from asyncrl.core.advantage import Advantage
from asyncrl.core.types import Batch, Group
from asyncrl.ports import StepResult, TrainerDied, TrainerError


def train_seconds(model: TrainerModel, tokens: int) -> float:
    """One step on ``tokens`` tokens, prompts and observations counted."""
    return model.fixed_s + tokens / (model.tokens_per_s * math.pow(model.gpus, model.scaling))


class SimTrainer:
    """Refuses what the real one refuses: a step out of turn, advantages that do not fit, a batch without what was fed
    for it. ``trained`` are the steps of all jobs, in order of their end. The first goes on from ``checkpoint``."""

    def __init__(
        self, model: TrainerModel | None = None, part_tokens: int = 1, checkpoint: tuple[int, int] = (0, 0)
    ) -> None:
        self.version, self.weights = checkpoint
        self.trained: list[int] = []
        self._model = model or TrainerModel()
        self._part_tokens = part_tokens
        self._fed: list[Group] = []
        """For the next step; the last ``_waiting`` of them are still to be trained."""
        self._waiting = 0
        self._passes = 0
        """A checksum of what was fed, part by part: the same batch in other parts gives other weights, by rounding."""
        self._training: int | None = None
        self._dead = asyncio.Event()
        self._hangs = False
        self.checkpoint = checkpoint
        """Version and weights of the newest complete one."""
        self._writing: tuple[int, int] | None = None
        self._written_at = 0.0

    def crash(self) -> None:
        """Fault: the job dies, now."""
        self._dead.set()

    async def connect(self) -> int:
        if self._dead.is_set():
            await asyncio.sleep(self._model.start_s)
            self._dead.clear()
            self._hangs = False
            self._writing = None
            self.version, self.weights = self.checkpoint
            self._fed, self._waiting, self._passes = [], 0, 0
        return self.version

    async def while_alive(self, seconds: float | None) -> None:
        """Work for so long; None: for ever. Raises ``TrainerDied`` if the job is dead, or dies meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._hangs else seconds):
                await self._dead.wait()
        if self._dead.is_set():
            raise TrainerDied(f"trainer: it died at version {self.version} (simulated)")

    async def feed(self, part: Batch, advantages: Sequence[Advantage]) -> bool:
        self._check(part, advantages)
        self._fed += part.groups
        self._waiting += len(part.groups)
        self._passes = _checksum(part, advantages, self._passes)
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
        self.weights = _checksum(batch, advantages, self.weights ^ self._passes)
        self._passes = 0
        self.trained.append(batch.step)
        metrics = {"tokens": float(tokens)}
        if done:
            metrics["streamed_sequences"] = float(sum(len(g.trajectories) for g in done))
        return StepResult(version=self.version, metrics=metrics, checksum=self.weights)

    def _check(self, batch: Batch, advantages: Sequence[Advantage]) -> None:
        if not self._dead.is_set() and batch.step != self.version:
            raise TrainerError(f"the trainer is at version {self.version} and was asked to train step {batch.step}")
        if len(advantages) != len(batch.trajectories):
            raise TrainerError(f"{len(advantages)} advantages for {len(batch.trajectories)} trajectories")

    async def _train(self, step: int, seconds: float) -> None:
        self._training = step
        try:
            await self.while_alive(seconds)
        finally:
            self._training = None

    async def save(self, folder: str) -> int:
        await self.while_alive(0.0)
        self._writing = self.version, self.weights
        self._written_at = asyncio.get_running_loop().time() + self._model.save_s
        return self.version

    async def saved(self) -> None:
        await self.while_alive(max(0.0, self._written_at - asyncio.get_running_loop().time()))
        if self._writing is not None:
            self.checkpoint, self._writing = self._writing, None

    async def doing(self) -> str:
        """Changes as long as a step gets on, so that a long one is no stall."""
        if self._training is None or self._hangs:
            return ""
        return f"step {self._training}, at {asyncio.get_running_loop().time():.0f} s"

    def hang(self) -> None:
        """Fault: what is asked of it from now on is never answered, until it is given up."""
        self._hangs = True

    def give_up(self) -> None:
        self.crash()

    async def watch(self) -> None:
        await self.while_alive(None)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def __repr__(self) -> str:
        doing = "dead" if self._dead.is_set() else "idle" if self._training is None else f"trains step {self._training}"
        return f"<SimTrainer v{self.version} {doing}>"


def _checksum(batch: Batch, advantages: Sequence[Advantage], before: int) -> int:
    return zlib.crc32(repr((batch.step, [t.id for t in batch.trajectories], advantages)).encode(), before)
