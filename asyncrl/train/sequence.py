"""Sequence parallelism: k neighbouring ranks share each packed row, for rows too long for one of them.

After DeepSpeed-Ulysses (arXiv:2309.14509): a rank holds one k-th of the row's tokens, of all activations and of the
logits; only around the attention kernel the ranks exchange, each giving up tokens for heads, so that it attends over
the whole row for one k-th of the heads. The logprobs are then put together, and every rank computes the loss of the
whole row, of which it differentiates its own tokens' part: a loss may look at whole sequences, and the gradient's sum
over all ranks is that of one rank with the whole row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Split:
    """This rank's place among the ``size`` that share each row. Made by every rank of the job at the same time."""

    def __init__(self, size: int) -> None:
        self._group, _ = dist.new_subgroups(size)
        self.size = size
        self.rank = dist.get_rank(self._group)

    def span(self, length: int) -> tuple[int, int]:
        """First token and number of tokens of this rank, of a row of ``length``; the last rank's may be padding."""
        count = math.ceil(length / self.size)
        return self.rank * count, count

    def own(self, row: Tensor) -> Tensor:
        """This rank's part of ``row`` ``[..., tokens]``, padded with zeros."""
        start, count = self.span(row.shape[-1])
        return F.pad(row, (0, count * self.size - row.shape[-1]))[..., start : start + count]

    def heads(self, x: Tensor, length: int) -> Tensor:
        """``[own tokens, heads, dim]`` of each rank → ``[length, heads / k, dim]``. Heads of grouped keys and values
        that k does not divide are repeated until it does; their order stays that of the queries' groups."""
        x = x.repeat_interleave(self.size // math.gcd(x.shape[1], self.size), dim=1)
        return self._exchange(x, 1, 0)[:length]

    def tokens(self, x: Tensor) -> Tensor:
        """``[row length, heads / k, dim]`` → ``[own tokens, heads, dim]``, the way back."""
        _, count = self.span(len(x))
        return self._exchange(F.pad(x, (0, 0, 0, 0, 0, count * self.size - len(x))), 0, 1)

    def mine(self, positions: Tensor, length: int) -> Tensor:
        """Which of ``positions`` ``[n]`` in a row of ``length`` are this rank's (bool)."""
        start, count = self.span(length)
        return (positions >= start) & (positions < start + count)

    def whole(self, part: Tensor, mine: Tensor) -> Tensor:
        """``[n]``, put together of each rank's ``part``, one for each True of its ``mine`` ``[n]``. The gradient of a
        rank's own part is the one that arrives here: all ranks go on with the same computation."""
        column = torch.zeros(len(mine), dtype=part.dtype, device=part.device).masked_scatter(mine, part)
        whole: Tensor = _call(_Whole, column, self._group)
        return whole

    def _exchange(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        out: Tensor = _call(_Exchange, x, self._group, scatter, gather)
        return out


def _call(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Exchange(torch.autograd.Function):
    """All-to-all: dimension ``scatter`` is cut into as many parts as there are ranks, and what each rank sent is joined
    along ``gather``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, scatter: int, gather: int) -> Tensor:
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        sent = torch.stack(x.chunk(group.size(), scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _call(_Exchange, grads[0], ctx.group, ctx.gather, ctx.scatter), None, None, None


class _Whole(torch.autograd.Function):
    """The sum over the ranks, with the gradient of a rank's own summand only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None
