"""Every kernel is the same attention: against plain masked attention, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.train.attention import KERNELS, Layout, best_kernel

LENGTHS = [7, 1, 30, 12, 12, 29, 2]
HEADS, KV_HEADS, WIDTH = 4, 2, 16


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None, cap: float | None):
    """One score for every pair of tokens in the row, in float32."""
    q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    document = torch.arange(len(lengths), device=q.device).repeat_interleave(torch.tensor(lengths, device=q.device))
    back = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
    seen = (document[:, None] == document) & (back >= 0) & (back < (window or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def compare(name: str, device: str, dtype: torch.dtype, window: int | None, cap: float | None, atol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, pull = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    results = []
    for kernel in (plain, KERNELS[name]):
        # FlexAttention has no backward on CPUs.
        differentiable = name != "flex" or device != "cpu"
        leaves = [x.clone().requires_grad_(differentiable) for x in (q, k, v)]
        where = LENGTHS if kernel is plain else Layout(LENGTHS, torch.device(device))
        out = kernel(*leaves, where, 0.3, window, cap)
        results.append([out, *(torch.autograd.grad(out, leaves, pull.to(out.dtype)) if differentiable else ())])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["blocks", "flex"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_kernel_is_causal_attention_within_each_sequence(name: str, window: int | None, cap: float | None) -> None:
    compare(name, "cpu", torch.float32, window, cap, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["blocks", "varlen", "flash", "flex"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_kernel_on_a_gpu_is_too(name: str, window: int | None, cap: float | None) -> None:
    if name == "flash":
        pytest.importorskip("flash_attn")
    if name == "varlen" and cap:
        with pytest.raises(ValueError, match=r"trainer\.attention = flex"):
            compare(name, "cuda", torch.bfloat16, window, cap, 0.05)
        return
    compare(name, "cuda", torch.bfloat16, window, cap, 0.05)


def test_the_kernel_is_chosen_by_device_precision_and_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert best_kernel(cpu, torch.bfloat16, True) == "blocks"
    assert best_kernel(gpu, torch.float32, True) == "blocks"
    assert best_kernel(gpu, torch.bfloat16, False) == "varlen"
    assert best_kernel(gpu, torch.bfloat16, True) == "flex"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert best_kernel(gpu, torch.bfloat16, True) == "flash"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_layout_leads_every_token_into_its_block_and_back(lengths: list[int]) -> None:
    layout = Layout(lengths, torch.device("cpu"))
    row = torch.arange(sum(lengths))
    blocks = torch.cat([row[index] for index, _, _ in layout.blocks])
    assert torch.equal(blocks[layout.inverse], row)
    assert layout.positions[0].tolist() == [p for n in lengths for p in range(n)]
    assert len(blocks) <= 1.25 * len(row)
