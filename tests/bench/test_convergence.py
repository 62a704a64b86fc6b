"""bench/convergence.py: which runs it asks for, what it keeps of one, and (``-m figures``) two short real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from asyncrl.config import load
from asyncrl.config.algorithm import LOSSES

ROOT = Path(__file__).resolve().parents[2]
RUNSUM = ROOT / "recipes" / "runsum"


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch, script: Any) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return script("convergence")


def outcome(module: Any, cell: Any, norms: list[float]) -> Any:
    steps = {name: [0.5] * len(norms) for name in module.COLUMNS} | {
        "grad_norm": norms,
        "staleness": [min(float(i), cell.bound) for i in range(len(norms))],
    }
    return module.Outcome(
        cell=cell,
        machine="two cores",
        exit="finished",
        seconds=1.0,
        heldout_before=0.25,
        heldout_after=None,
        steps=steps,
    )


def test_every_loss_runs_at_both_alphas_beside_sync_and_has_room_for_all_that_may_be_in_flight(
    convergence: Any,
) -> None:
    cells = convergence.cells(RUNSUM, [0], 80, ["trainer.learning_rate=1e-3"])
    assert len(cells) == len(set(cells)) == 1 + 2 * len(LOSSES) + 4
    for cell in cells:
        recipe = load(RUNSUM, overrides=cell.settings)
        assert (recipe.algorithm.loss, recipe.staleness.bound) == (cell.loss, cell.bound)
        assert recipe.trainer.learning_rate == 1e-3
        assert recipe.rollout.num_envs >= (1 + cell.bound) * recipe.batch_trajectories


def test_results_come_back_as_written_and_know_their_cell(convergence: Any, tmp_path: Path) -> None:
    sync, stale, *_ = convergence.cells(RUNSUM, [0], 80, [])
    kept = [outcome(convergence, cell, [1.0] * 20) for cell in (sync, stale)]
    convergence.write(tmp_path / "runs.json", kept)
    assert convergence.read(tmp_path / "runs.json") == kept
    assert convergence.read(tmp_path / "none.json") == []
    [other, *_] = convergence.cells(RUNSUM, [0], 81, [])
    assert other != sync


def test_the_first_alpha_steps_count_for_no_staleness(convergence: Any) -> None:
    [cell] = [c for c in convergence.cells(RUNSUM, [0], 80, []) if (c.loss, c.bound) == ("tis", 8.0)]
    assert outcome(convergence, cell, [1.0] * 20).settled("staleness") == 8.0
    assert outcome(convergence, cell, [1.0] * 5).settled("staleness") == 4.0


def test_a_spike_is_a_norm_far_above_those_before_it(convergence: Any) -> None:
    [cell, *_] = convergence.cells(RUNSUM, [0], 80, [])
    assert outcome(convergence, cell, [1.0] * 12 + [2.9] + [1.0] * 5).spikes == 0
    assert outcome(convergence, cell, [1.0] * 12 + [3.1] + [1.0] * 5).spikes == 1


def test_what_is_there_is_shown_a_row_for_all_seeds(convergence: Any) -> None:
    cells = convergence.cells(RUNSUM, [0], 80, [])[:3] + convergence.cells(RUNSUM, [1], 80, [])[:2]
    kept = [outcome(convergence, cell, [1.0] * 20) for cell in reversed(cells)]
    header, _, first, *rest = convergence.table(kept)
    assert len(rest) == 2 and first.startswith("| ppo | 0 (sync) | 0.00 /") and "0.25, 0.25 → –, –" in first
    assert {line.count("|") for line in [header, first, *rest]} == {header.count("|")}
    figure = Figure()
    convergence.draw(figure, kept)
    panel, heldout = figure.axes
    assert [line.get_label() for line in panel.get_lines()] == ["ppo, synchronous", "ppo", "decoupled_ppo"]
    assert len(heldout.get_lines()) == 5  # no accuracy after


def test_a_part_of_the_runs_and_none_that_is_not_among_them(convergence: Any) -> None:
    cells = convergence.cells(RUNSUM, [0], 80, [])
    assert convergence.chosen(cells, [], []) == cells
    assert [(c.loss, c.bound) for c in convergence.chosen(cells, ["ppo", "tis"], [2.0])] == [("ppo", 2.0), ("tis", 2.0)]
    with pytest.raises(ValueError, match=r"no run with bound 3\.0; there are 0\.0, 8\.0, 2\.0"):
        convergence.chosen(cells, [], [3.0])
    with pytest.raises(ValueError, match="no run with loss tsi"):
        convergence.chosen(cells, ["tsi"], [])


@pytest.mark.figures
def test_two_short_runs_and_none_the_second_time(tmp_path: Path) -> None:
    results = tmp_path / "runs.json"
    command = [sys.executable, str(ROOT / "bench" / "convergence.py"), "--quick", "--json", str(results)]
    first = subprocess.run(command, check=True, timeout=280, capture_output=True, text=True).stdout
    assert first.count("finished,") == 2
    sync, stale = json.loads(results.read_text())
    assert len(sync["steps"]["reward"]) == 3 and sync["steps"]["staleness"] == [0, 0, 0]
    assert max(stale["steps"]["staleness"]) == max(stale["steps"]["token_staleness"]) == 2
    assert "finished," not in subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    assert (tmp_path / "runs-runsum.png").exists()
