"""Simulated environments: latencies, turns and outcomes by the recipe's ``[sim.env]``.

The i-th episode of a task is a function of (seed, task, i): its latencies, its turns, whether and where it breaks, and
whether it ends well. Nothing else that runs has a part in it. What an episode brings is independent of its responses;
one that the runtime cuts short, because it grew too long, brings nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from asyncrl.config import EnvModel
from asyncrl.env import Action, Env, Step, Task
from asyncrl.sim.tasks import SimTasks


class SimEnvs:
    """Makes the environments of one run. ``open`` counts those that were made and not closed."""

    def __init__(self, model: EnvModel, tasks: SimTasks, *, seed: int, max_turns: int) -> None:
        self.model = model
        self.tasks = tasks
        self.open = 0
        self.storm = 1.0
        """Fault: waits that begin now take so many times as long."""
        self._seed = seed
        self._max_turns = max_turns
        self._episodes: Counter[str] = Counter()

    def make(self) -> Env:
        self.open += 1
        return SimEnv(self)

    def episode(self, name: str) -> random.Random:
        """The draws of the next episode of a task."""
        number = self._episodes[name]
        self._episodes[name] += 1
        return random.Random(f"{self._seed}/env/{name}/{number}")

    def turns(self, rng: random.Random) -> int:
        if self.model.turns is None:
            return self._max_turns
        return min(self._max_turns, max(1, round(self.model.turns.sample(rng))))


class SimEnv(Env):
    """One episode. The reward, 1 or 0, comes with the last turn."""

    _rng: random.Random
    _turns: int
    _solved: bool

    def __init__(self, world: SimEnvs) -> None:
        self._world = world
        self._model = world.model

    async def reset(self, task: Task) -> str:
        traits = self._world.tasks.traits(task.id)
        self._rng = rng = self._world.episode(task.id)
        self._turns = self._world.turns(rng)
        self._solved = rng.random() < traits.success
        await self._wait(self._model.reset.sample(rng))
        return traits.prompt

    async def step(self, action: Action) -> Step:
        model, rng = self._model, self._rng
        seconds = model.step.sample(rng)
        tokens = max(1, round(model.observation_tokens.sample(rng)))
        crashes, hangs, is_slow = (rng.random() < share for share in (model.crash, model.hang, model.slow))
        if hangs:
            await asyncio.get_running_loop().create_future()
        await self._wait(seconds * model.slow_factor if is_slow else seconds)
        if crashes:
            raise RuntimeError("simulated crash of the environment")
        done = action.turn + 1 >= self._turns
        return Step(observation="" if done else "." * tokens, reward=float(done and self._solved), done=done)

    async def close(self) -> None:
        self._world.open -= 1

    async def _wait(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds * self._world.storm)
