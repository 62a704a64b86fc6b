"""How rank 0 tells the other ranks what to do next: one message to each, over a gloo group of its own.

The ranks wait here between steps, for as long as it takes: the group has no practical deadline, because a silent
controller is no fault. A dead rank is: its connections break, and torchrun ends the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

T = TypeVar("T")

IDLE_TIMEOUT = timedelta(days=365)


def all_gather(message: Any, kind: type[T], group: dist.ProcessGroup | None) -> list[T]:
    """What each rank of ``group`` gives, in their order: a collective, of plain data, where torch's own would unpickle
    what came over a socket."""
    body = torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(body)]), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(body)] = body
    bodies = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(bodies, padded, group=group)
    received = zip(bodies, sizes, strict=True)
    return [msgspec.msgpack.decode(body[: int(size)].numpy().tobytes(), type=kind) for body, size in received]


class Channel:
    """Rank 0 calls ``send``, all others ``receive``; each pair of calls moves one message."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._rank = dist.get_rank()

    def send(self, messages: Sequence[bytes]) -> None:
        """``messages[rank]`` for every rank; rank 0's own is not looked at."""
        sizes = torch.tensor([len(m) for m in messages])
        dist.broadcast(sizes, src=0, group=self.group)
        for rank in range(1, len(messages)):
            dist.send(torch.frombuffer(bytearray(messages[rank]), dtype=torch.uint8), rank, group=self.group)

    def receive(self) -> bytes:
        sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        dist.broadcast(sizes, src=0, group=self.group)
        message = torch.empty(int(sizes[self._rank]), dtype=torch.uint8)
        dist.recv(message, 0, group=self.group)
        return message.numpy().tobytes()
