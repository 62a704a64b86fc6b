"""Routing by marginal throughput over versions (StaleFlow §5.3, algorithms 2 and 3).

Requests come in the order of the multi-level queue. Each goes to the server of the *oldest* version (old ones have
fewer that they may serve) on which it adds at least μ times what it would on an idle one, ΔT_ideal; of these to that
where it adds most. Where none does, it and all behind it wait, so that what runs speeds up.

What a request adds is Eq. 3. It counts only what decodes at once, so a server without room, or with requests that wait
inside it, is none. Prefill, which the paper leaves out, is spread over the tokens that a request generates on average:
each step of the server takes k5 · prefill / mean_new_tokens longer. On the server that holds its prefix that is less,
so a conversation stays where it is as long as the load there does not cost more than its prefill would elsewhere.

**Nothing waits for ever.** With 0 < μ ≤ 1 (checked) a server that runs nothing takes the first request that it may
serve: the gain there is ΔT_ideal, which is reckoned without any prefix, or more. So where the first request waits,
every server that may serve it is busy, and the end of what it runs brings another plan. That some server may serve it
is the part of synchronization (``selective``) and of the staleness control (§4, no deadlock).

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
    """Servers of one version. What a request adds on each is reckoned for all at once. ``pulls``: each of them would
    pull first, and then have to prefill all that it runs again."""

    __slots__ = (
        "_cost",
        "_gains",
        "_kv",
        "_loads",
        "_longest",
        "_lost",
        "_max_tokens",
        "_names",
        "_one_more",
        "_product",
        "_pulls",
        "_rows",
    )

    def __init__(self, cost: CostModel, loads: Iterable[Load], *, pulls: bool = False) -> None:
        self._cost = cost
        self._pulls = pulls
        self._loads = [load for load in loads if not load.waiting]
        self._rows = {load.index: row for row, load in enumerate(self._loads)}
        self._names = {load.name: row for row, load in enumerate(self._loads)}
        size = len(self._loads)
        self._kv, self._one_more, self._product, self._lost, self._gains = (np.empty(size) for _ in range(5))
        self._max_tokens = np.array([load.max_tokens for load in self._loads], dtype=float)
        self._longest = math.inf
        """Of the requests that fit on every server."""
        for load in self._loads:
            self.update(load)

    def update(self, load: Load) -> None:
        """Its load has changed, or it was closed."""
        cost, n, row = self._cost, load.running, self._rows[load.index]
        self._kv[row] = load.kv_tokens
        self._one_more[row] = n + 1
        self._product[row] = max(cost.k2, cost.k3 * (n + 1))
        full = n and n + 1 > load.max_running
        self._lost[row] = math.inf if full else cost.throughput(n, load.kv_tokens)
        self._longest = min(self._longest, load.max_tokens - load.kv_tokens)

    def close(self, load: Load) -> None:
        """It takes no requests."""
        self._lost[self._rows[load.index]] = math.inf

    def best(self, request: RequestView, spread: float) -> tuple[float, Load] | None:
        """The largest gain, and the server that has it, the first of the fleet if several do; None without any.
        ``spread`` is the part of its prefill that each step has."""
        if not self._loads:
            return None
        gains = self._gains_of_one(request, spread) if request.slots == 1 else self._gains_of_many(request, spread)
        row = int(gains.argmax())
        gain = float(gains[row])
        return None if gain == -math.inf else (gain, self._loads[row])

    def _gains_of_one(self, request: RequestView, spread: float) -> Array:
        """``gain_of`` for one sequence, operation by operation, so that equal servers have equal gains."""
        cost, gains, tokens = self._cost, self._gains, request.tokens
        kv = np.add(self._kv, tokens, out=gains)
        too_long = kv > self._max_tokens if tokens > self._longest else None
        prefill = cost.k5 * (kv * spread) if self._pulls else cost.k5 * (tokens * spread)
        gains *= cost.k1
        gains += self._product
        gains += cost.k4
        gains += prefill
        np.divide(self._one_more, gains, out=gains)
        gains -= self._lost
        if too_long is not None:
            gains[too_long] = -math.inf
        home = None if request.home is None or self._pulls else self._names.get(request.home)
        if home is not None and gains[home] > -math.inf:
            gains[home] = gain_of(self._cost, request, self._loads[home], spread)
        return gains

    def _gains_of_many(self, request: RequestView, spread: float) -> Array:
        for row, load in enumerate(self._loads):
            gain = gain_of(self._cost, request, load, spread, pulls=self._pulls)
            self._gains[row] = -math.inf if gain is None or self._lost[row] == math.inf else gain
        return self._gains


def gain_of(cost: CostModel, request: RequestView, load: Load, spread: float, *, pulls: bool = False) -> float | None:
    """Tokens a second that the request adds on the server (Eq. 3); None if it would wait there."""
    if (
        load.waiting
        or load.kv_tokens + request.tokens > load.max_tokens
        or (load.running and load.running + request.slots > load.max_running)
    ):
        return None
    has = load.name == request.home and load.version == request.after and not pulls
    held = request.prefix if has else 0
    prefill = request.tokens - held + (load.kv_tokens if pulls else 0)
    return cost.gain(load.running, load.kv_tokens, request.tokens, request.slots, prefill * spread)


class Waterfall:
    """Algorithm 3 over the servers that the plan may command. Raises ``ValueError`` unless 0 < μ ≤ 1: with a larger
    one even an idle server would refuse requests, with 0 a full one would take them."""

    def __init__(
        self,
        loads: Sequence[Load],
        admission: Admission,
        offered: Sequence[Load] = (),
        *,
        cost: CostModel,
        mu: float,
        mean_new_tokens: float,
    ) -> None:
        if not 0.0 < mu <= 1.0:
            raise ValueError(f"mu is {mu}; give a share of an idle server's gain, above 0 and at most 1")
        self._admission = admission
        self._cost = cost
        self._mu = mu
        self._spread = 1.0 / mean_new_tokens
        ready = [load for load in loads if load.up]
        by_version: dict[int, list[Load]] = {}
        for load in sorted([*ready, *offered], key=lambda load: load.index) if offered else ready:
            by_version.setdefault(load.version, []).append(load)
        self._versions = {version: _Servers(cost, by_version[version]) for version in sorted(by_version)}
        self._offered = _Servers(cost, offered, pulls=True)
        for load in offered:
            if not load.waiting:
                self._versions[load.version].close(load)

    def _least(self, request: RequestView) -> float:
        """μ · ΔT_ideal."""
        return self._mu * self._cost.gain(0, 0, request.tokens, request.slots, request.tokens * self._spread)

    def choose(self, request: RequestView) -> Load | None:
        admission, least = self._admission, self._least(request)
        for version, servers in self._versions.items():
            if admission.routable(request, version):
                best = servers.best(request, self._spread)
                if best is not None and best[0] >= least:
                    return best[1]
        return None

    def placed(self, load: Load) -> None:
        self._versions[load.version].update(load)

    def pull(self, request: RequestView, chosen: Load | None) -> Load | None:
        best = self._offered.best(request, self._spread)
        if best is None:
            return None
        gain, load = best
        if (chosen is not None and chosen.version < load.version) or not self._admission.routable(
            request, load.version
        ):
            return None
        if chosen is not None:
            there = gain_of(self._cost, request, chosen, self._spread)
            assert there is not None, "it was chosen"
            pays = gain > there
        else:
            alone = gain_of(self._cost, request, load, self._spread)
            assert alone is not None, "it has room"
            pays = alone >= self._least(request)
        if not pays:
            return None
        self._offered.close(load)
        return load
