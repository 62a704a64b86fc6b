"""BudgetKeeper: holds the mean staleness of a run on its target (core/staleness/adaptive.py says how).

It stands between the runtime and the run's observer, counts what passes, and moves the bound and the slots in use at
the end of every ``staleness.adaptive.every_steps``-th step. It waits for nothing: the step wakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config import Recipe
from asyncrl.core.journal import Noted
from asyncrl.core.staleness.adaptive import Budget, Setting, propose
from asyncrl.core.types import Trajectory
from asyncrl.observe.tally import NO_ARGS, Tally
from asyncrl.ports import NoStore, Observer, RunStore, StepMetrics


class BudgetKeeper(Observer):
    """``set_bound`` is the control's. Every move is told to ``inner``: the counters ``staleness/bound`` and
    ``rollout/slots``, and an instant on the track ``budget`` whose name is the reason."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        inner: Observer,
        clock: Callable[[], float],
        set_bound: Callable[[float], None],
        store: RunStore | None = None,
        notes: Mapping[str, float | str] = NO_ARGS,
    ) -> None:
        self._store = store or NoStore()
        adaptive, rollout = recipe.staleness.adaptive, recipe.rollout
        self._inner = inner
        self._tally = Tally(recipe, clock)
        self._set_bound = set_bound
        self.keep_idle: Callable[[int], None] = lambda slots: None
        """The SampleBuffer's."""
        self._every = adaptive.every_steps
        episodes_a_slot = 1 if rollout.expand_num_return_sequences else rollout.group_size
        self._budget = Budget(
            target=adaptive.target,
            bound_min=adaptive.bound_min,
            bound_max=adaptive.bound_max,
            envs_min=1,
            envs_max=rollout.num_envs,
            whole=recipe.staleness.control == "buffers",
            batch=recipe.batch_trajectories,
            episodes_a_slot=episodes_a_slot,
        )
        self.setting = Setting(
            bound=min(max(float(notes.get("bound", recipe.staleness.bound)), adaptive.bound_min), adaptive.bound_max),
            num_envs=min(rollout.num_envs, int(notes.get("slots", rollout.num_envs))),
        )
        self._since = self._tally.newest
        self._staleness: list[int] = []

    def begin(self, keep_idle: Callable[[int], None]) -> None:
        """With the bound and the slots that are in use now."""
        self._set_bound(self.setting.bound)
        self.keep_idle = keep_idle
        keep_idle(self._budget.envs_max - self.setting.num_envs)

    def step(self, metrics: StepMetrics) -> None:
        self._tally.step(metrics)
        batch = metrics.batch
        self._staleness += [batch.step - t.v_traj for t in batch.trajectories]
        if (batch.step + 1) % self._every == 0:
            self._move(metrics.at)
        self._inner.step(metrics)

    def _move(self, at: float) -> None:
        first, last = self._since, self._tally.newest
        mean = sum(self._staleness) / len(self._staleness)
        self._since = last
        self._staleness.clear()
        if (seen := self._tally.observed(first, last)) is None:
            return
        self.setting = propose(self._budget, seen, mean, self.setting)
        self._set_bound(self.setting.bound)
        self.keep_idle(self._budget.envs_max - self.setting.num_envs)
        self.counter("staleness/bound", at, self.setting.bound)
        self.counter("rollout/slots", at, self.setting.num_envs)
        self._inner.instant("budget", self.setting.reason, at)
        self._store.put(Noted(key="bound", value=self.setting.bound))
        self._store.put(Noted(key="slots", value=self.setting.num_envs))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        self._tally.trajectory(trajectory, state)
        self._inner.trajectory(trajectory, state)

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        self._tally.server(name, at, running, version, up)
        self._inner.server(name, at, running, version, up)

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        self._tally.span(track, name, start, end, args)
        self._inner.span(track, name, start, end, args)

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        self._inner.instant(track, name, at, args)

    def counter(self, name: str, at: float, value: float) -> None:
        self._tally.counter(name, at, value)
        self._inner.counter(name, at, value)

    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = NO_ARGS) -> None:
        self._inner.eval(version, accuracy, n, details)
