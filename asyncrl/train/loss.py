"""The policy losses by name, as functions of per-token columns. Pure torch: no model, no ranks, no batch structure.

Notation, per generated token t: ``μ`` is the policy that sampled it (the engine's own probability under whatever
version it then had; in one trajectory each token has its own), ``π_θ`` the policy being differentiated, ``π_prox`` the
trainer's policy at the start of the step or an estimate of it, ``π_ref`` a frozen reference, ``A`` the advantage,
``C`` ``importance_cap``, ``sg`` stop-gradient. Where a paper says π_old, that is μ here.

A loss maps ``Tokens`` to one value a token, of which the batch's weighted sum is minimised (``policy_loss``): every
token carries its share of the batch's mean (``token_weights``), so neither packing nor sharding changes the result. A
user's own loss is a function of the same form::

    def my_loss(tokens: Tokens, options: AlgorithmConfig) -> Tensor:      # [tokens], differentiable
        return -(tokens.logprobs - tokens.behaviour).exp() * tokens.advantages

Staleness and the mismatch between engine and trainer are one thing to a loss: both show in π/μ. That ratio is counted
exactly once; clipping π_θ/μ *and* multiplying by π_θ/μ again would weight a token by its squared ratio, which estimates
no policy's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from asyncrl.config import AlgorithmConfig, RecipeError
from asyncrl.core.types import Record


class Tokens(Record, frozen=True, kw_only=True):
    """The trained tokens of one micro-batch; whole sequences, one after the other. Columns are ``[tokens]``, float32 or
    float64 unless said; only ``logprobs`` has a gradient, and ``entropy`` if ``entropy_coef`` > 0.

    ``logprobs`` log π_θ, ``behaviour`` log μ, ``proximal`` log π_prox (for ``decoupled_ppo`` and users' losses;
    else log π_θ), ``reference`` log π_ref (None without a KL
    term), ``entropy`` of π_θ at the token, ``advantages`` A, ``weights`` the share in the batch's mean (up to a factor
    that all tokens share, where the batch is streamed), ``staleness`` (int64) the version being trained minus the one
    that sampled the token; ``lengths`` ``[sequences]`` (int64) the number of tokens of each sequence.
    """

    logprobs: Tensor
    behaviour: Tensor
    proximal: Tensor
    entropy: Tensor
    advantages: Tensor
    weights: Tensor
    staleness: Tensor
    lengths: Tensor
    reference: Tensor | None = None


class PerToken(Record, frozen=True, kw_only=True):
    """A loss of each token ``[tokens]``, and where its lower or upper clip took effect (bool ``[tokens]``)."""

    loss: Tensor
    low: Tensor
    high: Tensor


LossFunction = Callable[[Tokens, AlgorithmConfig], "PerToken | Tensor"]


# --- the losses -------------------------------------------------------------------------------------------------------


def ppo(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """ROLL Flash §2.2's PPO surrogate (GRPO's clipped form) with the truncated importance weight of its Eq. 12::

        s = min(sg(π_θ) / μ, C) · π_θ / sg(π_θ)
        L = −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A)

    The trust region is around μ: what has to be bounded with stale data is the distance to the policy that sampled it.
    With C = ∞ this is PPO with π_old = μ, and DAPO's (§3.1) where clip_high > clip_low. C bounds the one side that
    PPO's min leaves open, a token with A < 0 whose probability has grown, and leaves it a gradient; ``dual_clip``
    takes that away (``_clipped``).
    """
    now = t.logprobs.detach()
    return _clipped(_capped(now - t.behaviour, o) * (t.logprobs - now).exp(), t.advantages, o)


def decoupled_ppo(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """Decoupled PPO (Hilton et al. 2022; ROLL Flash §2.2): the trust region is around π_prox, and what lies between it
    and μ is a plain importance weight, truncated at C::

        ρ = π_θ / π_prox
        L = −min(π_prox / μ, C) · min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A)
    """
    inner = _clipped((t.logprobs - t.proximal).exp(), t.advantages, o)
    return PerToken(loss=_capped(t.proximal - t.behaviour, o) * inner.loss, low=inner.low, high=inner.high)


def tis(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """Truncated importance sampling (Espeholt et al. 2018; ROLL Flash §2.2), which caps the weight and nothing else::

    L = −sg(min(π_θ / μ, C)) · A · log π_θ
    """
    log_ratio = _log_ratio(t, o)
    high = log_ratio > math.log(o.importance_cap)
    return PerToken(loss=-_capped(log_ratio, o) * t.advantages * t.logprobs, low=torch.zeros_like(high), high=high)


def cispo(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """CISPO (MiniMax-M1, Chen et al. 2025; ROLL Flash §2.2): the weight is clipped, and no token loses its gradient::

        L = −sg(clip(π_θ / μ, 1 − clip_low, 1 + clip_high)) · A · log π_θ

    ``clip_low`` = 1 leaves the lower side open, as MiniMax-M1 does.
    """
    ratio = (t.logprobs.detach() - t.behaviour).clamp(max=_LARGEST).exp()
    weight = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
    return PerToken(loss=-weight * t.advantages * t.logprobs, low=ratio < 1 - o.clip_low, high=ratio > 1 + o.clip_high)


def topr(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """Tapered off-policy REINFORCE (Le Roux et al. 2025; ROLL Flash §2.2): what went well is learned as it is, what
    went badly is unlearned only as far as it is still likely::

        L = −(1[A > 0] + 1[A < 0] · sg(min(π_θ / μ, C))) · A · log π_θ

    T⁺ and T⁻ are told apart by the sign of what multiplies the gradient, the advantage. Le Roux et al. take C = 1 and
    the ratio of whole trajectories, ``importance_level = "sequence"``.
    """
    return _tapered(t, o, 1.0, 1.0)


def weighted_topr(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """TOPR with its two sets weighed against each other (named in ROLL Flash §5.3)::

        L = −(w⁺ · 1[A > 0] + w⁻ · 1[A < 0] · sg(min(π_θ / μ, C))) · A · log π_θ

    w⁺ and w⁻ are ``positive_weight`` and ``negative_weight``.
    """
    return _tapered(t, o, o.positive_weight, o.negative_weight)


def gspo(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """Group sequence policy optimisation (Zheng et al. 2025, Eq. 7), in its per-token form (Eq. 13–15)::

        s   = (π_θ(y) / μ(y))^(1/|y|), at most C           one for a sequence of |y| generated tokens
        s_t = sg(s) · π_θ,t / sg(π_θ,t)
        L_t = −min(s_t·A, clip(s_t, 1 − clip_low, 1 + clip_high)·A)

    With one advantage for all tokens of a sequence, value and gradient are those of GSPO's sequence loss; the paper's
    mean over sequences is ``aggregation = "sequence_mean"``, and its clip ranges are a few 1e-4.
    """
    now = t.logprobs.detach()
    s = _capped(_over_sequences(now - t.behaviour, t.lengths, "mean"), o)
    return _clipped(s * (t.logprobs - now).exp(), t.advantages, o)


def reinforce(t: Tokens, o: AlgorithmConfig) -> PerToken:
    """Plain REINFORCE (Williams 1992), as if every token had been sampled by π_θ: ``L = −A · log π_θ``."""
    none = torch.zeros_like(t.advantages, dtype=torch.bool)
    return PerToken(loss=-t.advantages * t.logprobs, low=none, high=none)


LOSSES: dict[str, LossFunction] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "tis": tis,
    "cispo": cispo,
    "topr": topr,
    "weighted_topr": weighted_topr,
    "gspo": gspo,
    "reinforce": reinforce,
}
"""The recipe's ``algorithm.loss`` by name."""

_LARGEST = 80.0
"""Logarithm of the largest ratio that is told apart from infinity: its exponential is finite in float32."""


def _clipped(ratio: Tensor, advantages: Tensor, o: AlgorithmConfig) -> PerToken:
    """``−min(r·A, clip(r)·A)``. With ``dual_clip`` c > 1 (Ye et al. 2020, Eq. 5) a token with A < 0 is worth at least
    c·A however likely it has become: ``−max(min(r·A, clip(r)·A), c·A)``."""
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * advantages)
    down = advantages < 0
    high = (advantages > 0) & (ratio > 1 + o.clip_high)
    if o.dual_clip:
        objective = torch.where(down, torch.maximum(objective, o.dual_clip * advantages), objective)
        high = high | down & (ratio > o.dual_clip)
    return PerToken(loss=-objective, low=down & (ratio < 1 - o.clip_low), high=high)


def _tapered(t: Tokens, o: AlgorithmConfig, positive: float, negative: float) -> PerToken:
    log_ratio = _log_ratio(t, o)
    good = t.advantages > 0
    weight = torch.where(good, torch.full_like(log_ratio, positive), negative * _capped(log_ratio, o))
    high = ~good & (log_ratio > math.log(o.importance_cap))
    return PerToken(loss=-weight * t.advantages * t.logprobs, low=torch.zeros_like(high), high=high)


def _capped(log_ratio: Tensor, o: AlgorithmConfig) -> Tensor:
    # The cap is applied to the logarithm, so that no ratio overflows however wrong an engine's logprob is.
    return log_ratio.clamp(max=math.log(o.importance_cap)).exp()


def _log_ratio(t: Tokens, o: AlgorithmConfig) -> Tensor:
    """log π_θ/μ without gradient: of the token, or of its whole sequence (the product over its generated tokens)."""
    log_ratio = t.logprobs.detach() - t.behaviour
    return _over_sequences(log_ratio, t.lengths, "sum") if o.importance_level == "sequence" else log_ratio


def _over_sequences(values: Tensor, lengths: Tensor, reduce: str) -> Tensor:
    """Each token's sequence's sum or mean. No gradient."""
    return torch.segment_reduce(values, reduce, lengths=lengths).repeat_interleave(lengths)


# --- what is put around every loss ------------------------------------------------------------------------------------


def policy_loss(tokens: Tokens, loss: LossFunction, options: AlgorithmConfig) -> tuple[Tensor, PerToken, Tensor]:
    """The weighted sum over tokens of the loss and its regularisers::

        Σ_t w_t · (L_t + kl_coef · k(π_θ, π_ref)_t − entropy_coef · H_t)

    Rejected tokens (``rejected``) have weight 0; the weights of the others stay as they are. With ``kl_in`` =
    ``reward`` the KL is taken off the advantages instead (``kl_to_go``), but for those of a critic, which has taken it
    off the rewards. Returns the sum, the bare loss of each token, and which tokens were rejected (bool ``[tokens]``).
    Raises ``ValueError`` for a user's loss of another shape.
    """
    out = rejected(tokens, options)
    if options.reject != "none":
        # On-policy by decree, so that no ratio of a rejected token can overflow into the gradient of the others.
        tokens = msgspec.structs.replace(
            tokens,
            weights=tokens.weights.masked_fill(out, 0.0),
            behaviour=torch.where(out, tokens.logprobs.detach(), tokens.behaviour),
            proximal=torch.where(out, tokens.logprobs.detach(), tokens.proximal),
        )
    if tokens.reference is not None and options.kl_in == "reward" and not options.uses_critic:
        tokens = msgspec.structs.replace(
            tokens, advantages=tokens.advantages - options.kl_coef * kl_to_go(tokens, options.kl)
        )
    per_token = _per_token(loss(tokens, options), tokens)
    total = per_token.loss
    if tokens.reference is not None and options.kl_in == "loss":
        total = total + options.kl_coef * KLS[options.kl](tokens.logprobs - tokens.reference)
    if options.entropy_coef:
        total = total - options.entropy_coef * tokens.entropy
    return (tokens.weights * total).sum(), per_token, out


def _per_token(value: PerToken | Tensor, tokens: Tokens) -> PerToken:
    if isinstance(value, PerToken):
        return value
    if not isinstance(value, Tensor) or value.shape != tokens.logprobs.shape:
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"it must return one value a token, a tensor [{len(tokens.logprobs)}], and returned {found}")
    none = torch.zeros_like(value, dtype=torch.bool)
    return PerToken(loss=value, low=none, high=none)


def check_loss(loss: LossFunction, options: AlgorithmConfig) -> None:
    """Try a user's loss on two sequences before a run depends on it. Raises ``RecipeError``."""
    one = torch.ones(3)
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs,
        behaviour=-one,
        proximal=logprobs.detach(),
        entropy=one,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        weights=one / 3,
        staleness=torch.tensor([0, 1, 2]),
        lengths=torch.tensor([2, 1]),
        reference=-one if options.kl_coef else None,
    )
    try:
        value = policy_loss(tokens, loss, options)[1].loss
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"algorithm.loss: {options.loss} failed on a trial: {what}") from error
    if not value.requires_grad:
        raise RecipeError(f"algorithm.loss: {options.loss} has no gradient; compute it from tokens.logprobs")


def rejected(tokens: Tokens, options: AlgorithmConfig) -> Tensor:
    """Which tokens are left out because engine and trainer disagree too much (bool ``[tokens]``).

    ``reject`` = ``token``: those whose π_θ/μ lies outside [reject_low, reject_high]; ``sequence``: all of a sequence
    whose geometric mean of it does (masked importance sampling, in both forms of Yao et al. 2025).
    """
    log_ratio = tokens.logprobs.detach() - tokens.behaviour
    if options.reject == "none":
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    if options.reject == "sequence":
        log_ratio = _over_sequences(log_ratio, tokens.lengths, "mean")
    return ~((log_ratio >= math.log(options.reject_low)) & (log_ratio <= math.log(options.reject_high)))


KLS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
}
"""Schulman's estimators of KL(π_θ ‖ π_ref) from log π_θ/π_ref of sampled tokens (joschu.net/blog/kl-approx). k1 is
unbiased but as a *loss* its gradient has mean 0; k2's gradient is that of the KL; k3 is unbiased and never negative."""


def kl_to_go(tokens: Tokens, estimator: str) -> Tensor:
    """Sum of the KL estimates from each token to the end of its sequence ``[tokens]``, without gradient: what a token
    is responsible for when the reward of every token is lowered by its KL (Ouyang et al. 2022)."""
    assert tokens.reference is not None
    values = KLS[estimator](tokens.logprobs.detach() - tokens.reference)
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in values.split(tokens.lengths.tolist())])


def interpolated(logprobs: Tensor, behaviour: Tensor, staleness: Tensor) -> Tensor:
    """log π_prox without a forward pass: on the straight line in log space from μ, which sampled the token at version
    v, to π_θ, which is on its way from version s to s + 1, at version s (AReaL's ``loglinear``,
    inclusionai.github.io/AReaL/algorithms/prox_approx.html)::

        log π_prox = log μ + α · (log π_θ − log μ),    α = (s − v) / (s + 1 − v)

    A fresh token has π_prox = μ, exactly; the staler, the nearer to π_θ.
    """
    alpha = staleness / (staleness + 1)
    return torch.lerp(behaviour, logprobs.detach(), alpha.to(behaviour.dtype))


def token_weights(generated: list[int], aggregation: str, total: int | None = None) -> list[float]:
    """Weight of each token of a sequence, from the number of trained tokens per sequence of the *whole* batch.

    ``token_mean``: 1 / all tokens (DAPO §3.3). ``sequence_mean``: 1 / (sequences × tokens of this one); sequences
    without trained tokens do not count. The weights of all tokens of a batch sum to 1. With ``total`` = 1 they are
    those of a part of a batch, but for the factor 1 / ``batch_total``, which only the whole batch knows.
    """
    total = batch_total(generated, aggregation) if total is None else total
    if aggregation == "token_mean":
        return [1.0 / total if n else 0.0 for n in generated]
    return [1.0 / (total * n) if n else 0.0 for n in generated]


def batch_total(generated: list[int], aggregation: str) -> int:
    """What the mean is over: all tokens, or all sequences that have some."""
    if aggregation == "token_mean":
        return sum(generated)
    if aggregation == "sequence_mean":
        return sum(1 for n in generated if n)
    raise ValueError(f"algorithm.aggregation: unknown {aggregation!r}; known are token_mean, sequence_mean")
