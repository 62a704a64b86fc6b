"""The comparison of presets: its worlds are what it says, the recipes differ by their columns, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.config import Recipe, load_table


def test_the_batch_grows_with_the_cluster_and_only_synchronous_training_shares_its_gpus(script: Any) -> None:
    presets = script("presets")
    for name, load in presets.WORKLOADS.items():
        for gpus in presets.SIZES:
            split, shared = (load_table(presets.table(name, gpus, presets.SYSTEMS[s])) for s in ("asyncrl", "sync"))
            serving = split.engine.count * load.server_gpus
            assert serving + split.sim.trainer.gpus == gpus
            assert shared.engine.count * load.server_gpus == shared.sim.trainer.gpus == gpus
            assert split.batch_trajectories == shared.batch_trajectories == load.per_gpu * gpus
            assert (split.rollout.num_envs, shared.rollout.num_envs) == (2 * load.per_gpu * gpus, load.per_gpu * gpus)
        assert load_table(presets.table(name, 16, presets.SYSTEMS["sync"])).sim.lengths.quantile(0.99) == pytest.approx(
            load.p99, rel=1e-3
        )


def test_all_others_differ_by_their_columns_only_and_have_one_bound(script: Any) -> None:
    presets = script("presets")
    recipes = {
        name: load_table(presets.table("agentic", 64, system))
        for name, system in presets.SYSTEMS.items()
        if name != "sync"
    }
    first = recipes["asyncrl"]
    assert all(r.sim == first.sim and r.rollout == first.rollout for r in recipes.values())
    assert all(replace(r.run, steps=first.run.steps) == first.run for r in recipes.values())
    assert all(r.overlaps_update for r in recipes.values())
    limits = {name: r.staleness.limit for name, r in recipes.items()}
    assert {name: limit for name, limit in limits.items() if limit != presets.BOUND} == {
        "asyncrl, bound 4": 4,
        "laminar": None,
    }
    assert {name: r.run.steps for name, r in recipes.items() if limits[name] != presets.BOUND} == {
        "asyncrl, bound 4": 3 + 8 + 4,
        "laminar": 3 + 8 + 1,
    }
    assert recipes["asyncrl"].run.steps == 3 + 4 + 1


def test_a_run_is_measured_between_the_filling_of_the_pipeline_and_its_last_steps(script: Any) -> None:
    presets = script("presets")
    small = presets.table("RLVR, short", 16, presets.SYSTEMS["roll-flash"], measured=2)
    result = presets.measured(load_table(small))
    assert (result.staleness_mean, result.staleness_max) == (1.0, 1.0)
    assert result.tokens_s * result.period == pytest.approx(128 * 860, rel=0.2), "a batch of 128 responses"
    assert 0 < result.rollout_idle < 1 and 0 < result.trainer_idle < 1
    assert result.again < 0.05


def test_runs_are_kept_by_their_recipes(script: Any, tmp_path: Path) -> None:
    common = script("common")
    seen: list[int] = []

    class Seed(msgspec.Struct):
        value: int

    def measured(recipe: Recipe) -> Seed:
        seen.append(recipe.seed)
        return Seed(recipe.seed)

    for seed in (1, 2, 1):
        assert common.kept(measured, Seed, tmp_path / "runs", load_table({"seed": seed})) == Seed(seed)
    assert seen == [1, 2]
    assert common.kept(measured, Seed, None, load_table({"seed": 1})) == Seed(1)
    assert seen == [1, 2, 1]
