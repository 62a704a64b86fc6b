"""The staleness paper's figures: their scripts import, their world is the formula's, and (``-m figures``) they run."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load_table
from asyncrl.core.theory.staleness import mean_staleness, tailness_multiplier, train_period
from asyncrl.sim.trainer import train_seconds

FIGURES = Path(__file__).resolve().parents[2] / "bench" / "figures"
SCRIPTS = ["staleness", "staleness_tables", "length_bias", "frontier", "inflight_cap_frontier"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script as running it would: its neighbours are top-level modules."""
    monkeypatch.syspath_prepend(str(FIGURES))
    return importlib.import_module


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_shows_and_how_to_run_it(script: Any, name: str) -> None:
    module = script(name)
    assert f"python bench/figures/{name}.py" in module.__doc__
    assert callable(module.measure) and callable(module.draw)


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


@pytest.mark.figures
@pytest.mark.parametrize("name", SCRIPTS)
def test_quick_figures(name: str, tmp_path: Path) -> None:
    out = tmp_path / "points.json"
    command = [sys.executable, str(FIGURES / f"{name}.py"), "--quick", "--json", str(out)]
    subprocess.run(command, check=True, timeout=280)
    points = json.loads(out.read_text())
    assert points
    assert all({"figure", "point", "paper", "ours", "assumption"} <= point.keys() for point in points)
