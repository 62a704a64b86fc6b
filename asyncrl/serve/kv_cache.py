"""Keys and values of the running sequences, in arenas by length class, and of ended ones for who begins like them.

A step reads every row of a batch up to the longest one, so rows of like length must lie together, or the long tail of a
rollout makes every short row pay for the longest. An ``Arena`` holds the sequences that need at most ``width`` tokens
(widths double), densely from row 0; attention reads a plain view of it, with no gather. A sequence that outgrows its
arena moves on to the next (a copy of its own length, so O(1) a token amortised); when one leaves, the last row fills
the hole. Rows of all arenas, in order, are the decode batch.

The rows of a sequence that leaves are kept in a tensor of their own length (one copy) while the token budget has room
beside the running sequences, and then in (pinned) host memory, where ``host_tokens`` allow that: so a trajectory that
waits for its environment holds no device memory that others need. A new sequence gets the rows of the longest prefix
that it shares with a kept or a running one, as a copy; a kept one that it continues whole is dropped then. New weights
drop all, and hide what still runs with rows of the old ones. Rows may also come from another server, or go there
(``insert``, ``rows_of``).

Owned by the engine's thread. Memory follows use: an arena grows by half when full, and an empty one is freed when all
of them together have memory for more than twice ``max_tokens``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from asyncrl.serve.prefix_cache import SIZE, PrefixCache, key_of
from asyncrl.serve.scheduler import Sequence
from asyncrl.serve.spec import ModelSpec

MIN_WIDTH = 64
WORTH_WAITING = 32
"""Tokens that a new sequence must be able to share with another new one to be prefilled after it, and not beside it."""


class Group(NamedTuple):
    """Rows ``start``…``stop`` of the decode batch: one arena's."""

    start: int
    stop: int
    rows: torch.Tensor  # (n,) int64: 0…n-1, index of the row in the arena
    positions: torch.Tensor  # (n,) int64: column of the token that this step writes
    kv: torch.Tensor  # (layers, capacity, 2, kv_heads, width, head_dim)
    bias: torch.Tensor  # (n, 1, 1, longest): 0 where a row has a token, -inf behind its end
    longest: int


class Arena:
    """Rows of at most ``width`` tokens. ``sequences[i]`` lives in row i of ``kv`` and ``bias``."""

    def __init__(self, spec: ModelSpec, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self.sequences: list[Sequence] = []
        self._shape = (spec.layers, 2, spec.kv_heads, width, spec.head_dim)
        self._dtype = dtype
        self._device = device
        self.release()

    def release(self) -> None:
        layers, *row = self._shape
        self.kv = torch.empty((layers, 0, *row), dtype=self._dtype, device=self._device)
        self.bias = torch.empty((0, self.width), dtype=self._dtype, device=self._device)

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return self.bias.numel()

    def take(self, count: int) -> int:
        """Room for ``count`` more rows at the end; the first of them."""
        start, need = len(self.sequences), len(self.sequences) + count
        capacity = self.bias.shape[0]
        if need > capacity:
            capacity = max(need, capacity + capacity // 2, 4)
            layers, *row = self._shape
            # Zeros, for what lies behind a row's end is multiplied by 0: it must be a number.
            kv = torch.zeros((layers, capacity, *row), dtype=self._dtype, device=self._device)
            bias = torch.empty((capacity, self.width), dtype=self._dtype, device=self._device)
            kv[:, :start] = self.kv[:, :start]
            bias[:start] = self.bias[:start]
            self.kv, self.bias = kv, bias
        return start


class KVCache:
    """See the module. A sequence of ``n`` tokens has KV for its first ``n - 1``; the step that samples the next token
    writes the last one's."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        context_length: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        prefix_cache: bool = True,
        host_tokens: int = 0,
    ) -> None:
        widths = [MIN_WIDTH]
        while widths[-1] < context_length:
            widths.append(widths[-1] * 2)
        self.arenas = [Arena(spec, width, dtype, device) for width in widths]
        self._max_tokens = max_tokens
        self._device = device
        self._arange = torch.arange(4096, device=device)
        self._home: dict[Sequence, tuple[Arena, int]] = {}
        self._keep = prefix_cache
        self._host_tokens = host_tokens
        self._prefixes = PrefixCache(host_tokens, _to_host)
        self.prefilled = 0
        """Tokens that were computed to begin with a sequence. The last one of each is a decode step's work, and is not
        counted."""
        self._shared: dict[Sequence, bytes] = {}
        """Running sequences whose rows are all of the present weights, by the tokens that they were placed with."""

    def __len__(self) -> int:
        return len(self._home)

    def arena_index(self, tokens: int) -> int:
        """Which arena holds a sequence of ``tokens`` tokens."""
        return max(0, math.ceil(math.log2(tokens / MIN_WIDTH))) if tokens > MIN_WIDTH else 0

    @property
    def kept(self) -> int:
        """Tokens whose rows are kept on the device though no sequence runs on them."""
        return self._prefixes.saved

    @property
    def hosted(self) -> int:
        """Tokens whose rows are kept in host memory."""
        return self._prefixes.hosted

    def trim(self, tokens: int) -> None:
        """Keep at most so many on the device, those used last."""
        self._prefixes.trim(tokens)

    def forget(self) -> PrefixCache:
        """Let no sequence begin with rows that are here now. What was kept, for those who still have a use for it."""
        kept, self._prefixes = self._prefixes, PrefixCache(self._host_tokens, _to_host)
        kept.drop_running()
        self._shared.clear()
        return kept

    def held(self, ids: list[int]) -> int:
        """Tokens of ``ids`` that a new sequence of them would not have to compute."""
        return min(self._prefixes.longest(key_of(ids))[0], len(ids) - 1)

    def rows_of(self, ids: list[int], beyond: int, forgotten: PrefixCache | None = None) -> torch.Tensor | None:
        """Rows (layers, 2, kv_heads, tokens, head_dim) of the longest prefix of ``ids`` that is here, or among what was
        ``forgotten``, for another server; None if it has no more than ``beyond`` tokens. Nothing changes them any more.
        Kept ones that go as a whole are the first that make room here: kept twice, they would cost others theirs."""
        prefixes = self._prefixes if forgotten is None else forgotten
        shared, source = prefixes.longest(key_of(ids))
        count = min(shared, len(ids) - 1)
        if count <= beyond:
            return None
        holder = prefixes[source]
        if shared == len(source) // SIZE:
            prefixes.given(source)
        if isinstance(holder, torch.Tensor):
            return holder[:, :, :, :count]
        arena, index = self._home[holder]
        return arena.kv[:, index, :, :, :count].clone()

    def insert(self, ids: list[int], rows: torch.Tensor) -> None:
        """Keep rows of all ``ids`` that another server computed, by the same weights."""
        if self._keep:
            self._prefixes.add(key_of(ids), rows.to(self._device))

    def wave(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Which new sequences to prefill now, and which after them, for these can then share their rows."""
        now: list[Sequence] = []
        later: list[Sequence] = []
        starts = PrefixCache()
        for sequence in sequences:
            key = key_of(sequence.ids())
            if self._keep and starts.longest(key)[0] >= self._prefixes.longest(key)[0] + WORTH_WAITING:
                later.append(sequence)
            else:
                now.append(sequence)
                starts.add(key, sequence)
        return now, later

    def place(self, sequences: list[Sequence]) -> tuple[Arena, int, list[int]]:
        """Give new sequences, all of one arena, neighbouring rows: (arena, first row, columns of each that have their
        KV already). The others up to ``tokens`` columns, at least one, are still to be written."""
        arena = self.arenas[self.arena_index(max(s.tokens for s in sequences))]
        start = arena.take(len(sequences))
        bias = arena.bias[start : start + len(sequences)]
        lengths = torch.tensor([s.tokens for s in sequences], device=self._device)
        ends = torch.arange(arena.width, device=self._device) < lengths[:, None]
        bias.copy_(torch.where(ends, 0.0, -math.inf))
        keys = [key_of(s.ids()) for s in sequences] if self._keep else []
        continued: set[bytes] = set()
        cached = [self._copy_prefix(key, arena.kv[:, row], continued) for row, key in enumerate(keys, start)]
        for source in continued:
            self._prefixes.remove(source)
        self.prefilled += sum(s.tokens - 1 for s in sequences) - sum(cached)
        for sequence, key in zip(sequences, keys, strict=False):
            self._shared[sequence] = key
            self._prefixes.add(key, sequence)
        for row, sequence in enumerate(sequences, start):
            arena.sequences.append(sequence)
            self._home[sequence] = (arena, row)
        return arena, start, cached or [0] * len(sequences)

    def _copy_prefix(self, key: bytes, row: torch.Tensor, continued: set[bytes]) -> int:
        """Fill the first columns of a new row by those of whoever shares most tokens; how many. ``continued`` gets kept
        ones of which nothing is left out."""
        count, source = self._prefixes.longest(key)
        count = min(count, len(key) // SIZE - 1)  # the last token's logits are wanted
        if not count:
            return 0
        holder = self._prefixes[source]
        if isinstance(holder, Sequence):
            arena, index = self._home[holder]
            kv = arena.kv[:, index]
        else:
            kv = holder
        row[:, :, :, :count].copy_(kv[:, :, :, :count], non_blocking=True)  # it may come from host memory
        if kv is holder and key.startswith(source):
            continued.add(source)
        return count

    def remove(self, sequence: Sequence) -> None:
        """A sequence leaves; its rows are kept for others if they are of the present weights. Harmless for one that has
        none."""
        if sequence not in self._home:
            return
        arena, row = self._home[sequence]
        key = self._shared.pop(sequence, None)
        if key is not None:
            self._prefixes.remove(key, sequence)
            kept = key_of(sequence.ids()[:-1])
            self._prefixes.add(kept, arena.kv[:, row, :, :, : sequence.tokens - 1].clone())
        self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        arena, row = self._home.pop(sequence)
        last = arena.sequences.pop()
        if last is not sequence:
            length = last.tokens
            arena.kv[:, row, :, :, :length] = arena.kv[:, len(arena.sequences), :, :, :length]
            arena.bias[row] = arena.bias[len(arena.sequences)]
            arena.sequences[row] = last
            self._home[last] = (arena, row)
        elif not arena.sequences and sum(a.capacity for a in self.arenas) > 2 * self._max_tokens:
            arena.release()

    def batch(self) -> tuple[list[Sequence], torch.Tensor, list[Group]]:
        """The decode batch: its sequences, the positions of their last tokens (n,), and its groups.

        Sequences that outgrew their arena move on first; the columns of the last tokens become visible.
        """
        for arena in self.arenas:
            outgrown = [s for s in arena.sequences if s.tokens > arena.width]
            for sequence in outgrown:
                self._promote(sequence)
        order = [s for arena in self.arenas for s in arena.sequences]
        positions = torch.tensor([s.tokens - 1 for s in order], device=self._device)
        groups = []
        start = 0
        for arena in self.arenas:
            count = len(arena.sequences)
            if not count:
                continue
            stop = start + count
            rows, columns = self._rows(count), positions[start:stop]
            arena.bias[rows, columns] = 0.0
            longest = max(s.tokens for s in arena.sequences)
            bias = arena.bias[:count, None, None, :longest]
            groups.append(Group(start, stop, rows, columns, arena.kv, bias, longest))
            start = stop
        return order, positions, groups

    def _promote(self, sequence: Sequence) -> None:
        arena, row = self._home[sequence]
        length = sequence.tokens - 1
        target = self.arenas[self.arena_index(sequence.tokens)]
        new = target.take(1)
        target.kv[:, new, :, :, :length] = arena.kv[:, row, :, :, :length]
        target.bias[new, :length] = 0.0
        target.bias[new, length:] = -math.inf
        self._vacate(sequence)
        target.sequences.append(sequence)
        self._home[sequence] = (target, new)

    def _rows(self, count: int) -> torch.Tensor:
        if count > len(self._arange):
            self._arange = torch.arange(2 * count, device=self._device)
        return self._arange[:count]


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    """In host memory: pinned, so that both ways are copies beside the device's work, in the order of its stream."""
    if rows.device.type == "cpu":
        return rows
    return torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
