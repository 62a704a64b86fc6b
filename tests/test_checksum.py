"""The checksum against its definition on bytes, and what it has to notice."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from asyncrl.checksum import checksum, checksum_of_part


def by_hand(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return sum(int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(data), 8)) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (8, 16), (0,)])
def test_it_is_the_sum_of_64_bit_words(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert checksum(tensor) == by_hand(tensor)


def test_slices_and_transposed_tensors_count_as_what_they_show() -> None:
    whole = torch.arange(35, dtype=torch.float32).view(5, 7)
    for part in (whole[1:], whole[:, 2:5], whole.T, whole[1, 1:]):
        assert checksum(part) == checksum(part.clone()) == by_hand(part)


def test_any_flipped_bit_changes_it() -> None:
    tensor = torch.randn(9)
    before = checksum(tensor)
    for byte in range(36):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            assert checksum(other) != before


def test_the_bytes_of_a_tensor_give_its_checksum_however_they_are_cut() -> None:
    tensor = torch.randn(53)
    data = memoryview(tensor.numpy().tobytes())
    for cuts in ([0, 212], [0, 1, 212], [0, 3, 8, 11, 11, 100, 107, 212], list(range(213))):
        parts = [checksum_of_part(data[a:b], a) for a, b in pairwise(cuts)]
        assert sum(parts) % 2**64 == checksum(tensor)
