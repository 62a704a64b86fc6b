"""Draws the next token of every row of a batch at once.

Logprobs are after temperature and before top_p and top_k, as SGLang's: log_softmax(logits / T) of the drawn token. A
temperature of 0 takes the likeliest token, with logprobs at temperature 1. Drawing inverts the cumulative distribution
with one uniform number a row, which on a CPU is some thirty times cheaper than exponential noise for every entry; only
rows that ask for top_p or top_k are sorted.
"""

from __future__ import annotations

import math

import torch

from asyncrl.serve.scheduler import Sequence


class Sampler:
    """Owns the random state: one generator on the model's device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(seed)
        self._device = device

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        """Token ids and logprobs, one a row, of logits (n, vocab) float32, which may be overwritten."""
        for row, s in enumerate(sequences):
            if len(s.output) < s.min_new and s.stop_ids:
                logits[row, list(s.stop_ids)] = -math.inf
        temperatures = [s.temperature or 1.0 for s in sequences]
        if any(t != 1.0 for t in temperatures):
            logits.div_(torch.tensor(temperatures, device=self._device)[:, None])
        logprobs = logits.log_softmax(-1)
        greedy = [row for row, s in enumerate(sequences) if s.temperature == 0.0]
        if len(greedy) == len(sequences):
            ids = logprobs.argmax(-1)
        else:
            u = torch.rand((len(sequences), 1), generator=self._generator, device=self._device)
            ids = invert(self._restrict(logprobs.exp(), sequences), u)
            if greedy:
                ids[greedy] = logprobs[greedy].argmax(-1)
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        return ids.tolist(), chosen.tolist()

    def _restrict(self, probs: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Zero what top_k and top_p exclude, both judged on the whole distribution, as SGLang does."""
        rows = [i for i, s in enumerate(sequences) if s.temperature and (s.top_p < 1.0 or s.top_k > 0)]
        if not rows:
            return probs
        vocab = probs.shape[1]
        top_k = torch.tensor([k if (k := sequences[i].top_k) > 0 else vocab for i in rows], device=self._device)
        top_p = torch.tensor([sequences[i].top_p for i in rows], device=self._device)
        ranked, order = probs[rows].sort(stable=True, dim=-1, descending=True)
        before = ranked.cumsum(-1) - ranked
        ranked[torch.arange(vocab, device=self._device) >= top_k[:, None]] = 0.0
        ranked[before > top_p[:, None]] = 0.0
        probs[rows] = torch.zeros_like(ranked).scatter_(1, order, ranked)
        return probs


def invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The column (n,) of each row at which the cumulative weight passes share u (n, 1), 0 ≤ u ≤ 1, of the whole.

    Weights (n, vocab) are ≥ 0; a column with weight 0 is never taken.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total even after rounding, so that the first column beyond it always has weight.
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
