from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncrl.build.frontier import build_figure, unbeaten
from asyncrl.build.past import read_past
from asyncrl.build.plan import kept_share, levers, plan, plan_from_run, shape_of, system_of
from asyncrl.build.simulate import simulate
from asyncrl.config import Recipe, RecipeError, load_table
from asyncrl.core.choices import best_bound, splits
from asyncrl.core.planning import predict
from asyncrl.core.workload import Workload
from asyncrl.observe.run_dir import METRICS, TRAJECTORIES, RunDirError, read_lines

BASE: dict[str, Any] = {
    "name": "small",
    "preset": "roll-flash",
    "env": {"episode_timeout_s": 1e6, "step_timeout_s": 1e5},
    "rollout": {"batch_groups": 8, "group_size": 4, "num_envs": 64, "max_new_tokens": 1000, "max_tokens": 2000},
    "engine": {"count": 2, "max_total_tokens": 100_000, "stream_interval": 0, "request_timeout_s": 1e6},
    "sim": {
        "lengths": {"kind": "lognormal", "mean": 200.0, "tailness": 50.0},
        "instance": {"load_s": 0.2},
        "trainer": {"gpus": 2, "fixed_s": 0.5, "tokens_per_s": 4000.0},
        "weights": {"transport": "relay", "gigabytes": 2.0},
    },
    "run": {"steps": 45},
}
AGENT: dict[str, Any] = {
    "env": {"max_turns": 4},
    "sim": {
        "lengths": {"kind": "lognormal", "mean": 60.0, "tailness": 50.0},
        "env": {"step": {"kind": "normal", "mean": 1.0, "std": 1.0}, "reset": {"kind": "constant", "value": 0.5}},
    },
}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict) and "kind" not in value
        result[key] = merged(result[key], value) if nested else value
    return result


def recipe(*tables: dict[str, Any]) -> Recipe:
    table = BASE
    for changes in tables:
        table = merged(table, changes)
    return load_table(table)


def played(settings: Recipe, run_dir: Path) -> Path:
    _, error = simulate(settings, run_dir, command=["test"], started="", out=io.StringIO())
    assert error is None
    return run_dir


# --- against simulation -----------------------------------------------------------------------------------------------

CAP, DROP, MAX = ({"staleness": {"control": name}} for name in ("inflight_cap", "queue_drop", "queue_max"))
SLOW_TRAINER = {"sim": {"trainer": {"tokens_per_s": 1000.0}}}
SLOWER_TRAINER = {"sim": {"trainer": {"tokens_per_s": 2000.0}}}
STREAM = {"trainer": {"stream": True, "micro_batch_tokens": 1}}
LARGE = {"sim": {"weights": {"gigabytes": 30.0}}}
ALTERNATING = {"update": {"overlap": False}}


def bound(value: float) -> dict[str, Any]:
    return {"staleness": {"bound": value}}


@pytest.mark.parametrize(
    ("changes", "staleness"),
    [
        pytest.param([bound(0.0)], 0.0, id="sync"),
        pytest.param([bound(1.0)], 0.05, id="one version of stragglers"),
        pytest.param([bound(3.0)], 0.05, id="three versions of stragglers"),
        pytest.param([bound(2.0), SLOW_TRAINER], 0.02, id="bound by the trainer"),
        pytest.param([DROP, {"run": {"steps": 150}}], 0.12, id="queue-drop, bound by rollout"),
        pytest.param([DROP, {"staleness": {"queue": 2.0}}, SLOW_TRAINER], 0.12, id="queue-drop, bound by the trainer"),
        pytest.param([MAX, bound(2.0)], 0.12, id="queue-max"),
        pytest.param([bound(1.0), {"preset": "one-step"}], 0.02, id="drained updates"),
        pytest.param([bound(0.0), {"rollout": {"max_additional_running_prompts": 2}}], 0.0, id="redundant groups"),
        pytest.param([bound(0.0), {"rollout": {"num_envs": 16}}], 0.0, id="two rounds of a batch"),
        pytest.param([bound(1.0), AGENT], 0.05, id="agents"),
        pytest.param([DROP, AGENT], 0.12, id="agents and a queue"),
        pytest.param([bound(0.0), SLOWER_TRAINER, STREAM], 0.0, id="sync, streamed"),
        pytest.param([bound(1.0), AGENT, SLOWER_TRAINER, STREAM], 0.05, id="agents, streamed"),
        pytest.param([bound(3.0), SLOW_TRAINER, LARGE], 0.02, id="large weights, beside training"),
        pytest.param([bound(3.0), SLOW_TRAINER, LARGE, ALTERNATING], 0.02, id="large weights, after training"),
    ],
)
def test_the_prediction_agrees_with_a_simulation(tmp_path: Path, changes: list[dict[str, Any]], staleness: float):
    """The period within 12 %, of which chance in 30 steps is about half; ``staleness`` is its relative tolerance. What
    a queue drops hangs on chance for longer."""
    settings = recipe(*changes)
    p = predict(system_of(settings), Workload(shape_of(settings)))
    rows = list(read_lines(played(settings, tmp_path / "run") / METRICS))[12:-3]
    period = (rows[-1]["time/at"] - rows[0]["time/at"]) / (len(rows) - 1)
    assert p.period == pytest.approx(period, rel=0.12)
    measured = sum(row["staleness/mean"] for row in rows) / len(rows)
    assert p.staleness == pytest.approx(measured, rel=staleness, abs=1e-9)


def test_kept_groups_are_those_with_different_rewards():
    rng = Random(3)
    for success, spread, size in ((0.5, 0.0, 2), (0.8, 0.3, 8), (0.2, 0.7, 4)):
        kept = 0
        for _ in range(20_000):
            weight = 1 / spread - 1 if spread else 0.0
            p = rng.betavariate(success * weight, (1 - success) * weight) if spread else success
            kept += 0 < sum(rng.random() < p for _ in range(size)) < size
        assert kept_share(success, spread, size) == pytest.approx(kept / 20_000, abs=0.015)
    assert kept_share(1.0, 0.0, 8) == kept_share(0.5, 1.0, 8) == 0.0


# --- the text ---------------------------------------------------------------------------------------------------------


def test_the_plan_names_what_binds_and_what_each_lever_does():
    settings = recipe(bound(2.0))
    out = io.StringIO()
    plan(settings, out=out)
    text = out.getvalue()
    system, work = system_of(settings), Workload(shape_of(settings))
    p = predict(system, work)
    assert text.startswith("small: 2 × 1 GPU for rollout, 2 for training; roll-flash (in-flight cap, α = 2)")
    assert f"period      {p.period:.1f} s a step, bound by the stragglers of a version" in text
    assert f"no-bubble bound {p.shortest:.1f} s" in text
    assert f"staleness   {p.staleness:.2f}" in text
    assert f"best α      {best_bound(system, work)}:" in text
    for w in levers(system, work):
        [line] = [line for line in text.splitlines() if f"{w.key:24}{w.change} " in line]
        figures = line.split()[-4:]
        assert figures[:2] == [f"{w.prediction.staleness:.2f}", f"{w.prediction.period:.1f}"]
    assert max(map(len, text.splitlines())) <= 140


def test_levers_are_each_changed_both_ways():
    settings = recipe(bound(2.0))
    changes = [(w.key, w.change) for w in levers(system_of(settings), Workload(shape_of(settings)))]
    assert changes == [
        ("rollout.batch_groups", "8 → 6"),
        ("rollout.batch_groups", "8 → 10"),
        ("rollout.num_envs", "64 → 48"),
        ("rollout.num_envs", "64 → 80"),
        ("staleness.bound", "2 → 1"),
        ("staleness.bound", "2 → 3"),
        ("rollout.max_new_tokens", "1,000 → 750"),
        ("rollout.max_new_tokens", "1,000 → 1,250"),
        ("engine.count", "2 → 1 (3 GPUs train)"),
        ("engine.count", "2 → 3 (1 GPUs train)"),
    ]
    queue = recipe(DROP)
    keys = [w.key for w in levers(system_of(queue), Workload(shape_of(queue)))]
    assert "staleness.bound" not in keys
    assert "staleness.queue" in keys


def test_a_plan_loads_nothing_heavy():
    code = (
        "import io, sys; from asyncrl.config import Recipe; from asyncrl.build.plan import plan;"
        "plan(Recipe(), out=io.StringIO());"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'rich', 'aiohttp', 'asyncio', 'uvloop', 'transformers')"
        " if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- past runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(recipe(DROP), tmp_path_factory.mktemp("past") / "run")


def test_a_past_run_is_predicted_from_its_own_metrics(run_dir: Path):
    _, phases = read_past(run_dir)
    assert [p.first for p in phases[1:]] == [p.last + 1 for p in phases[:-1]]
    assert len(phases) == 4
    for p in phases:
        assert p.observed.episodes == pytest.approx(64, rel=0.15)
        assert p.expected_staleness == pytest.approx(p.staleness, rel=0.2)
        assert p.expected_period == pytest.approx(p.period, rel=0.15)
        assert p.expected_tokens_per_s * p.expected_period == pytest.approx(p.tokens_per_s * p.period)
    out = io.StringIO()
    plan_from_run(run_dir, out=out)
    for p in phases:
        assert (
            f"{p.expected_staleness:10.2f}{p.staleness:8.2f}{p.expected_period:10.1f}{p.period:8.1f}" in out.getvalue()
        )


def test_a_run_without_these_metrics_is_read_from_its_trajectories(run_dir: Path, tmp_path: Path):
    new = ("response/tailness", "rollout/episodes", "rollout/longest_s", "predicted/staleness")
    lines = [{k: v for k, v in row.items() if k not in new} for row in read_lines(run_dir / METRICS)]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in lines))
    (tmp_path / "recipe.json").write_bytes((run_dir / "recipe.json").read_bytes())
    with pytest.raises(RunDirError, match=r"trajectories\.jsonl: missing"):
        read_past(tmp_path)
    (tmp_path / TRAJECTORIES).write_bytes((run_dir / TRAJECTORIES).read_bytes())
    (_, old), (_, new_phases) = read_past(tmp_path), read_past(run_dir)
    tails = [p.observed.tailness for p in new_phases]
    assert old[0].observed.tailness == pytest.approx(sum(tails) / len(tails), rel=0.05)
    assert old[0].observed.episodes == 64  # as the recipe has it


def test_a_folder_that_tells_nothing_is_refused(run_dir: Path, tmp_path: Path):
    with pytest.raises(RecipeError, match=r"recipe\.json: not the recipe of a run"):
        plan_from_run(tmp_path, out=io.StringIO())
    (tmp_path / "recipe.json").write_bytes((run_dir / "recipe.json").read_bytes())
    with pytest.raises(RecipeError, match=r"0 steps; at least 2"):
        plan_from_run(tmp_path, out=io.StringIO())


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_picture_shows_every_split_and_marks_the_recipe(tmp_path: Path):
    settings = recipe(DROP)
    system, work = system_of(settings), Workload(shape_of(settings))
    figure = build_figure("small", system, work, [(3.0, 1.5)])
    axes = {ax.get_label(): ax for ax in figure.axes}
    assert set(axes) == {"batch", "control"}
    here = predict(system, work)
    for ax in axes.values():
        drawn = {(float(x), float(y)) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)}
        assert {(here.period, here.staleness), (3.0, 1.5)} <= drawn
        assert {(p.period, p.staleness) for p in (predict(s, work) for s in splits(system))} <= drawn
        assert ax.get_ylim()[1] > here.staleness
        assert len(set(ax.get_legend().get_texts())) >= 5
    out = io.StringIO()
    plan(settings, out=out, plot=tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert out.getvalue().splitlines()[-1].strip() == str(tmp_path / "plan.png")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path):
    with pytest.raises(RecipeError, match="cannot write the picture"):
        plan(recipe(), out=io.StringIO(), plot=tmp_path / "missing" / "plan.png")
    with pytest.raises(RecipeError, match=r"plan\.foo: no picture can be a \.foo; there are .*png"):
        plan(recipe(), out=io.StringIO(), plot=tmp_path / "plan.foo")


def test_sources_that_differ_in_turns_are_not_taken_for_one():
    source = {"train": "rows.jsonl", "target": "env.py:Env"}
    alike = {"env": {"max_turns": 6}, "sources": {"a": source, "b": {**source, "max_turns": 6}}}
    plan(recipe(alike), out=io.StringIO())
    other = {"env": {"max_turns": 6}, "sources": {"a": source, "b": {**source, "max_turns": 4}}}
    with pytest.raises(RecipeError, match=r"sources\.b\.max_turns = 4: one kind of tasks is simulated or planned"):
        plan(recipe(other), out=io.StringIO())


def test_unbeaten_points_are_those_that_none_is_better_than_in_both():
    settings = recipe(DROP)
    system, work = system_of(settings), Workload(shape_of(settings))
    points = [predict(s, work) for s in splits(system)]
    best = unbeaten(points)
    brute = {
        (p.period, p.staleness)
        for p in points
        if not any(
            (q.period <= p.period and q.staleness < p.staleness) or (q.period < p.period and q.staleness <= p.staleness)
            for q in points
        )
    }
    assert set(best) == brute
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(best))
