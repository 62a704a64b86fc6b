"""What trajectories are made of, as far as time depends on it: a sample of them, drawn once and asked many times.

A trajectory is turns of (tokens to read, tokens to generate, the environment's step); tasks differ, caps cut. Sums over
turns under caps have no closed form, so ``Workload`` draws some thousand trajectories from a fixed seed, the scores of
each turn stratified, and every number is a mean over them: the same question has the same answer, and two settings that
differ in a cap are compared on the same draws. Means are exact to about a thousandth, tails to about a hundredth.

How long a trajectory holds its slot depends on the decode speed: D = τ·L + W, with L tokens at τ seconds and W seconds
of the environment's. Ratios like the tail of a group depend only on x = E[W]/E[D], so they are computed at a few x and
interpolated. Owns nothing but its sample.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from random import Random
from statistics import NormalDist

from asyncrl.core.distributions import Constant, Distribution
from asyncrl.core.types import Record

DRAWS = 4096
"""Turns that are drawn, about."""
RANKS = 256
"""Draws of a batch's span."""
NODES = 4
"""Intervals of x = E[W]/E[D] between which ratios are interpolated."""


class Shape(Record, frozen=True, kw_only=True):
    """One trajectory, as the recipe and ``[sim]`` describe it. Tokens and seconds."""

    group_size: int
    lengths: Distribution
    """Tokens of a turn's response, before ``max_new_tokens`` and ``max_tokens`` (of the whole) cut it."""
    task_share: float = 0.0
    """Share of the lengths' variance that the trajectories of a task have in common."""
    max_new_tokens: int
    max_tokens: int
    prompt: Distribution
    observation: Distribution = Constant(value=0.0)
    turns: Distribution = Constant(value=1.0)
    max_turns: int = 1
    reset: Distribution = Constant(value=0.0)
    step: Distribution = Constant(value=0.0)
    slow: float = 0.0
    """Share of steps that take ``slow_factor`` times as long."""
    slow_factor: float = 1.0


class Workload:
    """A sample of trajectories in groups. All attributes are means over trajectories."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = Random(0)
        per_group = shape.group_size * max(1.0, min(shape.turns.expected, shape.max_turns))
        groups = max(64, round(DRAWS / per_group))
        n = groups * shape.group_size
        grid = [NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)]
        tasks = [NormalDist().inv_cdf((i + 0.5) / groups) for i in range(groups)]
        rng.shuffle(tasks)
        columns: list[list[float]] = []
        """Scores of each turn, a permutation of the grid."""
        own, common = math.sqrt(1.0 - shape.task_share), math.sqrt(shape.task_share)
        lengths: list[float] = []
        waits: list[float] = []
        tokens = context = read = fresh = turns = cut = 0.0
        for i in range(n):
            if i % shape.group_size == 0:
                prompt = max(1, round(shape.prompt.sample(rng)))
            held, generated, turn = prompt, 0, 0
            fresh += prompt
            wait = shape.reset.sample(rng)
            planned = min(shape.max_turns, max(1, round(shape.turns.sample(rng))))
            while True:
                if turn == len(columns):
                    columns.append(grid[:])
                    rng.shuffle(columns[-1])
                score = common * tasks[i // shape.group_size] + own * columns[turn][i]
                room = min(shape.max_new_tokens, shape.max_tokens - held)
                wanted = max(1, round(shape.lengths.at(score)))
                response = min(room, wanted)
                cut += wanted > shape.max_new_tokens
                read += held
                context += response * (held + 0.5 * response)
                generated += response
                held += response
                turn += 1
                step = shape.step.sample(rng)
                wait += step * shape.slow_factor if shape.slow and rng.random() < shape.slow else step
                if turn == planned:
                    break
                seen = round(shape.observation.sample(rng))
                held += seen
                if held >= shape.max_tokens:
                    break
                fresh += seen + 1  # the last token generated has no KV yet
            lengths.append(float(generated))
            waits.append(wait)
            tokens += held
            turns += turn
        self.generated = math.fsum(lengths) / n
        self.wait = math.fsum(waits) / n
        """Seconds of the environment's."""
        self.tokens = tokens / n
        """All tokens: prompt, responses, observations."""
        self.turns = turns / n
        self.context = context / math.fsum(lengths)
        """Tokens that a running sequence holds, averaged over time."""
        self.read = read / n
        """Tokens prefilled without a prefix cache: the whole conversation each turn."""
        self.fresh = fresh / n
        """Tokens prefilled if each turn finds what came before in the cache."""
        self.cut = cut > 0
        """Whether the cap on a turn cuts any."""
        self.prompt = shape.prompt.expected
        self._lengths = [value / self.generated for value in lengths]
        self._waits = [value / self.wait for value in waits] if self.wait else []
        self._spans: dict[int, list[float]] = {}
        self._tops: dict[int, list[float]] = {}
        self._sorted: dict[int, list[float]] = {}
        self._draws: dict[tuple[int, int, int], list[float]] = {}
        self._sums: dict[int, list[float]] = {}
        self._known: dict[tuple[object, ...], float] = {}

    # --- ratios to E[D], at x = E[W]/E[D]

    def tailness(self, x: float) -> float:
        """M_tail = E[longest of a group] / E[D]."""
        return self._at(x, ("tail",), lambda node: math.fsum(self._top(node)) / len(self._top(node)))

    def ranked(self, k: int, groups: int, x: float) -> float:
        """E[span until ``k`` of ``groups`` groups have ended that began together] / E[D]."""
        return self._at(x, (k, groups), lambda node: _ranked(self._top(node), k, groups))

    def makespan(self, trajectories: int, slots: int, x: float) -> float:
        """E[span of ``trajectories`` played on ``slots`` slots, each the next one as soon as it is free] / E[D]."""
        return self._at(x, ("all", trajectories, slots), lambda node: _makespan(self._span(node), trajectories, slots))

    def draws(self, k: int, groups: int, x: float) -> list[float]:
        """``RANKS`` draws of the span until ``k`` of ``groups`` groups have ended that began together, over E[D]."""
        low, part = self._node(x)
        below = self._draws_at(k, groups, low)
        if not part:
            return below
        return [(1.0 - part) * a + part * b for a, b in zip(below, self._draws_at(k, groups, low + 1), strict=True)]

    def _draws_at(self, k: int, groups: int, node: int) -> list[float]:
        if (drawn := self._draws.get((k, groups, node))) is None:
            rng, top = Random(0), self._top(node)
            ranks = [1.0] * RANKS
            for rank in range(groups, k - 1, -1):  # each time the largest of the uniform numbers that are left
                strata = [((i + 0.5) / RANKS) ** (1.0 / rank) for i in range(RANKS)]
                rng.shuffle(strata)
                ranks = list(map(mul, ranks, strata))
            drawn = self._draws[k, groups, node] = [_quantile(top, p) for p in ranks]
        return drawn

    def ended_by(self, span: float, x: float) -> float:
        """Share of trajectories that end within ``span`` · E[D]."""
        node = self._nearest(x)
        if node not in self._sorted:
            self._sorted[node] = sorted(self._span(node))
        return bisect_right(self._sorted[node], span) / len(self._lengths)

    def ended_within(self, span: float, x: float) -> tuple[float, float]:
        """Share of groups that end within ``span`` · E[D], and the mean response length in those over E[L]."""
        tops, totals = self._by_span(self._nearest(x))
        count = bisect_right(tops, span)
        return count / len(tops), totals[count] / (self.shape.group_size * count) if count else 0.0

    def _nearest(self, x: float) -> int:
        return round(x * NODES) if self._waits else 0

    def _node(self, x: float) -> tuple[int, float]:
        """The node below x, and how far x is from it to the next."""
        if not self._waits:
            return 0, 0.0
        node = min(NODES - 1, int(x * NODES))
        return node, x * NODES - node

    def _at(self, x: float, key: tuple[object, ...], of: Callable[[int], float]) -> float:
        node, part = self._node(x)
        value = self._cached(key, node, of)
        return value + part * (self._cached(key, node + 1, of) - value) if part else value

    def _cached(self, key: tuple[object, ...], node: int, of: Callable[[int], float]) -> float:
        if (value := self._known.get((key, node))) is None:
            value = self._known[key, node] = of(node)
        return value

    def _span(self, node: int) -> list[float]:
        """D / E[D] of every trajectory."""
        if node not in self._spans:
            x = node / NODES
            spans = self._lengths
            if node:
                spans = [(1.0 - x) * a + x * b for a, b in zip(self._lengths, self._waits, strict=True)]
            self._spans[node] = spans
        return self._spans[node]

    def _groups(self, values: list[float]) -> list[list[float]]:
        size = self.shape.group_size
        return [values[i : i + size] for i in range(0, len(values), size)]

    def _top(self, node: int) -> list[float]:
        """The longest of each group, sorted."""
        if node not in self._tops:
            self._tops[node] = sorted(map(max, self._groups(self._span(node))))
        return self._tops[node]

    def _by_span(self, node: int) -> tuple[list[float], list[float]]:
        """``_top``, and the sum of the lengths of the first 0, 1, 2 … groups in that order."""
        if node not in self._sums:
            spans, lengths = self._groups(self._span(node)), self._groups(self._lengths)
            order = sorted(range(len(spans)), key=lambda i: max(spans[i]))
            self._sums[node] = list(accumulate((math.fsum(lengths[i]) for i in order), initial=0.0))
        return self._top(node), self._sums[node]


def _quantile(values: list[float], p: float) -> float:
    return values[min(len(values) - 1, int(len(values) * p))]


def _ranked(values: list[float], k: int, n: int) -> float:
    """E[the k-th smallest of n draws with replacement] of sorted ``values``."""
    spare, size = n - k, len(values)
    if spare > 16:  # in the middle it is narrow: its quantile will do
        return _quantile(values, k / (n + 1))
    total = before = 0.0
    for i, value in enumerate(values, start=1):
        # P(at most ``spare`` of n draws lie above): a few terms of a binomial sum.
        p = i / size
        upto = term = p**n
        for j in range(1, spare + 1):
            term = term * (n - j + 1) / j * (1.0 - p) / p if term else math.comb(n, j) * (1.0 - p) ** j * p ** (n - j)
            upto += term
        total += value * (upto - before)
        before = upto
    return total


def _makespan(spans: list[float], trajectories: int, slots: int) -> float:
    rounds = max(1, len(spans) // trajectories)
    total = 0.0
    for r in range(rounds):
        ends = [0.0] * min(slots, trajectories)
        for i in range(trajectories):
            heapq.heapreplace(ends, ends[0] + spans[(r * trajectories + i) % len(spans)])
        total += max(ends)
    return total / rounds
