"""Environments that live on the loop: made, lent to one episode after another, closed.

Owns the idle objects of a reusable class and the places that ``limit`` allows.

    acquire()    waits for: a place    woken by: release()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from asyncrl.env import Action, Env, Observation, Step, SyncEnv, Task
from asyncrl.ports import Blocking
from asyncrl.runtime.user_code import EpisodeFailed, in_own_task, user_call
from asyncrl.shield import to_the_end


class LocalEnvs:
    """An ``EnvSource``. At most ``limit`` environments live at once; 0: any number."""

    keeps_deadlines = False

    def __init__(self, make: Callable[[], Env], *, limit: int = 0, close_timeout_s: float = 10.0) -> None:
        self._make = make
        self._places = asyncio.Semaphore(limit) if limit else None
        self._close_timeout_s = close_timeout_s
        self._idle: list[Env] = []
        self._over = False

    async def acquire(self) -> Env:
        if self._places is not None:
            await self._places.acquire()
        try:
            return self._idle.pop() if self._idle else self._make()
        except BaseException:
            self._free()
            raise

    def release(self, env: Env, *, whole: bool) -> Coroutine[Any, Any, None] | None:
        if not (whole and env.reusable and not self._over):
            if type(env).close is not Env.close:
                return self._close(env)
        else:
            self._idle.append(env)
        self._free()
        return None

    async def _close(self, env: Env) -> None:
        try:
            await in_own_task(env.close())
        finally:
            self._free()

    def _free(self) -> None:
        if self._places is not None:
            self._places.release()

    async def run(self) -> None:
        """Until cancelled; then what is idle is closed."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._over = True
            if self._idle:
                await to_the_end(self._close_idle(), self._close_timeout_s + 1.0)

    async def _close_idle(self) -> None:
        async def close(env: Env) -> None:
            with suppress(EpisodeFailed):
                async with user_call("close", self._close_timeout_s):
                    await in_own_task(env.close())

        async with asyncio.TaskGroup() as group:
            for env in self._idle:
                group.create_task(close(env))


class BlockingEnv(Env):
    """A ``SyncEnv`` through the Blocking port: in simulation, where nothing really blocks."""

    def __init__(self, env: SyncEnv, blocking: Blocking) -> None:
        self._env = env
        self._blocking = blocking

    async def reset(self, task: Task) -> Observation | str:
        return await self._blocking.run(self._env.reset, task)

    async def step(self, action: Action) -> Step:
        return await self._blocking.run(self._env.step, action)

    async def close(self) -> None:
        await self._blocking.run(self._env.close)
