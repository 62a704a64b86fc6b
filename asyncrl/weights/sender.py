"""The trainer's end of the ``collective`` transport: rank 0 of a process group whose other members are the servers.

Group and order of travel are SGLang's: each server joins through /init_weights_update_group, then receives tensor after
tensor as broadcasts from rank 0, in the order of the names that the controller sent to it. Needs torch; runs in the
trainer's process.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

JOIN_TIMEOUT = timedelta(seconds=30)
"""How long a server that does not come can hold the trainer and the other servers."""

BROADCAST_TIMEOUT = timedelta(seconds=120)
"""The same for a server that does not receive."""


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
        self.on_gpu = backend == "nccl"
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

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send whole tensors in order; blocks until every server has taken them. Raises ``RuntimeError``."""
        works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
