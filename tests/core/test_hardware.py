"""The estimated cost model: it is table 4 where table 4 was measured, and follows the hardware elsewhere."""

from __future__ import annotations

import pytest

from asyncrl.core.cost_model import CostModel
from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens, named, training_tokens_per_s


def test_the_measured_pair_gives_the_measured_coefficients() -> None:
    model, gpu, count = named("qwen3-30b-a3b@h20")
    got, table = cost_model(model, gpu, count), CostModel()
    for name in ("k1", "k2", "k3", "k4"):
        assert getattr(got, name) == pytest.approx(getattr(table, name))


def test_coefficients_follow_bandwidth_peak_and_size() -> None:
    model = MODELS["qwen3-8b"]
    slow, fast = cost_model(model, GPUS["h100"]), cost_model(model, GPUS["h200"])
    assert (slow.k1 / fast.k1, slow.k2 / fast.k2) == pytest.approx((4.8 / 3.35, 4.8 / 3.35))
    assert slow.k3 == fast.k3, "the two have the same peak"
    two = cost_model(model, GPUS["h100"], 2)
    assert (two.k1, two.k2, two.k3, two.k4) == pytest.approx((slow.k1 / 2, slow.k2 / 2, slow.k3 / 2, slow.k4))
    big = cost_model(MODELS["qwen3-32b"], GPUS["h100"])
    assert big.k3 / slow.k3 == pytest.approx(32.8 / 8.2)


def test_the_kv_cache_is_what_the_weights_leave() -> None:
    assert MODELS["qwen3-8b"].kv_bytes == 147_456
    assert kv_tokens(MODELS["qwen3-8b"], GPUS["h800"]) == int(0.8 * (80e9 - 16.4e9) / 147_456)
    with pytest.raises(ValueError, match="145 GB of weights do not fit into 1 × 80 GB"):
        kv_tokens(MODELS["qwen2.5-72b"], GPUS["h800"])


def test_further_forward_passes_cost_a_third_of_a_step_each() -> None:
    model, gpu = MODELS["qwen3-8b"], GPUS["h800"]
    assert training_tokens_per_s(model, gpu) / training_tokens_per_s(model, gpu, forwards=1) == pytest.approx(8 / 6)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("gpt@h800", "unknown model 'gpt'; known are qwen3-0.6b"),
        ("qwen3-8b", "unknown GPU ''; known are h20"),
        ("qwen3-8b@h800xmany", "'many' is no number of GPUs"),
    ],
)
def test_unknown_names_say_what_is_known(profile: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("?", "\\?")):
        named(profile)
