"""Environments with one fault each, and some with none, for ``asyncrl env check``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from typing import Any, ClassVar

import asyncrl
from asyncrl import Action, Cost, Observation, Step, Task

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


class Sound(asyncrl.Env):
    """Three turns, whatever is said."""

    example_actions = ("go north", "take lamp")
    deterministic = True

    async def reset(self, task: Task) -> Any:
        self.turn = 0
        return Observation(messages=[{"role": "user", "content": "You are in a room."}], tools=[TOOL])

    async def step(self, action: Action) -> Any:
        await asyncio.sleep(0.001)
        self.turn += 1
        return Step(observation=f"turn {self.turn}", reward=0.5, done=self.turn == 3)


class SoundSync(asyncrl.SyncEnv):
    example_actions: ClassVar[list[str]] = ["go north"]
    cost = Cost(per_process=2)

    def reset(self, task: Task) -> Any:
        self.turn = 0
        return "?"

    def step(self, action: Action) -> Any:
        self.turn += 1
        return Step(observation="?", done=self.turn == 3)


class Fragile(Sound):
    async def step(self, action: Action) -> Any:
        return Step(reward=float(action.text), done=True)


class Blocks(Sound):
    async def step(self, action: Action) -> Any:
        if self.turn == 0:
            time.sleep(0.11)  # noqa: ASYNC251
        return await super().step(action)


class Hangs(Sound):
    async def step(self, action: Action) -> Any:
        await asyncio.get_running_loop().create_future()


class Spins(Sound):
    async def step(self, action: Action) -> Any:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251


class Endless(Sound):
    async def step(self, action: Action) -> Any:
        return Step(observation="more")


class Infinite(Sound):
    async def step(self, action: Action) -> Any:
        return Step(reward=float("nan"), done=True)


class Odd(Sound):
    async def step(self, action: Action) -> Any:
        return "an answer"


class Mute(Sound):
    async def reset(self, task: Task) -> Any:
        return ""


class Roles(Sound):
    async def reset(self, task: Task) -> Any:
        self.turn = 0
        return Observation(messages=[{"role": "human", "content": "hello"}], tools=[{"name": "look"}])


class Draws(Sound):
    async def reset(self, task: Task) -> Any:
        await super().reset(task)
        return str(random.random())


class Leaks(Sound):
    async def reset(self, task: Task) -> Any:
        self.file, _ = tempfile.mkstemp()
        return await super().reset(task)


class Tidy(Leaks):
    async def close(self) -> None:
        os.close(self.file)
        for name in os.listdir(tempfile.gettempdir()):
            os.unlink(os.path.join(tempfile.gettempdir(), name))


class Together(Sound):
    """The turn is the class's."""

    count = 0

    async def reset(self, task: Task) -> Any:
        type(self).count = 0
        return "?"

    async def step(self, action: Action) -> Any:
        type(self).count += 1
        return Step(observation=f"turn {self.count}", done=self.count == 6)


class Stubborn(Sound):
    async def step(self, action: Action) -> Any:
        try:
            await asyncio.sleep(0.02)
            return await super().step(action)
        except asyncio.CancelledError:
            raise RuntimeError("clean-up failed") from None


class NeedsRows(Sound):
    async def reset(self, task: Task) -> Any:
        return task.data["question"]


class Mistyped(Sound):
    """Each episode gives another thing of a wrong type."""

    episodes = 0
    observations: Any = (None, Observation(messages=5), Observation(text=5), Observation(text="?", tools="x"))

    async def reset(self, task: Task) -> Any:
        Mistyped.episodes += 1
        return self.observations[Mistyped.episodes % 4]


class Untyped(Sound):
    async def step(self, action: Action) -> Any:
        return Step(observation="?", reward="high", done=True, metrics=None)  # type: ignore[arg-type]


class Cancels(Sound):
    async def reset(self, task: Task) -> Any:
        raise asyncio.CancelledError


class Deaf(SoundSync):
    """In a worker, it does not let itself be interrupted."""

    cost = Cost()

    def step(self, action: Action) -> Step:
        ends = time.monotonic() + (2 if callable(signal.getsignal(signal.SIGUSR1)) else 0)
        while time.monotonic() < ends:
            with contextlib.suppress(BaseException):
                time.sleep(0.01)
        return Step(done=True)


class Unsendable(SoundSync):
    def reset(self, task: Task) -> Any:
        super().reset(task)
        return Observation(messages=[{"role": "user", "content": "?", "extra": object()}])


def sound(task: Task, response: Action) -> float:
    return float(response.text == "yes")


def fragile(task: Task, response: Action) -> float:
    return 1 / len(response.text)


async def slow(task: Task, response: Action) -> float:
    if response.text == "yes":
        time.sleep(0.11)  # noqa: ASYNC251
    return 0.0


async def drives(task: Task, agent: Any) -> float:
    return 0.0
