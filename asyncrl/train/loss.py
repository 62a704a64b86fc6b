"""The policy losses, as functions of per-token columns. Pure torch: no model, no ranks, no batch structure.

Notation, per generated token t: ``μ`` is the policy that sampled it (the engine's own probability under whatever
version it then had; in one trajectory each token has its own), ``π_old`` the trainer's policy at the start of the step,
``π_θ`` the policy being differentiated, ``A`` the advantage.

**ppo.** ROLL Flash §2.2's PPO surrogate with the truncated importance weight of its Eq. 12::

    w_t = min(π_old / μ, C)            stop-gradient: corrects for staleness and for engine-trainer mismatch at once
    ρ_t = π_θ / π_old                  the proximal ratio; carries the gradient
    s_t = w_t · ρ_t
    L_t = −min(s_t · A, clip(s_t, 1 − clip_low, 1 + clip_high) · A)

A batch is used for one update, so π_old *is* π_θ at the point of evaluation: ρ_t = 1 in value, ∇ρ_t = ∇log π_θ, and
no second forward pass is needed for it. Three things follow:

* The ratio π_θ/μ is counted exactly once. Clipping ``π_θ/μ`` *and* multiplying by ``π_θ/μ`` again would weight a token
  by its squared ratio, which estimates no policy's gradient.
* The trust region is around μ, because around π_old it would be empty of effect: ρ_t never leaves 1 in the only
  update. What has to be bounded with stale data is the distance to the policy that sampled it.
* With C = ∞ this is PPO with π_old = μ; with clip = ∞ it is truncated importance sampling (``TIS`` of §2.2). C bounds
  the one side that PPO's min leaves open: a token with A < 0 whose probability has grown (s > 1 + clip_high).

Callers who take several updates from a batch pass the ``proximal`` logprobs, frozen at the start of the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUMS = ("loss", "tokens", "ratio", "clipped", "capped", "kl", "gap", "entropy")
"""Columns of the statistics that are summed over tokens, micro-batches and ranks."""


def ppo(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cap: float,
    proximal: Tensor | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Weighted sum of L_t over tokens, and statistics.

    All columns are ``[tokens]``, float32 or float64: ``logprobs`` log π_θ (with gradient), ``behaviour`` log μ,
    ``weights`` the share of each token in the batch's mean (see ``token_weights``), which makes the result additive:
    its gradient does not depend on how tokens are spread over micro-batches and ranks. Returns (loss, sums, the
    largest ratio π_old/μ); ``sums`` is ``[len(SUMS) − 1]`` (all but the entropy), detached.
    """
    old = logprobs.detach() if proximal is None else proximal
    log_ratio = old - behaviour
    # The cap is applied to the logarithm, so that no ratio overflows however wrong an engine's logprob is.
    weight = log_ratio.clamp(max=math.log(cap)).exp()
    s = weight * (logprobs - old).exp()
    loss = -(weights * torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)).sum()
    with torch.no_grad():
        ratio = log_ratio.exp()
        clipped = ((advantages > 0) & (s > 1 + clip_high)) | ((advantages < 0) & (s < 1 - clip_low))
        sums = torch.stack(
            [
                loss.detach(),
                torch.full_like(loss, logprobs.numel()),
                ratio.sum(),
                clipped.sum().to(loss.dtype),
                (ratio > cap).sum().to(loss.dtype),
                # E_μ[(r − 1) − log r] = KL(μ ‖ π_old), every term of it ≥ 0
                (ratio - 1 - log_ratio).sum(),
                log_ratio.abs().sum(),
            ]
        )
        largest = float(ratio.max()) if ratio.numel() else 0.0
    return loss, sums, largest


def token_weights(generated: list[int], aggregation: str) -> list[float]:
    """Weight of each token of a sequence, from the number of trained tokens per sequence of the *whole* batch.

    ``token_mean``: 1 / all tokens. ``sequence_mean``: 1 / (sequences × tokens of this one); sequences without trained
    tokens do not count. The weights of all tokens of a batch sum to 1.
    """
    tokens = sum(generated)
    sequences = sum(1 for n in generated if n)
    if aggregation == "token_mean":
        return [1.0 / tokens if n else 0.0 for n in generated]
    if aggregation == "sequence_mean":
        return [1.0 / (sequences * n) if n else 0.0 for n in generated]
    raise ValueError(f"algorithm.aggregation: unknown {aggregation!r}; known are token_mean, sequence_mean")
