"""One rank in this process: what a checkpoint holds, how it is resumed from, and how a bad one is refused."""

from __future__ import annotations

import json
import pickle
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem

from asyncrl.config import AlgorithmConfig, ModelConfig, Recipe, TrainerConfig
from asyncrl.train import checkpoint as checkpoints
from asyncrl.train import description
from asyncrl.train.checkpoint import WriteFailed
from asyncrl.train.client import train_request
from asyncrl.train.description import CheckpointError, Description, FileInfo
from asyncrl.train.export import crc32
from asyncrl.train.rank import Rank
from asyncrl.train.work import plan_work

from .batches import VOCABULARY, make_advantages, make_batch

pytestmark = pytest.mark.usefixtures("lone_rank")

RECIPE = Recipe(
    trainer=TrainerConfig(learning_rate=1e-3, warmup_steps=8, weight_decay=0.1),
    algorithm=AlgorithmConfig(mini_batches=2),
)


@pytest.fixture
def new_rank(model_folder: Path) -> Callable[..., Rank]:
    def make(**trainer: Any) -> Rank:
        table = {**{f: getattr(RECIPE.trainer, f) for f in TrainerConfig.__struct_fields__}, **trainer}
        recipe = Recipe(trainer=TrainerConfig(**table), algorithm=RECIPE.algorithm)
        return Rank(recipe, str(model_folder), torch.device("cpu"))

    return make


def train(rank: Rank, steps: int) -> None:
    for _ in range(steps):
        step = rank.learner.version
        batch = make_batch(step, seed=step, groups=2)
        (work,) = plan_work(
            train_request(batch, make_advantages(batch, step)),
            ranks=1,
            vocabulary=VOCABULARY,
            hidden=32,
            trainer=rank.recipe.trainer,
            algorithm=rank.recipe.algorithm,
        )
        rank.learner.step(work)


def begin(rank: Rank, folder: Path) -> Path:
    """A checkpoint ``folder/version-N``, without the Hugging Face files."""
    path = folder / f"version-{rank.learner.version}"
    rank.checkpoints.begin(path / description.STATE)
    return path


def save(rank: Rank, folder: Path) -> Path:
    path = begin(rank, folder)
    rank.checkpoints.saved()
    return path


def resume(rank: Rank, path: Path) -> None:
    rank.checkpoints.load(path)


def state(rank: Rank) -> dict[str, Tensor]:
    tensors = dict(checkpoints._tensors(rank.learner))
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_steps_straight_and_steps_resumed_arrive_at_the_same_bits(
    new_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    straight = new_rank()
    train(straight, 3)
    path = save(straight, tmp_path)
    train(straight, 3)

    resumed = new_rank()
    resume(resumed, path)
    assert resumed.learner.version == 3
    assert resumed.learner.learning_rate == pytest.approx(1e-3 * 4 / 9)  # the warm-up goes on
    train(resumed, 3)
    assert_same(state(straight), state(resumed))
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in state(resumed))


def test_what_is_written_is_the_state_at_the_call_though_training_goes_on_meanwhile(
    new_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    write = checkpoints.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "save", slow)
    one = new_rank()
    train(one, 1)
    before = state(one)
    path = begin(one, tmp_path)
    train(one, 2)
    assert not path.exists()
    go.set()
    one.checkpoints.saved()
    other = new_rank()
    resume(other, path)
    assert other.learner.version == 1
    assert_same(before, state(other))


def test_the_next_checkpoint_waits_for_the_last(
    new_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, order = threading.Event(), []
    write = checkpoints.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(30)
        done = write(*args, **kwargs)
        order.append("written")
        return done

    monkeypatch.setattr(checkpoints, "save", slow)
    one = new_rank()
    first = begin(one, tmp_path)
    threading.Timer(0.1, go.set).start()
    train(one, 1)
    second = begin(one, tmp_path)
    order.append("begun")
    one.checkpoints.saved()
    assert order == ["written", "begun", "written"]
    assert description.versions(tmp_path) == [0, 1]
    assert (first / "trainer").is_dir() and (second / "trainer").is_dir()


def test_the_writing_thread_uses_the_ranks_own_gpu(
    new_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA is played: its current device is each thread's own."""
    rank, used = new_rank(), list[tuple[torch.device, str]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((device, threading.current_thread().name)))
    save(rank, tmp_path / "cpu")
    assert used == []
    rank.learner.device = torch.device("cuda", 3)
    rank.checkpoints = checkpoints.Checkpoints(rank.learner, rank.recipe, Path(rank.folder))
    save(rank, tmp_path / "cuda")
    assert used == [(torch.device("cuda", 3), "checkpoint_0")]


def test_random_states_go_on_where_they_were(new_rank: Callable[..., Rank], tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.random()]

    one = new_rank()
    path = save(one, tmp_path)
    expected = draw()
    draw()
    resume(new_rank(), path)
    assert draw() == expected


def test_a_checkpoint_of_version_0_has_no_optimiser_state_and_can_be_resumed(
    new_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    path = save(new_rank(), tmp_path)
    one, other = new_rank(), new_rank()
    train(one, 2)
    resume(one, path)  # the state that it has is put away
    assert not one.learner.optimizer.state
    train(one, 2)
    train(other, 2)
    assert_same(state(one), state(other))


def test_a_full_disk_fails_that_checkpoint_alone(
    new_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = new_rank()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "_write_item", full)
        begin(one, tmp_path)
        with pytest.raises(WriteFailed, match=r"^rank 0: \[Errno 28\] No space left on device$"):
            one.checkpoints.saved()
    assert description.versions(tmp_path) == []
    train(one, 1)
    resume(new_rank(), save(one, tmp_path))


def damaged(path: Path, how: str) -> Path:
    file = path / "trainer" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    if how == "cut short":
        data = data[:-100]
    else:
        data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("how", "says"), [("cut short", r"has \d+ of \d+ bytes"), ("one bit", r"is corrupt \(its checksum differs\)")]
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_the_remedy(
    new_rank: Callable[..., Rank], tmp_path: Path, how: str, says: str
) -> None:
    one = new_rank()
    paths = []
    for _ in range(3):
        paths.append(save(one, tmp_path))
        train(one, 1)
    file = damaged(paths[1], how)
    with pytest.raises(CheckpointError) as caught:
        resume(new_rank(), paths[1])
    line = rf"{re.escape(str(file))}: {says}; resume from the one before: --resume {re.escape(str(paths[0]))}"
    assert re.fullmatch(line, str(caught.value))
    damaged(paths[0], how)
    with pytest.raises(CheckpointError, match=r"; there are version-1, version-2$"):
        resume(new_rank(), paths[0])


def test_a_description_that_is_missing_or_unreadable_is_refused(new_rank: Callable[..., Rank], tmp_path: Path) -> None:
    path = save(new_rank(), tmp_path)
    file = path / "trainer" / "state.json"
    whole = json.loads(file.read_bytes())
    file.write_text(json.dumps({**whole, "format": 99}))
    with pytest.raises(CheckpointError, match=r"state\.json: format 99, but this version of asyncrl reads 1"):
        resume(new_rank(), path)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json: cannot be read"):
        resume(new_rank(), path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"version-0: not a checkpoint \(no trainer/state\.json\)"):
        resume(new_rank(), path)


def test_another_optimiser_is_refused_by_its_key_and_another_learning_rate_is_not(
    new_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    path = save(new_rank(), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"^trainer\.betas = \[0\.8,0\.95\]: .* was made with \[0\.9,0\.95\]; set"
    ):
        resume(new_rank(betas=(0.8, 0.95)), path)
    with pytest.raises(CheckpointError, match=r"^trainer\.weight_decay = 0\.0: the checkpoint"):
        resume(new_rank(weight_decay=0.0), path)
    resume(new_rank(learning_rate=5.0, warmup_steps=0, grad_clip=7.0), path)


def test_another_model_is_refused_by_its_key(new_rank: Callable[..., Rank], model_folder: Path, tmp_path: Path) -> None:
    path = save(new_rank(), tmp_path)
    bf16 = Recipe(trainer=RECIPE.trainer, model=ModelConfig(dtype="bfloat16"))
    with pytest.raises(CheckpointError, match=r'^model\.dtype = "bfloat16": .* was made with "float32"'):
        description.check(path, bf16, model_folder)
    config = json.loads((model_folder / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "transformers_version": "9"}))
    with pytest.raises(CheckpointError, match=r"^model\.path: num_hidden_layers = 3: .* was made with 2; set it back"):
        description.check(path, RECIPE, tmp_path)


class Trap:
    """What an index of somebody else's making might hold."""

    def __reduce__(self) -> Any:
        return print, ("code was run",)


def test_a_checkpoint_from_elsewhere_runs_no_code(
    new_rank: Callable[..., Rank], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(new_rank(), tmp_path)
    index = path / description.STATE / ".metadata"
    index.write_bytes(pickle.dumps(Trap()))
    about = msgspec.json.decode((path / description.STATE / description.FILE_NAME).read_bytes(), type=Description)
    about.files[".metadata"] = FileInfo(bytes=index.stat().st_size, crc32=crc32(index))
    description.write(path / description.STATE, about)
    with pytest.raises(CheckpointError, match=r"builtins\.print, which no index needs: do not trust it"):
        resume(new_rank(), path)
    assert capsys.readouterr().out == ""
