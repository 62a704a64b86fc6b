"""Scorer: a user's reward function, bounded in number and time, off the loop.

A plain function runs on a worker through the Blocking port; an ``async def`` runs on the loop, and so does an awaitable
that a plain callable returns. Whatever it raises, an answer that is no finite number, or a missed deadline is an
``EpisodeFailed``: data, not the end of the run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.core.types import Task
from asyncrl.env import Action
from asyncrl.ports import Blocking
from asyncrl.runtime.user_code import EpisodeFailed, in_own_task, user_call, utf8

RewardFunction = Callable[[Task, Action], "float | Awaitable[float]"]


class Scorer:
    """``limit`` scores run at once; further ones wait their turn (their deadline starts when they run)."""

    def __init__(self, function: RewardFunction, *, blocking: Blocking, timeout_s: float, limit: int = 64) -> None:
        self._function = function
        self._blocking = blocking
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(limit)
        self._is_async = inspect.iscoroutinefunction(function)

    async def score(self, task: Task, action: Action) -> float:
        async with self._slots, user_call("reward", self.timeout_s):
            answer: Any
            if self._is_async:
                answer = self._function(task, action)
            else:
                answer = await self._blocking.run(self._function, task, action)
            if inspect.isawaitable(answer):
                answer = await in_own_task(answer)
            return checked_reward("reward", answer)


def checked_reward(where: str, value: Any) -> float:
    """``value`` as a finite float, or ``EpisodeFailed``."""
    try:
        reward = float(value)
    except Exception:  # a type of the user's, with a conversion of its own
        shown = " ".join(repr(value).split())
        raise EpisodeFailed(where, f"gave {shown:.80} as the reward; it must be a number") from None
    if not math.isfinite(reward):
        raise EpisodeFailed(where, f"gave {reward} as the reward; it must be finite")
    return reward


def checked_metrics(where: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` with finite values, or ``EpisodeFailed``. Raises what they raise themselves."""
    return {utf8(str(name)): checked_reward(where, value) for name, value in metrics.items()}
