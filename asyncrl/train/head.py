"""The last layer: logprobs of chosen tokens and the entropy, without ever holding the logits of all positions.

A row of 32k tokens over a vocabulary of 150k would be 20 GB of float32 logits, and as much again for their gradient.
Here a chunk of positions at a time meets the vocabulary, in the forward and again in the backward, which computes the
chunk's logits anew and its gradient in closed form: nothing of the vocabulary's width outlives its chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGIT_ELEMENTS = 2**26
"""Float32 logits of one chunk (256 MB); about three tensors of this size are alive at once."""


def chosen_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    soft_cap: float | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` ``[n]`` given ``hidden`` ``[n, width]``, and the entropy there; both ``[n]``,
    float32. The logits are those of the linear layer ``head``, squashed into ±``soft_cap`` (Gemma 2), and divided by
    ``temperature``. The entropy has a gradient only with ``entropy_gradient``.
    """
    bias = getattr(head, "bias", None)
    apply: Any = _ChosenLogprobs.apply
    logprobs, entropy = apply(hidden, head.weight, bias, targets, temperature, soft_cap)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _ChosenLogprobs(torch.autograd.Function):
    """With p the tempered distribution and z the logits that the softmax sees::

    ∂ log p(target) / ∂z = onehot(target) − p          ∂H / ∂z = −p · (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), device=hidden.device)
        entropy = torch.empty_like(logprobs)
        norm = torch.empty_like(logprobs)
        for part in _chunks(len(targets), len(weight)):
            z = _logits(hidden[part], weight, bias, temperature, soft_cap)
            norm[part] = z.logsumexp(-1)
            logprobs[part] = z.gather(-1, targets[part, None])[:, 0] - norm[part]
            entropy[part] = torch.special.entr(z.sub_(norm[part, None]).exp_()).sum(-1)
            del z  # before the next chunk's is made
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.temperature, ctx.soft_cap = temperature, soft_cap
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(norm)
        wanted = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        # In float32: the sum of many chunks would lose what each adds in bfloat16.
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        for part in _chunks(len(targets), len(weight)):
            slope = _slope(
                _logits(hidden[part], weight, bias, ctx.temperature, ctx.soft_cap),
                targets[part, None],
                norm[part, None],
                entropy[part, None],
                of_logprobs[part, None],
                None if of_entropy is None else of_entropy[part, None],
            )
            if ctx.soft_cap:
                slope *= _soft_cap_slope(_logits(hidden[part], weight, bias, 1.0, ctx.soft_cap), ctx.soft_cap)
            slope /= ctx.temperature
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(slope, weight, out=to_hidden[part])
            if to_weight is not None:
                to_weight += slope.T @ hidden[part]
            del slope
        of_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return to_hidden, of_weight, None if to_bias is None else to_bias.to(bias.dtype), None, None, None


def _slope(
    z: Tensor, targets: Tensor, norm: Tensor, entropy: Tensor, of_logprobs: Tensor, of_entropy: Tensor | None
) -> Tensor:
    """Gradient with respect to ``z`` ``[n, vocabulary]``, which is used up; the others are ``[n, 1]``."""
    logs = z.sub_(norm)
    slope = logs.exp()
    if of_entropy is None:
        slope *= -of_logprobs
    else:
        slope *= logs.add_(entropy).mul_(of_entropy).add_(of_logprobs).neg_()
    return slope.scatter_add_(-1, targets, of_logprobs)


def _soft_cap_slope(capped: Tensor, soft_cap: float) -> Tensor:
    return capped.div_(soft_cap).square_().neg_().add_(1)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, soft_cap: float | None) -> Tensor:
    z = F.linear(hidden, weight, bias).float()
    if soft_cap:
        z = z.div_(soft_cap).tanh_().mul_(soft_cap)
    return z.div_(temperature)


def _chunks(positions: int, vocabulary: int) -> list[slice]:
    rows = max(1, LOGIT_ELEMENTS // vocabulary)
    return [slice(start, start + rows) for start in range(0, positions, rows)]
