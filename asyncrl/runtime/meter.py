"""Meter: what each server takes for its work, as seen from here, for the coordinator's cost model (StaleFlow §5.3).

An observation is a stretch in which a server was never idle, took no weights and did at least ``steps`` decode steps:
its mean load, what it generated and prefilled, and the seconds. It is made of the proxy's books at the end of each of
the coordinator's rounds, and there is a round whenever a request comes or goes. What a round has just routed runs, and
is prefilled, from then on. The model is one for all servers; by how much each takes longer is in its books.
"""

from __future__ import annotations

from asyncrl.core.cost_model import CostModel
from asyncrl.core.estimator import Estimator
from asyncrl.runtime.instance import Instance

FORGETS = 0.2
"""Weight of the newest observation in a server's slowness; an idle one loses as much of it in the same time."""


class _Stretch:
    """Of one server: since when, the load since the last look, and its sums over time."""

    __slots__ = ("at", "generated", "given", "kv", "kv_s", "n", "n_s", "prefilled", "since")

    def __init__(self, instance: Instance, now: float, prefilled: int) -> None:
        self.since = self.at = now
        self.generated = instance.generated
        self.prefilled = prefilled
        self.n_s = self.kv_s = 0.0
        self.look(instance, now)

    def look(self, instance: Instance, now: float) -> None:
        self.at = now
        self.n = instance.running - instance.queued
        self.kv = min(instance.tokens, instance.max_tokens)
        self.given = instance.prefilled


class Meter:
    def __init__(self, start: CostModel, *, steps: int) -> None:
        self._estimator = Estimator(start)
        self._steps = steps
        self._stretches: dict[str, _Stretch] = {}

    def look(self, instance: Instance, now: float) -> bool:
        """The server's books as they are now; True if an observation is complete, so that ``cost`` is another."""
        stretch = self._stretches.get(instance.name)
        prefilled = stretch.given if stretch is not None else 0
        if stretch is not None and stretch.n <= 0:  # else one without work would be thought slow for ever
            observations = (now - stretch.at) / (self._steps * (self.cost.step(1, 0) or 1.0))
            instance.slowness = 1.0 + (instance.slowness - 1.0) * (1.0 - FORGETS) ** observations
        if stretch is None or stretch.n <= 0 or instance.pulling or not instance.up:
            self._stretches[instance.name] = _Stretch(instance, now, prefilled)
            return False
        stretch.n_s += stretch.n * (now - stretch.at)
        stretch.kv_s += stretch.kv * (now - stretch.at)
        stretch.look(instance, now)
        seconds, tokens = now - stretch.since, instance.generated - stretch.generated
        if not stretch.n_s or tokens * seconds < self._steps * stretch.n_s:
            return False
        slowness = self._estimator.add(
            n=stretch.n_s / seconds,
            kv=stretch.kv_s / seconds,
            tokens=tokens,
            prefill=prefilled - stretch.prefilled,
            seconds=seconds,
        )
        instance.slowness += FORGETS * (slowness - instance.slowness)
        self._stretches[instance.name] = _Stretch(instance, now, prefilled)
        return True

    @property
    def cost(self) -> CostModel:
        return self._estimator.cost

    @property
    def error(self) -> float:
        """Mean relative error of what the model foretold."""
        return self._estimator.error or 0.0
