"""A whole step in one process: independent of packing, equal to a plain reference, and nothing changes when refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.types import Batch
from asyncrl.train import model
from asyncrl.train.client import train_request
from asyncrl.train.step import Learner
from asyncrl.train.work import StepRefused, plan_work
from asyncrl.wire import TrainReq

from .batches import VOCABULARY, make_advantages, make_batch

TRAINER = TrainerConfig(learning_rate=1e-3, grad_clip=0.5, weight_decay=0.1, micro_batch_tokens=64)
ALGORITHM = AlgorithmConfig(clip_high=0.3, importance_cap=3.0)


def learner(
    folder: Path, group: dist.ProcessGroup, trainer: TrainerConfig = TRAINER, algorithm: AlgorithmConfig = ALGORITHM
) -> Learner:
    policy = model.load(str(folder), 1.0)
    model.shard(policy, init_device_mesh("cpu", (1,)), torch.float32, trainer.activation_checkpointing)
    return Learner(policy, trainer, algorithm, torch.device("cpu"), group)


def step(one: Learner, batch: Batch, advantages: list[float], **changes: Any) -> dict[str, float]:
    trainer = msgspec.structs.replace(TRAINER, **changes)
    request = train_request(batch, advantages)
    (work,) = plan_work(request, ranks=1, vocabulary=VOCABULARY, hidden=32, trainer=trainer, algorithm=ALGORITHM)
    return one.step(work)


def parameters(one: Learner) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters(one.policy)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_step_equals_a_plain_float64_reference(
    model_folder: Path, lone_rank: dist.ProcessGroup, aggregation: str
) -> None:
    """Sequence by sequence through transformers in float64, the loss in NumPy, AdamW by its formula."""
    algorithm = msgspec.structs.replace(ALGORITHM, aggregation=aggregation)
    batch = make_batch(0, seed=3)
    advantages = make_advantages(batch, 3)
    one = learner(model_folder, lone_rank, algorithm=algorithm)
    request = train_request(batch, advantages)
    (work,) = plan_work(request, ranks=1, vocabulary=64, hidden=32, trainer=TRAINER, algorithm=algorithm)
    metrics = one.step(work)

    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    counts = [t.generated for t in batch.trajectories]
    loss = 0.0
    for trajectory, advantage in zip(batch.trajectories, advantages, strict=True):
        tokens = torch.tensor(trajectory.tokens)
        trained = np.flatnonzero(trajectory.loss_mask)
        logprobs = lm(input_ids=tokens[None]).logits[0].log_softmax(-1)
        chosen = logprobs[trained - 1, tokens[trained]]
        weight = 1 / sum(counts) if aggregation == "token_mean" else 1 / (len(counts) * len(trained))
        s = np.minimum(np.exp(chosen.detach().numpy() - np.array(trajectory.logprobs)[trained]), 3.0)
        unclipped, clipped = s * advantage, np.clip(s, 0.8, 1.3) * advantage
        loss -= weight * np.minimum(unclipped, clipped).sum()
        # d L_t / d log π = −s·A where min takes the unclipped branch, else 0
        slope = -weight * np.where(unclipped <= clipped, unclipped, 0.0)
        (chosen * torch.tensor(slope)).sum().backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm().item()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > TRAINER.grad_clip  # else the clipping would not be tested

    after = parameters(one)
    for name, p in lm.named_parameters():
        gradient = p.grad * min(1.0, TRAINER.grad_clip / norm)
        decay = TRAINER.weight_decay if p.ndim >= 2 else 0.0
        # First step of AdamW: both moments, corrected for their bias, are those of this gradient.
        expected = p.detach() * (1 - 1e-3 * decay) - 1e-3 * gradient / (gradient.abs() + 1e-8)
        # Where a gradient is about as small as AdamW's epsilon or float32's noise, its sign decides: left out.
        clear = gradient.abs() > 1e-6
        assert clear.float().mean() > 0.9
        torch.testing.assert_close(after[name][clear].double(), expected[clear], rtol=0, atol=2e-5)


def test_micro_batch_size_does_not_change_the_step(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    results = []
    for tokens in (1, 40, 10_000):
        one = learner(model_folder, lone_rank)
        for number in range(2):
            batch = make_batch(number, seed=number)
            metrics = step(one, batch, make_advantages(batch, number), micro_batch_tokens=tokens)
        results.append((metrics, parameters(one)))
    assert len({metrics["micro_batches"] for metrics, _ in results}) == 3
    for metrics, weights in results[1:]:
        for name in ("loss", "grad_norm", "entropy", "ratio_mean", "kl", "engine_gap", "clip_fraction"):
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4), name
        same(weights, results[0][1], atol=1e-6)


def test_activation_checkpointing_does_not_change_the_step(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    batch = make_batch(0, seed=5)
    weights = []
    for on in (False, True):
        one = learner(model_folder, lone_rank, msgspec.structs.replace(TRAINER, activation_checkpointing=on))
        step(one, batch, make_advantages(batch, 5))
        weights.append(parameters(one))
    same(*weights, atol=1e-6)


def test_in_bfloat16_the_master_weights_stay_float32_and_follow_the_float32_step(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    batch = make_batch(0, seed=5)
    advantages = make_advantages(batch, 5)
    full = step(learner(model_folder, lone_rank), batch, advantages)
    policy = model.load(str(model_folder), 1.0)
    model.shard(policy, init_device_mesh("cpu", (1,)), torch.bfloat16, False)
    half = Learner(policy, TRAINER, ALGORITHM, torch.device("cpu"), lone_rank)
    metrics = step(half, batch, advantages)
    assert metrics["engine_gap"] == pytest.approx(full["engine_gap"], rel=0.01)
    assert metrics["engine_gap"] != full["engine_gap"]  # it did compute in bfloat16
    assert metrics["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.1)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    weights = model.manifest(policy, 1, torch.bfloat16)
    (bucket,) = model.gather(policy, weights, torch.bfloat16, 2**20, keep=True)
    for name, tensor in bucket.items():
        assert torch.equal(tensor, parameters(half)[name].bfloat16())


def test_sequences_without_advantage_keep_their_place_in_the_mean(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    """They are not computed, but a mean over the whole batch still counts their tokens."""
    batch = make_batch(0, seed=6)
    advantages = make_advantages(batch, 6)
    kept = sum(t.generated for t, a in zip(batch.trajectories, advantages, strict=True) if a)
    total = sum(t.generated for t in batch.trajectories)
    request = train_request(batch, advantages)
    (work,) = plan_work(request, ranks=1, vocabulary=64, hidden=32, trainer=TRAINER, algorithm=ALGORITHM)
    shares = [share for update in work.updates for micro in update for share in micro]
    assert len(shares) == sum(1 for a in advantages if a)
    assert {share.weight for share in shares} == {1 / total}
    metrics = learner(model_folder, lone_rank).step(work)
    assert metrics["trained_tokens"] == kept < total


def test_a_batch_without_any_advantage_is_a_step_that_only_decays(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    one = learner(model_folder, lone_rank)
    before = parameters(one)
    batch = make_batch(0, seed=7)
    metrics = step(one, batch, [0.0] * len(batch.trajectories))
    assert (metrics["loss"], metrics["grad_norm"], one.version) == (0.0, 0.0, 1)
    decayed = {n: p * (1 - 1e-3 * 0.1) if p.ndim >= 2 else p for n, p in before.items()}
    same(parameters(one), decayed, atol=1e-7)


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_step_is_normal(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    batch = make_batch(0, seed=8)
    advantages = make_advantages(batch, 8)
    one, untouched = learner(model_folder, lone_rank), learner(model_folder, lone_rank)
    before = parameters(one)
    with pytest.raises(StepRefused, match=r"step 0: the (loss|gradient) is not finite"):
        step(one, batch, [a * 1e38 for a in advantages])
    assert one.version == 0
    same(parameters(one), before, atol=0)
    step(one, batch, advantages)
    step(untouched, batch, advantages)
    same(parameters(one), parameters(untouched), atol=0)


def test_the_learning_rate_warms_up_linearly_and_then_stays(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    one = learner(model_folder, lone_rank, msgspec.structs.replace(TRAINER, warmup_steps=3))
    rates = []
    for number in range(5):
        batch = make_batch(number, seed=number, groups=1)
        rates.append(step(one, batch, make_advantages(batch, number))["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


TWO = {"tokens": bytes(8), "loss_mask": b"\x00\x01", "logprobs": bytes(8), "versions": bytes(8)}
"""The columns of a sequence of two tokens."""


def broken(**changes: Any) -> TrainReq:
    request = train_request(make_batch(0, seed=1), [1.0] * 16)
    first = msgspec.structs.replace(request.sequences[2], **changes)
    return msgspec.structs.replace(request, sequences=[*request.sequences[:2], first, *request.sequences[3:]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": b"\x01\x00\x00\x00"}, "sequence 2: columns differ in length"),
        ({"advantage": float("nan")}, "sequence 2: its advantage is not finite"),
        (TWO | {"versions": bytes(4)}, "sequence 2: columns differ in length"),
        (TWO | {"advantages": bytes(4)}, "sequence 2: columns differ in length"),
        (
            TWO | {"advantages": np.float32([0, np.inf]).tobytes()},
            r"sequence 2: its advantage is not finite \(inf\)",
        ),
        (
            TWO | {"tokens": b"\x40\x00\x00\x00" * 2},
            "sequence 2: a token id lies outside the vocabulary of 64",
        ),
        (
            TWO | {"loss_mask": b"\x01\x01"},
            "sequence 2: its first token is to be trained",
        ),
        (
            TWO | {"logprobs": np.float32([0, -np.inf]).tobytes()},
            "sequence 2: an engine's logprob is not finite",
        ),
    ],
)
def test_a_sequence_that_cannot_be_trained_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StepRefused, match=says):
        plan_work(broken(**changes), ranks=1, vocabulary=64, hidden=32, trainer=TRAINER, algorithm=ALGORITHM)


def test_a_batch_without_generated_tokens_is_refused() -> None:
    with pytest.raises(StepRefused, match="no generated token"):
        plan_work(
            TrainReq(step=0, sequences=[]), ranks=1, vocabulary=64, hidden=32, trainer=TRAINER, algorithm=ALGORITHM
        )
