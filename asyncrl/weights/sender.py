"""The trainer's end of the ``collective`` transport: rank 0 of a process group whose other members are the servers.

Group and order of travel are SGLang's: each server joins through /init_weights_update_group, then receives tensor after
tensor as broadcasts from rank 0, in the order of the names that the controller sent to it. Needs torch; runs in the
trainer's process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

JOIN_TIMEOUT = timedelta(seconds=30)
"""How long a server that does not come can hold the trainer and the other servers."""

BROADCAST_TIMEOUT = timedelta(seconds=120)
"""The same for a server that does not receive."""

NCCL_BROADCAST_S = 100.0
"""The same with NCCL, whose own end of patience would end the trainer's process."""

POLL_S = 0.005
"""Pause between two looks at whether NCCL has done."""


class UpdateGroup:
    """A group of ``world_size`` members, of which this process is rank 0. Its store listens at ``port`` from the
    beginning; only then may servers be asked to join, as one that finds nobody there waits until torch gives up
    (SGLang with its scheduler at a standstill).

    The default process group of the trainer cannot serve: the servers are not in it. ``init_process_group`` cannot make
    another one, and servers look for the store under the group's plain name, so the group is put together by hand.
    """

    def __init__(self, address: str, world_size: int, name: str, backend: str) -> None:
        """Raises ``RuntimeError`` or ``OSError``, where ``address`` is none of this machine for instance."""
        # Not rendezvous("tcp://…") as on the servers' side: under torchrun it makes no store but looks for the agent's.
        # By itself it would listen on all of the machine's addresses.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self.port = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            self.port,
            world_size,
            is_master=True,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # and closed by it
        )
        self._on_gpu = backend == "nccl"
        self._world_size = world_size
        self._name = name
        self._backend = backend
        self._group: dist.ProcessGroup | None = None

    def join(self) -> None:
        """Blocks until all members are there. Raises ``RuntimeError``."""
        group, _ = c10d._new_process_group_helper(
            self._world_size,
            0,
            [],
            dist.Backend(self._backend),
            PrefixStore(self._name, self._store),
            group_name=c10d.GroupName(self._name),
            timeout=JOIN_TIMEOUT,
        )
        c10d._world.pg_group_ranks[group] = {member: member for member in range(self._world_size)}
        c10d._set_pg_timeout(BROADCAST_TIMEOUT, group)
        self._group = group

    def broadcast(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> None:
        """Send whole tensors, which are in host memory, in order; blocks until every server has taken them. NCCL sends
        from ``device``, where they must have room. Raises ``RuntimeError``."""
        if not self._on_gpu:
            for work in self._begin(tensors):
                work.wait()
            return
        assert device is not None
        deadline = time.monotonic() + NCCL_BROADCAST_S
        # On the stream that all threads share, the trainer's kernels would queue behind the servers. This one need not
        # wait for another, as the tensors come from the host; their copies are kept until all are sent.
        with torch.cuda.stream(_stream(device)):
            copies = [tensor.to(device) for tensor in tensors]
            for work in self._begin(copies):
                while not work.is_completed():  # wait() would hold up the stream only
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"a server did not receive within {NCCL_BROADCAST_S:g} s")
                    time.sleep(POLL_S)
                work.wait()  # raises what went wrong

    def _begin(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
        return [work for work in works if work is not None]

    def close(self) -> None:
        if self._group is None:
            return
        if self._on_gpu:
            c10d._abort_process_group(self._group)  # to destroy it would be to wait for members, who may be dead
        else:
            dist.destroy_process_group(self._group)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The sender's own; only one, for memory that was used on a stream is used again on the same one only."""
    return torch.cuda.Stream(device)
