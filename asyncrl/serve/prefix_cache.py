"""Whose keys and values begin with which tokens: what a new prompt need not compute again.

A holder is a running sequence, whose rows stay where they are, or a tensor, the rows of one that has ended. Their
tokens stand as bytes in a sorted list: those that share most with a prompt are beside the place where it would stand,
so a search costs two comparisons, however many there are. No I/O, no clock; torch is only carried.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable

import torch

from asyncrl.serve.scheduler import Sequence

SIZE = array("i").itemsize


def key_of(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def common(a: bytes, b: bytes) -> int:
    """Tokens at the beginning that two keys share."""
    limit = min(len(a), len(b)) // SIZE
    return bisect_left(range(1, limit + 1), True, key=lambda n: a[: SIZE * n] != b[: SIZE * n])


class PrefixCache:
    """See the module. A tensor is (layers, 2, kv_heads, tokens, head_dim)."""

    def __init__(self) -> None:
        self.saved = 0
        """Tokens of all tensors."""
        self._keys: list[bytes] = []  # sorted
        self._holders: dict[bytes, Sequence | torch.Tensor] = {}  # least recently used first

    def __getitem__(self, key: bytes) -> Sequence | torch.Tensor:
        """The holder, which is then the one used last."""
        holder = self._holders[key] = self._holders.pop(key)
        return holder

    def longest(self, key: bytes) -> tuple[int, bytes]:
        """How many tokens ``key`` shares with the holder that shares most, and that one's key."""
        place = bisect_left(self._keys, key)
        found = [(common(key, other), other) for other in self._keys[max(0, place - 1) : place + 1]]
        return max(found, default=(0, b""))

    def add(self, key: bytes, holder: Sequence | torch.Tensor) -> None:
        """Equal tokens have equal rows: a running sequence takes the place of a tensor, and nothing that of a running
        sequence."""
        if isinstance(self._holders.get(key), Sequence):
            return
        self.remove(key)
        insort(self._keys, key)
        self._holders[key] = holder
        if isinstance(holder, torch.Tensor):
            self.saved += len(key) // SIZE

    def remove(self, key: bytes, holder: Sequence | None = None) -> None:
        """Forget a key, if there is such (and if it is ``holder``'s, where one is given)."""
        if key not in self._holders or (holder is not None and self._holders[key] is not holder):
            return
        if isinstance(self._holders.pop(key), torch.Tensor):
            self.saved -= len(key) // SIZE
        del self._keys[bisect_left(self._keys, key)]

    def trim(self, tokens: int) -> None:
        """Drop tensors, the least recently used first, until they hold at most so many tokens."""
        while self.saved > tokens:
            self.remove(next(key for key, holder in self._holders.items() if isinstance(holder, torch.Tensor)))

    def clear(self) -> None:
        self._keys.clear()
        self._holders.clear()
        self.saved = 0
