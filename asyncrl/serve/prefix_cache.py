"""Whose keys and values begin with which tokens: what a new prompt need not compute again.

A holder is a running sequence, whose rows stay where they are, or a tensor, the rows of one that has ended: on the
device, or in host memory once the device has no room for it. Their tokens stand as bytes in a sorted list: those that
share most with a prompt are beside the place where it would stand, so a search costs two comparisons, however many
there are. No I/O, no clock; torch is only carried.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable

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
    """See the module. A tensor is (layers, 2, kv_heads, tokens, head_dim). ``to_host`` moves one to host memory, which
    takes ``host_tokens`` of them."""

    def __init__(
        self, host_tokens: int = 0, to_host: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
    ) -> None:
        self.saved = 0
        """Tokens of the tensors on the device."""
        self.hosted = 0
        """Of those in host memory."""
        self._host_tokens = host_tokens
        self._to_host = to_host
        self._keys: list[bytes] = []  # sorted
        self._holders: dict[bytes, Sequence | torch.Tensor] = {}
        # Of the tensors, those on the device and those in host memory, each least recently used first.
        self._device: OrderedDict[bytes, None] = OrderedDict()
        self._host: OrderedDict[bytes, None] = OrderedDict()

    def __getitem__(self, key: bytes) -> Sequence | torch.Tensor:
        """The holder, which is then the one used last."""
        for tier in (self._device, self._host):
            if key in tier:
                tier.move_to_end(key)
        return self._holders[key]

    def given(self, key: bytes) -> None:
        """Another server has these rows now: of the tensors this is the first to go."""
        for tier in (self._device, self._host):
            if key in tier:
                tier.move_to_end(key, last=False)

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
            self._device[key] = None

    def remove(self, key: bytes, holder: Sequence | None = None) -> None:
        """Forget a key, if there is such (and if it is ``holder``'s, where one is given)."""
        if key not in self._holders or (holder is not None and self._holders[key] is not holder):
            return
        del self._holders[key]
        if key in self._device:
            del self._device[key]
            self.saved -= len(key) // SIZE
        elif key in self._host:
            del self._host[key]
            self.hosted -= len(key) // SIZE
        del self._keys[bisect_left(self._keys, key)]

    def trim(self, tokens: int) -> None:
        """Move tensors to host memory, the least recently used first, until those on the device hold at most so many
        tokens. What host memory has no room for is dropped, there too the least recently used first."""
        while self.saved > tokens:
            key = next(iter(self._device))
            holder, size = self._holders[key], len(key) // SIZE
            if size > self._host_tokens or not isinstance(holder, torch.Tensor):
                self.remove(key)
                continue
            while self.hosted + size > self._host_tokens:
                self.remove(next(iter(self._host)))
            del self._device[key]
            self._holders[key] = self._to_host(holder)
            self._host[key] = None
            self.saved -= size
            self.hosted += size

    def drop_running(self) -> None:
        """Forget running sequences: their rows may change."""
        for key in [key for key, holder in self._holders.items() if isinstance(holder, Sequence)]:
            self.remove(key)
