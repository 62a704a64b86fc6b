"""HealthMonitor: notices servers that hang or die while nobody is waiting for them, and when they come back.

Owns what is known of each server's health. Runs inside the runtime's TaskGroup; one child task a server.

    run()    waits for: the next probe, then its answer    woken by: the clock, the server (bounded inside the adapter)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from asyncrl.ports import Engine


class HealthMonitor:
    """Probes every server each ``interval_s``; ``failures`` in a row mean that it is down, one success that it is up.

    ``on_change(engine, up)`` is called at each change, synchronously; servers are taken to be up at the start.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        interval_s: float,
        failures: int,
        on_change: Callable[[Engine, bool], None],
    ) -> None:
        if failures < 1:
            raise ValueError(f"failures must be at least 1, not {failures}")
        self._engines = engines
        self._interval_s = interval_s
        self._failures = failures
        self._on_change = on_change
        self._failed = {engine.name: 0 for engine in engines}
        """Failed probes in a row."""

    def snapshot(self) -> Mapping[str, bool]:
        """Which servers are up, by name."""
        return {name: failed < self._failures for name, failed in self._failed.items()}

    def __repr__(self) -> str:
        up = self.snapshot()
        return f"<HealthMonitor {sum(up.values())} of {len(up)} servers up>"

    async def run(self) -> None:
        """Probe until cancelled. An exception of ``on_change`` ends it."""
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            healthy = await engine.health()
            before = self._failed[engine.name]
            self._failed[engine.name] = 0 if healthy else before + 1
            if healthy and before >= self._failures:
                self._on_change(engine, True)
            elif not healthy and before + 1 == self._failures:
                self._on_change(engine, False)
