"""An Observer that keeps everything in order of happening: what determinism is checked on, and what tests look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.core.types import Batch, Trajectory
from asyncrl.ports import StepMetrics


class TraceRecorder:
    """``events`` are plain tuples, equal between two runs of one seed; none costs work or memory a token. With
    ``keep_batches`` what was trained is kept as well, tokens and all."""

    def __init__(self, *, keep_batches: bool = False) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.batches: list[Batch] = []
        self._keep_batches = keep_batches

    def step(self, metrics: StepMetrics) -> None:
        batch = metrics.batch
        if self._keep_batches:
            self.batches.append(batch)
        groups = [(g.id, g.v_traj, tuple(g.rewards)) for g in batch.groups]
        self.events.append(("step", metrics.at, batch.step, groups))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        t = trajectory
        self.events.append(("trajectory", t.id, state, len(t.tokens), t.turns, t.reward, t.v_traj, t.versions[-1:]))

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        self.events.append(("server", name, at, running, version, up))

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] | None = None) -> None:
        self.events.append(("span", track, name, start, end, tuple(sorted((args or {}).items()))))

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] | None = None) -> None:
        self.events.append(("instant", track, name, at, tuple(sorted((args or {}).items()))))

    def counter(self, name: str, at: float, value: float) -> None:
        self.events.append(("counter", name, at, value))

    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = {}) -> None:
        self.events.append(("eval", version, accuracy, n))
