"""``asyncrl sim`` on small worlds: the run directory, replay, determinism, sweeps with random faults, comparison."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.build import simulate, virtual
from asyncrl.cli import main
from asyncrl.config import Recipe, RecipeError, load_table, loads_json
from asyncrl.observe.run_dir import METRICS, RECIPE, REPORT, SUMMARY, TRACE, TRAJECTORIES, read_lines
from asyncrl.runtime.accounts import Accounts

CHAOS: dict[str, Any] = {
    "env": {"max_turns": 2, "retries": 2, "episode_timeout_s": 900, "max_failure_rate": 1.0},
    "rollout": {"batch_groups": 4, "group_size": 4, "num_envs": 24, "max_new_tokens": 400, "max_tokens": 1200},
    "engine": {
        "count": 4,
        "max_running_requests": 8,
        "max_total_tokens": 8000,
        "stream_interval": 32,
        "idle_timeout_s": 30,
    },
    "run": {"steps": 8},
    "sim": {
        "lengths": {"kind": "lognormal", "mean": 120, "tailness": 60},
        "random_faults": 6,
        "random_within_s": 120,
        "tasks": 50,
        "instance": {"start_s": 10},
        "trainer": {"tokens_per_s": 2000},
        "weights": {"gigabytes": 1},
        "env": {"step": {"kind": "normal", "mean": 2, "std": 2}, "crash": 0.01, "hang": 0.002},
    },
}
VARIANTS: list[dict[str, Any]] = [
    {"preset": "sync"},
    {"preset": "one-step"},
    {"preset": "roll-flash"},
    {"preset": "asyncrl", "trainer": {"micro_batch_tokens": 500}},
    {"preset": "roll-flash", "staleness": {"bound": 2.5}, "sim": {"env": {"success": 0.5, "spread": 0.6}},
     "rollout": {"filter_zero_variance": True, "max_additional_running_prompts": 2},
     "trainer": {"stream": True, "micro_batch_tokens": 500}},
    {"preset": "roll-flash", "engine": {"stream_interval": 0, "count": 2},
     "sim": {"instance": {"chunked_prefill": 64}}},
    {"preset": "queue-drop", "trainer": {"stream": True, "micro_batch_tokens": 500}},
    {"preset": "queue-max"},
    {"preset": "roll-flash", "env": {"max_turns": 1}, "rollout": {"expand_num_return_sequences": False}},
    {"preset": "sync", "env": {"max_turns": 1}, "rollout": {"queue_scheduling": False},
     "engine": {"routing": "round_robin"}},
    {"preset": "roll-flash", "sim": {"faults": [{"kind": "trainer_crash", "at_s": 40}]},
     "trainer": {"stream": True, "micro_batch_tokens": 500}},
    {"preset": "staleflow"},
    {"preset": "roll-flash", "sim": {"faults": [{"kind": "trainer_crash", "at_s": 40}]}, "trainer": {"restarts": 0}},
]  # fmt: skip
SEEDS = int(os.environ.get("ASYNCRL_SEEDS", "100"))
"""Of each variant: more than a thousand runs in all."""


def table(*changes: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for change in changes:
        for key, value in change.items():
            old = merged.get(key)
            merged[key] = table(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def small(**changes: Any) -> Recipe:
    return load_table(table(CHAOS, {"sim": {"random_faults": 0}}, changes))


def toml(folder: Path, **changes: Any) -> Path:
    """The recipe as a user's file."""
    file = folder / "recipe.toml"
    rows = [f"{k}.{key} = {_value(v)}" for k, tab in table(CHAOS, changes).items() if isinstance(tab, dict)
            for key, v in tab.items()]  # fmt: skip
    file.write_text("\n".join(rows) + "\n")
    return file


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_runs_with_random_faults_break_no_law(number: int) -> None:
    """Each run is checked all the way (sim/invariants.py); a bug is anything that the world's faults do not explain."""
    recipe = load_table(table(CHAOS, VARIANTS[number]))
    outcomes = list(simulate.sweep(recipe, range(number * SEEDS, (number + 1) * SEEDS)))
    assert len(outcomes) == SEEDS
    assert [(o.seed, o.error) for o in outcomes if o.bug] == []
    ends: Counter[str] = Counter()
    for o in outcomes:
        ends["finished" if not o.error else re.sub(r"\d+", "N", o.error)] += 1
        assert (
            sum(n for state, n in o.summary.ledger.items() if state != "reserved_ever")
            == (o.summary.ledger["reserved_ever"])
        )
        if not o.error:
            assert o.summary.steps == recipe.run.steps
    if recipe.trainer.restarts:
        assert ends["finished"] > 0.9 * SEEDS, ends
    else:
        assert ends["trainer: it died at version N (simulated)"] > 0.9 * SEEDS, ends


def test_a_run_leaves_what_a_real_run_leaves(tmp_path: Path) -> None:
    recipe = small(run={"steps": 5})
    out = io.StringIO()
    summary, error = simulate.simulate(recipe, tmp_path / "run", command=["asyncrl"], started="now", out=out)
    assert error is None
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {RECIPE, METRICS, TRAJECTORIES, TRACE, SUMMARY, REPORT}
    assert loads_json((tmp_path / "run" / RECIPE).read_bytes()) == recipe
    steps = list(read_lines(tmp_path / "run" / METRICS))
    assert [line["step"] for line in steps] == list(range(5))
    assert steps[-1]["time/at"] <= summary.seconds, "virtual seconds"
    trajectories = list(read_lines(tmp_path / "run" / TRAJECTORIES))
    assert len(trajectories) == summary.ledger["reserved_ever"] - summary.ledger.get("aborted", 0)
    assert all("tokens" not in line for line in trajectories), "simulated tokens mean nothing"
    assert summary.exit == "finished" and "finished, 5 steps" in out.getvalue()


def test_one_seed_is_one_trace_and_two_seeds_are_two() -> None:
    events, difference = simulate.first_difference(load_table(CHAOS))
    assert events > 1000 and difference is None
    one, two = (simulate.outcome(small(seed=seed)) for seed in (1, 2))
    assert one.summary.seconds != two.summary.seconds
    again = simulate.outcome(small(seed=1))
    assert msgspec.structs.replace(again, cpu_s=0.0) == msgspec.structs.replace(one, cpu_s=0.0)


def test_a_difference_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(10**6))
    real = virtual.SimTrainer.train_step

    async def drifting(self: Any, *args: Any) -> Any:
        import asyncio

        await asyncio.sleep(1e-3 * next(turns))  # what global state would do
        return await real(self, *args)

    monkeypatch.setattr(virtual.SimTrainer, "train_step", drifting)
    _, difference = simulate.first_difference(small(run={"steps": 3}))
    assert difference is not None and re.match(r"event \d+: .* in the first run, .* in the second", difference)


def test_a_bug_fails_the_sweep_and_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer that forgets what ended: every run fails, and the message replays the first seed."""
    monkeypatch.setattr(Accounts, "_end", lambda *args: None)
    file = toml(tmp_path)
    assert main(["sim", str(file), "--seed", "5", "--seeds", "2", "--jobs", "1"]) == 1
    captured = capsys.readouterr()
    assert f"asyncrl sim {file} --seed 5   plays the first again" in captured.err
    assert "(first seed 5)" in captured.out


def test_the_command_line_plays_sweeps_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = toml(tmp_path, run={"steps": 3}, sim={"random_faults": 0})
    assert main(["sim", str(file), "--seed", "3", "--run-dir", str(tmp_path / "one")]) == 0
    assert "seed 3" in capsys.readouterr().out
    assert main(["sim", str(file), "--check-determinism"]) == 0
    assert "the same twice" in capsys.readouterr().out
    assert (
        main(["sim", str(file), "--compare", "--presets", "sync,roll-flash", "--run-dir", str(tmp_path / "two")]) == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"^sync +[\d.]+ ", out, re.M) and re.search(r"^roll-flash +[\d.]+ ", out, re.M)
    assert (tmp_path / "two" / "comparison.png").stat().st_size > 10_000
    sync = loads_json((tmp_path / "two" / "sync" / RECIPE).read_bytes())
    assert (sync.preset, sync.staleness.bound) == ("sync", 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RECIPE", "RECIPE"], "more than one recipe: say --compare"),
        (["RECIPE", "--presets", "sync"], "--presets: say --compare with it"),
        (["RECIPE", "--compare", "--presets", "sink"], "preset: unknown 'sink'; known are sync"),
        (["RECIPE", "--set", "sim.lengths.kind=gamma"], "sim.lengths.kind: unknown 'gamma'; known are constant"),
        (["RECIPE", "--set", "sim.instance.profile=gone.json"], "gone.json: No such file or directory; make it anew"),
        (["RECIPE", "--run-dir", "FULL"], "already exists: this folder holds a run; give another --run-dir"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = toml(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / METRICS).touch()
    given = [{"RECIPE": str(file), "FULL": str(tmp_path / "full")}.get(a, a) for a in arguments]
    assert main(["sim", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_server_may_be_named_by_model_and_gpu() -> None:
    slow, fast = (
        simulate.outcome(small(sim={"instance": {"profile": name}})) for name in ("qwen3-32b@a100", "qwen3-0.6b@h200")
    )
    assert not slow.error and not fast.error
    assert slow.summary.seconds > 1.1 * fast.summary.seconds
    with pytest.raises(RecipeError, match="unknown GPU 'b200'; known are"):
        simulate.check(small(sim={"instance": {"profile": "qwen3-8b@b200"}}))
