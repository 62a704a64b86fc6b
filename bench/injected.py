"""Environments with drawn latencies, turns and faults, around real ones.

``Injected`` is an ``EnvSource`` around another. The i-th episode of a task draws from (seed, task, i), so two runs of
the same tasks are given the same episodes. Latencies are waited for here, on the loop; a hang or a crash is the
environment's own: its task's data says at which turn (``hang_at``, ``crash_at``; ``-1``: never), and ``seed`` is for
what it draws itself.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.core.distributions import Distribution
from asyncrl.env import Action, Env, Observation, Step, Task
from asyncrl.ports import EnvSource

sys.path.append(str(Path(__file__).parent / "figures"))
from agentic import Rounds  # the simulated figures' lock-step, which needs a loop and no more


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of episodes. A hang and a crash come at a random turn; all steps of a slow one take ``slow_factor`` times
    as long."""

    hang: float = 0.0
    crash: float = 0.0
    slow: float = 0.0
    slow_factor: float = 10.0


NO_FAULTS = Faults()


class Played(msgspec.Struct, kw_only=True):
    """Turns generated, by how their episode ended. ``failed``: by an injected fault; ``cut``: interrupted, as the run
    did not need it any more, or by the fault of a neighbour in its process."""

    whole: int = 0
    failed: int = 0
    cut: int = 0
    episodes: int = 0
    faulty: int = 0
    """Episodes that hung or crashed."""

    @property
    def failed_share(self) -> float:
        return self.failed / ((self.whole + self.failed + self.cut) or 1)


def sum_of(parts: Sequence[Played]) -> Played:
    return Played(**{name: sum(getattr(part, name) for part in parts) for name in Played.__struct_fields__})


class Injected:
    """``rounds``: environments step together, all of a batch (§5.2.1's baseline). Then no episode may fail."""

    def __init__(
        self,
        inner: EnvSource,
        *,
        latency: Distribution,
        turns: Distribution,
        max_turns: int,
        faults: Faults = NO_FAULTS,
        rounds: Rounds | None = None,
        seed: int = 0,
    ) -> None:
        self.inner = inner
        self.latency = latency
        self.turns = turns
        self.max_turns = max_turns
        self.faults = faults
        self.rounds = rounds
        self.played = Played()
        self.keeps_deadlines = inner.keeps_deadlines
        self._seed = seed
        self._episodes: Counter[str] = Counter()

    def draws(self, task: str) -> random.Random:
        number = self._episodes[task]
        self._episodes[task] += 1
        return random.Random(f"{self._seed}/{task}/{number}")

    async def acquire(self) -> Env:
        return InjectedEnv(self, await self.inner.acquire())

    def release(self, env: Env, *, whole: bool) -> Coroutine[Any, Any, None] | None:
        assert isinstance(env, InjectedEnv)
        env.account(whole)
        if self.rounds is not None:
            self.rounds.leave()
        return self.inner.release(env.inner, whole=whole)

    async def run(self) -> None:
        await self.inner.run()


class InjectedEnv(Env):
    """One episode."""

    def __init__(self, source: Injected, inner: Env) -> None:
        self.inner = inner
        self._source = source
        self._turn = 0
        self._fails_at = -1

    async def reset(self, task: Task) -> Observation | str:
        source = self._source
        faults, rng = source.faults, source.draws(task.id)
        self._turns = min(source.max_turns, max(1, round(source.turns.sample(rng))))
        fate, at, slow = rng.random(), rng.randrange(self._turns), rng.random() < faults.slow
        hangs, crashes = fate < faults.hang, faults.hang <= fate < faults.hang + faults.crash
        self._fails_at = at if hangs or crashes else -1
        self._factor = faults.slow_factor if slow and self._fails_at < 0 else 1.0
        self._latencies = [self._factor * source.latency.sample(rng) for _ in range(self._turns)]
        data = {"hang_at": at if hangs else -1, "crash_at": at if crashes else -1, "seed": rng.getrandbits(32)}
        observation = await self.inner.reset(msgspec.structs.replace(task, data={**task.data, **data}))
        if source.rounds is not None:
            await source.rounds.meet()
        return observation

    async def step(self, action: Action) -> Step:
        rounds, turn = self._source.rounds, self._turn
        self._turn += 1
        if rounds is not None:
            await rounds.meet()
        await asyncio.sleep(self._latencies[turn])
        step = await self.inner.step(action)
        if rounds is not None:
            await rounds.meet()
        return msgspec.structs.replace(step, done=step.done or self._turn == self._turns)

    def account(self, whole: bool) -> None:
        played = self._source.played
        played.episodes += 1
        if whole:
            played.whole += self._turn
        elif self._turn > self._fails_at >= 0:
            played.faulty += 1
            played.failed += self._turn
        else:
            played.cut += self._turn


class Cheap(Env):
    """The least environment: a text for a text."""

    async def reset(self, task: Task) -> str:
        self._hang_at, self._crash_at = task.data["hang_at"], task.data["crash_at"]
        return f"{task.id} ".ljust(64, ".")

    async def step(self, action: Action) -> Step:
        if action.turn == self._hang_at:
            await asyncio.get_running_loop().create_future()
        if action.turn == self._crash_at:
            raise RuntimeError("injected crash")
        return Step(observation="." * 32, reward=float(action.turn % 2))
