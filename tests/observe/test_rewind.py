"""A run directory that is taken back to a checkpoint, and appended to."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_dir import (
    EVALS,
    METRICS,
    TRACE,
    TRAJECTORIES,
    LineFile,
    Resumed,
    RunDirError,
    read_lines,
    rewind,
)

from .synthetic import Clock, make_recipe, make_step, make_trajectory


def record(recorder: Recorder, clock: Clock, *steps: int) -> None:
    """Ten seconds a step, with a trajectory that ends in the middle of it."""
    for step in steps:
        clock.now += 5
        recorder.trajectory(make_trajectory(step, v_traj=step, reward=0.5, length=8), "consumed")
        clock.now += 5
        recorder.step(make_step(step, [make_trajectory(step, v_traj=step, reward=step, length=8)], clock.now))


def finish(recorder: Recorder) -> dict[str, object]:
    recorder.close()
    summary = recorder.summary(exit="finished", started="now", command=[], ledger={})
    return {name: getattr(summary, name) for name in ("steps", "seconds", "reward_last", "heldout_before")}


def test_a_resumed_run_appends_to_what_was_there_at_its_checkpoint(tmp_path: Path) -> None:
    clock = Clock()
    first = Recorder(tmp_path, make_recipe(), clock)
    first.eval(0, 0.25, 4)
    record(first, clock, 0, 1, 2)
    first.eval(3, 0.5, 4)
    first.close()
    trace = (tmp_path / TRACE).read_bytes()

    later = Clock()
    later.now += 1000
    second = Recorder(tmp_path, make_recipe(), later, resume=Resumed(version=2, at=20.0))
    second.eval(2, 0.375, 4)
    record(second, later, 2, 3)
    assert second.seconds_per_step == 10
    assert finish(second) == {"steps": 4, "seconds": 40, "reward_last": 2.5, "heldout_before": 0.25}

    rows = list(read_lines(tmp_path / METRICS))
    assert [(row["version"], row["time/at"]) for row in rows] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert [(e["version"], e["accuracy"]) for e in read_lines(tmp_path / EVALS)] == [(0, 0.25), (2, 0.375)]
    assert [(t["v_traj"], t["at"]) for t in read_lines(tmp_path / TRAJECTORIES)] == [(0, 5), (1, 15), (2, 25), (3, 35)]
    assert (tmp_path / "trace-before-v2.json").read_bytes() == trace
    assert (tmp_path / TRACE).read_bytes().startswith(b"[")


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"version":1}\n{"version":2}\n{"vers')
    rewind(tmp_path, Resumed(version=2, at=0.0))
    assert (tmp_path / METRICS).read_bytes() == b'{"version":1}\n{"version":2}\n'
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_line_that_is_no_json_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b"oops\n")
    with pytest.raises(RunDirError, match=r"metrics\.jsonl: has a line that is not a JSON object"):
        rewind(tmp_path, Resumed(version=2, at=0.0))
    assert (tmp_path / METRICS).read_bytes() == b"oops\n"


def test_an_appended_file_undoes_only_its_own_failed_write(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"{}\n")
    file = LineFile(tmp_path / "a", append=True)
    file.write(b"[]\n")
    assert file._size == 6
    file.close()
    assert (tmp_path / "a").read_bytes() == b"{}\n[]\n"
