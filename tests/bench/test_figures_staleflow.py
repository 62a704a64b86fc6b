"""StaleFlow's figures: their worlds are what they say, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import load_table


def test_the_cluster_is_split_or_shared_and_scaled_with_the_batch(script: Any) -> None:
    worlds = script("staleflow")
    split, shared = (load_table(worlds.system(name, eta=3)) for name in ("StaleFlow", "VeRL"))
    assert (split.engine.count, split.sim.trainer.gpus, split.sim.instance.gpus) == (6, 8, 4)
    assert (shared.engine.count, shared.sim.trainer.gpus) == (8, 32)
    assert split.batch_trajectories == shared.batch_trajectories == 128 * 16 / worlds.SCALE
    assert (split.rollout.num_envs, shared.rollout.num_envs) == (4 * 512, 512)
    assert (split.staleness.bound, shared.staleness.bound) == (3, 0)
    assert shared.sim.trainer.fixed_s - split.sim.trainer.fixed_s == worlds.RESHARD_S
    larger = load_table(worlds.system("StaleFlow", gpus=256, groups=64, response=40_000))
    assert (larger.engine.count, larger.rollout.batch_groups, larger.rollout.max_new_tokens) == (12, 16, 40_000)


def test_one_in_twenty_responses_reaches_20k_tokens_and_one_in_a_hundred_40k(script: Any) -> None:
    lengths = load_table(script("staleflow").world()).sim.lengths
    assert lengths.quantile(0.5) == pytest.approx(4_000, rel=1e-3)
    assert lengths.quantile(0.99) == pytest.approx(40_000, rel=2e-3)
    assert lengths.quantile(0.948) == pytest.approx(20_000, rel=0.01)


def test_systems_differ_by_their_columns_only(script: Any) -> None:
    worlds = script("staleflow")
    recipes = [load_table(worlds.system(name, eta=2)) for name in worlds.BOUNDED]
    assert all(r.sim == recipes[0].sim and r.rollout == recipes[0].rollout for r in recipes)
    assert {r.staleness.bound for r in recipes} == {2}
    assert [r.staleness.control for r in recipes] == ["inflight_cap"] * 3 + ["buffers"]
    assert [r.engine.routing for r in recipes] == ["least_loaded", "least_loaded", "prefix_affine", "waterfall"]
    assert [r.overlaps_update for r in recipes] == [True, False, False, True]
    assert recipes[-1].engine.phi_wait == 3, "StaleFlow §6.1"


def test_the_eight_combinations_of_strategies(script: Any) -> None:
    worlds, fig16 = script("staleflow"), script("staleflow_fig16")
    all_on = load_table(worlds.system("StaleFlow", over=fig16.strategies(True, True, True)))
    assert all_on == load_table(worlds.system("StaleFlow"))
    off = load_table(worlds.system("StaleFlow", over=fig16.strategies(False, False, False)))
    assert (off.engine.routing, off.engine.migration, off.update.synchronization) == ("least_loaded", "none", "all")
    assert off.staleness == all_on.staleness
    assert [fig16.name(on) for on in ((True, False, True), (False, False, False))] == ["R–M", "–––"]


def test_a_run_is_summed_up_without_its_beginning_and_end(script: Any) -> None:
    common, worlds = script("common"), script("staleflow")
    steps = [
        {
            "time/at": 10.0 * (i + 1),
            "time/step": 10.0,
            "tokens/batch": 1000.0 if worlds.WARM_UP <= i < worlds.WARM_UP + 5 else 1e9,
            "bubble/trainer_idle": 0.25,
            "bubble/share": 0.5,
        }
        for i in range(worlds.WARM_UP + 7)
    ]
    result = common.Result(steps=steps, summary=None)
    run = worlds.summed_up(result, figure="", point="", system="", eta=2)
    assert run.ours == pytest.approx(worlds.SCALE * 100.0)
    assert (run.period, run.trainer_idle, run.bubbles) == (10.0, 0.25, 0.5)


def test_time_with_requests_is_counted_within_the_steps(script: Any) -> None:
    table3 = script("staleflow_table3")

    class Seen:
        loads = {"a": [(0.0, 1, 0), (5.0, 0, 0), (8.0, 2, 0)], "b": [(3.0, 1, 0)]}

    assert table3._busy(Seen, 2.0, 10.0) == pytest.approx((5 - 2) + (10 - 8) + (10 - 3))
