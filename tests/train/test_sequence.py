"""Sequence parallelism as a job: what is dealt out, and that the numbers of a step are counted once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.train.client import HttpTrainer, train_request
from asyncrl.train.work import plan_work

from .batches import VOCABULARY, make_advantages, make_batch
from .test_worker import RECIPE, alone


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
