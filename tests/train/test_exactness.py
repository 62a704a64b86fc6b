"""The loss and the gradient of a batch do not depend on how it was packed, over how many ranks it was dealt out, or
which of its sequences were trained before the others were there.

The gradient is what is compared, to 1e-6 of its norm in float32, and not the weights after an update: AdamW's first
step is the gradient's *sign*, so that where a gradient is as small as float32's rounding of it, two weights may end up
two learning rates apart whatever the trainer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.train import model
from asyncrl.train.client import train_request
from asyncrl.train.step import Learner
from asyncrl.train.work import plan_part, plan_work
from asyncrl.wire import FeedReq

from .batches import VOCABULARY, make_advantages, make_batch
from .ranks import on_ranks

TRAINER = TrainerConfig(learning_rate=0.0, grad_clip=1e9, micro_batch_tokens=100_000)
ALGORITHM = AlgorithmConfig(clip_high=0.3, importance_cap=3.0, entropy_coef=0.01)
TOLERANCE = 1e-6


class Outcome(msgspec.Struct):
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def train(
    folder: Path, trainer: TrainerConfig, algorithm: AlgorithmConfig, parts: Sequence[Sequence[int]] = ()
) -> Outcome:
    """One update on this rank's share of a fixed batch: metrics, and the whole gradients that the optimiser got.
    ``parts`` are groups of it that come first."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    policy = model.load(str(folder), 1.0)
    model.shard(policy, init_device_mesh("cpu", (ranks,)), torch.float32, trainer.activation_checkpointing)
    model.attend(policy, trainer.attention, trainer.sequence_parallel, torch.device("cpu"), torch.float32)
    if trainer.compile:
        model.compile_layers(policy, "aot_eager")  # all of the compiler but its slow last part
    assert dist.group.WORLD is not None
    one = Learner(policy, trainer, algorithm, torch.device("cpu"), dist.group.WORLD)
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in model.named_parameters(policy):
            assert parameter.grad is not None
            gradients[name] = parameter.grad.full_tensor().clone()

    one.optimizer.register_step_pre_hook(keep)
    batch = make_batch(0, seed=11, groups=6)
    request = train_request(batch, make_advantages(batch, 11))
    options: dict[str, Any] = {
        "ranks": ranks,
        "vocabulary": VOCABULARY,
        "hidden": 32,
        "trainer": trainer,
        "algorithm": algorithm,
    }
    done: list[int] = []
    for part in parts:
        places = [4 * group + i for group in part for i in range(4)]
        sequences = [request.sequences[i] for i in places]
        feed = FeedReq(step=0, start=len(done), sequences=sequences)
        dealt = plan_part(feed, sequences, first=not done, **options)
        assert dealt is not None
        one.begin(dealt[rank])
        done += places
    works = plan_work(request, done=done, **options)
    return Outcome(one.step(works[rank]), gradients)


def same(got: Outcome, expected: Outcome) -> None:
    for name in ("loss", "grad_norm", "entropy", "kl", "ratio_mean", "clip_fraction", "engine_gap"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=TOLERANCE, abs=1e-9), name
    assert got.gradients.keys() == expected.gradients.keys()
    differences = {name: (got.gradients[name] - gradient).norm() for name, gradient in expected.gradients.items()}
    off = torch.stack(list(differences.values())).norm() / expected.metrics["grad_norm"]
    assert off < TOLERANCE, f"the gradient is off by {off:.2g} of its norm"
    for name, gradient in expected.gradients.items():  # much cancels in some, scales of norms above all
        assert differences[name] < 5 * TOLERANCE * gradient.norm(), name


@pytest.fixture(scope="module")
def whole(model_folder: Path) -> Iterator[Outcome]:
    """One rank, everything in one micro-batch."""
    (outcome,) = on_ranks(1, train, model_folder, TRAINER, ALGORITHM)
    assert outcome.metrics["micro_batches"] == 1
    yield outcome


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1), (1, 50), (2, 100_000), (2, 40), (3, 70), (4, 100_000), (4, 25)])
def test_loss_and_gradient_are_the_same_on_any_number_of_ranks_and_for_any_micro_batch_size(
    model_folder: Path, whole: Outcome, ranks: int, tokens: int
) -> None:
    trainer = msgspec.structs.replace(TRAINER, micro_batch_tokens=tokens)
    outcomes = on_ranks(ranks, train, model_folder, trainer, ALGORITHM)
    for outcome in outcomes:
        same(outcome, whole)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parts", [[[5], [0, 3]], [[4, 2, 0, 1, 3, 5]]])
def test_loss_and_gradient_are_the_same_whatever_is_trained_first(
    model_folder: Path, whole: Outcome, ranks: int, parts: list[list[int]]
) -> None:
    trainer = msgspec.structs.replace(TRAINER, micro_batch_tokens=20)
    for outcome in on_ranks(ranks, train, model_folder, trainer, ALGORITHM, parts):
        same(outcome, whole)


def test_a_sequence_level_loss_does_not_depend_on_the_ranks_either(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(loss="gspo", aggregation="sequence_mean", clip_low=0.5, clip_high=0.5)
    (expected,) = on_ranks(1, train, model_folder, TRAINER, algorithm)
    trainer = msgspec.structs.replace(TRAINER, micro_batch_tokens=40)
    for outcome in on_ranks(2, train, model_folder, trainer, algorithm):
        same(outcome, expected)


def test_activation_checkpointing_does_not_change_the_gradient(model_folder: Path, whole: Outcome) -> None:
    trainer = msgspec.structs.replace(TRAINER, activation_checkpointing=True)
    for outcome in on_ranks(2, train, model_folder, trainer, ALGORITHM):
        same(outcome, whole)


def test_compiled_layers_have_the_same_gradient(model_folder: Path, whole: Outcome) -> None:
    trainer = msgspec.structs.replace(TRAINER, compile=True, activation_checkpointing=True)
    (outcome,) = on_ranks(1, train, model_folder, trainer, ALGORITHM)
    same(outcome, whole)


@pytest.mark.parametrize(("ranks", "together", "tokens"), [(2, 2, 100_000), (4, 2, 30), (4, 4, 100_000)])
def test_ranks_that_share_rows_have_the_same_loss_and_gradient(
    model_folder: Path, whole: Outcome, ranks: int, together: int, tokens: int
) -> None:
    """With 4 ranks together, the 2 heads of keys and values are fewer than the ranks."""
    trainer = msgspec.structs.replace(TRAINER, sequence_parallel=together, micro_batch_tokens=tokens)
    for outcome in on_ranks(ranks, train, model_folder, trainer, ALGORITHM):
        same(outcome, whole)


def test_ranks_that_share_rows_see_whole_sequences(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(loss="gspo", clip_low=0.5, clip_high=0.5)
    (expected,) = on_ranks(1, train, model_folder, TRAINER, algorithm)
    trainer = msgspec.structs.replace(TRAINER, sequence_parallel=2, activation_checkpointing=True)
    for outcome in on_ranks(2, train, model_folder, trainer, algorithm):
        same(outcome, expected)
