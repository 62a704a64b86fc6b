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
    newest_ids,
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
        trajectory = make_trajectory(step, v_traj=step - step % 2, reward=step, length=8)
        recorder.step(make_step(step, [trajectory], clock.now))


def finish(recorder: Recorder) -> dict[str, object]:
    recorder.close()
    summary = recorder.summary(exit="finished", started="now", command=[], ledger={})
    assert summary.staleness.mean == 0.5  # of 0, 1, 0, 1
    return {name: getattr(summary, name) for name in ("steps", "seconds", "reward_last", "heldout_before", "tokens")}


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
    assert finish(second) == {"steps": 4, "seconds": 40, "reward_last": 2.5, "heldout_before": 0.25, "tokens": 600}

    rows = list(read_lines(tmp_path / METRICS))
    assert [row["tokens/total"] for row in rows] == [100, 200, 500, 600]
    assert [row["tokens/s"] for row in rows] == [10, 10, 30, 10]
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


def episodes(*ids: int) -> bytes:
    return b"".join(b'{"id":%d,"group":%d}\n' % (number, number // 2) for number in ids)


def test_what_stays_after_a_line_that_goes_is_put_back_also_when_a_kill_came_between(tmp_path: Path) -> None:
    path, stays = tmp_path / TRAJECTORIES, Resumed(version=0, at=0.0, has_ended=lambda number: number not in (3, 5))
    path.write_bytes(episodes(0, 1, 2, 3, 4, 5, 6))
    rewind(tmp_path, stays)
    assert path.read_bytes() == episodes(0, 1, 2, 4, 6)
    assert [file.name for file in tmp_path.iterdir()] == [TRAJECTORIES]
    aside = tmp_path / f"{TRAJECTORIES}.cut-at-{len(episodes(0, 1, 2))}"
    for left in (episodes(0, 1, 2, 3, 4, 5, 6), episodes(0, 1, 2), episodes(0, 1, 2, 4)[:-3], episodes(0, 1, 2, 4, 6)):
        path.write_bytes(left)
        aside.write_bytes(episodes(4, 6))
        rewind(tmp_path, stays)
        assert path.read_bytes() == episodes(0, 1, 2, 4, 6)
        assert not aside.exists()


def test_going_on_needs_no_space_for_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / TRAJECTORIES
    path.write_bytes(episodes(*range(10_000)))
    inode, size = path.stat().st_ino, path.stat().st_size
    rewind(tmp_path, Resumed(version=0, at=0.0, has_ended=lambda number: True))
    written: list[int] = []
    monkeypatch.setattr("shutil.copyfileobj", lambda source, target: written.append(len(source.read())))
    rewind(tmp_path, Resumed(version=0, at=0.0, has_ended=lambda number: number < 9_999))
    assert (path.stat().st_ino, path.stat().st_size) == (inode, size - len(episodes(9_999)))
    assert written == [0]


def test_the_newest_ids_are_known_from_the_episodes(tmp_path: Path) -> None:
    assert newest_ids(tmp_path) == (-1, -1)
    (tmp_path / TRAJECTORIES).write_bytes(episodes(4, 7, 2))
    assert newest_ids(tmp_path) == (3, 7)
