"""The real torchrun job: two ranks on gloo, over HTTP. One job serves the tests in their order, until one kills it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from transformers import AutoModelForCausalLM

from asyncrl.checksum import checksum
from asyncrl.config import AlgorithmConfig, Recipe, TrainerConfig, WeightsConfig
from asyncrl.core import manifest as manifests
from asyncrl.ports import CheckpointFailed, TrainerError
from asyncrl.train import model
from asyncrl.train.client import HttpTrainer, train_request
from asyncrl.train.step import Learner
from asyncrl.train.work import plan_work
from asyncrl.wire import TrainReq

from .batches import VOCABULARY, make_advantages, make_batch

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 3
RECIPE = Recipe(
    trainer=TrainerConfig(ranks=2, learning_rate=1e-3, grad_clip=0.5, micro_batch_tokens=40, connect_timeout_s=120),
    # Two updates a batch, and a reference model: all that makes a step collective more than once.
    algorithm=AlgorithmConfig(clip_high=0.3, mini_batches=2, kl_coef=0.05, entropy_coef=0.01),
    weights=WeightsConfig(bucket_mb=1),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpTrainer]:
    run_dir = tmp_path_factory.mktemp("run")
    trainer = HttpTrainer(RECIPE, str(model_folder), run_dir=run_dir, log=run_dir / "trainer.log")
    try:
        assert await trainer.connect() == 0
        yield trainer
    finally:
        await trainer.close()


async def saved(trainer: HttpTrainer, folder: Path) -> Path:
    """A complete checkpoint of the trainer in ``folder``."""
    version = await trainer.save(str(folder))
    await trainer.saved()
    return folder / f"version-{version}"


def alone(folder: Path, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The same steps by a single rank in this process: its weights, and the last step's metrics."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = model.load(str(folder), 1.0)
        model.shard(policy, init_device_mesh("cpu", (1,)), torch.float32, False)
        assert dist.group.WORLD is not None
        reference = model.load(str(folder), 1.0).requires_grad_(False)
        model.shard(reference, init_device_mesh("cpu", (1,)), torch.float32, False)
        one = Learner(
            policy, RECIPE.trainer, RECIPE.algorithm, torch.device("cpu"), dist.group.WORLD, reference=reference
        )
        for step in range(steps):
            batch = make_batch(step, seed=step)
            request = train_request(batch, make_advantages(batch, step))
            (work,) = plan_work(
                request,
                ranks=1,
                vocabulary=VOCABULARY,
                hidden=32,
                trainer=RECIPE.trainer,
                algorithm=RECIPE.algorithm,
            )
            metrics = one.step(work)
        return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters(policy)}, metrics
    finally:
        dist.destroy_process_group()


async def test_the_job_describes_itself(trainer: HttpTrainer, model_folder: Path) -> None:
    saved = load_file(model_folder / "model.safetensors")
    assert sorted(trainer.info.names) == sorted(saved)  # tied embeddings: no second copy under lm_head
    assert trainer.info.parameters == sum(t.numel() for t in saved.values())
    assert (trainer.info.world_size, trainer.info.backend) == (2, "gloo")


async def test_two_ranks_and_one_rank_arrive_at_the_same_weights(
    trainer: HttpTrainer, model_folder: Path, tmp_path: Path
) -> None:
    """The two begin with a part of the first mini-batch, from the second step on; the one has each batch whole."""
    for step in range(STEPS):
        batch = make_batch(step, seed=step)
        advantages = make_advantages(batch, step)
        if step:
            part = msgspec.structs.replace(batch, groups=(batch.groups[1], batch.groups[0]))
            assert await trainer.feed(part, advantages[4:8] + advantages[:4])
        result = await trainer.train_step(batch, advantages)
        assert result.version == step + 1
        assert result.metrics.get("streamed_sequences", 0) == (8 if step else 0)
    out = await saved(trainer, tmp_path)
    weights, metrics = alone(model_folder, STEPS)
    for name in (
        "loss",
        "grad_norm",
        "entropy",
        "ratio_mean",
        "ratio_max",
        "kl",
        "engine_gap",
        "clip_fraction",
        "reference_kl",
    ):
        assert result.metrics[name] == pytest.approx(metrics[name], rel=1e-4), name
    assert result.metrics["tokens"] == sum(len(t.tokens) for t in batch.trajectories)
    assert result.metrics["sequences"] == 16
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


async def test_a_wrong_step_is_refused_and_changes_nothing(trainer: HttpTrainer) -> None:
    batch = make_batch(STEPS + 1, seed=0)
    with pytest.raises(TrainerError, match=f"step {STEPS + 1} cannot be trained: the weights are version {STEPS}"):
        await trainer.train_step(batch, make_advantages(batch, 0))
    assert await trainer.connect() == STEPS


async def test_a_step_that_is_not_finite_is_refused_on_both_ranks_and_changes_nothing_and_its_batch_is_kept(
    trainer: HttpTrainer, tmp_path: Path
) -> None:
    before = load_file(await saved(trainer, tmp_path / "before") / "model.safetensors")
    batch = make_batch(STEPS, seed=0)
    with pytest.raises(
        TrainerError, match=rf"step {STEPS}, update 1 of 2: the (loss|gradient) is not finite"
    ) as caught:
        await trainer.train_step(batch, [1e38] * 16)
    kept = trainer._run_dir / f"bad-batch-{STEPS}.safetensors"
    assert str(caught.value).endswith(f"; the batch is kept in {kept}")
    assert load_file(kept)["tokens"].tolist() == [token for t in batch.trajectories for token in t.tokens]
    after = load_file(await saved(trainer, tmp_path / "after") / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_step_that_breaks_ends_the_job_with_its_batch_kept_and_leaves_no_process(
    model_folder: Path, tmp_path: Path
) -> None:
    """A batch of many observed tokens, which cost nothing but the time to write them."""
    batch = make_batch(0, seed=0)
    for t in batch.trajectories:
        for column in (t.tokens, t.loss_mask, t.logprobs, t.versions):
            column.extend([0] * 4_000)
    broken = HttpTrainer(RECIPE, str(model_folder), run_dir=tmp_path, log=tmp_path / "trainer.log")
    try:
        await broken.connect()
        ranks = ranks_of(broken)
        with pytest.raises(TrainerError, match=r"rank 0: step 0, update 2 of 2: the (loss|gradient) is not") as caught:
            await broken.train_step(batch, [1.0] * 8 + [1e38] * 8)
        kept = tmp_path / "bad-batch-0.safetensors"
        assert f"; the batch is kept in {kept}" in str(caught.value)
        assert len(load_file(kept)["tokens"]) == sum(len(t.tokens) for t in batch.trajectories)
        assert len(ranks) == 2 and not any(alive(pid) for pid in ranks)
    finally:
        await broken.close()


async def test_a_saved_folder_loads_with_from_pretrained_and_has_the_tokenizer(
    trainer: HttpTrainer, model_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / f"version-{STEPS}"
    target.mkdir()
    (target / "there already").touch()
    assert await saved(trainer, tmp_path) == target
    expected = {p.name for p in model_folder.iterdir()} | {manifests.FILE_NAME, "trainer"}
    assert {p.name for p in target.iterdir()} == expected
    assert [p.name for p in tmp_path.iterdir()] == [target.name]  # nothing half-written beside it
    assert (target / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()
    lm = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    written = load_file(target / "model.safetensors")
    for name, parameter in lm.named_parameters():
        assert torch.equal(parameter, written[name])
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


async def test_a_folder_that_cannot_be_written_is_one_line_and_the_job_goes_on(
    trainer: HttpTrainer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointFailed, match=rf"checkpoint .*file/out/version-{STEPS} was not written: .*") as caught:
        await trainer.save(str(tmp_path / "file" / "out"))
    assert "\n" not in str(caught.value)
    assert await trainer.connect() == STEPS


async def test_disk_publishes_what_servers_load_and_keeps_two_versions(trainer: HttpTrainer, tmp_path: Path) -> None:
    for stale in ("v1", f"v{STEPS - 1}", "v900"):
        (tmp_path / stale).mkdir()
    path = tmp_path / f"v{STEPS}"
    await trainer.publish(STEPS, "disk", str(path))
    assert {p.name for p in tmp_path.iterdir()} == {f"v{STEPS - 1}", f"v{STEPS}"}
    weights = load_file(path / "model.safetensors")
    listed = manifests.loads((path / manifests.FILE_NAME).read_bytes())
    assert listed.version == STEPS
    assert {t.name: (t.shape, t.dtype) for t in listed.tensors} == {
        name: (tuple(t.shape), "float32") for name, t in weights.items()
    }
    assert listed.checksums == {
        name: checksum(tensor) for name, tensor in load_file(path / "model.safetensors").items()
    }
    with pytest.raises(TrainerError, match=f"version 7 cannot be published: the weights are version {STEPS}"):
        await trainer.publish(7, "disk", str(tmp_path / "v7"))


async def test_collective_brings_the_staged_version_even_after_another_step(
    trainer: HttpTrainer, tmp_path: Path
) -> None:
    expected = load_file(await saved(trainer, tmp_path) / "model.safetensors")
    await trainer.publish(STEPS, "stage")
    assert await trainer.hold(STEPS)
    batch = make_batch(STEPS, seed=STEPS)
    await trainer.train_step(batch, make_advantages(batch, STEPS))
    await trainer.publish(STEPS + 1, "stage")
    assert not await trainer.hold(STEPS), "the next one has taken its place; but what is held stays"

    port = await trainer.open_group("127.0.0.1", 2, "update", "gloo")
    info, wait = trainer.info, timedelta(seconds=30)

    def receive() -> dict[str, torch.Tensor]:
        """A server's end, as plain as it gets."""
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=wait))
        store, name = c10d.PrefixStore("update", store), c10d.GroupName("update")
        group, _ = c10d._new_process_group_helper(
            size, rank, [], dist.Backend("gloo"), store, group_name=name, timeout=wait
        )
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        weights = {}
        for key, dtype, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
            weights[key] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(weights[key], src=0, group=group)
        return weights

    async with asyncio.TaskGroup() as members:
        received = members.create_task(asyncio.to_thread(receive))
        await trainer.join_group()
        await trainer.publish(STEPS, "collective")
    weights = received.result()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with pytest.raises(TrainerError, match=f"version {STEPS} is not held to be broadcast"):
        await trainer.publish(STEPS, "collective")


async def test_health_answers_while_a_step_runs(trainer: HttpTrainer) -> None:
    batch = make_batch(STEPS + 1, seed=5, groups=48)
    order: list[str] = []

    async def train() -> None:
        await trainer.train_step(batch, make_advantages(batch, 5))
        order.append("step")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(train())
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert await trainer.connect() == STEPS + 1
            order.append("health")
    assert order == ["health"] * 3 + ["step"]


async def test_a_body_that_is_no_request_is_answered_with_its_reason(trainer: HttpTrainer) -> None:
    with pytest.raises(TrainerError, match=r"/train_step answered 400: .*not a TrainReq"):
        await trainer._request("POST", "train_step", b"\xc1", TrainReq)


def ranks_of(trainer: HttpTrainer) -> list[int]:
    """Process ids of the ranks, in order: the children of torchrun."""
    assert trainer._job is not None
    torchrun = trainer._job.pid
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    return sorted(int(child) for child in children)


def alive(pid: int) -> bool:
    """False for a process that is gone, or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_killed_rank_ends_the_job_at_once_with_the_reason_and_leaves_no_process(trainer: HttpTrainer) -> None:
    ranks = ranks_of(trainer)
    assert len(ranks) == 2
    batch = make_batch(await trainer.connect(), seed=6, groups=256)
    started = time.perf_counter()

    async def kill() -> None:
        await asyncio.sleep(0.1)
        os.kill(ranks[1], 9)

    with pytest.raises(TrainerError, match="the job ended with exit code 1: rank 1 was killed by SIGKILL") as caught:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            try:
                await trainer.train_step(batch, make_advantages(batch, 6))
            except TrainerError as error:
                failure = error
        raise failure
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - started < 30
    assert not trainer.alive
    assert not any(alive(pid) for pid in ranks)


async def test_close_ends_a_job_that_was_asked_and_leaves_no_process(model_folder: Path, tmp_path: Path) -> None:
    """A second job, of one rank; also: a job that was started elsewhere is used by its address and left alone."""
    one_rank = msgspec.structs.replace(RECIPE, trainer=msgspec.structs.replace(RECIPE.trainer, ranks=1))
    owner = HttpTrainer(one_rank, str(model_folder), run_dir=tmp_path, log=tmp_path / "trainer.log")
    try:
        await owner.connect()
        ranks = ranks_of(owner)
        guest = HttpTrainer(one_rank, "", run_dir=tmp_path, log=tmp_path / "none.log", url=owner._url)
        assert await guest.connect() == 0
        await guest.close()
        assert all(alive(pid) for pid in ranks)
    finally:
        await owner.close()
    assert not any(alive(pid) for pid in ranks)
    assert "Traceback" not in (tmp_path / "trainer.log").read_text()


async def test_a_job_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    lost = HttpTrainer(RECIPE, str(tmp_path / "nowhere"), run_dir=tmp_path, log=tmp_path / "trainer.log")
    try:
        with pytest.raises(
            TrainerError, match=r"trainer rank \d: model\.path: .*nowhere is not a Hugging Face"
        ) as caught:
            await lost.connect()
        assert "\n" not in str(caught.value)
        assert not lost.alive
    finally:
        await lost.close()
