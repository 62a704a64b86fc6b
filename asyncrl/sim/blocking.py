"""The simulated Blocking port: the call runs inline, after a drawn delay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class SimBlocking:
    """Delays are exponential with mean ``mean_s``."""

    def __init__(self, *, rng: random.Random, mean_s: float = 0.01) -> None:
        self._rng = rng
        self._mean_s = mean_s

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        await asyncio.sleep(self._rng.expovariate(1 / self._mean_s))
        return fn(*args)

    async def close(self) -> None:
        await asyncio.sleep(0)
