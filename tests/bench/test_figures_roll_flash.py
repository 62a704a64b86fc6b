"""ROLL Flash's figures 1b, 3 and table 1: their worlds are what they say, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import load_table


def test_synchronous_training_has_all_gpus_for_both_sides_and_pays_for_the_switch(script: Any) -> None:
    worlds = script("roll_flash")
    sync = load_table(worlds.synchronous(40, steps=3))
    split = load_table(worlds.asynchronous(24, 16, alpha=2.0, steps=3))
    assert (sync.engine.count, sync.sim.trainer.gpus) == (40, 40)
    assert (split.engine.count, split.sim.trainer.gpus) == (16, 24)
    assert sync.sim.trainer.fixed_s - split.sim.trainer.fixed_s == worlds.RESHARD_S
    assert sync.batch_trajectories == split.batch_trajectories == 256
    assert (sync.rollout.num_envs, split.rollout.num_envs) == (256, 3 * 256)
    assert (sync.staleness.bound, split.staleness.bound) == (0.0, 2.0)
    assert sync.rollout.queue_scheduling and sync.rollout.expand_num_return_sequences


def test_sync_naive_differs_from_sync_in_its_scheduling_only(script: Any) -> None:
    worlds = script("roll_flash")
    naive, sync = (load_table(worlds.synchronous(16, steps=3, naive=n)) for n in (True, False))
    assert not naive.rollout.queue_scheduling and not naive.rollout.expand_num_return_sequences
    assert naive.engine.routing == "round_robin"
    assert naive.sim == sync.sim and naive.engine.count == sync.engine.count
    assert naive.rollout.batch_groups == sync.rollout.batch_groups


def test_bounds_are_the_papers_equations_in_the_worlds_numbers(script: Any) -> None:
    worlds = script("roll_flash")
    table = worlds.asynchronous(24, 16, alpha=2.0, steps=3)
    recipe = load_table(table)
    plan = worlds.predict(worlds.system_of(recipe), worlds.Workload(worlds.shape_of(recipe)))
    share, longest = 24 / 40, worlds.RESPONSE_TOKENS * plan.token_s
    rollout = 256 / (16 * plan.per_server) * plan.token_s * worlds.Workload(worlds.shape_of(recipe)).generated
    expected = max(rollout + longest / (3 * (1 - share)), plan.train_s)
    assert worlds.bound(table) == pytest.approx(expected, rel=1e-9)
    table = worlds.synchronous(40, steps=3)
    recipe = load_table(table)
    plan = worlds.predict(worlds.system_of(recipe), worlds.Workload(worlds.shape_of(recipe)))
    # 256 responses are fewer than 40 servers can run, so each has its own worker.
    generated = worlds.Workload(worlds.shape_of(recipe)).generated
    expected = (generated + worlds.RESPONSE_TOKENS) * plan.token_s + plan.train_s
    assert worlds.bound(table) == pytest.approx(expected, rel=1e-9)


def test_throughput_leaves_out_how_a_run_begins_and_ends(script: Any) -> None:
    common, worlds = script("common"), script("roll_flash")
    at = [100.0, 110.0, 120.0, 130.0, 131.0, 132.0]
    steps = [{"time/at": t, "tokens/total": 50.0 * (i + 1)} for i, t in enumerate(at)]
    result = common.Result(steps=steps, summary=None)
    assert worlds.throughput(worlds.steady(result, 1.5), 1) == pytest.approx(5.0)
    assert worlds.steady(result, 0.0).steps == steps


def test_a_line_is_fitted_by_least_squares(script: Any) -> None:
    fig3 = script("fig3")

    def run(rollouts: int, seconds: float) -> Any:
        return fig3.Run(
            figure="",
            point="",
            paper=None,
            ours=seconds,
            panel="b",
            split=(),
            alpha=0.0,
            rollouts=rollouts,
            bound=0.0,
            planned=0.0,
        )

    assert fig3._fit([run(n, 10 + 2 * n) for n in (32, 64, 512)]) == pytest.approx((10.0, 2.0, 1.0))
    assert fig3._fit([run(0, 0.0), run(1, 1.0), run(2, 0.0)])[2] == pytest.approx(0.0)


def test_the_alpha_needed_is_the_smallest_that_has_enough(script: Any) -> None:
    table1 = script("table1")
    case = next(iter(table1.PAPER))
    need = table1._need(case, {1.0: 50.0, 2.0: 91.0, 3.0: 97.9, 4.0: 98.0, 6.0: 100.0, 8.0: 99.0})
    assert (need.ours, need.nearly) == (4.0, 2.0)
    assert need.shares[1] == pytest.approx(0.91)
