"""When servers were busy: running totals, O(1) an event, and the idle shares between two moments. Pure arithmetic.

A server is busy while it has at least one running request, and available while it is up. Over a window,

    bubble_share       = 1 − Σ busy time / Σ available time, summed over servers
    trainer_idle_share = 1 − (train time + weight-update time) / length of the window.
"""

from __future__ import annotations

from asyncrl.core.observed import Observed
from asyncrl.core.types import Record


class Segment(Record, frozen=True, kw_only=True):
    """A server was busy from ``start`` to ``end`` with weights ``version``."""

    start: float
    end: float
    version: int


class ServerTime:
    """Busy and available seconds of one server. ``version`` and ``running`` are its newest."""

    def __init__(self, at: float) -> None:
        self.running = 0
        self.version = 0
        self.up = False
        self._at = at  # _busy and _available are counted up to here
        self._busy = 0.0
        self._available = 0.0
        self._since: float | None = None  # start of the open busy segment: set exactly while running > 0

    def update(self, at: float, running: int, version: int, up: bool) -> Segment | None:
        """The server's state from ``at`` on. Returns the busy segment that this ends, if it does."""
        self._advance(at)
        ended = None
        if self._since is not None and (running == 0 or version != self.version or not up):
            ended = Segment(start=self._since, end=self._at, version=self.version)
            self._since = None
        self.running, self.version, self.up = running if up else 0, version, up
        if self.running > 0 and self._since is None:
            self._since = self._at
        return ended

    def totals(self, at: float) -> tuple[float, float]:
        """(busy, available) seconds up to ``at``."""
        self._advance(at)
        return self._busy, self._available

    def _advance(self, at: float) -> None:
        passed = max(0.0, at - self._at)
        if self.running > 0:
            self._busy += passed
        if self.up:
            self._available += passed
        self._at += passed


class Mark(Record, frozen=True, kw_only=True):
    """Totals up to a moment; two of them bound a window. ``tokens`` counts what the servers generated, ``trained`` what
    of it was trained, ``episode_s`` the seconds of the episodes that have ended."""

    at: float
    busy: float = 0.0
    available: float = 0.0
    trainer_busy: float = 0.0
    tokens: int = 0
    trained: int = 0
    episode_s: float = 0.0


def bubble_share(first: Mark, last: Mark) -> float | None:
    """Idle share of the servers' available time between two marks; None if none was available."""
    available = last.available - first.available
    return 1.0 - (last.busy - first.busy) / available if available > 0 else None


def trainer_idle_share(first: Mark, last: Mark) -> float | None:
    """Share of the window in which the trainer neither trained nor moved weights; None for an empty window."""
    length = last.at - first.at
    return max(0.0, 1.0 - (last.trainer_busy - first.trainer_busy) / length) if length > 0 else None


def tokens_per_second(first: Mark, last: Mark) -> float:
    """Rate of generation in a window; 0 for an empty one."""
    length = last.at - first.at
    return (last.tokens - first.tokens) / length if length > 0 else 0.0


def observed(first: Mark, last: Mark, *, tailness: float, kept: float) -> Observed | None:
    """What the formulas of core/planning.py need of a window; None if something of it did not happen there."""
    length, busy, trainer = last.at - first.at, last.busy - first.busy, last.trainer_busy - first.trainer_busy
    episode_s, tokens, trained = (
        last.episode_s - first.episode_s,
        last.tokens - first.tokens,
        last.trained - first.trained,
    )
    if min(length, busy, trainer, episode_s, tokens, trained) <= 0:
        return None
    return Observed(
        episodes=episode_s / length,
        tailness=tailness,
        v_r=tokens / length * (last.available - first.available) / busy,
        v_t=trained / trainer,
        kept=kept,
    )
