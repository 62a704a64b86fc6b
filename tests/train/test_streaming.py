"""A batch that is trained in parts, as it comes in, is trained as a whole one is; no part outlives its step."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config import AlgorithmConfig, Recipe, TrainerConfig
from asyncrl.core.types import Batch
from asyncrl.train import model
from asyncrl.train.client import train_request, train_sequences
from asyncrl.train.leader import Leader
from asyncrl.train.server import Refused
from asyncrl.train.step import Learner
from asyncrl.wire import FeedReq

from .batches import VOCABULARY, make_advantages, make_batch

TRAINER = TrainerConfig(learning_rate=1e-3, grad_clip=0.5, weight_decay=0.1, micro_batch_tokens=64)
BATCH = make_batch(0, seed=3, groups=6)
ADVANTAGES = make_advantages(BATCH, 3)


class Job:
    """Rank 0 alone, driven as the client drives it."""

    def __init__(
        self, folder: Path, group: dist.ProcessGroup, run_dir: Path, algorithm: AlgorithmConfig, **trainer: Any
    ) -> None:
        def policy() -> model.Policy:
            loaded = model.load(str(folder), 1.0)
            model.shard(loaded, init_device_mesh("cpu", (1,)), torch.float32, False)
            return loaded

        config = msgspec.structs.replace(TRAINER, **trainer)
        reference = policy().requires_grad_(False) if algorithm.kl_coef else None
        self.learner = Learner(policy(), config, algorithm, torch.device("cpu"), group, reference=reference)
        rank = SimpleNamespace(
            learner=self.learner,
            train=self.learner.step,
            recipe=Recipe(trainer=config, algorithm=algorithm),
            vocabulary=VOCABULARY,
            hidden=32,
            channel=SimpleNamespace(send=lambda messages: None),
        )
        self.leader = Leader(rank, run_dir)  # type: ignore[arg-type]

    def feed(self, groups: list[int], start: int, batch: Batch = BATCH, step: int = 0) -> float:
        chosen = [i for i, t in enumerate(batch.trajectories) if t.group_id in groups]
        chosen.sort(key=lambda i: groups.index(batch.trajectories[i].group_id))
        sequences = [s for i in chosen for s in train_sequences(batch.trajectories[i], ADVANTAGES[i])]
        return self.leader.feed(FeedReq(step=step, start=start, sequences=sequences))["micro_batches"]

    def train(self, fed: list[int] = [], batch: Batch = BATCH) -> dict[str, float]:  # noqa: B006
        ids = [t.id for g in fed for t in batch.groups[g].trajectories]
        return self.leader.train_step(train_request(batch, ADVANTAGES, ids))

    def parameters(self) -> dict[str, Tensor]:
        named = model.named_parameters(self.learner.policy)
        return {name: p.full_tensor().detach().clone() for name, p in named}

    def gradients(self) -> dict[str, Tensor]:
        """Of the step that is made, before it is clipped and used."""
        taken: dict[str, Tensor] = {}
        before = self.learner.optimizer.step

        def step() -> None:
            if not taken:
                for name, p in model.named_parameters(self.learner.policy):
                    taken[name] = p.grad.full_tensor().clone()  # type: ignore[union-attr]
            before()

        self.learner.optimizer.step = step  # type: ignore[method-assign]
        return taken


@pytest.fixture
def job(model_folder: Path, lone_rank: dist.ProcessGroup, tmp_path: Path) -> Any:
    def make(algorithm: AlgorithmConfig | None = None, **trainer: Any) -> Job:
        return Job(model_folder, lone_rank, tmp_path, algorithm or AlgorithmConfig(importance_cap=3.0), **trainer)

    return make


def same(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-6, atol: float = 0.0) -> None:
    """Each tensor's difference, by its norm, and each entry's."""
    assert a.keys() == b.keys() and a
    for name in a:
        difference = a[name] - b[name]
        assert float(difference.norm()) <= rtol * float(b[name].norm()) or float(difference.abs().max()) <= atol, name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("parts", [[[0], [2, 1], [4]], [[5], [4], [3], [2], [1], [0]], [[3, 0, 5]]])
def test_the_gradient_is_that_of_the_whole_batch(job: Any, aggregation: str, parts: list[list[int]]) -> None:
    """To 1e-6 of it, in float32, whatever arrives first; the last case feeds what the other two do not."""
    algorithm = AlgorithmConfig(importance_cap=3.0, aggregation=aggregation)
    whole, streamed = job(algorithm), job(algorithm)
    expected, got = whole.gradients(), streamed.gradients()
    reported = whole.train()
    fed: list[int] = []
    passes = 0.0
    for part in parts:
        passes += streamed.feed(part, start=4 * len(fed))
        fed += part
    assert passes > 0
    metrics = streamed.train(fed)
    same(got, expected)
    assert metrics["streamed_sequences"] > 0
    for key in reported.keys() - {"micro_batches", "tokens_per_second"}:
        if not key.endswith("seconds"):
            assert metrics[key] == pytest.approx(reported[key], rel=1e-5, abs=1e-9), key


def test_every_term_of_the_loss_and_later_updates_are_as_of_the_whole_batch(job: Any) -> None:
    """A reference, entropy, rejection and a proximal policy; two mini-batches gone through twice."""
    algorithm = AlgorithmConfig(
        loss="decoupled_ppo",
        mini_batches=2,
        epochs=2,
        reject="sequence",
        reject_low=0.05,
        reject_high=20.0,
        kl_coef=0.1,
        kl_in="reward",
        entropy_coef=0.01,
    )
    whole, streamed = job(algorithm), job(algorithm)
    expected, got = whole.gradients(), streamed.gradients()
    reported = whole.train()
    assert streamed.feed([1], start=0) + streamed.feed([0], start=4) > 0
    metrics = streamed.train([1, 0])
    same(got, expected)
    same(streamed.parameters(), whole.parameters(), rtol=0, atol=2e-5)
    for key in ("loss", "kl", "reference_kl", "rejected_fraction", "trained_tokens", "updates"):
        assert metrics[key] == pytest.approx(reported[key], rel=1e-4), key


@pytest.mark.parametrize("epochs", [1, 2])
def test_all_of_the_first_mini_batch_may_be_fed(job: Any, epochs: int) -> None:
    """Its update has no pass left then, but π_prox was asked about the others."""
    algorithm = AlgorithmConfig(loss="decoupled_ppo", mini_batches=2, epochs=epochs, importance_cap=3.0)
    whole, streamed = job(algorithm), job(algorithm)
    expected, got = whole.gradients(), streamed.gradients()
    reported = whole.train()
    assert streamed.feed([0, 1, 2], start=0) > 0
    metrics = streamed.train([0, 1, 2])
    same(got, expected)
    same(streamed.parameters(), whole.parameters(), rtol=0, atol=2e-5)
    for key in ("loss", "grad_norm", "kl", "trained_tokens", "updates"):
        assert metrics[key] == pytest.approx(reported[key], rel=1e-4), key


def test_sequences_that_were_fed_are_named_by_their_places_in_the_batch(job: Any) -> None:
    batch = make_batch(0, seed=3, groups=6)
    forged = batch.trajectories[10]
    forged.logprobs[:] = array("f", [-40.0 * m for m in forged.loss_mask])
    one = job()
    assert one.feed([4], start=0, batch=batch) + one.feed([2], start=4, batch=batch) > 0
    with pytest.raises(Refused, match=r"\(largest: sequence 10: .*; the batch is kept in .*bad-batch-0\.safetensors"):
        one.train([4, 2], batch)


def test_small_parts_wait_for_each_other(job: Any) -> None:
    one = job(micro_batch_tokens=100)
    assert [one.feed([g], start=4 * g) > 0 for g in range(4)] == [False, True, False, True]
    metrics = one.train([0, 1, 2, 3])
    assert metrics["streamed_sequences"] == 16


def test_groups_that_teach_nothing_fill_no_micro_batch(job: Any) -> None:
    one = job()
    silent = [s for t in BATCH.trajectories for s in train_sequences(t, 0.0)]
    assert one.leader.feed(FeedReq(step=0, start=0, sequences=silent))["micro_batches"] == 0
    own = job()
    own.leader._rank.recipe = Recipe(trainer=TRAINER, algorithm=AlgorithmConfig(loss="mine.py:loss"))
    assert own.leader.feed(FeedReq(step=0, start=0, sequences=silent))["micro_batches"] > 0, "it may find something"


def test_all_of_a_batch_may_be_fed(job: Any) -> None:
    whole, streamed = job(), job()
    expected, got = whole.gradients(), streamed.gradients()
    whole.train()
    assert streamed.feed([0, 1, 2, 3, 4, 5], start=0) > 0
    streamed.train([0, 1, 2, 3, 4, 5])
    same(got, expected)


def test_nothing_of_a_part_is_left_when_its_batch_is_trained_whole_or_fed_anew(job: Any) -> None:
    """The controller that fed it has gone; another begins."""
    expected = job()
    expected.train()
    for again in ([], [2, 3]):
        one = job()
        assert one.feed([4, 5], start=0) > 0
        if again:
            assert one.feed(again, start=0) > 0
        one.train(again)
        same(one.parameters(), expected.parameters(), rtol=0, atol=0 if not again else 2e-5)


def test_a_step_that_is_not_finite_takes_its_parts_with_it(job: Any) -> None:
    expected = job()
    expected.train()
    one = job()
    assert one.feed([0, 1], start=0) > 0
    for parameter in one.learner.policy.parameters():
        parameter.grad.fill_(float("nan"))
    with pytest.raises(Refused, match=r"the gradient is not finite.*the batch is kept in"):
        one.train([0, 1])
    one.train()
    same(one.parameters(), expected.parameters(), rtol=0, atol=0)


def test_a_part_or_batch_that_does_not_follow_is_refused_and_the_next_is_clean(job: Any) -> None:
    expected = job()
    expected.train()
    one = job()
    with pytest.raises(Refused, match="step 3 cannot be trained: the weights are version 0"):
        one.feed([0], start=0, step=3)
    assert one.feed([0, 1], start=0) > 0
    with pytest.raises(Refused, match="8 sequences were fed, but the next was sent as number 4; begin anew with 0"):
        one.feed([2], start=4)
    with pytest.raises(Refused, match="8 sequences were fed, but the batch has places for 4 of them; send the batch"):
        one.train([0])
    with pytest.raises(Refused, match="0 sequences were fed, but the batch has places for 8"):
        one.train([0, 1])
    assert one.feed([0, 1], start=0) > 0
    odd = msgspec.structs.replace(train_sequences(BATCH.trajectories[8], 1.0)[0], versions=b"")
    with pytest.raises(Refused, match="sequence 8: columns differ in length"):
        one.leader.feed(FeedReq(step=0, start=8, sequences=[odd]))
    one.train()
    same(one.parameters(), expected.parameters(), rtol=0, atol=0)


def test_what_is_of_a_later_mini_batch_must_not_come_early(job: Any) -> None:
    one = job(AlgorithmConfig(mini_batches=2))
    assert one.feed([0, 3], start=0) > 0
    with pytest.raises(Refused, match="trained early that is not of the first mini-batch"):
        one.train([0, 3])
