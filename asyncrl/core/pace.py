"""How long a decode step may take: so long that the longest responses of a batch are in time for it.

A group that starts on version v is due at step v + η. What there is between the moment when v could be pulled and the
moment when that step's batch is complete, the longest response of the batch may use, one decode step a token. Servers
that are slower hold up the batch by it; servers that are much faster decode few sequences at a time, and each step's
fixed cost is shared by few. So this is the load up to which groups should start. (If each batch's longest response
decodes as fast as all others do, a step of s seconds makes a period of P = W / (1 − k4/s) for W seconds of work in
sequences, and s ≤ ((η + 1)·P − the time of training) / its tokens.)

It regulates itself: where servers are too slow for the longest responses, the time that these are given grows, and so
does the load that is let in.
"""

from __future__ import annotations

import math
from collections import deque


class Pace:
    """``memory``: the number of batches of which means are taken."""

    def __init__(self, memory: int = 3) -> None:
        self._since: dict[int, float] = {}
        self._windows: deque[float] = deque(maxlen=memory)
        self._longest: deque[int] = deque(maxlen=memory)

    def available(self, version: int, at: float) -> None:
        """From this moment on servers can pull ``version``. That of the first one counts for nothing: all starts with
        it."""
        self._since.setdefault(version, at if self._since else -math.inf)

    def taken(self, version: int, longest: int, at: float) -> None:
        """At this moment the batch is complete whose oldest groups, which could not have come later, started on
        ``version``. Its longest response has so many tokens."""
        window = at - self._since.get(version, -math.inf)
        self._since = {v: since for v, since in self._since.items() if v >= version}
        if window < math.inf and longest:
            self._windows.append(window)
            self._longest.append(longest)

    @property
    def seconds(self) -> float:
        """Of a step, at most; infinite as long as nothing is known."""
        return sum(self._windows) / sum(self._longest) if self._windows else math.inf
