"""Tiny random models of the common families: packed exactly, trained the same on two ranks, by rows of their own and by
shared rows, and exported under the names that ``save_pretrained`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.train import model
from asyncrl.train.client import train_request
from asyncrl.train.step import Learner
from asyncrl.train.work import plan_work

from .batches import VOCABULARY, make_advantages, make_batch
from .ranks import on_ranks

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GROUPED = BASE | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = GROUPED | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": GROUPED,
    "Qwen3Moe": EXPERTS,
    "Llama": GROUPED | {"tie_word_embeddings": False},
    "Mistral": GROUPED | {"sliding_window": 5},
    # The caps are low enough to bend most scores and logits of such a model.
    "Gemma2": GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "Gemma3": GROUPED | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "GPTNeoX": BASE | {"tie_word_embeddings": False},
}
TRAINER = TrainerConfig(learning_rate=0.0, grad_clip=1e9, micro_batch_tokens=60)


class Outcome(msgspec.Struct):
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    exported: dict[str, Tensor]


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**MODELS[name])
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


def train_each(folder: Path, *trainers: TrainerConfig) -> list[Outcome]:
    return [train(folder, trainer) for trainer in trainers]


def train(folder: Path, trainer: TrainerConfig) -> Outcome:
    """One update of a fixed batch on this rank, without moving the weights; then the way out."""
    ranks, device = dist.get_world_size(), torch.device("cpu")
    policy = model.load(str(folder), 1.0)
    weights = model.manifest(policy, 0, torch.float32)
    model.shard(policy, init_device_mesh("cpu", (ranks,)), torch.float32, trainer.activation_checkpointing)
    model.attend(policy, trainer.attention, trainer.sequence_parallel, device, torch.float32)
    assert dist.group.WORLD is not None
    one = Learner(policy, trainer, AlgorithmConfig(loss="reinforce"), device, dist.group.WORLD)
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in model.named_parameters(policy):
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor().clone()

    one.optimizer.register_step_pre_hook(keep)
    batch = make_batch(0, seed=2, groups=3)
    request = train_request(batch, make_advantages(batch, 2))
    works = plan_work(
        request, ranks=ranks, vocabulary=VOCABULARY, hidden=32, trainer=trainer, algorithm=AlgorithmConfig()
    )
    metrics = one.step(works[dist.get_rank()])
    exported: dict[str, Tensor] = {}
    for bucket in model.gather(policy, weights, torch.float32, 5000, keep=True):
        exported |= {name: tensor.clone() for name, tensor in bucket.items()}
    return Outcome(metrics, gradients, exported)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_trained_alike_on_one_rank_and_two_and_leaves_as_it_came(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    (expected,) = on_ranks(1, train, folder, TRAINER)
    assert expected.metrics["grad_norm"] > 1e-3
    written = load_file(folder / "model.safetensors")
    shared = msgspec.structs.replace(TRAINER, sequence_parallel=2, activation_checkpointing=True)
    for outcomes in on_ranks(2, train_each, folder, TRAINER, shared):
        for outcome in outcomes:
            assert outcome.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
            for key, gradient in expected.gradients.items():
                difference = (outcome.gradients[key] - gradient).norm()
                assert difference < 1e-5 * expected.metrics["grad_norm"], f"{key}: {difference}"
            assert outcome.exported.keys() == written.keys()
            for key, tensor in written.items():
                assert torch.equal(outcome.exported[key], tensor), key


def test_ranks_that_share_rows_must_divide_the_heads(model_folder: Path) -> None:
    trainer = msgspec.structs.replace(TRAINER, sequence_parallel=3)
    with pytest.raises(model.ModelError, match=r"sequence_parallel = 3: must divide the model's 4 attention heads"):
        on_ranks(3, train, model_folder, trainer)


def test_a_kernel_of_gpus_is_refused_on_a_cpu(model_folder: Path) -> None:
    with pytest.raises(model.ModelError, match=r"trainer\.attention = flex: needs a GPU; use auto or blocks"):
        on_ranks(1, train, model_folder, msgspec.structs.replace(TRAINER, attention="flex"))
