"""The head in chunks: values and gradients of plain autograd, and never more of the logits than a few chunks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.train import head as heads
from asyncrl.train.head import chosen_logprobs

VOCABULARY, WIDTH, POSITIONS = 50, 8, 23


def plain(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("rows", [1, 5, 23])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_autograd(
    rows: int, soft_cap: float | None, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "LOGIT_ELEMENTS", VOCABULARY * rows)
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=soft_cap is None)
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (POSITIONS,))
    pull, other = torch.randn(2, POSITIONS)
    expected = plain(head, hidden, targets, 0.7, soft_cap)
    got = chosen_logprobs(head, hidden, targets, temperature=0.7, soft_cap=soft_cap, entropy_gradient=entropy_gradient)
    assert got[1].requires_grad == entropy_gradient
    gradients = []
    for logprobs, entropy in (expected, got):
        total = (logprobs * pull).sum() + (entropy * other).sum() * entropy_gradient
        gradients.append(torch.autograd.grad(total, [hidden, *head.parameters()]))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=5e-6)


def test_in_bfloat16_the_softmax_is_float32() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False).bfloat16()
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (POSITIONS,))
    expected, _ = plain(head, hidden.bfloat16(), targets, 1.0, None)
    got, _ = chosen_logprobs(head, hidden.bfloat16(), targets, temperature=1.0, soft_cap=None, entropy_gradient=False)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    torch.testing.assert_close(torch.autograd.grad(got.sum(), [hidden, head.weight]), wanted, rtol=0, atol=0.05)


def test_in_bfloat16_the_weights_gradient_is_as_exact_in_many_chunks_as_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, VOCABULARY, bias=False), torch.rand(512, WIDTH)
    targets = torch.randint(VOCABULARY, (512,))

    def gradient(dtype: torch.dtype, rows: int) -> Tensor:
        monkeypatch.setattr(heads, "LOGIT_ELEMENTS", VOCABULARY * rows)
        weights = nn.Linear(WIDTH, VOCABULARY, bias=False).to(dtype)
        weights.load_state_dict(head.bfloat16().state_dict())
        logprobs, _ = chosen_logprobs(
            weights, hidden.bfloat16().to(dtype), targets, temperature=1.0, soft_cap=None, entropy_gradient=False
        )
        return torch.autograd.grad(logprobs.sum(), weights.weight)[0].float()

    exact = gradient(torch.float32, 512)
    off = {rows: float((gradient(torch.bfloat16, rows) - exact).norm() / exact.norm()) for rows in (512, 2)}
    assert off[2] < 1.5 * off[512], off


def test_a_frozen_head_passes_the_gradient_on() -> None:
    head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    targets = torch.zeros(POSITIONS, dtype=torch.long)
    chosen_logprobs(head, hidden, targets, temperature=1.0, soft_cap=None, entropy_gradient=False)[0].sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


class WideTensors(TorchDispatchMode):
    """Watches every tensor as wide as the vocabulary that any operation makes: how many elements live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and VOCABULARY * 1000 in tensor.shape and WIDTH not in tensor.shape:
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self.alive:
                    weakref.finalize(storage, self.alive.pop, key, None)
                self.alive[key] = storage.nbytes() // tensor.element_size()
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_positions_are_never_held(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 4
    monkeypatch.setattr(heads, "LOGIT_ELEMENTS", VOCABULARY * 1000 * rows)
    head = nn.Linear(WIDTH, VOCABULARY * 1000, bias=False).to(dtype)
    hidden = torch.randn(60, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (60,))
    with WideTensors() as seen:
        logprobs, entropy = chosen_logprobs(
            head, hidden, targets, temperature=0.7, soft_cap=30.0, entropy_gradient=True
        )
        (logprobs.sum() + entropy.sum()).backward()
    chunk = rows * VOCABULARY * 1000
    assert chunk <= seen.peak <= 4 * chunk
    assert not seen.alive  # nothing waits for a later backward
