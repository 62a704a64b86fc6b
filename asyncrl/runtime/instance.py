"""The book entry of one inference server, as LLMProxy keeps it."""

from __future__ import annotations

import asyncio
from collections import deque

from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot
from asyncrl.ports import Engine, EngineInfo

Waiting = tuple[int, int, RequestView, "asyncio.Future[Instance]"]


class Instance:
    """The book entry of one server; what routing reads (``InstanceView``)."""

    __slots__ = (
        "down_since",
        "engine",
        "held",
        "max_running",
        "max_tokens",
        "name",
        "pinned",
        "running",
        "tokens",
        "up",
        "version",
    )

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine = engine
        self.name = engine.name
        self.version = info.version
        self.max_running = info.max_running_requests
        self.max_tokens = info.max_total_tokens
        self.running = 0
        self.tokens = 0
        self.up = True
        self.pinned = False
        """An evaluation uses it: its weights stay."""
        self.down_since = 0.0
        self.held: deque[Waiting] = deque()
        """Requests that wait for this very server: routing chose it though it had no room."""

    def snapshot(self) -> InstanceSnapshot:
        return InstanceSnapshot(
            name=self.name,
            version=self.version,
            up=self.up,
            running=self.running,
            tokens=self.tokens,
            max_running=self.max_running,
            max_tokens=self.max_tokens,
        )

    def __repr__(self) -> str:
        return f"<Instance {self.name} v{self.version} {'up' if self.up else 'down'} {self.running} running>"
