"""The step's metrics, from a handful of tokens by hand."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.train.loss import PerToken, Tokens
from asyncrl.train.statistics import STALENESS_BINS, SUMS, empty, measure, summarise

RATIOS = [1.0, 2.0, 0.5, 8.0]


def metrics(reference: bool = True) -> dict[str, float]:
    """Four tokens of staleness 0, 0, 2 and 30; measured as two micro-batches."""
    total, largest = empty()
    for part in (slice(0, 3), slice(3, 4)):
        new = torch.tensor([-1.0, -2.0, -3.0, -4.0])[part].requires_grad_()
        zero = torch.zeros(len(new))
        tokens = Tokens(
            logprobs=new,
            behaviour=new.detach() - torch.tensor(RATIOS)[part].log(),
            proximal=new.detach(),
            entropy=torch.tensor([0.5, 0.5, 1.0, 2.0])[part],
            advantages=zero,
            weights=zero,
            staleness=torch.tensor([0, 0, 2, 30])[part],
            lengths=torch.tensor([len(new)]),
            reference=new.detach() - math.log(2) if reference else None,
        )
        per_token = PerToken(
            loss=zero,
            low=torch.tensor([False, False, True, False])[part],
            high=torch.tensor([False, True, False, True])[part],
        )
        rejected = torch.tensor([False, False, False, True])[part]
        sums, maxima = measure(tokens, per_token, rejected, 5.0)
        total, largest = total + sums, torch.maximum(largest, maxima)
    return summarise([total], largest)


def test_means_shares_and_extremes_by_hand() -> None:
    kl = [r - 1 - math.log(r) for r in RATIOS]
    found = metrics()
    expected = {
        "trained_tokens": 4,
        "entropy": 1.0,
        "ratio_mean": 11.5 / 4,
        "ratio_max": 8.0,
        "clip_fraction": 3 / 4,
        "clip_low_fraction": 1 / 4,
        "clip_high_fraction": 2 / 4,
        "capped_fraction": 1 / 4,
        "rejected_fraction": 1 / 4,
        "kl": sum(kl) / 4,
        "reference_kl": 0.5 - 1 + math.log(2),
        "engine_gap": 5 * math.log(2) / 4,
        "engine_gap_max": math.log(8),
        "tokens_staleness_0": 2,
        "ratio_staleness_0": 1.5,
        "clip_fraction_staleness_0": 1 / 2,
        "kl_staleness_0": (kl[0] + kl[1]) / 2,
        "engine_gap_staleness_0": math.log(2) / 2,
        "tokens_staleness_2": 1,
        "ratio_staleness_2": 0.5,
        "clip_fraction_staleness_2": 1,
        "kl_staleness_2": kl[2],
        "engine_gap_staleness_2": math.log(2),
        f"tokens_staleness_{STALENESS_BINS - 1}": 1,  # and all that is older
        f"ratio_staleness_{STALENESS_BINS - 1}": 8.0,
        f"clip_fraction_staleness_{STALENESS_BINS - 1}": 1,
        f"kl_staleness_{STALENESS_BINS - 1}": kl[3],
        f"engine_gap_staleness_{STALENESS_BINS - 1}": math.log(8),
        "token_staleness": (2 + 30) / 4,
        "token_staleness_updates": (2 + 30) / 4,
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_each_update_of_a_step_is_that_much_nearer_to_the_next_version() -> None:
    """Four updates: tokens of staleness 1, trained by the second and the last of them, are 1¼ and 1¾ versions old."""
    none, maxima = empty()

    def update(tokens: int, kl: float, low: int) -> torch.Tensor:
        sums = none.clone()
        for name, value in (("tokens", tokens), ("staleness", tokens), ("kl", kl), ("low", low), ("high", 1)):
            sums[SUMS.index(name)] = value
        return sums

    found = summarise([none, update(2, 0.5, 0), none, update(4, 3.0, 1)], maxima)
    assert found["token_staleness"] == pytest.approx((2 * 1.25 + 4 * 1.75) / 6)
    assert found["token_staleness_updates"] == pytest.approx(4 * found["token_staleness"])
    assert [found[f"kl_update_{u}"] for u in range(4)] == [0, 0.25, 0, 0.75]
    assert [found[f"clip_fraction_update_{u}"] for u in range(4)] == [0, 0.5, 0, 0.5]


def test_without_a_reference_nothing_is_said_of_it() -> None:
    assert "reference_kl" not in metrics(reference=False)


def test_an_absurd_ratio_stays_finite() -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    no = torch.zeros(1, dtype=torch.bool)
    tokens = Tokens(
        logprobs=zero,
        behaviour=-1e4 * one,
        proximal=zero,
        entropy=zero,
        advantages=zero,
        weights=zero,
        staleness=torch.zeros(1, dtype=torch.long),
        lengths=torch.ones(1, dtype=torch.long),
    )
    sums, maxima = measure(tokens, PerToken(loss=zero, low=no, high=no), no, 5.0)
    assert torch.isfinite(sums).all() and torch.isfinite(maxima).all()


def test_no_tokens_are_no_division_by_zero() -> None:
    assert set(summarise([empty()[0]], empty()[1]).values()) == {0.0}
