"""An Observer that keeps everything in order of happening: what determinism and invariants are checked on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.core.types import Trajectory
from asyncrl.ports import StepMetrics


class TraceRecorder:
    """``events`` are plain tuples, equal between two runs of one seed."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        groups = [(g.id, g.v_traj, tuple(g.rewards)) for g in metrics.batch.groups]
        self.events.append(("step", metrics.at, metrics.batch.step, groups))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        self.events.append(("trajectory", trajectory.id, state, len(trajectory.tokens), tuple(trajectory.versions)))

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        self.events.append(("server", name, at, running, version, up))

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] | None = None) -> None:
        self.events.append(("span", track, name, start, end, tuple(sorted((args or {}).items()))))

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] | None = None) -> None:
        self.events.append(("instant", track, name, at, tuple(sorted((args or {}).items()))))

    def counter(self, name: str, at: float, value: float) -> None:
        self.events.append(("counter", name, at, value))

    def eval(self, version: int, accuracy: float, n: int) -> None:
        self.events.append(("eval", version, accuracy, n))
