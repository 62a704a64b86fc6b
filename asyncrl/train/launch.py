"""torchrun for ranks that are all on this machine: ``python -m asyncrl.train.launch``, with torchrun's own arguments.

torchrun's rendezvous listens on all of the machine's addresses, and unpickles what it is sent. Where there is one node
there is nobody to meet: the agent's store is in its memory, and the ranks meet at a port of loopback (``worker.py``).
"""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main

from asyncrl.processes import free_port

BACKEND = "one-node"


class OneNode(RendezvousHandler):
    """The rendezvous of an agent that is alone."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", free_port()))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, OneNode)
    main()
