"""Real torchrun jobs that go on from one another's checkpoints, with the same and with another number of ranks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from asyncrl.config import AlgorithmConfig, Recipe, TrainerConfig
from asyncrl.ports import TrainerError
from asyncrl.train import description
from asyncrl.train.client import HttpTrainer
from asyncrl.train.rank import Rank

from .batches import make_batch, make_rewards
from .test_worker import ranks_of, saved

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

RECIPE = Recipe(
    trainer=TrainerConfig(learning_rate=1e-3, warmup_steps=4, micro_batch_tokens=64, connect_timeout_s=200),
    algorithm=AlgorithmConfig(mini_batches=2, advantage="gae", credit="token", critic="model"),
)
"""With a critic of its own: all that a checkpoint can hold."""

BEFORE, AFTER = 2, 2
"""Steps before and after the checkpoint that all jobs resume from."""


def read(checkpoint: Path) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint's state, without its random states."""
    reader = FileSystemReader(checkpoint / description.STATE)
    stored = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(v.size) for k, v in stored.items() if not k.startswith("random.")}  # type: ignore[union-attr]
    load(state, storage_reader=reader)
    return state


async def train(trainer: HttpTrainer, first: int, count: int) -> None:
    for step in range(first, first + count):
        batch = make_batch(step, seed=step)
        await trainer.train_step(batch, make_rewards(batch, step))


@asynccontextmanager
async def job(model: Path, folder: Path, ranks: int, resume: Path | None = None) -> AsyncIterator[HttpTrainer]:
    recipe = msgspec.structs.replace(RECIPE, trainer=msgspec.structs.replace(RECIPE.trainer, ranks=ranks))
    trainer = HttpTrainer(recipe, str(model), run_dir=folder, log=folder / "trainer.log", resume=resume)
    try:
        yield trainer
    finally:
        await trainer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def straight(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two ranks that train to the end: the last, and one that is begun on the way."""
    folder = tmp_path_factory.mktemp("straight")
    async with job(model_folder, folder, ranks=2) as trainer:
        assert await trainer.connect() == 0
        await train(trainer, 0, BEFORE)
        assert await trainer.save(str(folder)) == BEFORE
        await train(trainer, BEFORE, AFTER)  # while it is written
        await saved(trainer, folder)
    assert description.versions(folder) == [BEFORE, BEFORE + AFTER]
    return folder


async def resumed(model: Path, folder: Path, ranks: int, checkpoint: Path) -> Path:
    """The last checkpoint of a job that goes on from ``checkpoint``."""
    async with job(model, folder, ranks, resume=checkpoint) as trainer:
        assert await trainer.connect() == BEFORE
        await train(trainer, BEFORE, AFTER)
        return await saved(trainer, folder)


async def test_two_ranks_resumed_arrive_at_the_same_bits(
    straight: Path, model_folder: Path, tmp_path: Path, lone_rank: dist.ProcessGroup
) -> None:
    again = await resumed(model_folder, tmp_path, 2, straight / f"version-{BEFORE}")
    expected, got = read(straight / again.name), read(again)
    assert got.keys() == expected.keys()
    assert any(key.startswith("optimizer.exp_avg_sq.model.") for key in got)
    assert any(key.startswith("optimizer.exp_avg_sq.critic.lm.") for key in got)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert (again / "model.safetensors").read_bytes() == (straight / again.name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("ranks", [1, 4])
async def test_what_two_ranks_wrote_goes_on_with_another_number_of_ranks(
    straight: Path, model_folder: Path, tmp_path: Path, lone_rank: dist.ProcessGroup, ranks: int
) -> None:
    again = await resumed(model_folder, tmp_path, ranks, straight / f"version-{BEFORE}")
    expected, got = read(straight / again.name), read(again)
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


async def test_the_exported_weights_are_the_states(straight: Path, lone_rank: dist.ProcessGroup) -> None:
    for version in description.versions(straight):
        checkpoint = straight / f"version-{version}"
        state = read(checkpoint)
        exported = load_file(checkpoint / "model.safetensors")
        assert exported.keys() == {k.removeprefix("model.") for k in state if k.startswith("model.")}
        assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in exported.items())


async def test_a_job_killed_while_it_writes_leaves_the_checkpoint_before_it(model_folder: Path, tmp_path: Path) -> None:
    async with job(model_folder, tmp_path, ranks=1) as trainer:
        await trainer.connect()
        await train(trainer, 0, 1)
        whole = await saved(trainer, tmp_path)
        await train(trainer, 1, 1)
        await trainer.save(str(tmp_path))
        for rank in ranks_of(trainer):
            os.kill(rank, 9)
    left = {path.name for path in tmp_path.glob("*version-*")}
    assert left - {whole.name} == {name for name in left if name.startswith(".version-2.") and name.endswith(".part")}
    assert left > {whole.name}, "it was killed before it was done"
    assert description.versions(tmp_path) == [1]
    rank = Rank(RECIPE, str(model_folder), torch.device("cpu"))
    rank.checkpoints.load(whole)
    assert rank.learner.version == 1


async def test_a_job_that_cannot_resume_says_why_in_one_line(
    straight: Path, model_folder: Path, tmp_path: Path
) -> None:
    async with job(model_folder, tmp_path, ranks=1, resume=straight / "version-77") as trainer:
        with pytest.raises(TrainerError, match=r"trainer rank 0: .*version-77: not a checkpoint") as caught:
            await trainer.connect()
    assert "\n" not in str(caught.value)
