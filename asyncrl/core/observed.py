"""The staleness that a run should have, from what is seen of it: throughputs, concurrency and tail of its lengths.

This is how the staleness paper holds its formulas against real runs. The display and ``asyncrl plan RUN`` use it, where
core/planning.py foretells the same numbers before a run.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.core.theory.runtime import natural_staleness
from asyncrl.core.theory.staleness import mean_staleness
from asyncrl.core.types import Record

Control = Literal["inflight_cap", "queue_drop", "queue_max"]


class Observed(Record, frozen=True, kw_only=True):
    """What a stretch of a run was like: its measured inputs of the formulas, as the staleness paper takes them from its
    runs."""

    episodes: float
    """Mean number in progress: the paper's concurrency C."""
    tailness: float
    """M_tail of the groups that were trained."""
    v_r: float
    """Generated tokens a second while servers are busy."""
    v_t: float
    """Generated tokens of the batches a second of training and updating."""
    kept: float = 1.0
    """Share of finished trajectories that pass the filter."""

    @property
    def rho(self) -> float:
        return self.kept * self.v_r / self.v_t


def admission_limits(s: Observed, *, slots: int) -> bool:
    """Were some of ``slots`` episodes empty? Nothing but the staleness control keeps them so."""
    return s.episodes < 0.95 * slots


def expected_staleness(s: Observed, *, control: Control, bound: float, queue: float, batch: int, slots: int) -> float:
    """Mean staleness of ``batch`` trajectories a step, with ``slots`` that could be in progress.

    Under the in-flight cap nothing but the cap keeps slots empty: where some are, admission is exhausted, and the mean
    is α (core/theory/runtime.py). ``queue_max`` is taken as the natural staleness, at most its bound: too high where it
    drops much.
    """
    begun = batch / s.kept
    match control:
        case "queue_drop":
            parts = mean_staleness(concurrency=s.episodes, batch=begun, tailness=s.tailness, rho=s.rho, q=queue)
            return parts.total
        case "inflight_cap" if s.rho >= 1.0 or admission_limits(s, slots=slots):
            return bound
    return min(bound, natural_staleness(concurrency=s.episodes, batch=begun, tailness=s.tailness, rho=s.rho))
