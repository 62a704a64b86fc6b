"""Adapters: only they are trained, and what leaves is the model with them merged."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from asyncrl.config import Recipe, RecipeError
from asyncrl.train import lora, model
from asyncrl.train.client import HttpTrainer, train_request
from asyncrl.train.rank import Rank
from asyncrl.train.work import plan_work

from . import test_architectures
from .batches import VOCABULARY, make_advantages, make_batch
from .test_model import TEMPERATURE, one_by_one, packed
from .test_worker import saved

pytest.importorskip("peft")


def recipe(folder: Path, dtype: str = "float32", **trainer: object) -> Recipe:
    settings = {"lora_rank": 2, "lora_alpha": 8, "learning_rate": 1e-2, "connect_timeout_s": 120.0} | trainer
    return msgspec.convert(
        {"model": {"path": str(folder), "dtype": dtype}, "trainer": settings, "rollout": {"temperature": TEMPERATURE}},
        Recipe,
    )


def rank(folder: Path, **settings: object) -> Rank:
    return Rank(recipe(folder, **settings), str(folder), torch.device("cpu"))  # type: ignore[arg-type]


def trained(one: Rank) -> dict[str, float]:
    batch = make_batch(one.learner.version, seed=one.learner.version)
    request = train_request(batch, make_advantages(batch, one.learner.version))
    config = one.recipe
    works = plan_work(
        request, ranks=1, vocabulary=VOCABULARY, hidden=32, trainer=config.trainer, algorithm=config.algorithm
    )
    return one.learner.step(works[0])


def leaving(one: Rank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in one.gather(keep=True) for name, tensor in bucket.items()}


def test_only_adapters_are_trained_and_the_merged_model_is_the_one_that_was_trained(
    model_folder: Path, lone_rank: dist.ProcessGroup, tmp_path: Path
) -> None:
    one = rank(model_folder)
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    original = dict(lm.named_parameters())
    before = leaving(one)
    assert list(before) == [t.name for t in one.weights.tensors]
    assert all(torch.equal(before[name], original[name]) for name in before)  # B begins as 0

    for _ in range(2):
        trained(one)
    names = dict(model.named_parameters(one.learner.policy))
    assert {p.requires_grad for name, p in names.items() if lora.is_factor(name)} == {True}
    assert not any(p.requires_grad for name, p in names.items() if not lora.is_factor(name))
    after = leaving(one)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if "_proj" in name}

    lm.load_state_dict(after | {"lm_head.weight": after["model.embed_tokens.weight"]})
    rows = [torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([2, 6, 5])]
    got, _ = packed(one.learner.policy, rows)
    torch.testing.assert_close(got, one_by_one(lm, rows), rtol=0, atol=1e-5)


def test_frozen_weights_have_the_servers_precision_and_adapters_their_own(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    one = rank(model_folder, dtype="bfloat16")
    types = {lora.is_factor(name): p.dtype for name, p in model.named_parameters(one.learner.policy)}
    assert types == {True: torch.float32, False: torch.bfloat16}
    assert math.isfinite(trained(one)["grad_norm"])
    assert {t.dtype for t in leaving(one).values()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning")
def test_named_layers_alone_get_adapters(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    one = rank(model_folder, lora_targets=["q_proj"])
    assert {n.split(".")[4] for n, _ in model.named_parameters(one.learner.policy) if lora.is_factor(n)} == {"q_proj"}
    with pytest.raises(RecipeError, match=r"trainer\.lora_targets: .*nonsense"):
        rank(model_folder, lora_targets=["nonsense"])
    with pytest.raises(RecipeError, match=r"trainer\.lora_targets: the output layer cannot have adapters"):
        rank(model_folder, lora_targets=["q_proj", "lm_head"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The following .*_pattern keys:RuntimeWarning")  # peft's
def test_layers_whose_adapters_cannot_be_merged_are_refused(
    model_folder: Path, lone_rank: dist.ProcessGroup, tmp_path: Path
) -> None:
    experts = test_architectures.save("Qwen3Moe", tmp_path / "experts")
    square = tmp_path / "square"  # GPT-2 holds its matrices transposed, which the shape of a square one does not tell
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2)).save_pretrained(square)
    for folder, targets, says in (
        (experts, [], r"mlp\.experts"),
        (experts, ["down_proj"], r"mlp\.experts"),
        (square, ["attn.c_proj"], r"attn\.c_proj \(Conv1D\)"),
        (model_folder, ["embed_tokens"], r"model\.embed_tokens"),
    ):
        with pytest.raises(RecipeError, match=rf"trainer\.lora_targets: adapters of .*{says}.* cannot be merged; name"):
            rank(folder, lora_targets=targets)
    one = rank(experts, lora_targets=["q_proj", "gate"])
    trained(one)
    assert list(leaving(one)) == [t.name for t in one.weights.tensors]


async def test_two_ranks_train_adapters_and_one_goes_on(model_folder: Path, tmp_path: Path) -> None:
    async def job(ranks: int, resume: Path | None = None) -> Path:
        folder = tmp_path / str(ranks)
        config = recipe(model_folder, ranks=ranks)
        trainer = HttpTrainer(config, str(model_folder), run_dir=folder, log=folder / "log", resume=resume)
        try:
            for step in range(await trainer.connect(), 2):
                await saved(trainer, folder)
                batch = make_batch(step, seed=step)
                await trainer.train_step(batch, make_advantages(batch, step))
            return await saved(trainer, folder)
        finally:
            await trainer.close()

    straight = await job(2)
    resumed = await job(1, straight.parent / "version-1")
    weights = load_file(straight / "model.safetensors")
    for name, tensor in load_file(resumed / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-4)
    loaded = dict(AutoModelForCausalLM.from_pretrained(straight, dtype="auto").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
