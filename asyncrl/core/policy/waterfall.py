"""Routing by marginal throughput over versions (StaleFlow §5.3, algorithms 2 and 3).

Requests come in the order of the multi-level queue. Each goes to the server of the *oldest* version (old ones have
fewer that they may serve) on which it adds at least μ times what it would on the best of all versions; of these to
that where it adds most. Where none has room, it and all behind it wait; and the first of a group waits as long as
servers are too busy for a group that starts now to be in time (core/pace.py).

What a request adds is Eq. 3, in another unit. By tokens a second, a token of a long response counts no more than one
of a short one, though it costs ten times as much: so every busy server loses by a long response, and what holds up a
batch waits first of all. Here the unit is the share of time that goes into sequences (``CostModel.use``), and what is
left is what they share, whatever their lengths. And the paper withholds all requests that add less than μ times
ΔT_ideal, an idle server's gain. How far that is from the best load depends on lengths, batch and bound, and it holds up
what is due next as well as what has not begun; hence the pace.

What it adds counts only if it decodes at once, so a server without room, or with requests that wait inside it, is none.
Prefill, which the paper leaves out, is spread over the tokens that a request generates on average: each step of the
server takes k5 · prefill / mean_new_tokens longer. On the server that holds its prefix that is less, so a conversation
stays where it is as long as the load there does not cost more than its prefill would elsewhere.

**Nothing waits for ever.** A server that runs nothing takes the first request that it may serve. So where the first
request waits, every server that may serve it is busy, and the end of what it runs brings another plan. That some server
may serve it is the part of synchronization (``selective``) and of the staleness control (§4, no deadlock).

A request that is routed costs a few vector operations over the servers of each version that it may go to, so the order
of a microsecond for a hundred servers. (A heap would have to be ordered anew for each: which of two servers gains more
depends on the length of the request.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Admission, Load
from asyncrl.core.policy.routing import RequestView

Array = npt.NDArray[np.float64]


class _Servers:
    """Servers, by version. What a request adds on each is reckoned for all at once. ``pulls``: each of them would
    pull first, and then have to prefill all that it runs again; this share of it is the request's."""

    __slots__ = (
        "_cost",
        "_gains",
        "_homes",
        "_kv",
        "_loads",
        "_longest",
        "_lost",
        "_matmul",
        "_max_tokens",
        "_more",
        "_pulls",
        "_rows",
        "_slowness",
        "_versions",
        "_work",
    )

    def __init__(self, cost: CostModel, loads: Iterable[Load], *, pulls: float = 0.0) -> None:
        self._cost = cost
        self._pulls = pulls
        self._loads = sorted((load for load in loads if not load.waiting), key=lambda load: (load.version, load.index))
        self._rows = {load: row for row, load in enumerate(self._loads)}
        self._homes = {(load.name, load.version): row for row, load in enumerate(self._loads)}
        self._versions: dict[int, list[int]] = {}
        """First row of each, and the one after its last."""
        for row, load in enumerate(self._loads):
            self._versions.setdefault(load.version, [row, row])[1] = row + 1
        size = len(self._loads)
        self._kv, self._more, self._matmul, self._lost, self._work, self._gains = (np.empty(size) for _ in range(6))
        self._slowness = np.array([load.slowness for load in self._loads])
        self._max_tokens = np.array([load.max_tokens for load in self._loads], dtype=float)
        self._longest = math.inf
        """Of the requests that fit on every server."""
        for load in self._loads:
            self.update(load)

    def update(self, load: Load) -> None:
        """Its load has changed, or it was closed."""
        cost, n, row = self._cost, load.running, self._rows[load]
        self._kv[row] = load.kv_tokens
        self._more[row] = cost.k3 * (n + 1)
        self._matmul[row] = max(cost.k2, cost.k3 * (n + 1))
        full = n and n + 1 > load.max_running
        self._lost[row] = math.inf if full else cost.use(n, load.kv_tokens)
        self._longest = min(self._longest, load.max_tokens - load.kv_tokens)

    def close(self, load: Load) -> None:
        """It takes no requests."""
        self._lost[self._rows[load]] = math.inf

    def best(self, request: RequestView, spread: float, admission: Admission) -> list[tuple[float, Load]]:
        """Of each version that may serve the request the largest gain, and the server that has it, the first of the
        fleet if several do. ``spread`` is the part of its prefill that each step has."""
        rows = [rows for version, rows in self._versions.items() if admission.routable(request, version)]
        if not rows:
            return []
        gains = self._gains_of_one(request, spread) if request.slots == 1 else self._gains_of_many(request, spread)
        found = []
        for first, end in rows:
            row = first + int(gains[first:end].argmax())
            gain = float(gains[row])
            if gain > -math.inf:
                found.append((gain, self._loads[row]))
        return found

    def _gains_of_one(self, request: RequestView, spread: float) -> Array:
        """``gain_of`` for one sequence, operation by operation, so that equal servers have equal gains."""
        cost, gains, tokens = self._cost, self._gains, request.tokens
        kv = np.add(self._kv, tokens, out=gains)
        too_long = kv > self._max_tokens if tokens > self._longest else None
        prefill: float | Array = cost.k5 * (tokens * spread)
        if self._pulls:
            prefill = cost.k5 * spread * ((kv - tokens) * self._pulls + tokens)
        gains *= cost.k1
        work = np.add(gains, self._more, out=self._work)
        gains += self._matmul
        gains += cost.k4
        gains += prefill
        np.divide(work, gains, out=gains)
        gains -= self._lost
        gains /= self._slowness
        if too_long is not None:
            gains[too_long] = -math.inf
        home = None if request.home is None or self._pulls else self._homes.get((request.home, request.after))
        if home is not None and gains[home] > -math.inf:
            gains[home] = gain_of(self._cost, request, self._loads[home], spread)
        return gains

    def _gains_of_many(self, request: RequestView, spread: float) -> Array:
        for row, load in enumerate(self._loads):
            gain = gain_of(self._cost, request, load, spread, pulls=self._pulls)
            self._gains[row] = -math.inf if gain is None or self._lost[row] == math.inf else gain
        return self._gains


def gain_of(cost: CostModel, request: RequestView, load: Load, spread: float, *, pulls: float = 0.0) -> float | None:
    """What the request adds on the server (Eq. 3); None if it would wait there. ``pulls``: as in ``_Servers``."""
    if (
        load.waiting
        or load.kv_tokens + request.tokens > load.max_tokens
        or (load.running and load.running + request.slots > load.max_running)
    ):
        return None
    has = load.name == request.home and load.version == request.after and not pulls
    held = request.prefix if has else 0
    prefill = request.tokens - held + load.kv_tokens * pulls
    return cost.gain(load.running, load.kv_tokens, request.tokens, request.slots, prefill * spread) / load.slowness


class Waterfall:
    """Algorithm 3 over the servers that the plan may command. What a server that pulls prefills again is counted as
    shared by the ``waiting`` requests that go to those ``offered``. Raises ``ValueError`` unless 0 ≤ μ ≤ 1."""

    passes_over = False

    def __init__(
        self,
        loads: Sequence[Load],
        admission: Admission,
        offered: Sequence[Load] = (),
        waiting: int = 1,
        *,
        cost: CostModel,
        mu: float,
        mean_new_tokens: float,
        pace: float = math.inf,
    ) -> None:
        if not 0.0 <= mu <= 1.0:
            raise ValueError(f"mu is {mu}; give a share of the best server's gain, from 0 to 1")
        self._admission = admission
        self._cost = cost
        self._mu = mu
        self._spread = 1.0 / mean_new_tokens
        self._pace = pace
        ready = [load for load in loads if load.up]
        self._servers = _Servers(cost, [*ready, *offered])
        self._offered = _Servers(cost, offered, pulls=min(1.0, len(offered) / waiting))
        for load in offered:
            if not load.waiting:
                self._servers.close(load)

    def choose(self, request: RequestView) -> Load | None:
        found = self._servers.best(request, self._spread, self._admission)
        if not found:
            return None
        most = max(gain for gain, _ in found)
        enough = most - (1.0 - self._mu) * abs(most)  # it is negative where prefill costs more than there is to gain
        return next((load for gain, load in found if gain >= enough and self._in_time(request, load)), None)

    def _in_time(self, request: RequestView, load: Load) -> bool:
        """A group starts only where its longest response would be in time."""
        if not load.running or self._admission.v_traj(request) is not None:
            return True
        step = self._cost.step(load.running + request.slots, load.kv_tokens + request.tokens)
        return load.slowness * step <= self._pace

    def placed(self, request: RequestView, load: Load) -> None:
        self._servers.update(load)

    def pull(self, request: RequestView, chosen: Load | None) -> Load | None:
        best = self._offered.best(request, self._spread, self._admission)
        if not best:
            return None
        [(gain, load)] = best
        if (chosen is not None and chosen.version < load.version) or not self._in_time(request, load):
            return None
        if chosen is not None:
            there = gain_of(self._cost, request, chosen, self._spread)
            assert there is not None, "it was chosen"
            if gain <= there:
                return None
        self._offered.close(load)
        return load
