"""What the recipe's algorithm makes of a step: every loss whatever the packing, several updates of a batch, the frozen
policies, and the statistics."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.types import Batch, Group
from asyncrl.train import model
from asyncrl.train.client import train_request
from asyncrl.train.loss import LOSSES, LossFunction, Tokens
from asyncrl.train.statistics import advantage_moments
from asyncrl.train.step import BadBatch, Learner, StepBroken
from asyncrl.train.work import Work, plan_work, token_advantages

from .batches import VOCABULARY, make_advantages, make_batch

TRAINER = TrainerConfig(learning_rate=1e-3, grad_clip=0.5, micro_batch_tokens=64)


def sharded(folder: Path) -> model.Policy:
    policy = model.load(str(folder), 1.0)
    model.shard(policy, init_device_mesh("cpu", (1,)), torch.float32, False)
    return policy


def learner(
    folder: Path, group: dist.ProcessGroup, algorithm: AlgorithmConfig, loss: LossFunction | None = None
) -> Learner:
    reference = None
    if algorithm.kl_coef:
        reference = sharded(folder).requires_grad_(False)
    return Learner(sharded(folder), TRAINER, algorithm, torch.device("cpu"), group, loss=loss, reference=reference)


def work_of(
    batch: Batch, advantages: list[Any], algorithm: AlgorithmConfig, tokens: int = 64, ranks: int = 1
) -> list[Work]:
    return plan_work(
        train_request(batch, advantages),
        ranks=ranks,
        vocabulary=VOCABULARY,
        hidden=32,
        trainer=msgspec.structs.replace(TRAINER, micro_batch_tokens=tokens),
        algorithm=algorithm,
    )


def parameters(one: Learner) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters(one.policy)}


def same(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", LOSSES)
def test_packing_does_not_change_a_step(model_folder: Path, lone_rank: dist.ProcessGroup, name: str) -> None:
    """Of any loss, with every regulariser, sequences rejected, and four updates of a batch; some tokens stale."""
    algorithm = AlgorithmConfig(
        loss=name,
        mini_batches=2,
        epochs=2,
        reject="sequence",
        reject_low=0.05,
        reject_high=20.0,
        kl_coef=0.1,
        kl_in="reward",
        entropy_coef=0.01,
        importance_level="sequence",
        dual_clip=3.0,
    )
    batch = make_batch(0, seed=2)
    results = []
    for tokens in (30, 10_000):
        one = learner(model_folder, lone_rank, algorithm)
        (work,) = work_of(batch, make_advantages(batch, 2), algorithm, tokens)
        results.append((one.step(work), parameters(one)))
    (first, expected), (metrics, weights) = results
    assert 0 < first["rejected_fraction"] < 1
    assert first["reference_kl"] > 0
    trained = [sum(t.generated for t in half) for half in (batch.trajectories[:8], batch.trajectories[8:])]
    progress = sum(u / 4 * trained[u % 2] for u in range(4)) / (2 * sum(trained))
    assert first["token_staleness"] == pytest.approx(progress)
    assert {f"kl_update_{u}" for u in range(4)} < first.keys()
    assert metrics["micro_batches"] < first["micro_batches"]
    for key in first.keys() - {"micro_batches"}:
        if not key.endswith("seconds"):
            assert metrics[key] == pytest.approx(first[key], rel=1e-4, abs=1e-7), key
    # AdamW makes the same step of a gradient of 1e-9 as of one of 1: where there is next to none, rounding decides.
    same(weights, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["reinforce", "tis", "ppo", "gspo"])
def test_mini_batches_are_steps_of_the_batchs_parts(
    model_folder: Path, lone_rank: dist.ProcessGroup, name: str
) -> None:
    """Three updates of a batch of 16 arrive where three batches of 5, 5 and 6 do, to the last bit."""
    batch = make_batch(0, seed=4)
    advantages = make_advantages(batch, 4)
    one = learner(model_folder, lone_rank, AlgorithmConfig(loss=name, mini_batches=3))
    (work,) = work_of(batch, advantages, AlgorithmConfig(loss=name, mini_batches=3))
    metrics = one.step(work)
    other = learner(model_folder, lone_rank, AlgorithmConfig(loss=name))
    parts = []
    for start, end in ((0, 5), (5, 10), (10, 16)):
        trajectories = tuple(batch.trajectories[start:end])
        part = Batch(step=0, groups=(Group(id=0, task=batch.groups[0].task, v_traj=0, trajectories=trajectories),))
        parts.append(other.step(work_of(part, advantages[start:end], AlgorithmConfig(loss=name))[0]))
    same(parameters(one), parameters(other), atol=0)
    assert (one.version, metrics["updates"]) == (1, 3)
    assert metrics["loss"] == pytest.approx(np.mean([p["loss"] for p in parts]))
    assert metrics["trained_tokens"] == sum(p["trained_tokens"] for p in parts)


@pytest.mark.parametrize("mini_batches", [1, 3, 5, 16, 40])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sequence_is_in_exactly_one_mini_batch_on_one_rank(mini_batches: int, ranks: int) -> None:
    batch = make_batch(0, seed=1)
    algorithm = AlgorithmConfig(mini_batches=mini_batches, kl_coef=0.1)
    works = work_of(batch, [1.0] * 16, algorithm, ranks=ranks)
    assert len({len(work.updates) for work in works}) == 1
    seen = [s.sequence.tokens for w in works for update in w.updates for micro in update for s in micro]
    assert sorted(seen) == sorted(t.tokens.tobytes() for t in batch.trajectories)
    for number in range(len(works[0].updates)):
        shares = [s for w in works for micro in w.updates[number] for s in micro]
        total = sum(s.weight * s.sequence.loss_mask.count(1) for s in shares)
        assert total == pytest.approx(1)


def test_the_proximal_policy_is_that_of_the_steps_start(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    seen: list[Tokens] = []

    def spy(t: Tokens, o: AlgorithmConfig) -> Tensor:
        seen.append(t)
        return -t.advantages * t.logprobs

    algorithm = AlgorithmConfig(loss="mine.py:spy", epochs=3)
    one = learner(model_folder, lone_rank, algorithm, spy)
    batch = make_batch(0, seed=3)
    one.step(work_of(batch, make_advantages(batch, 3), algorithm, 10_000)[0])
    first, second, third = seen
    torch.testing.assert_close(first.proximal, first.logprobs.detach())
    for later in (second, third):
        assert torch.equal(later.proximal, first.proximal)
        assert (later.logprobs - later.proximal).abs().max() > 1e-3


def test_with_one_update_nothing_is_computed_twice(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    algorithm = AlgorithmConfig(loss="decoupled_ppo")
    one = learner(model_folder, lone_rank, algorithm)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    one.policy.lm.register_forward_pre_hook(count)
    one.policy.lm.base_model.register_forward_pre_hook(count)
    batch = make_batch(0, seed=3)
    one.step(work_of(batch, make_advantages(batch, 3), algorithm, 10_000)[0])
    assert passes == 1


def test_the_interpolated_proximal_knows_each_tokens_own_staleness(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    seen: list[Tokens] = []

    def spy(t: Tokens, o: AlgorithmConfig) -> Tensor:
        seen.append(t)
        return -t.advantages * t.logprobs

    algorithm = AlgorithmConfig(loss="mine.py:spy", proximal="interpolate")
    batch = stale_batch(5, seed=3)
    one = learner(model_folder, lone_rank, algorithm, spy)
    one.step(work_of(batch, [1.0] * 16, algorithm, 10_000)[0])
    [t] = seen
    assert set(t.staleness.tolist()) == {0, 1, 2, 3}
    alpha = t.staleness / (t.staleness + 1)
    torch.testing.assert_close(t.proximal, (1 - alpha) * t.behaviour + alpha * t.logprobs.detach())


def stale_batch(step: int, seed: int) -> Batch:
    """Tokens of four versions in every trajectory, the oldest first."""
    batch = make_batch(step, seed=seed)
    replace = msgspec.structs.replace
    groups = []
    for group in batch.groups:
        made = []
        for t in group.trajectories:
            generated = iter(range(t.generated))
            versions = [step - 3 + min(3, next(generated) // 2) if m else -1 for m in t.loss_mask]
            made.append(replace(t, versions=array("i", versions)))
        groups.append(replace(group, trajectories=tuple(made)))
    return replace(batch, groups=tuple(groups))


def test_statistics_by_staleness_split_the_whole(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    algorithm = AlgorithmConfig()
    batch = stale_batch(5, seed=3)
    one = learner(model_folder, lone_rank, algorithm)
    metrics = one.step(work_of(batch, [1.0] * 16, algorithm)[0])
    counts = [metrics[f"tokens_staleness_{n}"] for n in range(4)]
    expected = np.zeros(4)
    for t in batch.trajectories:
        for version in t.versions:
            if version >= 0:
                expected[5 - version] += 1
    assert counts == expected.tolist()
    assert "tokens_staleness_4" not in metrics
    for name in ("kl", "engine_gap"):
        parts = [metrics[f"{name}_staleness_{n}"] for n in range(4)]
        assert np.average(parts, weights=counts) == pytest.approx(metrics[name])
    assert metrics["engine_gap_max"] >= max(metrics[f"engine_gap_staleness_{n}"] for n in range(4))


def test_advantage_moments_are_those_of_the_trained_tokens() -> None:
    batch = make_batch(0, seed=3)
    advantages = make_advantages(batch, 3)
    request = train_request(batch, advantages)
    metrics = advantage_moments([token_advantages(s) for s in request.sequences])
    every = np.repeat(np.float32(advantages), [t.generated for t in batch.trajectories]).astype(float)
    assert metrics == pytest.approx(
        {
            "advantage_mean": every.mean(),
            "advantage_std": every.std(),
            "advantage_min": every.min(),
            "advantage_max": every.max(),
            "advantage_zero_fraction": (every == 0).mean(),
        }
    )


# --- regularisers -----------------------------------------------------------------------------------------------------


def test_the_entropy_bonus_is_that_of_a_plain_float64_model(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    """Without advantages the step is one of entropy alone: its value and the norm of its gradient."""
    algorithm = AlgorithmConfig(entropy_coef=0.5)
    batch = make_batch(0, seed=3)
    one = learner(model_folder, lone_rank, algorithm)
    metrics = one.step(work_of(batch, [0.0] * 16, algorithm)[0])
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    count = sum(t.generated for t in batch.trajectories)
    total = torch.zeros((), dtype=torch.float64)
    for t in batch.trajectories:
        logs = lm(input_ids=torch.tensor(t.tokens)[None]).logits[0].log_softmax(-1)[np.flatnonzero(t.loss_mask) - 1]
        total = total + (logs.exp() * logs).sum() * 0.5 / count
    total.backward()
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(-2 * total.item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_reference_stays_where_it_was_and_the_policy_is_held_back(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    """Policy and reference are the same at first, and then drift apart: the less, the larger the coefficient."""
    drift = {}
    batch = make_batch(0, seed=3)
    for coefficient in (1e-6, 10.0):
        algorithm = AlgorithmConfig(loss="reinforce", kl_coef=coefficient, kl="k2")
        one = learner(model_folder, lone_rank, algorithm)
        metrics = [one.step(work_of(batch, [1.0] * 16, algorithm)[0]) for _ in range(8)]
        assert metrics[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
        drift[coefficient] = metrics[-1]["reference_kl"]
    assert 0 < drift[10.0] < 0.5 * drift[1e-6]


# --- advantages -------------------------------------------------------------------------------------------------------


def test_a_column_of_equal_advantages_is_the_number(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    batch = make_batch(0, seed=3)
    advantages = make_advantages(batch, 3)
    columns = [
        array("f", [a if m else 9.0 for m in t.loss_mask]) for t, a in zip(batch.trajectories, advantages, strict=True)
    ]
    results = []
    for given in (advantages, columns):
        one = learner(model_folder, lone_rank, AlgorithmConfig())
        one.step(work_of(batch, given, AlgorithmConfig())[0])
        results.append(parameters(one))
    same(*results, atol=0)


def test_each_token_has_its_own_advantage(model_folder: Path, lone_rank: dist.ProcessGroup) -> None:
    batch = make_batch(0, seed=3)
    draw = np.random.default_rng(0)
    columns = [array("f", draw.normal(size=len(t.tokens))) for t in batch.trajectories]
    algorithm = AlgorithmConfig(loss="reinforce")
    metrics = learner(model_folder, lone_rank, algorithm).step(work_of(batch, columns, algorithm)[0])
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    total = 0.0
    for t, column in zip(batch.trajectories, columns, strict=True):
        trained = np.flatnonzero(t.loss_mask)
        with torch.no_grad():
            logs = lm(input_ids=torch.tensor(t.tokens)[None]).logits[0].log_softmax(-1).numpy()
        total -= (np.array(column)[trained] * logs[trained - 1, np.array(t.tokens)[trained]]).sum()
    assert metrics["loss"] == pytest.approx(total / sum(t.generated for t in batch.trajectories), rel=1e-5)


def test_what_is_not_to_be_trained_counts_in_no_mean() -> None:
    batch = make_batch(0, seed=3)
    advantages: list[Any] = [1.0] * 15 + [None]
    (work,) = work_of(batch, advantages, AlgorithmConfig(kl_coef=0.1))
    shares = [s for update in work.updates for micro in update for s in micro]
    assert len(shares) == 15
    assert {s.weight for s in shares} == {1 / sum(t.generated for t in batch.trajectories[:15])}


def test_a_users_loss_sees_every_sequence_that_has_a_trained_token() -> None:
    """It may have a term that needs no advantage; the shipped ones, without a KL or entropy term, have none."""
    batch = make_batch(0, seed=3)
    advantages: list[Any] = [1.0] * 8 + [0.0] * 7 + [None]
    for loss, count in (("ppo", 8), ("mine.py:loss", 15)):
        algorithm = AlgorithmConfig(loss=loss)
        (work,) = work_of(batch, advantages, algorithm)
        shares = [s for update in work.updates for micro in update for s in micro]
        assert sorted(s.number for s in shares) == list(range(count))
        assert {s.weight for s in shares} == {1 / sum(t.generated for t in batch.trajectories[:15])}


# --- what must not be trained -----------------------------------------------------------------------------------------


def test_a_later_update_that_is_not_finite_ends_the_job_and_the_first_only_the_step(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    batch = make_batch(0, seed=3)
    algorithm = AlgorithmConfig(mini_batches=2)
    one = learner(model_folder, lone_rank, algorithm)
    before = parameters(one)
    with pytest.raises(BadBatch, match=r"step 0, update 1 of 2: the (loss|gradient) is not finite .* unchanged"):
        one.step(work_of(batch, [1e38] * 8 + [1.0] * 8, algorithm)[0])
    same(parameters(one), before, atol=0)
    with pytest.raises(
        StepBroken, match=r"step 0, update 2 of 2: the (loss|gradient) is not finite .* after 1 of them"
    ):
        one.step(work_of(batch, [1.0] * 8 + [1e38] * 8, algorithm)[0])


def test_wrong_logprobs_end_the_step_before_anything_has_changed(
    model_folder: Path, lone_rank: dist.ProcessGroup
) -> None:
    """Two sequences' engine logprobs are forged; where the limit is off they are trained, as far as clips let them."""
    batch = make_batch(0, seed=3)
    for trajectory, forged in ((batch.trajectories[5], -40.0), (batch.trajectories[9], -30.0)):
        trajectory.logprobs[:] = array("f", [forged * m for m in trajectory.loss_mask])
    one = learner(model_folder, lone_rank, AlgorithmConfig(mini_batches=2))
    before = parameters(one)
    (work,) = work_of(batch, [1.0] * 16, AlgorithmConfig())
    with pytest.raises(
        BadBatch,
        match=r"step 0: the mean ratio .* above algorithm\.max_ratio = 100 \(largest: sequence 5: \d\.\S+e\+1\d, "
        r"sequence 9: \S+e\+1\d, sequence \d+: .*\); the weights are unchanged: check .*",
    ):
        one.step(work)
    same(parameters(one), before, atol=0)
    assert all(p.grad is None for p in one.policy.parameters())
    assert one.version == 0
    off = learner(model_folder, lone_rank, AlgorithmConfig(max_ratio=0))
    assert off.step(work)["ratio_mean"] > 1e10
