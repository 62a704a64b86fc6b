"""Staleness control: who may start, and who is trained when (DESIGN.md §6)."""

from __future__ import annotations

import math

from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.staleness.inherent import InherentStaleness
from asyncrl.core.staleness.queue import QueueDrop, QueueMax
from asyncrl.core.staleness.window import SlidingWindow


def make_control(
    name: str, *, batch: int, bound: float, queue: float, redundant: int = 0, reuse: int = 1, step: int = 0
) -> StalenessControl:
    """The control that the recipe's ``staleness.control`` names, for ``batch`` groups a step from ``step`` on.

    ``bound`` is α of ``inflight_cap`` and the largest staleness of ``buffers``, ``window`` and ``queue_max``; ``queue``
    the capacity of ``queue_drop`` and ``inherent`` in batches; ``redundant`` the groups that ``inflight_cap`` runs
    beyond the need, or the entries that ``buffers`` adds to each buffer (a window has none; with a queue, the slots
    decide how many run); ``reuse`` how often ``inflight_cap`` may reckon with a group. Raises ``ValueError`` for
    impossible numbers.
    """
    capacity = math.floor(queue * batch + 1e-9)  # a decimal factor is meant exactly: 1.1 × 10 groups are 11
    match name:
        case "inflight_cap":
            return InflightCap(batch=batch, alpha=bound, redundant=redundant, reuse=reuse, step=step)
        case "buffers":
            return StalenessBuffers(batch=batch, bound=math.floor(bound), redundant=redundant, step=step)
        case "window":
            return SlidingWindow(batch=batch, bound=math.floor(bound), step=step)
        case "queue_drop":
            return QueueDrop(batch=batch, capacity=capacity, step=step)
        case "inherent":
            return InherentStaleness(batch=batch, capacity=capacity, step=step)
        case "queue_max":
            return QueueMax(batch=batch, bound=math.floor(bound), step=step)
        case _:
            raise ValueError(f"unknown staleness control {name!r}")
