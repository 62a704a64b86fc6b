"""From measured times to a ``CostModel``: StaleFlow's "offline profiling … and linear regression" (appendix B.1).

``plan_loads`` says what to measure on a server, ``fit_cost`` regresses k1 … k5 from what was measured. Owns nothing;
``build/fit.py`` measures.

All least squares are over relative errors, so that the short steps of a few sequences count as much as the long ones of
many, and with coefficients ≥ 0, as a cost model that promises time for more work is of no use to a planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from asyncrl.core.cost_model import CostModel
from asyncrl.core.types import Record

UNKNOWNS = 4
"""Of a decode step: k1 … k4."""
GROWTH_RESERVE = 32
"""Tokens a sequence for which servers keep KV free when they admit one; a load that ignores this would not all run at
once."""
KV_SHARE = 0.9
"""Of the KV budget that a load may fill."""
MIN_ROOM = 16
"""Tokens of context below which there is no steady decoding to measure."""

EQUAL = 1e-16
"""Mean squared relative errors that differ by less are equally good: a relative error of 1e-8."""
FALL = 0.1
"""By which share times may fall with the load before that is more than noise."""
DEPENDENT = 1e-9
"""Share of a column that must be left of it beside the others."""

Row = tuple[float, ...]
Coefficients = tuple[float, float, float, float]


class FitError(Exception):
    """The measurements say nothing about the cost model; one line with the remedy."""


class Load(Record, frozen=True, kw_only=True):
    """``n`` requests at once, each with ``prompt`` tokens, each of which generates exactly ``new`` tokens."""

    n: int
    prompt: int
    new: int


class StepPoint(Record, frozen=True, kw_only=True):
    """A decode step of ``n`` sequences that hold ``kv`` tokens together took ``seconds``. ``load`` is what was run."""

    load: Load
    n: int
    kv: float
    seconds: float


class PrefillPoint(Record, frozen=True, kw_only=True):
    """``n`` requests that arrived at once, with ``tokens`` tokens to prefill and ``kv`` tokens of KV then, had their
    first token each after ``seconds``."""

    load: Load
    n: int
    tokens: int
    kv: int
    seconds: float


class Quality(Record, frozen=True, kw_only=True):
    """How far predictions are from what was measured. Errors are shares of the measured time; ``points`` are (predicted
    − measured) / measured, in the order of the points."""

    mean: float
    max: float
    r2: float
    points: tuple[float, ...]


class Fit(Record, frozen=True, kw_only=True):
    """``latency_s`` passes before anything is computed, ``request_s`` is the work on a request beside its tokens
    (parsing, scheduling), which the cost model's k5 holds for prompts of ``prompt_tokens``. ``notes`` say what the
    measurements left open."""

    cost: CostModel
    latency_s: float
    request_s: float
    prompt_tokens: float
    decode: Quality
    prefill: Quality
    notes: tuple[str, ...] = ()


# --- what to measure --------------------------------------------------------------------------------------------------


def new_tokens(context_length: int, *, quick: bool = False) -> int:
    """Tokens that each request of a decode load generates."""
    return min(64 if quick else 128, context_length // 2)


def plan_loads(
    *, max_running: int, max_kv: int, context_length: int, quick: bool = False
) -> tuple[list[Load], list[Load]]:
    """Loads for (decode steps, prefill): concurrency 1, 2, 4 … ``max_running`` (``quick``: every second of them), each
    with short to long prompts, as the server's KV budget and ``context_length`` allow. Raises ``FitError``.

    Sequences must all fit at once, with the reserve that servers keep. In the prefill loads each request generates one
    token; they take the smallest, a middle and the largest concurrency.
    """
    if context_length < MIN_ROOM:
        raise FitError(
            f"a context of {context_length} tokens is too short to measure; give rollout.max_tokens at least {MIN_ROOM}"
        )
    new = new_tokens(context_length, quick=quick)
    short = max(1, min(16, context_length // 8))
    factor = 4 if quick else 2
    ns = [n for i in range(max_running.bit_length()) if (n := factor**i) < max_running] + [max_running]
    steps: list[Load] = []
    for n in ns:
        longest = min(context_length - new, int(KV_SHARE * max_kv / n) - new - GROWTH_RESERVE)
        if longest < short:
            break
        between = () if quick else (round(math.sqrt(short * longest)),)
        steps += [Load(n=n, prompt=p, new=new) for p in sorted({short, *between, longest})]
    if not steps:
        raise FitError(
            f"a KV cache of {max_kv} tokens holds no sequence of {short + new} tokens; raise engine.max_total_tokens"
        )
    fitting = sorted({load.n for load in steps})
    chosen = {fitting[0], fitting[len(fitting) // 2], fitting[-1]}
    return steps, [Load(n=load.n, prompt=load.prompt, new=1) for load in steps if load.n in chosen]


# --- regression -------------------------------------------------------------------------------------------------------


def fit_cost(steps: Sequence[StepPoint], prefills: Sequence[PrefillPoint], *, prompt_tokens: float) -> Fit:
    """The cost model that fits the points best. Raises ``FitError`` for too few points, for points that do not differ
    enough, and for times that fall with the load.

    The breakpoint of max(k2, k3·n) is searched: between any two concurrencies that were measured, and on each of them.
    For each of these the problem is linear, so the result is the global optimum of the relative squared error.

    Not everything can be told apart, and these are the conventions:

    * Without a breakpoint within the grid only k2 + k4 (all steps bound by memory) or k3 and k4 (all by compute) are
      known. Then k2 is 0, and what does not depend on n stands in k4. Beyond the largest n of the grid that is a guess.
    * With a single n above the breakpoint there is one coefficient too many. Of solutions that are equally good, the
      one with the fewest coefficients above 0 is taken, then that with the earliest breakpoint.
    * A coefficient that would be negative is 0.

    The time to the first token, less the decode step that the cost model charges for it, is regressed on the number of
    requests and on the tokens to prefill. The cost model has no place for what a request costs whatever its length, so
    k5 is the slope over the tokens plus that cost spread over ``prompt_tokens``, the mean of the prompts that are to be
    simulated: right for these, too dear for longer and too cheap for shorter ones.
    """
    _check_points(steps)
    k1, k2, k3, k4 = _fit_step(steps)
    notes = []
    if k1 == 0.0:
        notes.append("k1 is 0: steps do not get measurably longer with the context")
    if k2 == 0.0:
        held = f"n = {min(p.n for p in steps)} … {max(p.n for p in steps)}"
        notes.append(f"no breakpoint within {held}: k2 is 0, and k4 holds all that does not depend on n")
    latency, request, token = _fit_prefill(prefills, _cost(k1, k2, k3, k4))
    if token == 0.0:
        notes.append("a token of prefill costs nothing measurable")
    if request > 0.0:
        notes.append(
            f"a request costs {1000 * request:.3g} ms beside {1e6 * token:.3g} µs a prompt token: k5 is right for "
            f"prompts of {prompt_tokens:g} tokens in the mean"
        )
    cost = _cost(k1, k2, k3, k4, token + request / prompt_tokens)
    return Fit(
        cost=cost,
        latency_s=latency,
        request_s=request,
        prompt_tokens=prompt_tokens,
        decode=_quality([_step(cost, p.n, p.kv) for p in steps], [p.seconds for p in steps]),
        prefill=_quality(
            [latency + request * p.n + token * p.tokens + _step(cost, p.n, p.kv) for p in prefills],
            [p.seconds for p in prefills],
        ),
        notes=tuple(notes),
    )


def _cost(k1: float, k2: float, k3: float, k4: float, k5: float = 0.0) -> CostModel:
    return CostModel(k1=k1, k2=k2, k3=k3, k4=k4, k5=k5)


def _step(cost: CostModel, n: int, kv: float) -> float:
    """``CostModel.step`` for a mean number of KV tokens, which need not be whole."""
    return cost.k1 * kv + max(cost.k2, cost.k3 * n) + cost.k4


def _check_points(steps: Sequence[StepPoint]) -> None:
    if len(steps) < UNKNOWNS:
        raise FitError(f"{len(steps)} decode points for {UNKNOWNS} coefficients; allow more time, or a larger grid")
    if not all(p.seconds > 0 and math.isfinite(p.seconds) for p in steps):
        raise FitError("a decode step took no time; the server's clock or stream is broken")
    slopes = _solve(*_weighted([(p.kv, float(p.n), 1.0) for p in steps], [p.seconds for p in steps]))
    if slopes is None:
        raise FitError(
            "concurrency and context of the decode points depend on each other; measure several contexts at several "
            "concurrencies (raise engine.max_running_requests, engine.max_total_tokens or rollout.max_tokens)"
        )
    ends = [slopes[0] * p.kv + slopes[1] * p.n + slopes[2] for p in steps]
    if _falls([p.kv for p in steps], ends):
        raise FitError("decode steps get shorter with more load; the server was not alone, or too noisy: measure again")


def _falls(load: Sequence[float], seconds: Sequence[float]) -> bool:
    """Whether the largest load takes clearly less time than the smallest, of ``seconds`` as regressed."""
    by_load = sorted(zip(load, seconds, strict=True))
    return by_load[-1][1] < (1.0 - FALL) * by_load[0][1]


def _fit_step(steps: Sequence[StepPoint]) -> Coefficients:
    """See ``fit_cost`` for what is chosen among equals."""
    ranked: list[tuple[float, int, Row]] = []
    for k in _hypotheses(steps):
        cost = _cost(*k)
        error = math.fsum((_step(cost, p.n, p.kv) / p.seconds - 1.0) ** 2 for p in steps) / len(steps)
        ranked.append((error, sum(coefficient > 0.0 for coefficient in k), k))
    k1, k2, k3, k4 = _choose(ranked)
    return k1, k2, k3, k4


def _hypotheses(steps: Sequence[StepPoint]) -> Iterator[Coefficients]:
    """Solutions among which is the best (k1, k2, k3, k4).

    Without a breakpoint the model is linear. With one strictly between two measured concurrencies it is linear in k1 …
    k4, as it is known which points have k2 and which k3·n; with one on a measured n*, k2 is k3·n*. A solution of the
    former kind that contradicts its breakpoint is left out: then the optimum lies on one of the n*.
    """
    seconds = [p.seconds for p in steps]
    for k1, k3, k4 in _non_negative([(p.kv, float(p.n), 1.0) for p in steps], seconds):
        yield k1, 0.0, k3, k4
    ns = sorted({p.n for p in steps})
    for low, high in pairwise(ns):
        if low > ns[0]:
            for k1, k3, k4 in _non_negative([(p.kv, float(max(low, p.n)), 1.0) for p in steps], seconds):
                yield k1, low * k3, k3, k4
        rows = [(p.kv, float(p.n <= low), float(p.n if p.n > low else 0), 1.0) for p in steps]
        for k1, k2, k3, k4 in _non_negative(rows, seconds):
            if k3 * low <= k2 <= k3 * high:
                yield k1, k2, k3, k4


def _fit_prefill(prefills: Sequence[PrefillPoint], cost: CostModel) -> tuple[float, float, float]:
    """Seconds (a load, a request, a token), where ``cost`` charges the decode step of a request's only token."""
    if len({p.tokens for p in prefills}) < 2:
        raise FitError("prefill needs at least two numbers of prompt tokens; allow more time, or a longer context")
    rest = [p.seconds - _step(cost, p.n, p.kv) for p in prefills]
    weights = [1.0 / p.seconds for p in prefills]
    line = _solve(*_weighted([(1.0, float(p.tokens)) for p in prefills], [p.seconds for p in prefills]))
    assert line is not None, "two different numbers of tokens do not depend on each other"
    if _falls([p.tokens for p in prefills], [line[0] + line[1] * p.tokens for p in prefills]):
        raise FitError(
            "longer prompts have their first token earlier; the server was not alone, or too noisy: measure again"
        )
    rows = [(1.0, float(p.n), float(p.tokens)) for p in prefills]
    ranked = [
        (_mean_square(rows, rest, weights, solution), sum(x > 0.0 for x in solution), solution)
        for solution in [*_non_negative(rows, rest, weights), (0.0, 0.0, 0.0)]
    ]
    latency, request, token = _choose(ranked)
    return latency, request, token


def _choose(ranked: Sequence[tuple[float, int, Row]]) -> Row:
    """Of (error, coefficients above 0, solution) the best; of equally good ones the simplest, then the first."""
    least = min(error for error, _, _ in ranked)
    return min((r for r in ranked if r[0] <= least + EQUAL), key=lambda r: r[1])[2]


def _mean_square(rows: Sequence[Row], target: Sequence[float], weights: Sequence[float], solution: Row) -> float:
    return math.fsum(
        ((_dot(row, solution) - t) * w) ** 2 for row, t, w in zip(rows, target, weights, strict=True)
    ) / len(rows)


def _quality(predicted: Sequence[float], measured: Sequence[float]) -> Quality:
    points = tuple(p / m - 1.0 for p, m in zip(predicted, measured, strict=True))
    mean = math.fsum(measured) / len(measured)
    spread = math.fsum((m - mean) ** 2 for m in measured)
    rest = math.fsum((p - m) ** 2 for p, m in zip(predicted, measured, strict=True))
    return Quality(
        mean=math.fsum(map(abs, points)) / len(points),
        max=max(map(abs, points)),
        r2=1.0 - rest / spread if spread > 0 else float(rest == 0),
        points=points,
    )


# --- least squares ----------------------------------------------------------------------------------------------------


def _weighted(
    rows: Sequence[Row], target: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[list[Row], list[float]]:
    """Rows and target times their weights: 1 / target unless given, for relative errors."""
    by = [1.0 / t for t in target] if weights is None else weights
    return [tuple(x * w for x in row) for row, w in zip(rows, by, strict=True)], [
        t * w for t, w in zip(target, by, strict=True)
    ]


def _non_negative(
    rows: Sequence[Row], target: Sequence[float], weights: Sequence[float] | None = None
) -> Iterator[Row]:
    """Solutions ≥ 0 on every set of columns, the others being 0; the non-negative least squares is among them."""
    rows, target = _weighted(rows, target, weights)
    width = len(rows[0])
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            solution = _solve([tuple(row[c] for c in columns) for row in rows], target)
            if solution is not None and all(x >= 0.0 for x in solution):
                values = dict(zip(columns, solution, strict=True))
                yield tuple(values.get(c, 0.0) for c in range(width))


def _solve(rows: Sequence[Row], target: Sequence[float]) -> list[float] | None:
    """Least squares by modified Gram-Schmidt; None if the columns depend on each other."""
    basis: list[list[float]] = []
    triangle: list[list[float]] = []
    rest = list(target)
    projections = []
    for column in map(list, zip(*rows, strict=True)):
        size = math.hypot(*column)
        coefficients = []
        for unit in basis:
            part = _dot(unit, column)
            coefficients.append(part)
            column = [x - part * u for x, u in zip(column, unit, strict=True)]
        norm = math.hypot(*column)
        if norm <= DEPENDENT * size:
            return None
        unit = [x / norm for x in column]
        basis.append(unit)
        triangle.append([*coefficients, norm])
        projections.append(_dot(unit, rest))
        rest = [x - projections[-1] * u for x, u in zip(rest, unit, strict=True)]
    solution = [0.0] * len(basis)
    for i in reversed(range(len(basis))):
        known = math.fsum(triangle[j][i] * solution[j] for j in range(i + 1, len(basis)))
        solution[i] = (projections[i] - known) / triangle[i][i]
    return solution


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
