"""How long a server takes: StaleFlow's cost model (StaleFlow §5.3, Eq. 2, appendix B, Eq. 11).

One decode step of n running sequences that hold kv tokens takes  k1·kv + max(k2, k3·n) + k4  seconds and gives each
sequence one token. Between two events n is constant and kv grows by n a step, so any number of steps has a closed form:
a simulator pays for events, never for tokens.
"""

from __future__ import annotations

import math

from asyncrl.core.types import Record


class CostModel(Record, frozen=True, kw_only=True):
    """Coefficients in seconds (a token of KV, a step, a sequence, a step) and the prefill's seconds a token.

    The defaults are StaleFlow's table 4 for Qwen3-30B-A3B; ``prefill`` is not given there and is our assumption.
    """

    k1: float = 7.28e-8
    k2: float = 1.72e-3
    k3: float = 1.25e-4
    k4: float = 1.07e-2
    prefill: float = 2e-5

    def step(self, n: int, kv: int) -> float:
        """Seconds of one decode step (Eq. 11)."""
        return self.k1 * kv + max(self.k2, self.k3 * n) + self.k4

    def throughput(self, n: int, kv: int) -> float:
        """Tokens per second (Eq. 12); 0 for an idle server."""
        return n / self.step(n, kv) if n else 0.0

    def time_of(self, steps: int, n: int, kv: int) -> float:
        """Seconds of ``steps`` steps in a row, starting from ``kv`` tokens."""
        return steps * self.step(n, kv) + self.k1 * n * steps * (steps - 1) / 2

    def steps_in(self, seconds: float, n: int, kv: int) -> int:
        """Whole steps that fit into ``seconds``: the inverse of ``time_of``, up to rounding of the last step."""
        seconds += 1e-9 * (1.0 + abs(seconds))
        a, b = self.k1 * n / 2, self.step(n, kv) - self.k1 * n / 2
        steps = seconds / b if a == 0 else 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))
        return int(steps)
