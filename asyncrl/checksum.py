"""The checksum of a tensor: the sum of its bytes, taken as 64-bit words. Loads torch for tensors, not for their bytes.

Runs where the tensor lies, about as fast as its memory is read. It finds what transports and restarts may get wrong
(lost, old or exchanged tensors, flipped bits), not words that changed places within a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def sum_of_words(tensor: Tensor) -> Tensor:
    """A single int64 on the tensor's device, modulo 2^64; a last word that is not full is filled with zeros."""
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    total = data[:whole].view(torch.int64).sum()
    if rest := data.numel() - whole:
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[:rest] = data[whole:]
        total = total + last.view(torch.int64)[0]
    return total


def checksum(tensor: Tensor) -> int:
    """``sum_of_words`` as an unsigned number."""
    return int(sum_of_words(tensor)) % 2**64


def checksum_of_part(data: memoryview, start: int) -> int:
    """What ``data``, the bytes of a tensor from its byte ``start`` on, add to its checksum, modulo 2^64."""
    lead = min(-start % 8, len(data))
    total = int.from_bytes(data[:lead], "little") << 8 * (start % 8)
    words = (len(data) - lead) // 8
    total += int(np.frombuffer(data, dtype="<u8", count=words, offset=lead).sum(dtype=np.uint64))
    return (total + int.from_bytes(data[lead + 8 * words :], "little")) % 2**64
