"""Values, the advantages that they give, and how they learn: against a float64 reference, whatever the packing."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config import AlgorithmConfig, ModelConfig, Recipe, TrainerConfig
from asyncrl.core.advantage import EPSILON, TurnRewards
from asyncrl.core.types import Batch
from asyncrl.train import critic, description, model
from asyncrl.train.client import train_request, train_sequences
from asyncrl.train.critic import Judged, Seen
from asyncrl.train.description import CheckpointError
from asyncrl.train.model import ModelError
from asyncrl.train.rank import Rank
from asyncrl.train.step import BadBatch
from asyncrl.train.work import StepRefused, Work, plan_work, step_lengths
from asyncrl.wire import TrainReq, TrainSequence

from . import reference
from .batches import VOCABULARY, in_segments, make_batch, make_rewards
from .ranks import on_ranks
from .test_checkpoint import assert_same, save, state

pytestmark = pytest.mark.usefixtures("lone_rank")

TRAINER = TrainerConfig(learning_rate=1e-3, grad_clip=0.5, weight_decay=0.1, micro_batch_tokens=64)
GAE = {"advantage": "gae", "credit": "token", "gamma": 0.98, "gae_lambda": 0.9, "value_coef": 0.7}


def rank(folder: Path, *, seed: int | None = 0, trainer: TrainerConfig = TRAINER, **algorithm: Any) -> Rank:
    """With ``seed``, the value head has weights of its own instead of zeros."""
    recipe = Recipe(model=ModelConfig(path=str(folder)), trainer=trainer, algorithm=AlgorithmConfig(**GAE | algorithm))
    one = Rank(recipe, str(folder), torch.device("cpu"))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in head(one).values():
            parameter.to_local().copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return one


def head(one: Rank) -> dict[str, Any]:
    parameters = dict(model.critic_parameters(one.learner.policy, one.learner.critic))
    return {part: parameters[f"critic.value_head.{part}"].detach() for part in ("weight", "bias")}


def work_of(one: Rank, batch: Batch, rewards: list[Any], tokens: int = 64) -> Work:
    (work,) = plan_work(
        train_request(batch, rewards),
        ranks=1,
        vocabulary=VOCABULARY,
        hidden=32,
        trainer=msgspec.structs.replace(TRAINER, micro_batch_tokens=tokens),
        algorithm=one.recipe.algorithm,
    )
    return work


def train(one: Rank, steps: int, **keys: Any) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for _ in range(steps):
        step = one.learner.version
        batch = make_batch(step, seed=step, groups=2)
        metrics = one.learner.step(work_of(one, batch, make_rewards(batch, step), **keys))
    return metrics


# --- the formulas -----------------------------------------------------------------------------------------------------


def random_judged(draw: np.random.Generator, n: int) -> tuple[Tensor, Judged]:
    """New values and what they are judged by, in float64; a third of the tokens begin no step."""
    values, old, returns = (torch.from_numpy(draw.normal(size=n)) for _ in range(3))
    weights = torch.from_numpy(draw.random(n) * (np.arange(n) % 3 > 0))
    moments = critic.no_moments()
    return values, Judged(advantages=returns, values=old, returns=returns, weights=weights, moments=moments)


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_the_value_loss_is_the_references_in_value_and_gradient(clip: float) -> None:
    values, judged = random_judged(np.random.default_rng(0), 60)
    values.requires_grad_()

    def expected(new: np.ndarray[Any, Any]) -> float:
        columns = zip(new, judged.values.tolist(), judged.returns.tolist(), judged.weights.tolist(), strict=True)
        return sum(w * reference.value_loss(v, old, target, clip) for v, old, target, w in columns)

    loss, clipped = critic.value_loss(values, judged, clip)
    loss.backward()
    now = values.detach().numpy()
    assert loss.item() == pytest.approx(expected(now), rel=1e-12)
    assert values.grad is not None
    for t, slope in enumerate(values.grad.tolist()):
        shift = 1e-6 * np.eye(len(now))[t]
        assert slope == pytest.approx((expected(now + shift) - expected(now - shift)) / 2e-6, abs=1e-8)
    dead = (values.grad == 0) & (judged.weights > 0)
    assert clipped.item() == pytest.approx(judged.weights[dead].sum().item())
    assert bool(dead.any()) == bool(clip)


def test_by_hand() -> None:
    """Two turns of two tokens and one, of which the second brings 4; γ = λ = 0.5, a penalty of 1 on the third token."""
    sequence = train_request(make_batch(0, seed=0), [0.0] * 16).sequences[0]
    sequence = msgspec.structs.replace(sequence, loss_mask=b"\0\1\1\0\1\0", turn_ends=(3, 6), turn_rewards=(0.0, 4.0))
    share = critic.Share(sequence=sequence, number=0, weight=0.1, value_weight=0.5)
    seen = Seen(shares=[share], values=torch.tensor([1.0, 2.0, 3.0]), penalties=torch.tensor([0.0, 0.0, 1.0]))
    keys = {"advantage": "gae", "gamma": 0.5, "gae_lambda": 0.5}
    # δ of tokens: 0 + 0.5·2 − 1 = 0; 0 + 0.5·3 − 2 = −0.5; (4 − 1) − 3 = 0
    judged = critic.judge(seen, AlgorithmConfig(credit="token", **keys), {})
    assert judged.advantages.tolist() == [-0.125, -0.5, 0.0]
    assert judged.returns.tolist() == [0.875, 1.5, 3.0]
    assert judged.weights.tolist() == [0.5, 0.5, 0.5]
    assert judged.moments[3:].tolist() == [3, 5.375, 0.875**2 + 1.5**2 + 9, -0.625, 0.125**2 + 0.25, 6.0]
    # δ of turns: 0 + 0.5·3 − 1 = 0.5; (4 − 1) − 3 = 0
    judged = critic.judge(seen, AlgorithmConfig(credit="turn", **keys), {})
    assert judged.advantages.tolist() == [0.5, 0.5, 0.0]
    assert judged.returns.tolist() == [1.5, 0.0, 3.0]
    assert judged.weights.tolist() == [0.5, 0.0, 0.5]
    assert judged.moments[:6].tolist() == [3, 1.0, 0.5, 2, 4.5, 1.5**2 + 9]


def test_segments_by_hand() -> None:
    """Three turns of two tokens, one and one, each a segment, of which the last brings 4; γ = λ = 0.5."""
    batch = make_batch(0, seed=0, groups=1, group_size=1)
    (trajectory,) = batch.trajectories
    columns = {name: getattr(trajectory, name)[:8] for name in ("tokens", "logprobs", "versions")}
    mask = array("b", [0, 1, 1, 0, 1, 0, 0, 1])
    one = msgspec.structs.replace(trajectory, loss_mask=mask, **columns, segment_ends=(3, 5, 8))
    sequences = train_sequences(one, TurnRewards(ends=(3, 5, 8), rewards=(0.0, 0.0, 4.0)))
    shares = [critic.Share(sequence=s, number=n, weight=0.1) for n, s in enumerate(sequences, 7)]
    # Two micro-batches, the last segment in the first of them.
    apart = (
        Seen(shares=[shares[2], shares[0]], values=torch.tensor([2.0, 1.0, 2.0]), penalties=None),
        Seen(shares=[shares[1]], values=torch.tensor([3.0]), penalties=None),
    )
    for credit, expected in (
        # δ of tokens: 0.5·2 − 1 = 0; 0.5·3 − 2 = −0.5; 0.5·2 − 3 = −2; 4 − 2 = 2
        ("token", [[2.0, -0.21875, -0.875], [-1.5]]),
        # δ of turns: 0.5·3 − 1 = 0.5; 0.5·2 − 3 = −2; 4 − 2 = 2
        ("turn", [[2.0, 0.125, 0.125], [-1.5]]),
    ):
        algorithm = AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=0.5, credit=credit)
        links = critic.links(apart[0], algorithm) | critic.links(apart[1], algorithm)
        after = critic.behind([[7, 8, 9]], [links[number] for number in (7, 8, 9)])
        assert after == {9: 0.0, 8: 0.5 * (2 + 0.5 * 2.0), 7: 0.5 * (3 - 0.5 * 1.5)}
        assert [critic.judge(seen, algorithm, after).advantages.tolist() for seen in apart] == expected


def test_advantages_are_normalised_over_all_tokens_of_the_batch() -> None:
    advantages = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([6.0], dtype=torch.float64)]
    moments = critic.no_moments()
    moments[:3] = torch.tensor([3.0, 9.0, 41.0])
    std = np.std([1, 2, 6])
    for part in advantages:
        judged = Judged(advantages=part, values=part, returns=part, weights=part, moments=moments)
        for norm, expected in (("batch", (part - 3) / (std + EPSILON)), ("none", part)):
            options = AlgorithmConfig(advantage_norm=norm)
            found = critic.normalise(judged, moments, options, torch.device("cpu"))
            torch.testing.assert_close(found.advantages, expected.float())
            assert torch.equal(found.values, part.float())


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "credit", "segments", "options"),
    [
        ("value_head", "token", False, {}),
        ("value_head", "turn", False, {"aggregation": "sequence_mean", "advantage_norm": "none"}),
        ("value_head", "token", False, {"kl_coef": 0.3, "kl_in": "reward", "kl": "k3"}),
        ("model", "turn", False, {"kl_coef": 0.3, "kl_in": "reward", "kl": "k1"}),
        ("model", "token", False, {"aggregation": "sequence_mean"}),
        ("value_head", "token", True, {}),
        ("model", "turn", True, {"kl_coef": 0.3, "kl_in": "reward", "kl": "k1"}),
    ],
)
def test_a_step_equals_a_plain_float64_reference(
    model_folder: Path, other_model: Path, kind: str, credit: str, segments: bool, options: dict[str, Any]
) -> None:
    """Sequence by sequence through transformers in float64: values, advantages, both losses, and their gradients. GAE
    is of whole trajectories, whose segments the models see one by one."""
    own = {"critic_path": str(other_model)} if kind == "model" else {}
    one = rank(model_folder, critic=kind, credit=credit, reference=str(other_model), **own, **options)
    o = one.recipe.algorithm
    batch = make_batch(0, seed=3)
    rewards = make_rewards(batch, 3)
    if segments:
        batch = in_segments(batch, rewards)
        assert {len(t.segment_ends) for t in batch.trajectories} >= {0, 2, 3}
    weight, bias = (p.full_tensor().double().numpy().copy() for p in head(one).values())
    metrics = one.learner.step(work_of(one, batch, rewards))

    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    other = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float64)
    trunk = lm.model if kind == "value_head" else other.model
    w, b = torch.tensor(weight[0], requires_grad=True), torch.tensor(bias[0], requires_grad=True)
    seen = []
    for t, turns in zip(batch.trajectories, rewards, strict=True):
        pieces = []
        for start, end in pairwise((0, *(t.segment_ends or (len(t.tokens),)))):
            tokens, trained = torch.tensor(t.tokens[start:end]), np.flatnonzero(t.loss_mask[start:end])
            chosen = lm(input_ids=tokens[None]).logits[0].log_softmax(-1)[trained - 1, tokens[trained]]
            values = trunk(input_ids=tokens[None]).last_hidden_state[0][trained - 1] @ w + b
            with torch.no_grad():
                referred = other(input_ids=tokens[None]).logits[0].log_softmax(-1)[trained - 1, tokens[trained]]
            pieces.append((chosen, values, chosen.detach() - referred))
        chosen, values, gaps = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        penalties = o.kl_coef * np.array([reference.KLS[o.kl](gap) for gap in gaps.tolist()])
        trained = np.flatnonzero(t.loss_mask)
        pairs = list(zip(turns.ends, turns.rewards, strict=True))
        advantages, targets = reference.estimate(np.array(t.loss_mask), pairs, values.detach().numpy(), penalties, o)
        behaviour = np.array(t.logprobs)[trained]
        seen.append((chosen, values, advantages, targets, behaviour))
    every = np.concatenate([advantages for _, _, advantages, _, _ in seen])
    mean, std = (every.mean(), every.std()) if o.advantage_norm == "batch" else (0.0, 1.0 - EPSILON)
    tokens_total, steps_total = len(every), sum(len(targets) for _, _, _, targets, _ in seen)
    loss = value_loss = 0.0
    for chosen, values, advantages, targets, behaviour in seen:
        by_sequence = o.aggregation == "sequence_mean"
        share = 1 / (len(seen) * len(advantages)) if by_sequence else 1 / tokens_total
        columns = {"advantages": (advantages - mean) / (std + EPSILON), "behaviour": behaviour}
        now = chosen.detach().numpy()
        loss += share * sum(reference.ppo(columns, now, now, o))
        slope = []
        for k in range(len(now)):
            high, low = (reference.ppo(columns, now + s * 1e-6 * np.eye(len(now))[k], now, o)[k] for s in (1, -1))
            slope.append(share * (high - low) / 2e-6)
        (chosen * torch.tensor(slope)).sum().backward(retain_graph=True)
        share = 1 / (len(seen) * len(targets)) if by_sequence else 1 / steps_total
        at, to = torch.tensor(list(targets)), torch.tensor(list(targets.values()), dtype=torch.float64)
        wrong = share * (values[at] - to).square().sum() / 2
        (o.value_coef * wrong).backward()
        value_loss += wrong.item()

    def norm(parameters: Any) -> float:
        return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())

    of_policy = [*lm.parameters(), w, b] if kind == "value_head" else list(lm.parameters())
    returns = np.array([target for *_, targets, _ in seen for target in targets.values()])
    old = np.array([values[k].item() for _, values, _, targets, _ in seen for k in targets])
    expected = {
        "loss": loss,
        "value_loss": value_loss,
        "grad_norm": norm(of_policy),
        "advantage_mean": every.mean(),
        "advantage_std": every.std(),
        "return_mean": returns.mean(),
        "return_std": returns.std(),
        "value_mean": old.mean(),
        "explained_variance": 1 - np.var(returns - old) / np.var(returns),
        "value_clip_fraction": 0.0,
    }
    if kind == "model":
        expected["critic_grad_norm"] = norm([*other.parameters(), w, b])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=1e-7)


@pytest.fixture(scope="module")
def other_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights, as reference or critic."""
    folder = tmp_path_factory.mktemp("other")
    lm = AutoModelForCausalLM.from_pretrained(model_folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in lm.parameters():
            p += 0.05 * torch.randn(p.shape, generator=generator)
    lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_packing_does_not_change_a_step(model_folder: Path, kind: str) -> None:
    """Of several updates, with values that are clipped."""
    found = []
    for tokens in (1, 10_000):
        one = rank(model_folder, critic=kind, mini_batches=2, epochs=2, value_clip=0.01, critic_learning_rate=3e-3)
        metrics = train(one, 2, tokens=tokens)
        found.append((metrics, {k: t for k, t in state(one).items() if not k.startswith("optimizer.")}))
    (small, a), (large, b) = found
    assert small["micro_batches"] > large["micro_batches"]
    assert 0 < small["value_clip_fraction"] < 1
    for name in ("loss", "value_loss", "value_clip_fraction", "explained_variance", "advantage_std", "grad_norm"):
        assert small[name] == pytest.approx(large[name], rel=1e-4, abs=1e-7), name
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_values_learn_the_returns_at_a_rate_of_their_own(model_folder: Path, kind: str) -> None:
    one = rank(model_folder, seed=None, critic=kind, gae_lambda=1.0, critic_learning_rate=0.02, credit="turn")
    assert all(not p.full_tensor().any() for p in head(one).values())
    batch = make_batch(0, seed=3)
    rewards = [msgspec.structs.replace(r, rewards=tuple(1.0 for _ in r.ends)) for r in make_rewards(batch, 3)]
    seen = []
    for step in range(8):
        seen.append(one.learner.step(msgspec.structs.replace(work_of(one, batch, rewards), step=step)))
        if step == 0:  # the first step of AdamW is as long as the learning rate
            assert head(one)["bias"].full_tensor().item() == pytest.approx(0.02, rel=1e-3)
    assert seen[0]["value_mean"] == 0.0
    assert seen[-1]["value_loss"] < 0.5 * seen[0]["value_loss"]
    assert all(m["return_mean"] == pytest.approx(seen[0]["return_mean"]) for m in seen)  # λ = 1: no matter the values
    assert seen[0]["lr"] == seen[-1]["lr"] == 1e-3


def test_a_policy_learns_from_its_own_samples_by_a_critic(model_folder: Path) -> None:
    """Four tokens a turn, of which those below 32 are wanted; the reward comes with the last."""
    trainer = msgspec.structs.replace(TRAINER, learning_rate=1e-2, weight_decay=0.0, micro_batch_tokens=4096)
    one = rank(model_folder, seed=None, trainer=trainer, gamma=1.0, epochs=2)
    served = AutoModelForCausalLM.from_pretrained(model_folder)
    generator = torch.Generator().manual_seed(0)
    scores = []
    for step in range(25):
        (bucket,) = one.gather(keep=True)
        served.load_state_dict(bucket, strict=False)
        tokens = torch.randint(VOCABULARY, (32, 3), generator=generator)
        logprobs = torch.zeros(32, 3)
        for _ in range(4):
            with torch.no_grad():
                logs = served(input_ids=tokens).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(logs.exp(), 1, generator=generator)
            tokens, logprobs = torch.cat([tokens, drawn], 1), torch.cat([logprobs, logs.gather(1, drawn)], 1)
        rewards = (tokens[:, 3:] < 32).float().mean(1).tolist()
        sequences = [
            TrainSequence(
                tokens=row.int().numpy().tobytes(),
                loss_mask=b"\0\0\0\1\1\1\1",
                logprobs=logs.numpy().tobytes(),
                versions=np.full(7, step, np.int32).tobytes(),
                turn_ends=(7,),
                turn_rewards=(reward,),
            )
            for row, logs, reward in zip(tokens, logprobs, rewards, strict=True)
        ]
        (work,) = plan_work(
            TrainReq(step=step, sequences=sequences),
            ranks=1,
            vocabulary=VOCABULARY,
            hidden=32,
            trainer=trainer,
            algorithm=one.recipe.algorithm,
        )
        one.learner.step(work)
        scores.append(np.mean(rewards))
    assert np.mean(scores[:3]) < 0.65
    assert np.mean(scores[-3:]) > 0.9


def test_a_sequence_without_rewards_teaches_nothing(model_folder: Path) -> None:
    """A batch of which all was cut off and is to be filtered."""
    one = rank(model_folder)
    batch = make_batch(0, seed=3)
    metrics = one.learner.step(work_of(one, batch, [0.0] * 16))
    assert (metrics["loss"], metrics["value_loss"], metrics["grad_norm"]) == (0.0, 0.0, 0.0)


def test_a_step_that_is_not_finite_changes_nothing(model_folder: Path) -> None:
    one = rank(model_folder, critic="model", advantage_norm="none")
    before = state(one)
    batch = make_batch(0, seed=3)
    huge = [TurnRewards(ends=r.ends, rewards=tuple(1e38 for _ in r.ends)) for r in make_rewards(batch, 3)]
    with pytest.raises(BadBatch, match=r"step 0: the (loss|gradient) is not finite"):
        one.learner.step(work_of(one, batch, huge))
    assert_same(before, state(one))


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        (TurnRewards(ends=(2,), rewards=(1.0,)), r"which end at \[2\], do not hold all its trained tokens"),
        (TurnRewards(ends=(900, 2, 900), rewards=(1.0,) * 3), "do not hold all its trained tokens"),
        (TurnRewards(ends=(900,), rewards=()), r"\[\] are not the finite rewards of 1 turns"),
        (TurnRewards(ends=(900,), rewards=(float("nan"),)), "are not the finite rewards of 1 turns"),
    ],
)
def test_turns_that_do_not_fit_are_refused(turns: TurnRewards, says: str) -> None:
    batch = make_batch(0, seed=3)
    request = train_request(batch, [*make_rewards(batch, 3)[:15], turns])
    with pytest.raises(StepRefused, match=f"sequence 15: .*{says}"):
        plan_work(request, ranks=1, vocabulary=64, hidden=32, trainer=TRAINER, algorithm=AlgorithmConfig(**GAE))


def on_rank(folder: Path, critic: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Two steps of four updates on this rank's share, of segments in the second: the last one's metrics, and the whole
    parameters."""
    one = rank(folder, seed=None, critic=critic, mini_batches=2, epochs=2, kl_coef=0.1, kl_in="reward", value_clip=0.01)
    for step in range(2):
        batch = make_batch(step, seed=step)
        rewards = make_rewards(batch, step)
        works = plan_work(
            train_request(in_segments(batch, rewards) if step else batch, rewards),
            ranks=dist.get_world_size(),
            vocabulary=VOCABULARY,
            hidden=32,
            trainer=TRAINER,
            algorithm=one.recipe.algorithm,
        )
        metrics = one.train(works[dist.get_rank()])
    assert one.checksum
    return metrics, {name: t for name, t in state(one).items() if not name.startswith(("optimizer.", "random."))}


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_two_ranks_and_one_rank_arrive_at_the_same(model_folder: Path, kind: str) -> None:
    (expected, weights), *others = (found for n in (1, 2) for found in on_ranks(n, on_rank, model_folder, kind))
    assert len(others) == 2
    assert 0 < expected["value_clip_fraction"] < 1
    names = {"loss", "value_loss", "value_clip_fraction", "explained_variance", "return_std", "value_mean", "grad_norm"}
    for metrics, found in others:
        for name in names | {"advantage_mean", "advantage_std"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert found.keys() == weights.keys()
        for name in weights:
            torch.testing.assert_close(found[name], weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_every_step_has_its_weight_in_the_mean_over_all_ranks() -> None:
    batch = make_batch(0, seed=3)
    for credit in ("token", "turn"):
        for aggregation in ("token_mean", "sequence_mean"):
            algorithm = AlgorithmConfig(**GAE | {"credit": credit}, aggregation=aggregation, mini_batches=2)
            works = plan_work(
                train_request(batch, make_rewards(batch, 3)),
                ranks=3,
                vocabulary=64,
                hidden=32,
                trainer=TRAINER,
                algorithm=algorithm,
            )
            for update in range(2):
                shares = [s for work in works for micro in work.updates[update] for s in micro]
                assert len(shares) == 8
                total = sum(s.value_weight * len(step_lengths(s.sequence, credit)) for s in shares)
                assert total == pytest.approx(1)


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["value_head", "model"])
def test_steps_straight_and_steps_resumed_arrive_at_the_same_bits(
    model_folder: Path, tmp_path: Path, kind: str
) -> None:
    straight = rank(model_folder, critic=kind, mini_batches=2)
    train(straight, 2)
    path = save(straight, tmp_path)
    train(straight, 2)
    resumed = rank(model_folder, seed=1, critic=kind, mini_batches=2)
    resumed.checkpoints.load(path)
    train(resumed, 2)
    assert_same(state(straight), state(resumed))
    assert "optimizer.exp_avg_sq.critic.value_head.weight" in state(resumed)
    assert ("critic.lm.layers.1.mlp.up_proj.weight" in state(resumed)) == (kind == "model")


def test_servers_see_nothing_of_the_critic(model_folder: Path) -> None:
    plain, *critics = (rank(model_folder, seed=None, critic=kind) for kind in ("value_head", "value_head", "model"))
    reference_rank = Rank(Recipe(), str(model_folder), torch.device("cpu"))
    for one in (plain, *critics):
        assert one.weights == reference_rank.weights
        assert one.parameters == reference_rank.parameters
        (bucket,) = one.gather(keep=True)
        assert not any("value" in name for name in bucket if "head" in name)
        assert bucket.keys() == {t.name for t in reference_rank.weights.tensors}


def test_another_critic_is_refused_by_its_key(model_folder: Path, tmp_path: Path) -> None:
    path = save(rank(model_folder), tmp_path)
    changes: list[tuple[Callable[[], Rank], str]] = [
        (
            lambda: rank(model_folder, critic="model"),
            r'^algorithm\.critic = "model": .* made with "value_head"; set it',
        ),
        (lambda: Rank(Recipe(), str(model_folder), torch.device("cpu")), r"^algorithm\.critic = \(nothing\): "),
    ]
    for make, says in changes:
        one = make()
        with pytest.raises(CheckpointError, match=says):
            description.check(path, one.recipe, model_folder)


def test_a_critic_that_is_no_model_is_refused_by_its_key(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^algorithm\.critic_path: .*nowhere is not a Hugging Face model folder"):
        rank(model_folder, critic="model", critic_path=str(tmp_path / "nowhere"))


def test_in_bfloat16_values_are_computed_in_float32(model_folder: Path) -> None:
    recipe = Recipe(model=ModelConfig(dtype="bfloat16"), trainer=TRAINER, algorithm=AlgorithmConfig(**GAE))
    one = Rank(recipe, str(model_folder), torch.device("cpu"))
    head(one)["weight"].to_local().fill_(0.3)
    train(one, 1)
    assert {p.dtype for p in one.learner.policy.parameters()} == {torch.float32}
    seen: list[Any] = []
    assert one.learner.policy.value_head is not None
    one.learner.policy.value_head.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    train(one, 1)
    assert set(seen) == {(torch.float32, torch.float32)}
