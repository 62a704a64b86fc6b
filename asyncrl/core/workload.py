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
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from random import Random
from statistics import NormalDist

from asyncrl.core.distributions import Constant, Distribution
from asyncrl.core.types import Record

TURNS = 4096
"""Turns that are drawn, about."""
RANKS = 256
"""Draws of a batch's span."""
NODES = 4
"""Intervals of x = E[W]/E[D] between which ratios are interpolated."""


class Shape(Record, frozen=True, kw_only=True):
    """One trajectory, as the recipe and ``[sim]`` describe it. Tokens and seconds."""

    group_size: int
    redundancy: int = 0
    """Members of a group beside those; the first ``group_size`` that end count, the rest is aborted then."""
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
    """A sample of trajectories in groups. Attributes are means over all trajectories that are begun."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        members = self.members = shape.group_size + shape.redundancy
        """Trajectories that a group begins."""
        rng = Random(0)
        groups = max(64, round(TURNS / (members * max(1.0, min(shape.turns.expected, shape.max_turns)))))
        n = groups * members
        normal = NormalDist()
        grid = [normal.inv_cdf((i + 0.5) / n) for i in range(n)]
        tasks = [normal.inv_cdf((i + 0.5) / groups) for i in range(groups)]
        rng.shuffle(tasks)
        columns: list[list[float]] = []  # scores of each turn: the grid, shuffled
        own, common = math.sqrt(1.0 - shape.task_share), math.sqrt(shape.task_share)
        lengths: list[float] = []
        waits: list[float] = []
        prompt = prompts = tokens = read = fresh = turns = cut = 0
        context = 0.0
        for i in range(n):
            if i % members == 0:
                prompt = _prompt(shape, rng)
            prompts += prompt
            held, generated, turn = prompt, 0, 0
            fresh += prompt
            wait = shape.reset.sample(rng)
            planned = min(shape.max_turns, max(1, round(shape.turns.sample(rng))))
            while True:
                if turn == len(columns):
                    columns.append(grid[:])
                    rng.shuffle(columns[-1])
                score = common * tasks[i // members] + own * columns[turn][i]
                wanted = max(1, round(shape.lengths.at(score)))
                cut += wanted > shape.max_new_tokens
                response = min(wanted, shape.max_new_tokens, shape.max_tokens - held)
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
        self.prompt = prompts / n
        self.generated = math.fsum(lengths) / n
        self.wait = math.fsum(waits) / n
        """Seconds of the environment's."""
        self.observed = tokens / n - self.generated
        """Tokens that nobody generated: prompt and observations."""
        self.turns = turns / n
        self.context = context / math.fsum(lengths)
        """Tokens that a running sequence holds, averaged over time."""
        self.read = read / n
        """Tokens prefilled without a prefix cache: the whole conversation each turn."""
        self.fresh = fresh / n
        """Tokens prefilled if each turn finds what came before in the cache."""
        self.cut = cut / turns
        """Share of responses that ``max_new_tokens`` cuts."""
        self._lengths = [value / self.generated for value in lengths]
        self._waits = [value / self.wait for value in waits] if self.wait else []
        self._nodes: dict[int, _Node] = {}
        self._known: dict[tuple[object, ...], float] = {}
        self._draws: dict[tuple[int, int, int], list[float]] = {}

    # --- ratios to E[D], at x = E[W]/E[D]

    def tailness(self, x: float) -> float:
        """M_tail = E[span of a group] / E[D]; without redundancy the span is its longest trajectory."""
        return self._at(x, ("tail",), lambda node: math.fsum(node.tops) / len(node.tops))

    def held(self, x: float) -> float:
        """Slot time of a group over ``group_size`` · E[D]; 1 without redundancy."""
        return self._at(x, ("held",), lambda node: node.held)

    def counted(self, x: float) -> float:
        """Mean length of the responses that count over that of all; 1 without redundancy."""
        return self._at(x, ("counted",), lambda node: node.lengths_within[-1] / len(node.tops))

    def ranked(self, k: int, groups: int, x: float) -> float:
        """E[span until ``k`` of ``groups`` groups have ended that began together] / E[D]."""
        return self._at(x, ("ranked", k, groups), lambda node: _ranked(node.tops, k, groups))

    def makespan(self, trajectories: int, slots: int, x: float) -> float:
        """E[span of ``trajectories`` played on ``slots`` slots, each the next one as soon as it is free] / E[D]."""
        return self._at(x, ("all", trajectories, slots), lambda node: _makespan(node.spans, trajectories, slots))

    def draws(self, k: int, groups: int, x: float) -> list[float]:
        """``RANKS`` draws of what ``ranked`` is the mean of."""
        low, part = self._place(x)
        below = self._draws_at(k, groups, low)
        if not part:
            return below
        return [(1.0 - part) * a + part * b for a, b in zip(below, self._draws_at(k, groups, low + 1), strict=True)]

    def ended_by(self, span: float, x: float) -> float:
        """Share of trajectories that end within ``span`` · E[D]."""
        spans = self._nearest(x).sorted_spans
        return bisect_right(spans, span) / len(spans)

    def ended_within(self, span: float, x: float) -> tuple[float, float]:
        """Share of groups that end within ``span`` · E[D], and the mean response length in those over E[L]."""
        node = self._nearest(x)
        count = bisect_right(node.tops, span)
        return count / len(node.tops), node.lengths_within[count] / count if count else 0.0

    def worked(self, span: float, x: float) -> float:
        """Share of all tokens that are of groups which end before ``span`` · E[D]."""
        node = self._nearest(x)
        return node.lengths_within[bisect_left(node.tops, span)] / len(node.tops)

    # --- the nodes

    def _place(self, x: float) -> tuple[int, float]:
        """The node below x, and how far x is from it to the next."""
        if not self._waits:
            return 0, 0.0
        low = min(NODES - 1, int(x * NODES))
        return low, x * NODES - low

    def _nearest(self, x: float) -> _Node:
        return self._node(round(x * NODES) if self._waits else 0)

    def _node(self, i: int) -> _Node:
        if (node := self._nodes.get(i)) is None:
            x, spans = i / NODES, self._lengths
            if i:
                spans = [(1.0 - x) * a + x * b for a, b in zip(self._lengths, self._waits, strict=True)]
            node = self._nodes[i] = _Node(spans, self._lengths, self.members, self.shape.group_size)
        return node

    def _at(self, x: float, key: tuple[object, ...], of: Callable[[_Node], float]) -> float:
        low, part = self._place(x)
        value = self._cached(key, low, of)
        return value + part * (self._cached(key, low + 1, of) - value) if part else value

    def _cached(self, key: tuple[object, ...], i: int, of: Callable[[_Node], float]) -> float:
        if (value := self._known.get((*key, i))) is None:
            value = self._known[(*key, i)] = of(self._node(i))
        return value

    def _draws_at(self, k: int, groups: int, i: int) -> list[float]:
        if (drawn := self._draws.get((k, groups, i))) is None:
            rng, tops = Random(0), self._node(i).tops
            ranks = [1.0] * RANKS
            for rank in range(groups, k - 1, -1):  # each time the largest of the uniform numbers that are left
                strata = [((j + 0.5) / RANKS) ** (1.0 / rank) for j in range(RANKS)]
                rng.shuffle(strata)
                ranks = list(map(mul, ranks, strata))
            drawn = self._draws[k, groups, i] = [_quantile(tops, p) for p in ranks]
        return drawn


class _Node:
    """The sample at one x. Spans are over E[D]."""

    def __init__(self, spans: list[float], lengths: list[float], members: int, size: int) -> None:
        self.spans = spans
        self.sorted_spans = sorted(spans)
        ends: list[tuple[float, float]] = []
        """Span of each group, and mean length over E[L] of its members that count."""
        slots = 0.0
        for i in range(0, len(spans), members):
            group = sorted(zip(spans[i : i + members], lengths[i : i + members], strict=True))
            end = group[size - 1][0]
            ends.append((end, math.fsum(length for _, length in group[:size]) / size))
            slots += math.fsum(min(span, end) for span, _ in group)
        ends.sort()
        self.tops = [end for end, _ in ends]
        self.lengths_within = list(accumulate((length for _, length in ends), initial=0.0))
        """Sum of the lengths of the first 0, 1, 2 … of ``tops``."""
        self.held = slots / (size * len(ends))


def _prompt(shape: Shape, rng: Random) -> int:
    """Of a task that can be played: there is room for a token after it."""
    for _ in range(100):
        if (prompt := max(1, round(shape.prompt.sample(rng)))) < shape.max_tokens:
            return prompt
    return max(1, shape.max_tokens - 1)


def _quantile(values: list[float], p: float) -> float:
    return values[min(len(values) - 1, int(len(values) * p))]


def _ranked(values: list[float], k: int, n: int) -> float:
    """E[the k-th smallest of n draws with replacement] of sorted ``values``."""
    spare, size = n - k, len(values)
    if spare > 16:  # in the middle it is narrow: its quantile will do
        return _quantile(values, k / (n + 1))
    total = before = 0.0
    for i, value in enumerate(values, start=1):
        p = i / size
        # P(at most ``spare`` of n draws lie above): a few terms of a binomial sum.
        upto = math.fsum(math.comb(n, j) * (1.0 - p) ** j * p ** (n - j) for j in range(spare + 1))
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
