"""How long a server takes: StaleFlow's cost model (StaleFlow §5.3, Eq. 2, appendix B, Eq. 11).

One decode step of n running sequences that hold kv tokens takes  k1·kv + max(k2, k3·n) + k4  seconds and gives each
sequence one token. Prefill adds  k5  seconds a token, on its own or beside the decoding of a step (chunked prefill).
Between two events n is constant and kv grows by n a step, so any number of steps has a closed form: a simulator pays
for events, never for tokens.
"""

from __future__ import annotations

import math

from asyncrl.core.types import Record


class CostModel(Record, frozen=True, kw_only=True):
    """Coefficients in seconds: ``k1`` a token of KV, ``k2`` a step that is bound by memory, ``k3`` a sequence, ``k4`` a
    step, ``k5`` a prefilled token.

    The defaults are StaleFlow's table 4 for Qwen3-30B-A3B. ``k5`` is not given there and is our assumption (the paper's
    own k5 is another thing: the KV bytes of a token, which is 1 here, as KV is counted in tokens).
    """

    k1: float = 7.28e-8
    k2: float = 1.72e-3
    k3: float = 1.25e-4
    k4: float = 1.07e-2
    k5: float = 2e-5

    def step(self, n: int, kv: int, prefill: float = 0) -> float:
        """Seconds of one step: ``n`` sequences decode (Eq. 11), and ``prefill`` tokens are prefilled beside them. With
        ``n`` 0 nothing is decoded, and only the prefill takes time."""
        decode = self.k1 * kv + max(self.k2, self.k3 * n) + self.k4 if n else 0.0
        return decode + self.k5 * prefill

    def throughput(self, n: int, kv: int, prefill: float = 0) -> float:
        """Tokens per second (Eq. 12); 0 for an idle server."""
        return n / self.step(n, kv, prefill) if n else 0.0

    def use(self, n: int, kv: int, prefill: float = 0) -> float:
        """Share of a server's time that goes into its sequences, k1·kv + k3·n of each step; the rest is what a step
        takes for any number of them, and prefill. 0 for an idle server."""
        step = self.step(n, kv, prefill)
        return (self.k1 * kv + self.k3 * n) / step if n and step else 0.0

    def gain(self, n: int, kv: int, tokens: int, slots: int = 1, prefill: float = 0) -> float:
        """What a server with ``n`` sequences in ``kv`` tokens gains in ``use`` by ``slots`` more in ``tokens`` more.
        ``prefill`` is the tokens to prefill for them, spread over the steps that they stay."""
        return self.use(n + slots, kv + tokens, prefill) - self.use(n, kv)

    def time_of(self, steps: int, n: int, kv: int, prefill: int = 0) -> float:
        """Seconds of ``steps`` steps in a row, starting from ``kv`` tokens, each with ``prefill`` tokens beside it."""
        return steps * self.step(n, kv, prefill) + self.k1 * n * steps * (steps - 1) / 2

    def steps_in(self, seconds: float, n: int, kv: int, prefill: int = 0) -> int:
        """Whole steps that fit into ``seconds``: the inverse of ``time_of``, up to rounding of the last step. A step
        must take time."""
        seconds += 1e-9 * (1.0 + abs(seconds))
        a, b = self.k1 * n / 2, self.step(n, kv, prefill) - self.k1 * n / 2
        steps = seconds / b if a == 0 else 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))
        return int(steps)
