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

A plan costs O(servers · log) to set up, and for each request that it routes, in the worst case, a look at every server.
Usually few: servers of a version are sorted by a bound of what a request may add.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Admission, Load
from asyncrl.core.policy.routing import RequestView

ROUNDING = 1.0 - 1e-6
"""Of a bound: what is equal must not be passed over."""


class _Version:
    """Servers of one version with room, by falling bound: what a request of no length would add. One of more tokens
    makes a step longer by x and adds less, by (n + 1) · x / (A · (A + x)) for n sequences and a step of A seconds.
    That is least for the fewest sequences and the longest step of all, which gives the bound for x."""

    __slots__ = ("_bounds", "_changes", "_cost", "_entries", "_fewest", "_homes", "_longest")

    def __init__(self, cost: CostModel, loads: Iterable[Load]) -> None:
        self._cost = cost
        self._bounds: dict[int, float] = {}
        self._homes: dict[str, Load] = {}
        self._entries: list[tuple[float, int, float, float, Load]] = []
        """(−bound, index, max(k2, k3·(n + 1)), throughput, server)"""
        self._longest = 0.0
        for load in loads:
            self._enter(load)
        self._measure()

    def _enter(self, load: Load) -> None:
        if load.waiting or (load.running >= load.max_running and load.running):
            return
        cost, n = self._cost, load.running
        product = max(cost.k2, cost.k3 * (n + 1))
        throughput = cost.throughput(n, load.kv_tokens)
        bound = (n + 1) / (cost.k1 * load.kv_tokens + product + cost.k4) - throughput
        self._bounds[load.index] = -bound
        self._homes[load.name] = load
        insort(self._entries, (-bound, load.index, product, throughput, load))

    def remove(self, load: Load) -> None:
        bound = self._bounds.pop(load.index, None)
        if bound is not None:
            del self._homes[load.name]
            del self._entries[bisect_left(self._entries, (bound, load.index))]

    def update(self, load: Load) -> None:
        """Its load has grown."""
        self.remove(load)
        self._enter(load)
        self._longest = max(self._longest, self._cost.step(load.running + 1, load.kv_tokens))
        self._changes += 1
        if self._changes > len(self._entries):
            self._measure()

    def _measure(self) -> None:
        """The fewest sequences, with one more, and the longest step."""
        self._changes = 0
        self._fewest = min((load.running for *_, load in self._entries), default=0) + 1
        steps = (self._cost.k1 * load.kv_tokens + product for _, _, product, _, load in self._entries)
        self._longest = max(steps, default=0.0) + self._cost.k4

    def best(self, request: RequestView, spread: float, least: float) -> tuple[float, Load] | None:
        """The largest gain that is at least ``least``, and the server that has it, the first of the fleet if several
        do. ``spread`` is the part of its prefill that each step has."""
        if request.slots > 1:
            return self._best_of_many(request, spread, least)
        cost, tokens, k1, k4 = self._cost, request.tokens, self._cost.k1, self._cost.k4
        if not self._entries:
            return None
        best: Load | None = None
        home = self._homes.get(request.home) if request.home is not None else None
        if home is not None:
            gain = gain_of(cost, request, home, spread)
            if gain is not None and gain >= least:
                best, least = home, gain
        prefill = cost.k5 * (tokens * spread)
        longer = k1 * tokens + prefill
        drop = ROUNDING * self._fewest * longer / (self._longest * (self._longest + longer)) if longer else 0.0
        for bound, index, product, throughput, load in self._entries:
            if -bound - drop < least:
                break
            kv = load.kv_tokens + tokens
            if kv > load.max_tokens or load is home:
                continue
            gain = (load.running + 1) / (k1 * kv + product + k4 + prefill) - throughput
            if gain > least or (gain == least and (best is None or index < best.index)):
                best, least = load, gain
        return None if best is None else (least, best)

    def _best_of_many(self, request: RequestView, spread: float, least: float) -> tuple[float, Load] | None:
        """The bound is for one sequence more: a request of several looks at all servers."""
        best: Load | None = None
        for _, index, _, _, load in self._entries:
            gain = gain_of(self._cost, request, load, spread)
            if gain is not None and (gain > least or (gain == least and (best is None or index < best.index))):
                best, least = load, gain
        return None if best is None else (least, best)


def gain_of(cost: CostModel, request: RequestView, load: Load, spread: float) -> float | None:
    """Tokens a second that the request adds on the server (Eq. 3); None if it would wait there."""
    if (
        load.waiting
        or load.kv_tokens + request.tokens > load.max_tokens
        or (load.running and load.running + request.slots > load.max_running)
    ):
        return None
    held = request.prefix if load.name == request.home and load.version == request.after else 0
    prefill = (request.tokens - held) * spread
    return cost.gain(load.running, load.kv_tokens, request.tokens, request.slots, prefill)


class Waterfall:
    """Algorithm 3 over the servers that the plan may command. Raises ``ValueError`` unless 0 < μ ≤ 1: with a larger
    one even an idle server would refuse requests, with 0 a full one would take them."""

    def __init__(
        self, loads: Sequence[Load], admission: Admission, *, cost: CostModel, mu: float, mean_new_tokens: float
    ) -> None:
        if not 0.0 < mu <= 1.0:
            raise ValueError(f"mu is {mu}; give a share of an idle server's gain, above 0 and at most 1")
        self._admission = admission
        self._cost = cost
        self._mu = mu
        self._spread = 1.0 / mean_new_tokens
        self._versions = {
            version: _Version(cost, (load for load in loads if load.up and load.version == version))
            for version in sorted({load.version for load in loads if load.up})
        }
        self._shadows: _Version | None = None
        self._shadow_version = -1

    def _least(self, request: RequestView) -> float:
        """μ · ΔT_ideal."""
        return self._mu * self._cost.gain(0, 0, request.tokens, request.slots, request.tokens * self._spread)

    def choose(self, request: RequestView) -> Load | None:
        admission, least = self._admission, self._least(request)
        for version, servers in self._versions.items():
            if admission.routable(request, version):
                best = servers.best(request, self._spread, least)
                if best is not None:
                    return best[1]
        return None

    def placed(self, load: Load) -> None:
        self._versions[load.version].update(load)

    def shadow(self, loads: Iterable[Load]) -> None:
        shadows = list(loads)
        self._shadows = _Version(self._cost, shadows)
        self._shadow_version = shadows[0].version if shadows else -1

    def winners(self, request: RequestView, chosen: Load | None) -> list[Load]:
        version = self._shadow_version
        if self._shadows is None or (chosen is not None and chosen.version < version):
            return []
        if not self._admission.routable(request, version):
            return []
        least = self._least(request)
        if chosen is not None:
            gain = gain_of(self._cost, request, chosen, self._spread)
            assert gain is not None, "it was chosen"
            least = max(least, gain)
        found: list[Load] = []
        passed: list[Load] = []
        while (best := self._shadows.best(request, self._spread, least)) is not None:
            gain, load = best
            self._shadows.remove(load)
            tied = chosen is not None and gain == least and load.index > chosen.index
            (passed if tied else found).append(load)
        for load in passed:
            self._shadows.update(load)
        return found
