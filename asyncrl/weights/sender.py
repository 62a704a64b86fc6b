"""The trainer's end of the ``collective`` transport: rank 0 of a process group whose other members are the servers.

Group and order of travel are SGLang's: each server joins through /init_weights_update_group, then receives tensor after
tensor as broadcasts from rank 0, in the order of the names that the controller sent to it. Needs torch; runs in the
trainer's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(seconds=120)
"""For joining and for each broadcast: how long a dead server can hold the trainer."""


class UpdateGroup:
    """A group of ``world_size`` members, of which this process is rank 0. The constructor blocks until all joined.

    The default process group of the trainer cannot serve: the servers are not in it. ``init_process_group`` cannot make
    another one, and servers look for the store under the group's plain name, so the group is put together by hand.
    """

    def __init__(self, address: str, port: int, world_size: int, name: str, backend: str) -> None:
        # Not rendezvous("tcp://…") as on the servers' side: under torchrun it makes no store but looks for the agent's.
        self._store = TCPStore(address, port, world_size, is_master=True, timeout=TIMEOUT)
        self.group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            PrefixStore(name, self._store),
            group_name=c10d.GroupName(name),
            timeout=TIMEOUT,
        )
        self.on_gpu = backend == "nccl"
        c10d._world.pg_group_ranks[self.group] = {member: member for member in range(world_size)}

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send whole tensors in order; blocks until every server has taken them. Raises ``RuntimeError``."""
        works = [dist.broadcast(tensor, src=0, group=self.group, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        dist.destroy_process_group(self.group)
