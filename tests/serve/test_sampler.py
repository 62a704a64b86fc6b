from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.serve.sampler import Sampler, invert
from asyncrl.serve.scheduler import Sequence

CPU = torch.device("cpu")


def rows(count: int, **options: float) -> list[Sequence]:
    return [Sequence(rid=str(i), prompt=[0], max_new=8, **options) for i in range(count)]  # type: ignore[arg-type]


def draw(logits: torch.Tensor, count: int, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids, logprobs = Sampler(3, CPU).sample(logits.repeat(count, 1), rows(count, **options))
    return torch.tensor(ids), torch.tensor(logprobs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """χ² over 12 tokens and 40,000 draws: 99.9 % of fair samplers stay below 31.3 (11 degrees of freedom)."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    sampler, batch = Sampler(3, CPU), rows(1000, temperature=temperature)
    results = [sampler.sample(logits.repeat(1000, 1), batch) for _ in range(40)]
    ids = torch.tensor([i for ids, _ in results for i in ids])
    logprobs = torch.tensor([lp for _, logprobs in results for lp in logprobs])
    expected = (logits / temperature).softmax(-1)
    counts = torch.bincount(ids, minlength=12).float()
    assert (((counts - 40_000 * expected) ** 2) / (40_000 * expected)).sum() < 31.3
    assert torch.allclose(logprobs, expected.log()[ids], atol=1e-5)


def test_top_p_and_top_k_restrict_the_draw_but_not_the_logprob() -> None:
    probs = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    logits = probs.log()
    for options, allowed in (({"top_k": 2}, {1, 3}), ({"top_p": 0.5}, {1, 3}), ({"top_p": 0.7}, {1, 3, 4}),
                             ({"top_k": 1, "top_p": 0.9}, {1})):  # fmt: skip
        ids, logprobs = draw(logits, 4000, **options)
        assert set(ids.tolist()) == allowed
        assert logprobs == pytest.approx(probs.log()[ids].tolist(), abs=1e-5)
        kept = torch.tensor(sorted(allowed))
        share = torch.bincount(ids, minlength=5)[kept] / 4000
        assert share.tolist() == pytest.approx((probs[kept] / probs[kept].sum()).tolist(), abs=0.04)


def test_rows_with_different_parameters_share_a_batch() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    batch = [*rows(1, temperature=0.0), *rows(1, temperature=2.0), *rows(1, top_k=1), *rows(1)]
    ids, logprobs = Sampler(0, CPU).sample(logits.clone(), batch)
    assert ids[0] == logits[0].argmax()
    assert ids[2] == logits[2].argmax()
    for row, temperature in enumerate((1.0, 2.0, 1.0, 1.0)):
        expected = (logits[row] / temperature).log_softmax(-1)[ids[row]]
        assert logprobs[row] == pytest.approx(float(expected), abs=1e-5)


def test_no_stop_token_before_min_new_tokens() -> None:
    s = Sequence(rid="a", prompt=[0], max_new=8, min_new=2, stop_ids=frozenset({0, 3}))
    logits = torch.tensor([[9.0, 0.0, 0.0, 9.0]])
    sampler = Sampler(0, CPU)
    assert {sampler.sample(logits.clone(), [s])[0][0] for _ in range(50)} == {1, 2}
    s.output += [1, 1]
    assert {sampler.sample(logits.clone(), [s])[0][0] for _ in range(50)} <= {0, 3}


def test_a_seed_repeats() -> None:
    logits = torch.zeros(200, 50)
    first = [Sampler(5, CPU).sample(logits.clone(), rows(200))[0] for _ in range(2)]
    assert first[0] == first[1] != Sampler(6, CPU).sample(logits.clone(), rows(200))[0]


@given(st.lists(st.sampled_from([0.0, 1e-12, 0.1, 0.3, 1.0]), min_size=1, max_size=40).filter(any), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_a_token_without_probability_is_never_drawn(weights: list[float], u: float) -> None:
    """Neither at the start (u = 0, an empty first token) nor at the end (u rounding up to 1)."""
    shares = torch.tensor([[0.0], [u], [1.0]])
    for chosen in invert(torch.tensor([weights]).repeat(3, 1), shares).tolist():
        assert weights[chosen] > 0


def test_logprobs_of_excluded_tokens_stay_finite_for_the_drawn_one() -> None:
    ids, logprobs = draw(torch.tensor([-math.inf, 0.0, -math.inf]), 100)
    assert set(ids.tolist()) == {1}
    assert logprobs.abs().max() == 0
