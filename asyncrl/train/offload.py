"""The optimiser's moments in host memory while they are not needed, which is all the time of a step but its updates.

AdamW's two moments are as large as the float32 weights and the gradients together. Activations, which are the other
large thing, are gone when an update is made; so the two take turns on the device. Tensors keep their identity and
sharding, and lose only their storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Offload:
    """Moves ``optimizer``'s state to the device for each update and away after it, on its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._away: list[tuple[Tensor, Tensor]] = []
        """What has no storage now, and its contents."""
        optimizer.register_step_pre_hook(lambda *_: self._bring())
        optimizer.register_step_post_hook(lambda *_: self._send())

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within it, the state can be read."""
        self._bring()
        try:
            yield
        finally:
            self._send()

    def _bring(self) -> None:
        for tensor, host in self._away:
            tensor.untyped_storage().resize_(host.nbytes)
            tensor.copy_(host)
        self._away = []

    @torch.no_grad()
    def _send(self) -> None:
        for slots in self._optimizer.state.values():
            for tensor in slots.values():
                if tensor.numel() > 1:  # not the number of the update, which AdamW keeps on the host
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    host = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                    host.copy_(local)
                    local.untyped_storage().resize_(0)
                    self._away.append((local, host))
