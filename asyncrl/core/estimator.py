"""The cost model of live servers: the measured one to begin with, corrected by what they are seen to take.

``core/fitting.py`` needs a server to itself and a grid of loads. A server at work shows neither: its load moves slowly,
and what it takes drifts (another GPU clock, longer contexts, a neighbour). So this is regularised least squares with
exponential forgetting. With b = k2/k3 kept, as that is a ratio of the hardware's own speeds (StaleFlow appendix B.1),

    seconds = steps · (k1·kv + k3·max(b, n) + k4) + k5·prefill

is linear in k1, k3, k4 and k5. Their ratios to the starting ones are fitted to the relative errors, with coefficients
≥ 0, and what the loads seen do not tell apart stays as near to the start as it can.
"""

from __future__ import annotations

import math

from asyncrl.core.cost_model import CostModel

STIFFNESS = 0.005
"""Weight of the starting model: variance of what is observed (relative errors of 4 %) over that of a coefficient about
its starting value (half of it). It does not fade."""
SIZE = 4


class Estimator:
    """``memory`` is the number of observations after which one counts 1/e of the newest."""

    def __init__(self, start: CostModel, *, memory: float = 200.0) -> None:
        if not memory > 1.0:
            raise ValueError(f"memory is {memory}; give more than 1 observation")
        reference = CostModel()
        unit = start.step(1, 0) / reference.step(1, 0)
        self._kept = math.exp(-1.0 / memory)
        self._breakpoint = start.k2 / start.k3 if start.k3 else 0.0
        """Sequences up to which a step is bound by memory."""
        self._fixed = 0.0 if start.k3 else start.k2
        """k2 of a model in which no number of sequences is bound by computation: a part of k4."""
        begin = (start.k1, start.k3, start.k4 + self._fixed, start.k5)
        of_reference = (reference.k1, reference.k3, reference.k4, reference.k5)
        # A coefficient that was not measurable has no ratio: its unit is the reference's, for a server of this speed.
        self._units = [k or unit * r for k, r in zip(begin, of_reference, strict=True)]
        self._begin = [1.0 if k else 0.0 for k in begin]
        self._normal = [[0.0] * SIZE for _ in range(SIZE)]
        self._target = [0.0] * SIZE
        self._ratios = list(self._begin)
        self._weight = self._errors = 0.0
        self.count = 0
        """Observations so far."""

    def add(self, *, n: float, kv: float, tokens: float, prefill: float, seconds: float) -> float:
        """In ``seconds`` a server that ran ``n`` sequences in ``kv`` tokens, on average, generated ``tokens`` and
        prefilled ``prefill`` tokens, and was never idle. Returns how many times as long as foretold that is. Raises
        ``ValueError`` for numbers that cannot be."""
        if not (seconds > 0.0 and n >= 0.0 and kv >= 0.0 and tokens >= 0.0 and prefill >= 0.0):
            raise ValueError(f"an observation of n={n}, kv={kv}, {tokens} tokens, {prefill} prefilled in {seconds} s")
        steps = tokens / n if n else 0.0
        row = [steps * kv, steps * max(self._breakpoint, n), steps, prefill]
        row = [x * unit / seconds for x, unit in zip(row, self._units, strict=True)]
        if not any(row):
            return 1.0  # nothing was computed
        foretold = _dot(row, self._ratios)
        self._weight = self._kept * self._weight + 1.0
        self._errors = self._kept * self._errors + abs(foretold - 1.0)
        self.count += 1
        for i in range(SIZE):
            self._target[i] = self._kept * self._target[i] + row[i]
            for j in range(SIZE):
                self._normal[i][j] = self._kept * self._normal[i][j] + row[i] * row[j]
        self._ratios = self._solve()
        return 1.0 / foretold if foretold else 1.0

    @property
    def cost(self) -> CostModel:
        """The model as it is now."""
        k1, k3, k4, k5 = (ratio * unit for ratio, unit in zip(self._ratios, self._units, strict=True))
        return CostModel(k1=k1, k2=self._breakpoint * k3, k3=k3, k4=k4, k5=k5)

    @property
    def error(self) -> float | None:
        """Mean of |predicted − measured| / measured over the last observations, each predicted before it was used; None
        before the first."""
        return self._errors / self._weight if self.count else None

    def _solve(self) -> list[float]:
        """Least squares with ratios ≥ 0: the most negative is set to 0, one after another."""
        free = list(range(SIZE))
        while True:
            rows = [
                [self._normal[i][j] + (STIFFNESS if i == j else 0.0) for j in free]
                + [self._target[i] + STIFFNESS * self._begin[i]]
                for i in free
            ]
            solution = dict(zip(free, _eliminate(rows), strict=True))
            worst = min(solution, key=solution.__getitem__)
            if solution[worst] >= 0.0:
                return [solution.get(i, 0.0) for i in range(SIZE)]
            free.remove(worst)


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solution of a positive definite system, each row with its right side last."""
    size = len(rows)
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = math.fsum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
