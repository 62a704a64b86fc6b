"""Forward passes of a Llama-family decoder over the KV cache: prefill of new rows (but for the prefix that the cache
has), decode of one token a row.

Weights live in fused tensors (q, k and v in one, gate and up in one); ``parameters`` names the Hugging Face tensors
inside them as views, so an update in place is one copy a tensor and nothing has to be rebuilt. Written for many small
steps: a layer is about twenty operator calls beside one attention call per length group.

Owned by the engine's thread. Every method is to be called under ``torch.inference_mode``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from asyncrl.serve.kv_cache import Arena, Group, KVCache
from asyncrl.serve.scheduler import Sequence
from asyncrl.serve.spec import ModelSpec, RopeSpec

PREFILL_CHUNK = 2048
"""Tokens (rows x columns) of one prefill forward pass: bounds activation and mask memory."""

_Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Layer:
    """The fused tensors of one block. Absent biases are None.

    Linear weights are (in, out), the transpose of Hugging Face's: on a CPU that halves the time of small products.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.input_norm = empty(spec.hidden)
        self.post_norm = empty(spec.hidden)
        self.qkv = empty(spec.hidden, rows)
        self.qkv_bias = empty(rows) if spec.qkv_bias else None
        # One row of weights a head, so that the norms of q and k are one operation.
        self.qk_norm = empty(spec.heads + spec.kv_heads, spec.head_dim) if spec.qk_norm else None
        self.out = empty(spec.heads * spec.head_dim, spec.hidden)
        self.out_bias = empty(spec.hidden) if spec.out_bias else None
        self.gate_up = empty(spec.hidden, 2 * spec.intermediate)
        self.gate_up_bias = empty(2 * spec.intermediate) if spec.mlp_bias else None
        self.down = empty(spec.intermediate, spec.hidden)
        self.down_bias = empty(spec.hidden) if spec.mlp_bias else None


class Parameter(NamedTuple):
    """Where a Hugging Face tensor of ``shape`` lives. ``view`` may have more rows than it (norms repeated by head)."""

    view: torch.Tensor
    shape: tuple[int, ...]


class Model:
    """A decoder without a cache of its own. ``context_length`` bounds positions."""

    def __init__(self, spec: ModelSpec, *, context_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.layers = [Layer(spec, dtype, device) for _ in range(spec.layers)]
        self.embedding = torch.zeros((spec.vocab_size, spec.hidden), dtype=dtype, device=device)
        self.norm = torch.zeros(spec.hidden, dtype=dtype, device=device)
        self.head = self.embedding if spec.tied else torch.zeros_like(self.embedding)
        self.cos, self.sin = rope_tables(spec.rope, spec.head_dim, context_length, dtype, device)
        self.parameters = self._name_parameters()

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, groups: list[Group]) -> torch.Tensor:
        """Next-token logits (n, vocab) float32 of one token (n,) a row; writes its KV."""
        spec = self.spec
        kv_heads, per_kv, dim = spec.kv_heads, spec.heads_per_kv, spec.head_dim

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            # The query heads that share a key head become its query positions: no key is read or copied twice.
            query = qkv[:, : spec.heads].reshape(-1, kv_heads, per_kv, dim)
            new = qkv[:, spec.heads :].view(-1, 2, kv_heads, dim)
            outs = []
            for start, stop, rows, positions, arena_kv, bias, longest in groups:
                kv = arena_kv[layer]
                kv[rows, :, :, positions] = new[start:stop]
                seen = kv[: stop - start, :, :, :longest]
                out = F.scaled_dot_product_attention(query[start:stop], seen[:, 0], seen[:, 1], attn_mask=bias)
                outs.append(out)
            merged = outs[0] if len(outs) == 1 else torch.cat(outs)
            return merged.reshape(-1, spec.heads * dim)

        return self._logits(self._forward(tokens, positions, attend))

    def prefill(self, cache: KVCache, sequences: list[Sequence]) -> torch.Tensor:
        """Place new sequences of one arena and compute those of their tokens that the cache has no rows for; next-token
        logits (n, vocab) float32."""
        arena, row, cached = cache.place(sequences)
        for sequence, count in zip(sequences, cached, strict=True):
            if not sequence.retractions:
                sequence.cached = count
        rest = [torch.tensor(s.ids()[count:]) for s, count in zip(sequences, cached, strict=True)]
        tokens = pad_sequence(rest, batch_first=True)
        starts = torch.tensor(cached)[:, None]
        lengths = torch.tensor([len(ids) for ids in rest])[:, None]
        last = torch.empty((len(rest), self.spec.hidden), dtype=self.dtype, device=self.device)
        step = max(1, PREFILL_CHUNK // len(rest))
        for begin in range(0, tokens.shape[1], step):
            columns = torch.arange(begin, min(begin + step, tokens.shape[1]))
            real = columns < lengths
            hidden = self._prefill_chunk(arena, row, tokens[:, columns], starts + columns, real)
            final = (columns == lengths - 1)[real]
            last[real.nonzero()[final, 0]] = hidden[final]
        return self._logits(last)

    def _prefill_chunk(
        self, arena: Arena, row: int, tokens: torch.Tensor, positions: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (m, hidden), row after row, of the ``real`` ones among tokens (n, columns) at ``positions`` of
        n neighbouring arena rows. The three tensors are on the CPU. Padding costs its place among the queries alone.
        """
        spec, device = self.spec, self.device
        count, columns = tokens.shape
        end = int(positions[real].max()) + 1
        starts_alike = bool((positions == positions[0]).all())  # then one mask serves all rows
        queries = (positions[:1] if starts_alike else positions).to(device)
        causal = queries[:, :, None] >= torch.arange(end, device=device)
        mask = torch.zeros(causal.shape, dtype=self.dtype, device=device).masked_fill_(~causal, -math.inf)
        mask = mask.repeat(1, spec.heads_per_kv, 1)[:, None]
        rows, places = (index.to(device) for index in real.nonzero(as_tuple=True))
        flat = positions[real].to(device)
        padded = len(flat) < real.numel()

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            kv = arena.kv[layer, row : row + count]
            kv[rows, :, :, flat] = qkv[:, spec.heads :].view(-1, 2, spec.kv_heads, spec.head_dim)
            query = qkv[:, : spec.heads]
            if padded:
                query = qkv.new_zeros((count, columns, spec.heads, spec.head_dim))
                query[rows, places] = qkv[:, : spec.heads]
            query = query.view(count, columns, spec.heads, spec.head_dim).transpose(1, 2)
            query = query.reshape(count, spec.kv_heads, spec.heads_per_kv * columns, spec.head_dim)
            out = F.scaled_dot_product_attention(query, kv[:, 0, :, :end], kv[:, 1, :, :end], attn_mask=mask)
            out = out.view(count, spec.heads, columns, spec.head_dim).transpose(1, 2)
            out = out[rows, places] if padded else out
            return out.reshape(-1, spec.heads * spec.head_dim)

        return self._forward(tokens[real].to(device), flat, attend)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: _Attend) -> torch.Tensor:
        """Hidden states (n, hidden) after the last norm, of tokens (n,). ``attend(layer, qkv)`` gets heads
        (n, heads + 2 kv_heads, head_dim), rotated; it writes the cache and returns (n, heads * head_dim)."""
        spec = self.spec
        eps, hidden, dim = spec.norm_eps, (spec.hidden,), (spec.head_dim,)
        rotated = spec.heads + spec.kv_heads
        half, width = spec.head_dim // 2, spec.intermediate
        x = self.embedding[tokens]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, hidden, layer.input_norm, eps)
            qkv = _linear(h, layer.qkv, layer.qkv_bias).view(len(x), -1, spec.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, dim, None, eps) * layer.qk_norm
            # sin carries the sign of the rotated half, so a roll replaces the usual split, negation and join.
            torch.addcmul(qk * cos, qk.roll(half, -1), sin, out=qkv[:, :rotated])
            _add_linear(x, attend(index, qkv), layer.out, layer.out_bias)
            h = F.rms_norm(x, hidden, layer.post_norm, eps)
            h = _linear(h, layer.gate_up, layer.gate_up_bias)
            h = F.silu(h[:, :width]).mul_(h[:, width:])
            _add_linear(x, h, layer.down, layer.down_bias)
        return F.rms_norm(x, hidden, self.norm, eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head).float()

    def _name_parameters(self) -> dict[str, Parameter]:
        spec = self.spec
        q, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        named: dict[str, Parameter] = {}

        def add(name: str, view: torch.Tensor | None, shape: tuple[int, ...] | None = None) -> None:
            if view is not None:
                named[name] = Parameter(view, tuple(view.shape) if shape is None else shape)

        add("model.embed_tokens.weight", self.embedding)
        for i, layer in enumerate(self.layers):
            base = f"model.layers.{i}."
            add(f"{base}input_layernorm.weight", layer.input_norm)
            add(f"{base}post_attention_layernorm.weight", layer.post_norm)
            for name, rows in (("q", slice(0, q)), ("k", slice(q, q + k)), ("v", slice(q + k, q + 2 * k))):
                add(f"{base}self_attn.{name}_proj.weight", layer.qkv.t()[rows])
                add(f"{base}self_attn.{name}_proj.bias", _rows(layer.qkv_bias, rows))
            if layer.qk_norm is not None:
                add(f"{base}self_attn.q_norm.weight", layer.qk_norm[: spec.heads], (spec.head_dim,))
                add(f"{base}self_attn.k_norm.weight", layer.qk_norm[spec.heads :], (spec.head_dim,))
            add(f"{base}self_attn.o_proj.weight", layer.out.t())
            add(f"{base}self_attn.o_proj.bias", layer.out_bias)
            for name, rows in (("gate", slice(0, spec.intermediate)), ("up", slice(spec.intermediate, None))):
                add(f"{base}mlp.{name}_proj.weight", layer.gate_up.t()[rows])
                add(f"{base}mlp.{name}_proj.bias", _rows(layer.gate_up_bias, rows))
            add(f"{base}mlp.down_proj.weight", layer.down.t())
            add(f"{base}mlp.down_proj.bias", layer.down_bias)
        add("model.norm.weight", self.norm)
        if not spec.tied:
            add("lm_head.weight", self.head)
        return named


def rope_tables(
    rope: RopeSpec, head_dim: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, each (length, head_dim): a head ``x`` turns to ``x * cos + roll(x, head_dim / 2) * sin``."""
    frequency = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        # Wavelengths beyond the original context are stretched by factor, short ones kept, those between blended.
        turns = rope.original_context * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _rows(bias: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if bias is None else bias[rows]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_linear(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    total.addmm_(x, weight)
    if bias is not None:
        total.add_(bias)
