"""The optimiser's moments away from the device: the same steps and checkpoints, and no storage between updates."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from asyncrl.config import Recipe, RecipeError, TrainerConfig
from asyncrl.train.checkpoint import Checkpoints
from asyncrl.train.rank import Rank

from .batches import make_advantages, make_batch
from .test_step import TRAINER, learner, parameters, same, step

OFFLOADED = msgspec.structs.replace(TRAINER, offload="optimizer")


def test_steps_are_the_same_and_between_them_the_moments_take_no_room(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    plain, other = learner(model_folder, lone_rank), learner(model_folder, lone_rank, OFFLOADED)
    for number in range(3):
        batch = make_batch(number, seed=number)
        for one in (plain, other):
            step(one, batch, make_advantages(batch, number))
        moments = [
            slots[name].to_local() for slots in other.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        ]
        assert {m.untyped_storage().nbytes() for m in moments} == {0}
    same(parameters(other), parameters(plain), atol=0)
    assert other.offload is not None
    with other.offload.present():
        for mine, yours in zip(other.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
            assert all(torch.equal(mine[name].to_local(), yours[name].to_local()) for name in ("exp_avg", "exp_avg_sq"))


def test_a_checkpoint_has_the_moments(model_folder: Path, lone_rank: dist.ProcessGroup, tmp_path: Path) -> None:
    stored = []
    for name, trainer in (("plain", TRAINER), ("other", OFFLOADED)):
        one = learner(model_folder, lone_rank, trainer)
        batch = make_batch(0, seed=0)
        step(one, batch, make_advantages(batch, 0))
        checkpoints = Checkpoints(one, Recipe(), model_folder)
        checkpoints.begin(tmp_path / name)
        checkpoints.saved()
        state = {"optimizer.exp_avg.model.norm.weight": torch.zeros(32)}
        load(state, storage_reader=FileSystemReader(tmp_path / name))
        stored.append(state["optimizer.exp_avg.model.norm.weight"])
    assert stored[0].any()
    assert torch.equal(*stored)


def test_on_a_cpu_it_is_refused(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    recipe = Recipe(trainer=TrainerConfig(offload="optimizer"))
    with pytest.raises(RecipeError, match=r"trainer\.offload: needs a GPU"):
        Rank(recipe, str(model_folder), torch.device("cpu"))
