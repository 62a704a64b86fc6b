"""Operations against PyTorch's own counter of them, and what each rank reports of itself."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.config import AlgorithmConfig, ModelConfig, Recipe, TrainerConfig
from asyncrl.train import effort, lora, model
from asyncrl.train.attention import Layout
from asyncrl.train.client import train_request
from asyncrl.train.effort import Cost, cost_of
from asyncrl.train.rank import Rank
from asyncrl.train.work import plan_work

from .batches import VOCABULARY, make_batch
from .ranks import on_ranks

LENGTHS = (7, 12, 4)


def test_dense_layers_and_the_head_cost_what_pytorch_counts(model_folder: Path) -> None:
    """Which does not count attention here, nor all of the head's backward."""
    policy = model.load(str(model_folder), 1.0)
    cost = msgspec.structs.replace(cost_of(policy), attention=0.0)
    tokens = torch.randint(VOCABULARY, (sum(LENGTHS),))
    layout, positions = Layout(LENGTHS, torch.device("cpu")), torch.arange(5)
    with FlopCounterMode(display=False) as forward:
        policy(tokens, layout, positions, tokens[positions])
    assert forward.get_total_flops() == cost.forward(LENGTHS, 5)
    hidden = policy.hidden(tokens, layout, positions).sum()
    with FlopCounterMode(display=False) as backward:
        hidden.backward()
    assert backward.get_total_flops() == cost.backward(LENGTHS, 0)
    assert cost.backward(LENGTHS, 5) - cost.backward(LENGTHS, 0) == 5 * 2 * (2 * 32 * VOCABULARY)


def test_a_frozen_weight_has_no_gradient_to_compute(model_folder: Path) -> None:
    policy = model.load(str(model_folder), 1.0)
    lora.inject(policy.lm, TrainerConfig(lora_rank=2), torch.float32, 0)
    cost = cost_of(policy)
    assert cost.trained_head == 0
    assert cost.trained_layers < 0.3 * cost.layers
    bare = cost_of(model.load(str(model_folder), 1.0))
    assert bare.trained_layers == bare.layers == cost.layers - cost.trained_layers


def test_a_token_meets_only_the_experts_that_it_is_routed_to() -> None:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )
    policy = model.Policy(Qwen3MoeForCausalLM(config), 1.0)
    attention = 32 * (4 * 8 + 2 * 2 * 8) + 4 * 8 * 32
    experts, router = 2 * 3 * 32 * 16, 8 * 32
    assert cost_of(policy).layers == 2 * 2 * (attention + experts + router)


def test_attention_is_counted_where_it_sees() -> None:
    """Two layers, one of which sees 3 tokens; 4 operations for each dimension of a pair."""
    cost = Cost(layers=0, head=0, trained_layers=0, trained_head=0, attention=4.0 * 8, windows=(math.inf, 3.0))
    assert cost.forward([5, 2], 0) == 4 * 8 * (15 + 3 + (1 + 2 + 3 + 3 + 3) + 3)
    assert cost.backward([5, 2], 0) == 2 * cost.forward([5, 2], 0)


def test_the_peak_is_that_of_the_data_sheet_for_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = SimpleNamespace(type="cuda")
    assert effort.peak_rate(gpu, torch.bfloat16) == 989e12  # type: ignore[arg-type]
    assert 1e8 < effort.peak_rate(torch.device("cpu"), torch.float32) < 1e14


def test_a_step_with_nothing_to_train_is_no_division_by_zero(lone_rank: dist.ProcessGroup) -> None:
    """A rank trains a dummy then, which is no operation."""
    nothing = effort.Effort()
    nothing.passes, nothing.seconds = [0.0], 0.5
    found = effort.over_ranks(nothing, idle=0.25, memory=1e6, peak=1e9, group=lone_rank)
    assert found["rank/mfu/max"] == found["rank/imbalance_seconds/max"] == found["rank/tokens/max"] == 0
    assert found["rank/idle_seconds/mean"] == 0.25


def report(folder: str, shares: int) -> dict[str, float]:
    """Of a step on this rank, in which one of the sequences is much longer than the others."""
    trainer = TrainerConfig(ranks=dist.get_world_size(), micro_batch_tokens=512, sequence_parallel=shares)
    rank = Rank(Recipe(model=ModelConfig(path=folder), trainer=trainer), folder, torch.device("cpu"))
    batch = make_batch(0, seed=3, groups=2)
    long = batch.trajectories[0]
    for column, value in ((long.tokens, 1), (long.loss_mask, 1), (long.logprobs, -4.0), (long.versions, 0)):
        column.extend(array(column.typecode, [value] * 150))
    works = plan_work(
        train_request(batch, [1.0] * len(batch.trajectories)),
        ranks=dist.get_world_size(),
        vocabulary=VOCABULARY,
        hidden=32,
        trainer=trainer,
        algorithm=AlgorithmConfig(),
    )
    list(rank.commands([1]))
    metrics = rank.train(works[dist.get_rank()])
    tokens = sum(share.sequence.loss_mask.rindex(1) for work in works for m in work.updates[0] for share in m)
    return metrics | {"all tokens": tokens / shares}


@pytest.mark.parametrize("shares", [1, 2])
def test_ranks_report_what_they_did_and_how_evenly(model_folder: Path, shares: int) -> None:
    first, second = on_ranks(2, report, str(model_folder), shares)
    for key, value in first.items():
        if key.startswith("rank/"):
            assert second[key] == value and math.isfinite(value), key

    def spread(name: str) -> tuple[float, float, float]:
        least, mean, most = (first[f"rank/{name}/{which}"] for which in ("min", "mean", "max"))
        assert least <= mean <= most
        return least, mean, most

    least, mean, most = spread("tokens")
    assert mean == pytest.approx(first["all tokens"] / 2)
    assert spread("mfu")[0] > 0 and spread("tokens_per_second")[0] > 0
    assert spread("peak_memory")[0] > 2**26
    assert spread("idle_seconds")[2] > 0
    if shares == 2:  # of the same rows
        assert least == most and spread("imbalance_seconds")[2] == 0
    else:
        assert least < most
        assert spread("imbalance_seconds")[2] > spread("imbalance_seconds")[0] == 0  # the costlier rank does not wait
