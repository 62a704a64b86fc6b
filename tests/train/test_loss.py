"""Every loss against an independent float64 NumPy reference, its gradient against finite differences of that, and
against cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import AlgorithmConfig, RecipeError
from asyncrl.config import algorithm as known
from asyncrl.train.loss import (
    KLS,
    LOSSES,
    Tokens,
    check_loss,
    interpolated,
    kl_to_go,
    policy_loss,
    token_weights,
)

from . import reference
from .reference import Column, Columns

LENGTHS = (1, 20, 7, 12)
COUNT = sum(LENGTHS)


def columns(seed: int, spread: float = 1.0) -> Columns:
    """Random inputs with ratios on all sides of every bound; one advantage a sequence, of both signs and 0."""
    draw = np.random.default_rng(seed)
    new = -draw.exponential(2.0, COUNT) - 0.01
    return {
        "logprobs": new,
        "behaviour": new + draw.normal(0, spread, COUNT),
        "proximal": new + draw.normal(0, 0.3 * spread, COUNT),
        "reference": new + draw.normal(0, 0.5, COUNT),
        "entropy": draw.uniform(0, 3, COUNT),
        "advantages": np.repeat(draw.permutation([1.3, -0.7, 0.0, -1.9]), LENGTHS),
        "weights": draw.uniform(0, 2 / COUNT, COUNT),
        "lengths": np.array(LENGTHS),
    }


def tokens_of(c: Columns, kl: bool = False) -> Tokens:
    tensors = {name: torch.tensor(column) for name, column in c.items()}
    tensors["logprobs"].requires_grad_()
    if not kl:
        tensors["reference"] = None
    return Tokens(staleness=torch.zeros(len(c["logprobs"]), dtype=torch.long), **tensors)


def run(name: str, c: Columns, **options: Any) -> tuple[float, Column]:
    """Value and gradient."""
    o = AlgorithmConfig(loss=name, **options)
    tokens = tokens_of(c, kl=o.kl_coef > 0)
    loss, _, _ = policy_loss(tokens, LOSSES[name], o)
    loss.backward()
    assert tokens.logprobs.grad is not None
    return loss.item(), tokens.logprobs.grad.numpy()


def agree(name: str, c: Columns, **options: Any) -> None:
    """Value equal to the reference's, gradient to central differences of it with the stop-gradients held."""
    o = AlgorithmConfig(loss=name, **options)
    loss, gradient = run(name, c, **options)
    now = c["logprobs"]

    def at(new: Column) -> float:
        return reference.objective(name, c, new, now, o)

    assert loss == pytest.approx(at(now), rel=1e-12, abs=1e-14)
    h = 1e-6
    for t in range(COUNT):
        nudge = np.zeros(COUNT)
        nudge[t] = h
        numeric = (at(now + nudge) - at(now - nudge)) / (2 * h)
        assert gradient[t] == pytest.approx(numeric, rel=1e-5, abs=1e-9), t


def test_the_recipe_knows_exactly_these_losses() -> None:
    assert set(known.LOSSES) == LOSSES.keys() == reference.LOSSES.keys()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_high": 0.28, "importance_cap": 2.0},
        {"clip_low": 1.0, "clip_high": 0.1, "importance_cap": 1.0},
        {"dual_clip": 1.5, "importance_cap": 20.0},
        {"positive_weight": 0.5, "negative_weight": 2.0, "importance_level": "sequence"},
    ],
    ids=["default", "clip-higher", "open-below", "dual-clip", "sequence"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_reference(name: str, options: dict[str, Any], seed: int) -> None:
    agree(name, columns(seed), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coef": 0.3, "kl": "k1"},
        {"kl_coef": 0.3, "kl": "k2"},
        {"kl_coef": 0.3, "kl": "k3"},
        {"kl_coef": 0.3, "kl": "k1", "kl_in": "reward"},
        {"kl_coef": 0.3, "kl": "k3", "kl_in": "reward"},
        {"reject": "token", "reject_low": 0.6, "reject_high": 1.5},
        {"reject": "sequence", "reject_low": 0.9, "reject_high": 1.2},
        {"reject": "token", "reject_low": 0.6, "reject_high": 1.5, "kl_coef": 0.1, "kl_in": "reward"},
        {"entropy_coef": 0.2, "kl_coef": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "gspo", "tis"])
def test_regularisers_and_rejection_equal_the_reference(name: str, options: dict[str, Any]) -> None:
    agree(name, columns(11), **options)


# --- by hand ----------------------------------------------------------------------------------------------------------


def one_token(ratio: float, advantage: float, proximal: float = 1.0) -> Columns:
    """A token of weight 1 with π_θ = 1/2, π_θ/μ = ``ratio`` and π_θ/π_prox = ``proximal``."""
    new = math.log(0.5)
    return {
        "logprobs": np.array([new]),
        "behaviour": np.array([new - math.log(ratio)]),
        "proximal": np.array([new - math.log(proximal)]),
        "reference": np.array([new]),
        "entropy": np.array([0.0]),
        "advantages": np.array([advantage]),
        "weights": np.array([1.0]),
        "lengths": np.array([1]),
    }


LOG2 = math.log(2)  # −log π_θ


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "options", "value", "gradient"),
    [
        ("ppo", 1.1, 2.0, {}, -2.2, -2.2),  # inside the trust region
        ("ppo", 1.5, 2.0, {}, -2.4, 0.0),  # above it and to be raised: clipped at 1.2
        ("ppo", 1.25, 2.0, {"clip_high": 0.28}, -2.5, -2.5),  # clip-higher lets it through
        ("ppo", 0.5, 2.0, {}, -1.0, -1.0),  # below it and to be raised: free
        ("ppo", 0.5, -2.0, {}, 1.6, 0.0),  # below it and to be lowered: clipped at 0.8
        ("ppo", 3.0, -2.0, {}, 6.0, 6.0),  # above it and to be lowered: free …
        ("ppo", 9.0, -2.0, {}, 10.0, 10.0),  # … up to the cap C = 5
        ("ppo", 9.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),  # … or up to dual clip's c
        ("tis", 3.0, 2.0, {}, 6 * LOG2, -6.0),
        ("tis", 9.0, 2.0, {}, 10 * LOG2, -10.0),
        ("cispo", 3.0, 2.0, {}, 2.4 * LOG2, -2.4),  # the weight is clipped, the gradient stays
        ("cispo", 0.1, -2.0, {}, -1.6 * LOG2, 1.6),
        ("topr", 0.1, 2.0, {}, 2 * LOG2, -2.0),  # good: as it is
        ("topr", 0.1, -2.0, {}, -0.2 * LOG2, 0.2),  # bad and unlikely: hardly
        ("topr", 9.0, -2.0, {"importance_cap": 1.0}, -2 * LOG2, 2.0),
        ("weighted_topr", 0.1, 2.0, {"positive_weight": 0.5}, LOG2, -1.0),
        ("weighted_topr", 0.1, -2.0, {"negative_weight": 4.0}, -0.8 * LOG2, 0.8),
        ("gspo", 1.1, 2.0, {}, -2.2, -2.2),
        ("gspo", 1.1, 2.0, {"clip_high": 4e-4}, -2.0008, 0.0),
        ("reinforce", 9.0, 2.0, {}, 2 * LOG2, -2.0),  # blind to the ratio
    ],
)
def test_by_hand(
    name: str, ratio: float, advantage: float, options: dict[str, Any], value: float, gradient: float
) -> None:
    loss, slope = run(name, one_token(ratio, advantage), **options)
    assert loss == pytest.approx(value)
    assert slope[0] == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "from_proximal", "advantage", "value", "gradient"),
    [
        (3.0, 1.0, 2.0, -6.0, -6.0),  # π_θ = π_prox: only the weight π_prox/μ = 3
        (3.0, 1.5, 2.0, -4.8, 0.0),  # weight 2, clipped at 1.2
        (18.0, 0.9, 2.0, -9.0, -9.0),  # weight 20 → 5, times 0.9
    ],
)
def test_decoupled_ppo_by_hand(
    ratio: float, from_proximal: float, advantage: float, value: float, gradient: float
) -> None:
    loss, slope = run("decoupled_ppo", one_token(ratio, advantage, from_proximal))
    assert loss == pytest.approx(value)
    assert slope[0] == pytest.approx(gradient, abs=1e-12)


def test_gspo_is_its_papers_sequence_loss() -> None:
    """With weights of ``sequence_mean``: mean over sequences of min(s·A, clip(s)·A), and the gradient of that."""
    c = columns(3, spread=0.2)
    c["weights"] = np.repeat(token_weights(list(LENGTHS), "sequence_mean"), LENGTHS)
    new = torch.tensor(c["logprobs"], requires_grad=True)
    total = torch.zeros(())
    for part in reference.sequences(c):
        s = (new[part.start : part.stop] - torch.tensor(c["behaviour"][part.start : part.stop])).mean().exp()
        a = float(c["advantages"][part.start])
        total = total - torch.minimum(s * a, s.clamp(0.9, 1.05) * a) / len(LENGTHS)
    total.backward()
    loss, gradient = run("gspo", c, clip_low=0.1, clip_high=0.05)
    assert loss == pytest.approx(total.item(), rel=1e-12)
    assert new.grad is not None
    assert gradient == pytest.approx(new.grad.numpy(), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"decoupled_ppo"}))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    c = columns(4, spread=0.0)
    _, gradient = run(name, c)
    assert gradient == pytest.approx(-c["weights"] * c["advantages"])


def test_decoupled_ppo_around_the_engines_policy_is_ppo_without_a_cap() -> None:
    c = columns(5)
    around = c | {"proximal": c["behaviour"]}
    big = {"importance_cap": 1e9}
    for one, other in zip(run("decoupled_ppo", around, **big), run("ppo", c, **big), strict=True):
        assert one == pytest.approx(other)


def test_an_absurd_engine_logprob_moves_a_token_by_no_more_than_the_cap() -> None:
    for name in ("ppo", "decoupled_ppo", "tis", "topr", "gspo"):
        c = one_token(1.0, -1.0) | {"behaviour": np.array([-1e4])}
        assert run(name, c)[1][0] == pytest.approx(5.0), name


# --- rejection, KL, proximal ------------------------------------------------------------------------------------------


def test_a_rejected_token_has_no_gradient_and_its_neighbours_keep_their_weight() -> None:
    c = columns(6, spread=0.01)
    c["behaviour"][5] = -1e4  # ratio e^10000: beyond every float
    for name in LOSSES:
        _, gradient = run(name, c, reject="token")
        assert gradient[5] == 0
        assert np.isfinite(gradient).all()
    assert np.delete(run("tis", c, reject="token")[1], 5) == pytest.approx(np.delete(run("tis", c)[1], 5))


def test_a_rejected_sequence_is_left_out_as_a_whole() -> None:
    c = columns(7, spread=0.01)
    second = reference.sequences(c)[1]
    c["behaviour"][second.start : second.stop] -= 1.0  # ratio e for each of its tokens
    o = AlgorithmConfig(reject="sequence")
    _, _, out = policy_loss(tokens_of(c), LOSSES["ppo"], o)
    assert out.nonzero().flatten().tolist() == list(second)


def test_a_non_finite_ratio_is_rejected() -> None:
    c = columns(8, spread=0.0)
    c["behaviour"][3] = float("nan")
    _, _, out = policy_loss(tokens_of(c), LOSSES["ppo"], AlgorithmConfig(reject="token"))
    assert out.nonzero().flatten().tolist() == [3]


def test_kl_estimators_by_hand() -> None:
    r = torch.tensor([0.0, LOG2, -LOG2])  # π_θ/π_ref = 1, 2, 1/2
    assert KLS["k1"](r).tolist() == pytest.approx([0, LOG2, -LOG2])
    assert KLS["k2"](r).tolist() == pytest.approx([0, LOG2**2 / 2, LOG2**2 / 2])
    assert KLS["k3"](r).tolist() == pytest.approx([0, 0.5 - 1 + LOG2, 2 - 1 - LOG2])


def test_k1_and_k3_estimate_the_kl_and_k2s_gradient_is_its_gradient() -> None:
    """Exact expectations over a vocabulary of five under π_θ."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([1.0, 0.2, -0.5, 0.7, 0.1], dtype=torch.float64).log_softmax(-1)
    logs = logits.log_softmax(-1)
    kl = (logs.exp() * (logs - other)).sum()
    for name in ("k1", "k3"):
        assert (logs.exp() * KLS[name](logs - other)).sum().item() == pytest.approx(kl.item())
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((logs.exp().detach() * KLS["k2"](logs - other)).sum(), logits, retain_graph=True)
    assert sampled.tolist() == pytest.approx(exact.tolist())
    (none,) = torch.autograd.grad((logs.exp().detach() * KLS["k1"](logs - other)).sum(), logits)
    assert none.tolist() == pytest.approx([0.0] * 5, abs=1e-12)


def test_kl_to_go_adds_up_to_the_end_of_each_sequence() -> None:
    c = columns(0) | {
        "logprobs": np.array([-1.0, -1.0, -1.0, -2.0]),
        "reference": np.array([-2.0, -3.0, -1.5, -2.0]),
        "lengths": np.array([3, 1]),
    }
    assert kl_to_go(tokens_of(c, kl=True), "k1").tolist() == pytest.approx([1 + 2 + 0.5, 2 + 0.5, 0.5, 0.0])


def test_the_interpolated_proximal_is_the_engines_for_fresh_tokens_and_nears_the_trainers_with_age() -> None:
    new, engine = torch.tensor([-1.0] * 4), torch.tensor([-2.0] * 4)
    proximal = interpolated(new, engine, torch.tensor([0, 1, 3, 10**6]))
    assert proximal.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.0])


# --- users' losses ----------------------------------------------------------------------------------------------------


def test_a_users_loss_is_weighted_and_regularised_like_the_others() -> None:
    c = columns(9)
    o = AlgorithmConfig(loss="mine.py:loss", kl_coef=0.1)
    mine = tokens_of(c, kl=True)
    value, per_token, _ = policy_loss(mine, lambda t, o: -t.advantages * t.logprobs, o)
    expected, _, _ = policy_loss(tokens_of(c, kl=True), LOSSES["reinforce"], o)
    assert value.item() == pytest.approx(expected.item())
    assert not per_token.low.any() and not per_token.high.any()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda t, o: t.logprobs.sum(), r"one value a token, a tensor \[3\], and returned shape \[\]"),
        (lambda t, o: 1.0, r"one value a token, a tensor \[3\], and returned float"),
        (lambda t, o: -t.advantages, "has no gradient; compute it from tokens.logprobs"),
        (lambda t, o: t.logprob, "failed on a trial: AttributeError: 'Tokens' object has no attribute 'logprob'"),
        (lambda t: t.logprobs, "failed on a trial: .* takes 1 positional argument"),
    ],
)
def test_a_users_loss_is_tried_before_the_run_starts(loss: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=rf"^algorithm\.loss: mine\.py:loss .*{says}") as error:
        check_loss(loss, AlgorithmConfig(loss="mine.py:loss"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_passes_the_trial(name: str) -> None:
    check_loss(LOSSES[name], AlgorithmConfig(loss=name, kl_coef=0.1, reject="sequence"))


# --- weights ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any), st.sampled_from(["token_mean", "sequence_mean"])
)
def test_weights_of_all_tokens_sum_to_one(generated: list[int], aggregation: str) -> None:
    weights = token_weights(generated, aggregation)
    assert sum(n * w for n, w in zip(generated, weights, strict=True)) == pytest.approx(1)


def test_token_mean_weighs_tokens_alike_and_sequence_mean_sequences() -> None:
    assert token_weights([1, 3, 0], "token_mean") == [0.25, 0.25, 0.0]
    assert token_weights([1, 3, 0], "sequence_mean") == [0.5, pytest.approx(1 / 6), 0.0]
