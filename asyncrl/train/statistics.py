"""What people look at in a train step: sums over tokens, which add up over micro-batches, updates and ranks.

``measure`` looks at one micro-batch, without gradient; ``summarise`` makes the step's metrics of the totals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.train.loss import KLS, PerToken, Tokens

SUMS = (
    "tokens",
    "ratio",
    "low",
    "high",
    "capped",
    "rejected",
    "kl",
    "gap",
    "entropy",
    "referred",
    "reference_kl",
    "staleness",
)
MAXIMA = ("ratio", "gap")
STALENESS_BINS = 9
"""Ratios, clipping and gaps are told apart for tokens of staleness 0, 1, …, 7, and 8 or more."""

_BY_STALENESS = ("tokens", "ratio", "clipped", "kl", "gap")
_LARGEST = 80.0


def empty() -> tuple[Tensor, Tensor]:
    """Totals of nothing: (sums ``[len(SUMS) + 3 · STALENESS_BINS]``, maxima ``[len(MAXIMA)]``), float64."""
    count = len(SUMS) + len(_BY_STALENESS) * STALENESS_BINS
    return torch.zeros(count, dtype=torch.float64), torch.zeros(len(MAXIMA), dtype=torch.float64)


@torch.no_grad()
def measure(tokens: Tokens, per_token: PerToken, rejected: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """(sums, maxima) of a micro-batch, of the shapes of ``empty``, in float64 on the CPU.

    ``kl`` is E_μ[(r − 1) − log r] = KL(μ ‖ π_θ) with r = π_θ/μ, every term of it ≥ 0; ``gap`` is |log r|, at staleness
    0 the disagreement of engine and trainer about the same weights.
    """
    log_ratio = (tokens.logprobs - tokens.behaviour).double()
    ratio = log_ratio.clamp(max=_LARGEST).exp()
    one = torch.ones_like(ratio)
    kl, gap = ratio - 1 - log_ratio, log_ratio.abs()
    referred = reference_kl = torch.zeros_like(ratio)
    if tokens.reference is not None:
        referred, reference_kl = one, KLS["k3"]((tokens.logprobs - tokens.reference).double())
    clips = (per_token.low, per_token.high, ratio > cap)
    columns = (one, ratio, *clips, rejected, kl, gap, tokens.entropy, referred, reference_kl, tokens.staleness)
    totals = torch.stack([column.double() for column in columns]).sum(-1)
    bins = torch.arange(STALENESS_BINS, device=ratio.device)
    member = (tokens.staleness.clamp(0, STALENESS_BINS - 1) == bins[:, None]).double()
    clipped = (per_token.low | per_token.high).double()
    by_staleness = torch.stack([one, ratio, clipped, kl, gap]) @ member.T
    largest = torch.stack([ratio.amax(), gap.amax()])
    return torch.cat([totals, by_staleness.flatten()]).cpu(), largest.cpu()


@torch.no_grad()
def sequence_ratios(tokens: Tokens) -> list[float]:
    """Mean of π_θ/μ over the tokens of each sequence."""
    ratio = (tokens.logprobs - tokens.behaviour).double().clamp(max=_LARGEST).exp()
    return torch.segment_reduce(ratio, "mean", lengths=tokens.lengths).tolist()


def mean_ratio(sums: Tensor) -> float:
    """Of the tokens of ``sums``."""
    return float(sums[SUMS.index("ratio")]) / max(1.0, float(sums[SUMS.index("tokens")]))


def summarise(updates: Sequence[Tensor], maxima: Tensor) -> dict[str, float]:
    """A step's metrics: means over trained tokens, from the sums of each of its ``updates``, in order.

    ``…_staleness_N`` are of tokens that were sampled N versions before the one that the step trains, only where there
    were such. But a policy moves with every update: of k updates to a step, the u-th (from 0) is made by a policy that
    is u/k of the way to the next version. So ``token_staleness`` counts a token as (versions between) + u/k each time
    it is trained, and ``token_staleness_updates``, k times that, is the number of optimiser updates that lie between
    the policy that sampled it and the one that is updated: what the staleness paper counts ("policy updates between
    when a rollout begins generating and when it is trained on") where every update is a version. With several updates
    ``kl_update_U`` and ``clip_fraction_update_U`` show how far each is from the data.
    """
    sums = torch.stack([*updates]).sum(0)
    total = dict(zip(SUMS, sums.tolist(), strict=False))
    tokens = max(1.0, total["tokens"])
    metrics = {
        "trained_tokens": total["tokens"],
        "entropy": total["entropy"] / tokens,
        "ratio_mean": mean_ratio(sums),
        "ratio_max": float(maxima[0]),
        "clip_fraction": (total["low"] + total["high"]) / tokens,
        "clip_low_fraction": total["low"] / tokens,
        "clip_high_fraction": total["high"] / tokens,
        "capped_fraction": total["capped"] / tokens,
        "rejected_fraction": total["rejected"] / tokens,
        "kl": total["kl"] / tokens,
        "engine_gap": total["gap"] / tokens,
        "engine_gap_max": float(maxima[1]),
    }
    if total["referred"]:
        metrics["reference_kl"] = total["reference_kl"] / total["referred"]
    count = len(updates)
    ahead = math.fsum(u / count * float(part[0]) for u, part in enumerate(updates))
    metrics["token_staleness"] = (total["staleness"] + ahead) / tokens
    metrics["token_staleness_updates"] = count * metrics["token_staleness"]
    for u, part in enumerate(updates if count > 1 else ()):
        of = dict(zip(SUMS, part.tolist(), strict=False))
        metrics[f"kl_update_{u}"] = of["kl"] / max(1.0, of["tokens"])
        metrics[f"clip_fraction_update_{u}"] = (of["low"] + of["high"]) / max(1.0, of["tokens"])
    counts, ratios, clipped, kls, gaps = sums[len(SUMS) :].view(len(_BY_STALENESS), STALENESS_BINS).tolist()
    for age, count in enumerate(counts):
        if count:
            metrics[f"tokens_staleness_{age}"] = count
            metrics[f"ratio_staleness_{age}"] = ratios[age] / count
            metrics[f"clip_fraction_staleness_{age}"] = clipped[age] / count
            metrics[f"kl_staleness_{age}"] = kls[age] / count
            metrics[f"engine_gap_staleness_{age}"] = gaps[age] / count
    return metrics


def advantage_moments(columns: Sequence[np.ndarray[tuple[int], np.dtype[np.float32]]]) -> dict[str, float]:
    """Mean, standard deviation and extremes of the advantages of a batch's tokens, zeros included."""
    values = np.concatenate([np.zeros(0, np.float32), *columns]).astype(np.float64)
    if not len(values):
        return {}
    return {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std()),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_zero_fraction": float((values == 0).mean()),
    }
