"""Checkpoints of whole runs: what stays of them, what an interrupt leaves, and runs that go on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from .conftest import Train
from .test_train import set_

pytestmark = pytest.mark.timeout(400)

Start = Callable[..., Train]


def checkpoints(run: Train) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())


def test_an_interrupted_run_goes_on_where_it_was(train: Start, tiny_recipe: Path) -> None:
    run = train(*set_("run.steps=5000", "run.checkpoint_every=2", "run.keep_checkpoints=1"))
    run.until(lambda: run.steps() >= 3, 200)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(90) == 130, run.text()
    run.check_ended_cleanly()
    steps = run.steps()
    index = json.loads((run.run_dir / "checkpoints" / "index.json").read_text())
    last = index["checkpoints"][-1]["version"]
    assert last in (steps, steps + 1), "a step that was being trained is in it"
    assert set(checkpoints(run)) == {"index.json", *(f"version-{e['version']}" for e in index["checkpoints"])}
    assert {e["version"] for e in index["checkpoints"]} == {last, index["best"]}
    AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / f"version-{last}")
    consumed = [t["task"] for t in run.lines("trajectories.jsonl") if t["state"] == "consumed"]

    again = Train(tiny_recipe, run.run_dir, *set_(f"run.steps={last + 2}", "run.keep_checkpoints=1"), resume=True)
    try:
        assert again.wait(120) == 0, again.text()
        again.check_ended_cleanly()
        assert again.summary["exit"] == "finished"
        metrics = again.lines("metrics.jsonl")
        versions = [row["version"] for row in metrics]
        assert versions == [*range(1, steps + 1), last + 1, last + 2]
        times = [row["time/at"] for row in metrics]
        assert times == sorted(times)
        assert max(row["staleness/max"] for row in metrics) <= 1
        evals = [row["version"] for row in again.lines("evals.jsonl")]
        assert evals == [0, last + 2]
        tasks = [t["task"] for t in again.lines("trajectories.jsonl") if t["state"] == "consumed"]
        assert tasks[: len(consumed)] == consumed, "also of a batch that was taken and not trained"
        assert len(tasks) == 16 * (last + 2)
        assert (again.run_dir / "report.png").exists()
        assert list(again.run_dir.glob("trace-before-v*.json"))
        AutoModelForCausalLM.from_pretrained(again.run_dir / "checkpoints" / f"version-{last + 2}")
    finally:
        again.kill()


def kill_controller(run: Train, steps: int) -> None:
    """Once it has done so many steps. What it started ends with it."""
    run.until(lambda: run.steps() >= steps, 300)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 60
    while run.processes():
        assert time.monotonic() < deadline, "processes outlive their controller"
        time.sleep(0.1)


@pytest.mark.timeout(1200)  # three starts
def test_a_run_that_is_killed_and_started_again_loses_nothing(train: Start, tiny_recipe: Path) -> None:
    overrides = set_("run.steps=7", "run.checkpoint_every=3", "run.eval_tasks=4")
    run = train(*overrides)
    kill_controller(run, 2)
    run = Train(tiny_recipe, run.run_dir, *overrides)  # the same command
    kill_controller(run, 5)
    run = Train(tiny_recipe, run.run_dir, *overrides, *set_("trainer.ranks=1", "engine.count=3"))
    try:
        assert run.wait(300) == 0, run.text()
        run.check_ended_cleanly()
        assert run.summary["exit"] == "finished"
        rows = run.lines("metrics.jsonl")
        assert len({row["version"] for row in rows}) == len(rows), "a step has two lines"
        assert [row["version"] for row in run.lines("evals.jsonl")] == [0, 7]
        with closing(sqlite3.connect(run.run_dir / "run.db")) as db:
            consumed = db.execute("SELECT step, count(*) FROM groups WHERE state = 'consumed' GROUP BY step").fetchall()
            assert consumed == [(step, 4) for step in range(7)]
            ends = dict(db.execute("SELECT state, count(*) FROM trajectories GROUP BY state"))
            ids = {number for (number,) in db.execute("SELECT id FROM trajectories WHERE state = 'consumed'")}
            assert db.execute("SELECT value FROM notes WHERE key = 'life'").fetchone() == (3,)
        ledger = run.summary["ledger"]
        assert ends == {state: n for state, n in ledger.items() if n and state != "reserved_ever"}
        written = [t["id"] for t in run.lines("trajectories.jsonl") if t["state"] == "consumed"]
        assert len(written) == len(set(written)) and set(written) == ids
    finally:
        run.kill()


def test_two_runs_in_one_folder_are_refused(train: Start, tiny_recipe: Path) -> None:
    run = train(*set_("run.steps=5000"))
    run.until(lambda: (run.run_dir / "run.db").exists())
    second = Train(tiny_recipe, run.run_dir, *set_("run.steps=5000"), output=run.run_dir.with_suffix(".second"))
    assert second.wait(90) == 1
    lock = run.run_dir / "run.lock"
    told = f"asyncrl: {lock}: another process runs in this folder; end it, or give another --run-dir"
    assert second.text() == f"{told}\n"


def test_a_killed_run_goes_on_from_its_last_checkpoint_and_a_damaged_one_names_the_one_before(
    train: Start, tiny_recipe: Path
) -> None:
    run = train(*set_("run.steps=5000", "run.checkpoint_every=1", "run.keep_checkpoints=0", "run.eval_tasks=1"))
    run.until(lambda: (run.run_dir / "checkpoints" / "version-3").is_dir())
    run.kill()
    folder = run.run_dir / "checkpoints"
    (folder / ".version-9.1.part").mkdir()
    newest = max(int(path.name.removeprefix("version-")) for path in folder.glob("version-*"))
    file = folder / f"version-{newest}" / "trainer" / "__1_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    before = {path: path.read_bytes() for path in run.run_dir.glob("*.jsonl")}
    again = Train(tiny_recipe, run.run_dir, *set_("run.steps=5000"), resume=True)
    assert again.wait(60) == 2
    (line,) = again.text().splitlines()
    assert line.startswith(f"asyncrl: {file}: has {len(whole) - 1} of {len(whole)} bytes; resume from the one before")
    assert line.endswith(f"--resume {folder / f'version-{newest - 1}'}")
    assert before == {path: path.read_bytes() for path in run.run_dir.glob("*.jsonl")}

    named = Train(
        tiny_recipe,
        run.run_dir,
        *set_(f"run.steps={newest}", "run.eval_tasks=1", "trainer.learning_rate=1e-4"),
        resume=f"checkpoints/version-{newest - 1}",
    )
    try:
        assert named.wait(120) == 0, named.text()
        assert [row["version"] for row in named.lines("metrics.jsonl")] == list(range(1, newest + 1))
        assert named.lines("metrics.jsonl")[-1]["trainer/lr"] == pytest.approx(1e-4)
        assert f"lost-version-{newest}" in checkpoints(named)
        assert ".version-9.1.part" not in checkpoints(named)
    finally:
        named.kill()


def test_what_cannot_be_resumed_is_refused_before_anything_starts(tiny_recipe: Path, tmp_path: Path) -> None:
    empty = Train(tiny_recipe, tmp_path / "empty", resume=True)
    assert empty.wait(60) == 2
    assert empty.text().splitlines() == [
        f"asyncrl: --resume {tmp_path / 'empty'}: no checkpoint in {tmp_path / 'empty' / 'checkpoints'}; "
        "begin a new run"
    ]
    assert not (tmp_path / "empty").exists()


def test_checkpoints_that_do_not_fit_on_the_disk_are_told_and_cost_only_the_end(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    """A limit on the size of the trainer's files stands for the disk."""
    overrides = set_("run.steps=3", "run.checkpoint_every=1", "run.eval_tasks=1", "run.trace_requests=false")
    run = Train(tiny_recipe, tmp_path / "run", *overrides)
    try:
        for rank in run.until(lambda: len(ranks := run.processes("-u -m asyncrl.train.worker")) == 2 and ranks):
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (100_000, 100_000))
        assert run.wait(120) == 1, run.text()
        assert run.steps() == 3
        told = [line for line in run.text().splitlines() if "was not written" in line and "training goes on" in line]
        assert len(told) >= 2 and str(tmp_path / "run" / "checkpoints" / "version-1") in told[0]
        assert run.text().splitlines()[-1].startswith("asyncrl: trainer: checkpoint ")
        assert list((run.run_dir / "checkpoints").iterdir()) == []
        assert "Traceback" not in run.text()
    finally:
        run.kill()
        shutil.rmtree(tmp_path / "run")


def test_a_second_interrupt_skips_the_last_checkpoint(train: Start) -> None:
    run = train(*set_("run.steps=5000"))
    run.until(lambda: run.steps() >= 1)
    for pid in run.processes("asyncrl.train.worker", "-u"):
        os.kill(pid, signal.SIGSTOP)  # it would take for ever
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "writing a last checkpoint" in run.text(), 30)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert run.summary["exit"] == "interrupted"
    assert "Traceback" not in run.text()
