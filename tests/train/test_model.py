"""Packing is exact, and what cannot be packed is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.train import model
from asyncrl.train.attention import Layout

TEMPERATURE = 0.7
LENGTHS = [7, 1, 30, 12, 12, 29, 2]


def one_by_one(lm: PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    """Logprobs of each row's own tokens after its first, by transformers alone."""
    parts = [
        (lm(input_ids=row[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        for row in rows
    ]
    return torch.cat(parts)


def packed(policy: model.Policy, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.cat(rows)
    inner = torch.cat([torch.tensor([True] * (len(row) - 1) + [False]) for row in rows])
    positions = inner.nonzero()[:, 0]
    scores = policy(tokens, Layout([len(row) for row in rows], tokens.device), positions, tokens[positions + 1])
    return scores.logprobs, scores.entropy


@pytest.fixture
def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (n,), generator=generator) for n in LENGTHS]


def test_packed_logprobs_and_gradients_equal_those_of_single_sequences(
    model_folder: Path, rows: list[torch.Tensor]
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected = one_by_one(lm, rows)
    policy = model.load(str(model_folder), TEMPERATURE)
    got, _ = packed(policy, rows)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)

    pull = torch.linspace(-1, 1, len(got))
    (expected * pull).sum().backward()
    (got * pull).sum().backward()
    wanted = dict(lm.named_parameters())
    for name, parameter in model.named_parameters(policy):
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-5)


def test_no_sequence_sees_another(model_folder: Path, rows: list[torch.Tensor]) -> None:
    policy = model.load(str(model_folder), TEMPERATURE)
    with torch.no_grad():
        before, _ = packed(policy, rows)
        changed = [*rows[:3], (rows[3] + 1) % 64, *rows[4:]]
        after, _ = packed(policy, changed)
    start = sum(n - 1 for n in LENGTHS[:3])
    inside = slice(start, start + LENGTHS[3] - 1)
    moved = (before - after).abs()
    assert moved[inside].min() > 1e-4
    moved[inside] = 0
    assert moved.max() < 1e-5


def test_entropy_is_that_of_the_tempered_distribution(model_folder: Path, rows: list[torch.Tensor]) -> None:
    policy = model.load(str(model_folder), TEMPERATURE)
    with torch.no_grad():
        _, entropy = packed(policy, rows[:1])
        lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        logits = lm(input_ids=rows[0][None]).logits[0, :-1] / TEMPERATURE
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def save(lm: PreTrainedModel, folder: Path) -> str:
    lm.save_pretrained(folder)
    return str(folder)


def test_a_sliding_window_is_kept(tmp_path: Path, rows: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=1, sliding_window=4, initializer_range=0.3
    )
    lm = MistralForCausalLM(config)
    expected = one_by_one(lm, rows)
    got, _ = packed(model.load(save(lm, tmp_path), TEMPERATURE), rows)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_experts_leave_under_the_names_that_save_pretrained_writes(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SMALL,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    lm = Qwen3MoeForCausalLM(config)
    policy = model.load(save(lm, tmp_path), 1.0)
    weights = model.manifest(policy, 0, torch.float32)
    gathered: dict[str, torch.Tensor] = {}
    for bucket in model.gather(policy, weights, torch.float32, 4096, keep=True):
        gathered |= bucket
    written = load_file(tmp_path / "model.safetensors")
    assert [t.name for t in weights.tensors] == list(gathered)
    assert gathered.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(gathered[name], tensor)


def test_a_model_with_weights_that_are_no_parameters_is_refused(tmp_path: Path) -> None:
    config = Glm4MoeConfig(
        **SMALL,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_key_value_heads=1,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    policy = model.load(save(Glm4MoeForCausalLM(config), tmp_path), 1.0)
    with pytest.raises(model.ModelError, match=r"keeps weights in buffers \(.*layers\.1\..*e_score_correction_bias\)"):
        model.manifest(policy, 0, torch.float32)


@pytest.mark.parametrize("name", ["bloom", "granite"])
def test_a_model_that_packing_would_change_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    lm: PreTrainedModel
    if name == "bloom":  # positions are a bias between the keys of a whole row; large weights make it show
        lm = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.5))
    else:  # the logits are not the head applied to the last hidden state, but a fraction of that
        lm = GraniteForCausalLM(GraniteConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, logits_scaling=2.0))
    with pytest.raises(model.ModelError, match=type(lm).__name__) as caught:
        model.load(save(lm, tmp_path), 1.0)
    assert "\n" not in str(caught.value)


DENSE = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1, "pad_token_id": 0}
EXPERTS = DENSE | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def phi(longest: int) -> PreTrainedModel:
    rope = LONG | {"original_max_position_embeddings": 16}
    return Phi3ForCausalLM(
        Phi3Config(**DENSE, max_position_embeddings=longest, original_max_position_embeddings=16, rope_parameters=rope)
    )


def qwen_moe(window: bool) -> PreTrainedModel:
    config = Qwen2MoeConfig(**EXPERTS, use_sliding_window=window, sliding_window=12, max_window_layers=1)
    return Qwen2MoeForCausalLM(config)


def phi_moe(window: int | None) -> PreTrainedModel:
    config = PhimoeConfig(**DENSE, num_local_experts=2, sliding_window=window, max_position_embeddings=64)
    return PhimoeForCausalLM(config)


def gemma(rope: dict[str, Any]) -> PreTrainedModel:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**DENSE, head_dim=16, layer_types=kinds, sliding_window=12, rope_parameters=ropes)
    return Gemma3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "works", "refused", "says"),
    [
        (phi, 16, 64, "with rope_type longrope"),
        (gemma, {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}, DYNAMIC, "with rope_type dynamic"),
        (qwen_moe, False, True, "has attention windows in its mask only"),
        (phi_moe, 64, 12, "has attention windows in its mask only"),
    ],
)
def test_what_only_long_sequences_would_show_is_refused(
    make: Callable[[Any], PreTrainedModel], works: Any, refused: Any, says: str, tmp_path: Path
) -> None:
    model.load(save(make(works), tmp_path / "works"), 1.0)
    with pytest.raises(model.ModelError, match=rf"^model\.path: \w+ {says}.*; it cannot be trained without padding$"):
        model.load(save(make(refused), tmp_path / "refused"), 1.0)


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(model.ModelError, match=r"model\.path: .* is not a Hugging Face model folder"):
        model.load(str(tmp_path / "nowhere"), 1.0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(model.ModelError, match=r"model\.path: cannot load") as caught:
        model.load(str(tmp_path), 1.0)
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_that_is_cut_short_is_refused_in_one_line(tmp_path: Path, model_folder: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(model.ModelError, match=r"^model\.path: cannot load .*/model: .*") as caught:
        model.load(str(folder), 1.0)
    assert "\n" not in str(caught.value)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path, model_folder: Path) -> None:
    model.load(str(model_folder), 1.0)  # its head is tied, and in no file
    config = Qwen3Config(**SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False)
    path = save(Qwen3ForCausalLM(config), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(model.ModelError, match=r"^model\.path: .* has no lm_head\.weight \(1 tensors are missing\)$"):
        model.load(path, 1.0)
    model.load(path, 1.0, "algorithm.critic_path", headless=True)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(model.ModelError, match=r"^algorithm\.critic_path: .* has no model\.layers\.1\.mlp\.up_proj"):
        model.load(path, 1.0, "algorithm.critic_path", headless=True)
