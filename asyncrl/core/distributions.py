"""Distributions of lengths and latencies, as tagged records; in a recipe: ``{kind = "normal", mean = 10, std = 5}``.

Decides how a value is drawn, and what is known of it without drawing: expectation, quantiles, and the expected maximum
of n draws, which is what a group or a batch waits for. Values are tokens or seconds, as the user of the record says;
they are ≥ 0 and not rounded. Owns no randomness: the caller passes his ``random.Random``.

Every distribution is a non-decreasing function ``at`` of a standard normal score z. So two draws can share a part of
their score and keep their marginal distribution: with z = √share·z_task + √(1−share)·z_own, ``share`` ∈ [0, 1] is the
part of the score's variance that a task's trajectories have in common (a hard task is long for the whole group). For a
lognormal it is that part of the variance of log L.
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random
from statistics import NormalDist

import msgspec

from asyncrl.core.types import Record

_ROOT2 = math.sqrt(2.0)
_INV_CDF = NormalDist().inv_cdf
_REACH = 10.0
"""Scores beyond ±10 have probability 1e-23 and are left out."""
_PANELS = 500
"""Simpson panels of one span of scores (even)."""
_CELLS = 1024
"""Cells of scores in which an empirical sample is grouped when draws are correlated."""


def _cdf(z: float) -> float:
    """Φ(z)."""
    return 0.5 * math.erfc(-z / _ROOT2)


def _pdf(z: float) -> float:
    """φ(z)."""
    return math.exp(-0.5 * z * z) / math.sqrt(math.tau)


def _log_cdf(z: float) -> float:
    """log Φ(z), exact also where Φ(z) rounds to 1; −inf where it rounds to 0."""
    if z > 0:
        return math.log1p(-0.5 * math.erfc(z / _ROOT2))
    return math.log(p) if (p := _cdf(z)) > 0 else -math.inf


class _MaxScore:
    """The largest of ``n`` correlated scores, M = √share·z_task + max √(1−share)·z_i, as a mixture of shifted parts.

    Of the two summands the one with the larger factor is kept as a function, the other is summed over nodes (trapezoid
    rule, exponentially exact for these densities).
    """

    def __init__(self, n: int, share: float) -> None:
        task, own = math.sqrt(share), math.sqrt(1.0 - share)
        self._n = 1 if share >= 0.5 else n
        self._scale = max(task, own)
        nodes = [(1.0, 0.0)]
        if 0.0 < share < 1.0:
            outer, width, step = (n, own, 0.1) if share >= 0.5 else (1, task, 0.2)
            grid = [step * i for i in range(-int(_REACH / step), int(_REACH / step) + 1)]
            weighed = [(step * _max_pdf(x, outer), width * x) for x in grid]
            total = math.fsum(w for w, _ in weighed)
            nodes = [(w / total, shift) for w, shift in weighed if w > 1e-16]
        self._nodes = nodes

    def pdf(self, z: float) -> float:
        n, scale = self._n, self._scale
        return sum(w * _max_pdf((z - shift) / scale, n) for w, shift in self._nodes) / scale

    def cdf(self, z: float) -> float:
        n, scale = self._n, self._scale
        return sum(w * math.exp(n * _log_cdf((z - shift) / scale)) for w, shift in self._nodes)

    def survival(self, z: float) -> float:
        """1 − cdf, exact where it is small."""
        n, scale = self._n, self._scale
        return sum(-w * math.expm1(n * _log_cdf((z - shift) / scale)) for w, shift in self._nodes)


def _max_pdf(z: float, n: int) -> float:
    """Density of the largest of n independent standard normal scores."""
    if n == 1:
        return _pdf(z)
    return n * math.exp((n - 1) * _log_cdf(z) - 0.5 * z * z) / math.sqrt(math.tau)


class DistributionBase(Record, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What every distribution can do. Subclasses give ``at``, ``expected`` and ``_span``."""

    def at(self, z: float) -> float:
        """The value whose standard normal score is ``z``: quantile Φ(z). Non-decreasing; ±inf are allowed."""
        raise NotImplementedError

    @property
    def expected(self) -> float:
        """E[X], exact, of what ``sample`` draws (a record's field ``mean`` may be before clipping or capping)."""
        raise NotImplementedError

    def _span(self) -> tuple[float, float]:
        """Scores between which ``at`` is smooth; outside it is constant, or has no weight."""
        raise NotImplementedError

    def sample(self, rng: Random) -> float:
        """One independent draw."""
        return self.at(rng.gauss(0.0, 1.0))

    def sample_shared(self, z_task: float, rng: Random, share: float) -> float:
        """One draw that has ``share`` ∈ [0, 1] of its score's variance in common with all draws of the same ``z_task``
        (itself one ``rng.gauss(0, 1)`` a task). The marginal distribution is that of ``sample``."""
        return self.at(math.sqrt(share) * z_task + math.sqrt(1.0 - share) * rng.gauss(0.0, 1.0))

    def quantile(self, p: float) -> float:
        """Smallest value that a draw does not exceed with probability ``p`` ∈ [0, 1]."""
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"quantile {p} is outside 0 … 1; give a probability")
        return self.at(-math.inf if p == 0.0 else math.inf if p == 1.0 else _INV_CDF(p))

    def expected_max(self, n: int, share: float = 0.0) -> float:
        """E[max(X_1 … X_n)] of ``n`` draws that share ``share`` of their score's variance.

        By quadrature over the score: relative error below 1e-6 for n ≤ 1e6. Costs about half a millisecond, or some
        tens of milliseconds where 0 < share < 1.
        """
        _check_draws(n, share)
        if n == 1 or share == 1.0:
            return self.expected
        top = _MaxScore(n, share)
        low, high = self._span()
        below, above = self.at(low) * top.cdf(low), self.at(high) * top.survival(high)
        if low == high:
            return below + above
        step = (high - low) / _PANELS
        inner = math.fsum(
            (1 if i in (0, _PANELS) else 2 + 2 * (i % 2)) * self.at(z) * top.pdf(z)
            for i in range(_PANELS + 1)
            for z in (low + i * step,)
        )
        return below + inner * step / 3 + above


def _check_draws(n: int, share: float) -> None:
    if n < 1:
        raise ValueError(f"the maximum of {n} draws does not exist; give n ≥ 1")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share {share} is outside 0 … 1; it is the part of the variance that a task's draws share")


def require_positive(owner: str, **values: float) -> None:
    """``ValueError`` naming the first of ``values`` that is not above 0 (nan is not)."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}: {name} = {value:g}; it must be above 0")


class Constant(DistributionBase, frozen=True, kw_only=True, tag="constant"):
    """Always ``value``."""

    value: float

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ValueError(f"constant: value = {self.value:g}; it must be finite and at least 0")

    def at(self, z: float) -> float:
        return self.value

    @property
    def expected(self) -> float:
        return self.value

    def _span(self) -> tuple[float, float]:
        return 0.0, 0.0

    def sample(self, rng: Random) -> float:
        return self.value


class Normal(DistributionBase, frozen=True, kw_only=True, tag="normal"):
    """Gaussian, clipped: a negative draw becomes 0 (ROLL Flash §5.2.1 has latencies "(10, 10)" and does not say what
    it does with the negative sixth of them).

    Clipping raises the expectation above ``mean``: to 10.83 for (10, 10), 10.04 for (10, 5); for (10, 1) not at all.
    """

    mean: float
    std: float

    def __post_init__(self) -> None:
        require_positive("normal", mean=self.mean)
        if not 0 <= self.std < math.inf:
            raise ValueError(f"normal: std = {self.std:g}; it must be finite and at least 0")

    def at(self, z: float) -> float:
        # std 0 times an infinite score would be nan.
        return max(0.0, self.mean + self.std * z) if self.std else self.mean

    @property
    def expected(self) -> float:
        if self.std == 0:
            return self.mean
        border = self.mean / self.std
        return self.mean * _cdf(border) + self.std * _pdf(border)

    def _span(self) -> tuple[float, float]:
        return (max(-_REACH, -self.mean / self.std), _REACH) if self.std else (0.0, 0.0)


class _Lognormal(DistributionBase, frozen=True, kw_only=True):
    """min(cap, m·exp(σz − σ²/2)); m is the mean before the cap. Subclasses give (m, σ, cap)."""

    def _parameters(self) -> tuple[float, float, float]:
        raise NotImplementedError

    def at(self, z: float) -> float:
        m, sigma, cap = self._parameters()
        if sigma == 0:
            return min(cap, m)
        if z == math.inf:
            return cap
        return min(cap, m * math.exp(sigma * z - 0.5 * sigma * sigma))

    @property
    def expected(self) -> float:
        return _capped_mean(*self._parameters())

    def _span(self) -> tuple[float, float]:
        m, sigma, cap = self._parameters()
        if sigma == 0:
            return 0.0, 0.0
        high = min(_cap_score(m, sigma, cap), _REACH + sigma)
        return min(-_REACH, high), high


def _cap_score(m: float, sigma: float, cap: float) -> float:
    return (math.log(cap / m) / sigma + 0.5 * sigma) if cap < math.inf else math.inf


def _capped_mean(m: float, sigma: float, cap: float) -> float:
    """E[min(cap, L)] of a lognormal L with mean m: m·Φ(z_cap − σ) + cap·Φ(−z_cap)."""
    if sigma == 0 or cap == math.inf:
        return min(m, cap)
    score = _cap_score(m, sigma, cap)
    return m * _cdf(score - sigma) + cap * _cdf(-score)


class LogNormal(_Lognormal, frozen=True, kw_only=True, tag="lognormal"):
    """The staleness paper's lengths (appendix, "Building an efficient staleness simulator").

    L = mean·exp(σz − σ²/2), σ = 1.3·tailness/100, then capped; ``tailness`` 0 is constant. ``mean`` is before the cap,
    so ``expected`` is lower. The paper rounds; here that is left to the user of lengths.
    """

    mean: float
    tailness: float = 50.0
    cap: float | None = None

    def __post_init__(self) -> None:
        require_positive("lognormal", mean=self.mean, cap=self._parameters()[2])
        if not 0 <= self.tailness <= 500:
            raise ValueError(
                f"lognormal: tailness = {self.tailness:g}; it must be in 0 … 500 (the paper's are 0 … 100)"
            )

    def _parameters(self) -> tuple[float, float, float]:
        return self.mean, 0.013 * self.tailness, math.inf if self.cap is None else self.cap


class LongTail(_Lognormal, frozen=True, kw_only=True, tag="long-tail"):
    """A capped lognormal whose *capped* mean is ``mean``, for workloads of which a paper states mean and maximum.

    ``sigma`` is the standard deviation of log L before the cap. The location is solved once a record by bisection.
    """

    mean: float
    sigma: float
    cap: float

    def __post_init__(self) -> None:
        require_positive("long-tail", mean=self.mean, cap=self.cap)
        if not self.mean < self.cap < math.inf:
            raise ValueError(f"long-tail: cap = {self.cap:g}; it must be finite and above mean = {self.mean:g}")
        if not 0 <= self.sigma <= 5:
            raise ValueError(f"long-tail: sigma = {self.sigma:g}; it must be in 0 … 5 (about 1 is p99 = 10 × median)")

    def _parameters(self) -> tuple[float, float, float]:
        return _mean_before_cap(self.mean, self.sigma, self.cap), self.sigma, self.cap


@lru_cache(maxsize=256)
def _mean_before_cap(mean: float, sigma: float, cap: float) -> float:
    """The m with ``_capped_mean(m, sigma, cap) == mean`` (the capped mean rises with m, from 0 to cap)."""
    low = high = mean
    while _capped_mean(high, sigma, cap) < mean:
        high *= 2.0
    while low < (middle := 0.5 * (low + high)) < high:
        if _capped_mean(middle, sigma, cap) < mean:
            low = middle
        else:
            high = middle
    return high


class Empirical(DistributionBase, frozen=True, kw_only=True, tag="empirical"):
    """Draws with replacement from ``values`` (kept sorted), all equally likely.

    In a recipe ``file`` may stand instead; whoever loads the recipe reads it and puts ``values`` in its place. ``at``,
    and so a shared draw, takes the value of the score's rank.
    """

    values: tuple[float, ...] = ()
    file: str = ""

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.file):
            raise ValueError("empirical: give either values (at least one) or file")
        if not all(0 <= value < math.inf for value in self.values):
            raise ValueError("empirical: a value is negative or not finite; lengths and latencies are at least 0")
        msgspec.structs.force_setattr(self, "values", tuple(sorted(self.values)))

    def _loaded(self) -> tuple[float, ...]:
        if not self.values:
            raise ValueError(f"empirical: file {self.file!r} was not read; load the recipe with asyncrl's loader")
        return self.values

    def at(self, z: float) -> float:
        values = self._loaded()
        # The smallest k with k/n ≥ Φ(z); counted from the end for z > 0, where Φ loses its digits.
        n = len(values)
        rank = n - math.floor(n * _cdf(-z)) if z > 0 else math.ceil(n * _cdf(z))
        return values[max(rank, 1) - 1]

    @property
    def expected(self) -> float:
        return math.fsum(self._loaded()) / len(self.values)

    def sample(self, rng: Random) -> float:
        return rng.choice(self._loaded())

    def quantile(self, p: float) -> float:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"quantile {p} is outside 0 … 1; give a probability")
        values = self._loaded()
        # p = 0.29 of 100 values is the 29th: the product's last digit must not make it the 30th.
        return values[max(math.ceil(p * len(values) * (1 - 1e-12)), 1) - 1]

    def expected_max(self, n: int, share: float = 0.0) -> float:
        """E[max(X_1 … X_n)]: exact from the order statistics for ``share`` 0 or 1. Otherwise values of neighbouring
        rank are averaged in at most 1,024 cells, a hundredth of a score wide, which is exact for few values."""
        _check_draws(n, share)
        values = self._loaded()
        k = len(values)
        if n == 1 or share == 1.0:
            return self.expected
        if share == 0.0:
            powers = [(i / k) ** n for i in range(k + 1)]
            return math.fsum(v * (powers[i + 1] - powers[i]) for i, v in enumerate(values))
        top = _MaxScore(n, share)
        scores = (12.0 * i / _CELLS - 6.0 for i in range(1, _CELLS))
        edges = list(range(k + 1)) if k <= _CELLS else sorted({0, *(round(k * _cdf(z)) for z in scores), k})
        below = [0.0, *(top.cdf(_INV_CDF(i / k)) for i in edges[1:-1]), 1.0]
        return math.fsum(
            math.fsum(values[edges[c] : edges[c + 1]]) / (edges[c + 1] - edges[c]) * (below[c + 1] - below[c])
            for c in range(len(below) - 1)
        )

    def _span(self) -> tuple[float, float]:
        raise AssertionError("the maximum of an empirical sample is computed from its order statistics")


class Named(DistributionBase, frozen=True, kw_only=True, tag="named"):
    """One of ``WORKLOADS`` by its name: response lengths in tokens."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ValueError(f"named: there is no workload {self.name!r}; take one of {', '.join(sorted(WORKLOADS))}")

    @property
    def workload(self) -> LongTail:
        return WORKLOADS[self.name]

    def at(self, z: float) -> float:
        return self.workload.at(z)

    @property
    def expected(self) -> float:
        return self.workload.expected

    def _span(self) -> tuple[float, float]:
        return self.workload._span()


# "The 99th-percentile output length can exceed the 50th percentile by an order of magnitude" (Laminar §1, §2.2 and
# fig. 2; DORA §1): of a lognormal, σ = ln 10 / z_0.99 = 0.99.
_TENFOLD = math.log(10.0) / _INV_CDF(0.99)

WORKLOADS = {
    # ROLL Flash §3.2 states the mean (2k), appendix A the cap. Assumption: σ of Laminar's and DORA's tenfold p99.
    "qwen3-8b-base": LongTail(mean=2000.0, sigma=_TENFOLD, cap=30720.0),
    # ROLL Flash §3.2 states the mean (11k), appendix A the cap. Assumption: σ; with 0.6 the median is 9.4k and one
    # response in 42 reaches the cap. A tenfold p99 would not fit under a cap of 2.8 times the mean.
    "qwen3-8b-think": LongTail(mean=11000.0, sigma=0.6, cap=30720.0),
    # DORA §5.1 states mean (2.4K) and maximum (30K) of its intermediate checkpoint. σ from its tenfold p99.
    "dora": LongTail(mean=2400.0, sigma=_TENFOLD, cap=30000.0),
    # Laminar §8 states the cap (16K) and the tenfold p99; its fig. 17 draws the lengths of the 7B, 32B and 72B
    # checkpoints without numbers. Assumption: one workload for all, with its 99th percentile at the cap.
    "laminar": LongTail(mean=2595.0, sigma=_TENFOLD, cap=16384.0),
}
"""Response lengths of the papers' workloads in tokens. What a paper does not state is an assumption, named above."""

Distribution = Constant | Normal | LogNormal | LongTail | Empirical | Named
"""Any distribution; msgspec picks the record by ``kind``."""

__all__ = [
    "WORKLOADS",
    "Constant",
    "Distribution",
    "DistributionBase",
    "Empirical",
    "LogNormal",
    "LongTail",
    "Named",
    "Normal",
    "require_positive",
]
