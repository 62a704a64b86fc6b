"""Sequence parallelism as a job: what is dealt out, and that the numbers of a step are counted once."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from asyncrl.config import AlgorithmConfig, ModelConfig, Recipe, TrainerConfig
from asyncrl.train.client import HttpTrainer, train_request
from asyncrl.train.rank import Rank
from asyncrl.train.work import plan_work

from .batches import VOCABULARY, in_segments, make_advantages, make_batch, make_rewards
from .ranks import on_ranks
from .test_worker import RECIPE, alone

CPU = torch.device("cpu")


def test_neighbouring_ranks_get_the_same_rows_with_the_room_of_both() -> None:
    request = train_request(make_batch(0, seed=1), [1.0] * 16)
    trainer = TrainerConfig(ranks=4, sequence_parallel=2, micro_batch_tokens=40)
    works = plan_work(request, ranks=4, vocabulary=VOCABULARY, hidden=32, trainer=trainer, algorithm=AlgorithmConfig())
    alone = plan_work(
        request,
        ranks=2,
        vocabulary=VOCABULARY,
        hidden=32,
        trainer=TrainerConfig(ranks=2, micro_batch_tokens=80),
        algorithm=AlgorithmConfig(),
    )
    assert works == [alone[0], alone[0], alone[1], alone[1]]


async def test_a_job_of_two_ranks_that_share_rows_makes_the_step_of_one(model_folder: Path, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(
        RECIPE, trainer=msgspec.structs.replace(RECIPE.trainer, sequence_parallel=2, activation_checkpointing=True)
    )
    trainer = HttpTrainer(recipe, str(model_folder), run_dir=tmp_path, log=tmp_path / "trainer.log")
    try:
        assert await trainer.connect() == 0
        batch = make_batch(0, seed=0)
        result = await trainer.train_step(batch, make_advantages(batch, 0))
    finally:
        await trainer.close()
    _, expected = alone(model_folder, 1)
    for name in ("loss", "grad_norm", "entropy", "kl", "ratio_max", "engine_gap", "clip_fraction", "reference_kl"):
        assert result.metrics[name] == pytest.approx(expected[name], rel=1e-5), name


def critic_steps(folder: Path, kind: str, together: int) -> dict[str, float]:
    """Two steps of two updates each, by this rank; of segments in the second."""
    trainer = TrainerConfig(sequence_parallel=together, learning_rate=1e-5, micro_batch_tokens=64)
    algorithm = AlgorithmConfig(advantage="gae", credit="token", critic=kind, mini_batches=2)
    one = Rank(Recipe(model=ModelConfig(path=str(folder)), trainer=trainer, algorithm=algorithm), str(folder), CPU)
    for step in range(2):
        batch = make_batch(step, seed=step, groups=2)
        rewards = make_rewards(batch, step)
        works = plan_work(
            train_request(in_segments(batch, rewards) if step else batch, rewards),
            ranks=dist.get_world_size(),
            vocabulary=VOCABULARY,
            hidden=32,
            trainer=trainer,
            algorithm=algorithm,
        )
        metrics = one.train(works[dist.get_rank()])
    return metrics


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_a_critic_shares_rows_too_and_is_counted_once(model_folder: Path, kind: str) -> None:
    (expected,) = on_ranks(1, critic_steps, model_folder, kind, 1)
    for metrics in on_ranks(2, critic_steps, model_folder, kind, 2):
        for name in ("loss", "value_loss", "advantage_std", "explained_variance", "grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


def test_what_the_benchmark_measures_is_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    script = importlib.import_module("sequence_parallel")
    args = argparse.Namespace(shape="tiny", tokens=256)
    ((alone, gradient),) = on_ranks(1, script.row, args)
    for shared, other in on_ranks(2, script.row, args):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert shared["cpu_s"] > 0
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6 * float(gradient.norm()))
