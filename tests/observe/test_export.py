"""``asyncrl export``: what a line of trajectories.jsonl has is in the Parquet file. Needs pyarrow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncrl.observe.export import export
from asyncrl.observe.run_dir import TRAJECTORIES, RunDirError

LINE = {
    "id": 7,
    "group": 3,
    "index": 1,
    "task": "train/3",
    "state": "consumed",
    "reward": 0.5,
    "v_traj": 2,
    "versions": [[-1, 2], [2, 1]],
    "turns": 1,
    "finish_reason": "stop",
    "at": 1.5,
    "metrics": {"solved": 1.0},
    "turn_ends": [3],
    "turn_rewards": [0.5],
    "segment_ends": [],
    "turn_seconds": [[0.0, 0.5, 0.25]],
    "reset_s": 0.0,
    "tokens": [5, 6, 7],
    "logprobs": [-0.5],
    "text": [{"by": "env", "text": "a"}, {"by": "policy", "text": "b"}],
}


def test_every_episode_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("asyncrl.observe.export.ROWS", 2)
    short = {key: value for key, value in LINE.items() if key not in ("tokens", "logprobs", "text")}
    lines = [LINE, {**short, "id": 8}, {**LINE, "id": 9, "metrics": {}}]
    (tmp_path / TRAJECTORIES).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": 10, "torn')
    assert export(tmp_path, tmp_path / "out.parquet") == 3
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in rows] == [7, 8, 9]
    assert rows[0]["versions"] == [{"version": -1, "tokens": 2}, {"version": 2, "tokens": 1}]
    assert rows[0]["turn_seconds"] == [{"waiting": 0.0, "generating": 0.5, "env": 0.25}]
    assert rows[0]["metrics"] == [("solved", 1.0)] and rows[2]["metrics"] == []
    assert rows[1]["tokens"] is None
    same = ("group", "task", "state", "reward", "tokens", "logprobs", "text", "turn_ends")
    assert {key: rows[0][key] for key in same} == {key: LINE[key] for key in same}


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RunDirError, match=r"out\.parquet: needs pyarrow; pip install 'asyncrl\[parquet\]'"):
        export(tmp_path, tmp_path / "out.parquet")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(RunDirError, match=r"trajectories\.jsonl: not there: give the directory of a run"):
        export(tmp_path, tmp_path / "out.parquet")
