"""The staleness paper's figures: their scripts import, their world is the formula's, and what they compute."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncrl.config import load_table
from asyncrl.core.theory.staleness import mean_staleness, tailness_multiplier, train_period
from asyncrl.sim.trainer import train_seconds


def test_splits_have_the_period_that_the_formula_gives_their_utilisation(script: Any) -> None:
    paper = script("staleness_paper")
    length = paper.lengths_of(20.0).expected
    for slots in (2, 4, 8):
        for gpus in (10, 24, 32, 44):
            recipe = load_table(paper.budget_table(gpus, tailness=20.0, steps=1, slots=slots, control="queue_drop"))
            v_r = recipe.rollout.num_envs / recipe.sim.instance.cost.step(recipe.rollout.num_envs, 0)
            train_s = train_seconds(recipe.sim.trainer, int(128 * length))
            rho = v_r * train_s / (128 * length)
            assert rho == pytest.approx(paper.budget_rho(gpus, slots), rel=1e-6)
            predicted, period = paper.budget_prediction(rho, tailness=20.0, slots=slots)
            formula = mean_staleness(
                concurrency=slots * gpus, batch=128, tailness=paper.multiplier(20.0), rho=rho, q=1
            ).total
            assert period == pytest.approx(
                train_period(batch=128, mean_length=length, v_r=v_r, v_t=v_r / rho), rel=1e-6
            )
            # At ρ = 1, up to rounding, the formula has a step.
            assert math.isclose(rho, 1.0, rel_tol=1e-6) or predicted == pytest.approx(formula, rel=1e-6)


def test_tables_draw_lengths_with_the_printed_tailness(script: Any) -> None:
    tables = script("staleness_tables")
    for wanted in (1.42, 1.45, 2.5):
        lengths = script("staleness_paper").lengths_of(tables.tailness_for(wanted, 8))
        assert tailness_multiplier(lengths, 8) == pytest.approx(wanted, abs=1e-6)


def test_errors_are_those_of_block_means(script: Any) -> None:
    paper = script("staleness_paper")
    assert paper.with_error([3.0] * 40) == (3.0, 0.0)
    # Ten blocks of 5, which agree within: so these 50 values say no more than 10.
    mean, error = paper.with_error([0.0] * 25 + [2.0] * 25)
    assert mean == 1.0
    assert error == pytest.approx((10 / 9) ** 0.5 / 10**0.5)


def test_the_runtime_in_the_papers_world_has_the_predicted_staleness(script: Any) -> None:
    common, paper = script("common"), script("staleness_paper")
    for rho in (0.5, 1.6):
        recipe = load_table(
            paper.table(
                rho=rho,
                tailness=50.0,
                steps=60,
                concurrency=32,
                batch=32,
                group_size=4,
                control="queue_drop",
                queue=2,
            )
        )
        measured, _ = paper.staleness_of(common.simulated(recipe), 20)
        formula = mean_staleness(concurrency=32, batch=32, tailness=paper.multiplier(50.0, 4), rho=rho, q=2).total
        assert measured == pytest.approx(formula, abs=0.25)
