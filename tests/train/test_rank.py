"""What a rank loads: the user's loss, and the reference model of a KL term; refused with one line before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import AlgorithmConfig, ModelConfig, Recipe, RecipeError
from asyncrl.train import model
from asyncrl.train.client import train_request
from asyncrl.train.model import ModelError
from asyncrl.train.rank import Rank, Stop, Train
from asyncrl.train.step import StepBroken
from asyncrl.train.work import Work, plan_work

from .batches import VOCABULARY, make_batch

MINE = """
def loss(tokens, options):
    return 0 * tokens.logprobs + 42.0 * options.importance_cap

def constant(tokens, options):
    return tokens.advantages
"""


def rank(folder: Path, **algorithm: Any) -> Rank:
    recipe = Recipe(model=ModelConfig(path=str(folder)), algorithm=AlgorithmConfig(**algorithm))
    return Rank(recipe, str(folder), torch.device("cpu"))


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_users_loss_is_trained_with_the_recipes_options(
    model_folder: Path, lone_rank: dist.ProcessGroup, mine: str
) -> None:
    one = rank(model_folder, loss=f"{mine}:loss", importance_cap=2.0)
    request = train_request(make_batch(0, seed=0), [1.0] * 16)
    (work,) = plan_work(
        request,
        ranks=1,
        vocabulary=VOCABULARY,
        hidden=32,
        trainer=one.recipe.trainer,
        algorithm=one.recipe.algorithm,
    )
    assert one.learner.step(work)["loss"] == pytest.approx(84.0)


def test_a_users_loss_that_cannot_be_used_is_refused(
    model_folder: Path, lone_rank: dist.ProcessGroup, mine: str
) -> None:
    for name, says in {
        "constant": "has no gradient",
        "absent": "has no 'absent'",
        "MINE": "has no 'MINE'",
    }.items():
        with pytest.raises(RecipeError, match=rf"algorithm\.loss: .*{says}"):
            rank(model_folder, loss=f"{mine}:{name}")
    with pytest.raises(RecipeError, match=r"algorithm\.loss: no file /nowhere/mine\.py"):
        rank(model_folder, loss="/nowhere/mine.py:loss")


def test_without_a_kl_term_no_reference_is_loaded(
    model_folder: Path, lone_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = model.load

    def spy(path: str, temperature: float) -> model.Policy:
        loaded.append(path)
        return load(path, temperature)

    monkeypatch.setattr(model, "load", spy)
    rank(model_folder)
    assert loaded == [str(model_folder)]
    rank(model_folder, kl_coef=0.1)
    assert loaded == [str(model_folder)] * 3


def test_the_reference_has_no_gradient_and_only_the_servers_precision(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    recipe = Recipe(model=ModelConfig(dtype="bfloat16"), algorithm=AlgorithmConfig(kl_coef=0.1))
    one = Rank(recipe, str(model_folder), torch.device("cpu"))
    assert one.learner._reference is not None
    assert {p.dtype for p in one.learner._reference.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in one.learner._reference.parameters())
    assert {p.dtype for p in one.learner.policy.parameters()} == {torch.float32}


def test_a_reference_with_another_vocabulary_is_refused(
    model_folder: Path, lone_rank: dist.ProcessGroup, tmp_path: Path
) -> None:
    config = Qwen3Config.from_pretrained(model_folder)
    config.vocab_size = VOCABULARY + 8
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"algorithm\.reference: .* vocabulary of 72 and the policy one of 64"):
        rank(model_folder, kl_coef=0.1, reference=str(tmp_path / "other"))


def test_a_critic_with_a_smaller_vocabulary_is_refused(
    model_folder: Path, lone_rank: dist.ProcessGroup, tmp_path: Path
) -> None:
    config = Qwen3Config.from_pretrained(model_folder)
    own = {"advantage": "gae", "credit": "token", "critic": "model", "critic_path": str(tmp_path / "other")}
    config.vocab_size = VOCABULARY + 8
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    rank(model_folder, **own)
    config.vocab_size = VOCABULARY - 8
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"algorithm\.critic_path: .* vocabulary of 56 and the policy one of 64"):
        rank(model_folder, **own)


def test_a_rank_whose_step_broke_waits_for_rank_0_which_keeps_the_batch(
    model_folder: Path, lone_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it to end at once, torchrun would end rank 0 while that still writes."""
    one = rank(model_folder)
    messages = [msgspec.msgpack.encode(message) for message in (Train(work=Work(step=0, updates=[[]])), Stop())]
    trained: list[Work] = []

    def broken(work: Work) -> dict[str, float]:
        trained.append(work)
        raise StepBroken("step 0, update 2 of 2: the loss is not finite")

    monkeypatch.setattr(one, "train", broken)
    monkeypatch.setattr(one.channel, "receive", lambda: messages.pop(0))
    one.follow()
    assert len(trained) == 1 and not messages
