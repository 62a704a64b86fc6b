"""Causal attention over packed sequences: exact, without padding anywhere else in the model.

A packed row holds many sequences end to end. A block-diagonal mask would cost the square of the row; here the sequences
are gathered into a few padded blocks of similar length just around the attention kernel, where causality alone keeps
real tokens from padding on their right, so that no mask is needed and every backend of
``scaled_dot_product_attention`` (flash included) serves. Measured on one CPU core with 128 sequences of 25 tokens: 13
times less time than the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "asyncrl_packed"
"""The attention's name in transformers' registry."""

PADDING = 1.25
"""A block may hold this many times its real tokens before a new block is begun."""


class Layout:
    """Where the sequences of one packed row lie, and how they are gathered into blocks.

    ``blocks`` holds (index ``[sequences · longest]`` into the row, sequences, longest); ``inverse`` ``[tokens]`` leads
    from the concatenated blocks back to the row. ``positions`` ``[1, tokens]`` restart at 0 with each sequence.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        blocks: list[tuple[Tensor, int, int]] = []
        inverse = torch.empty(starts[-1], dtype=torch.long)
        offset = 0
        for members in _blocks(lengths):
            longest = lengths[members[0]]
            index = torch.zeros(len(members), longest, dtype=torch.long)
            for row, i in enumerate(members):
                steps = torch.arange(lengths[i])
                index[row, : lengths[i]] = starts[i] + steps
                inverse[starts[i] : starts[i + 1]] = offset + row * longest + steps
            offset += index.numel()
            blocks.append((index.view(-1).to(device), len(members), longest))
        self.blocks = blocks
        self.inverse = inverse.to(device)
        self.positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Indices by falling length, cut where padding would exceed ``PADDING``."""
    blocks: list[list[int]] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not blocks or lengths[blocks[-1][0]] * (len(blocks[-1]) + 1) > PADDING * (real + lengths[i]):
            blocks.append([])
            real = 0
        blocks[-1].append(i)
        real += lengths[i]
    return blocks


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. ``query`` ``[1, heads, tokens, dim]``, ``key`` and ``value`` with possibly
    fewer heads; returns ``[1, tokens, heads, dim]``. Options of other architectures (soft caps, sinks) are not known
    here; ``model.check_packing`` refuses a model that needs them."""
    heads, dim = query.shape[1], value.shape[-1]
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    outputs = []
    for index, count, longest in layout.blocks:
        q, k, v = (x.index_select(0, index).view(count, longest, x.shape[1], -1).transpose(1, 2) for x in rows)
        band = None
        if sliding_window is not None and longest > sliding_window:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
            band = ones.tril() & ~ones.tril(-sliding_window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=key.shape[1] != heads
        )
        outputs.append(out.transpose(1, 2).reshape(count * longest, heads, dim))
    return torch.cat(outputs).index_select(0, layout.inverse)[None], None


AttentionInterface.register(NAME, packed_attention)
