from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_dir import RunDirError
from asyncrl.observe.summary import duration, package_versions, read_summary, reward_edges, write_summary

from .synthetic import Clock, make_recipe, make_run
from .test_run_dir import files_at_most


@pytest.mark.parametrize(
    ("rewards", "edges"),
    [
        ([], (None, None)),
        ([0.5], (0.5, 0.5)),
        ([0.0, 1.0], (0.0, 1.0)),
        ([0.0, 0.5, 1.0], (0.0, 1.0)),
        ([0.0] * 5 + [9.0] * 3 + [1.0] * 5, (0.0, 1.0)),
        ([1, 2, 3, 4, 5, 6], (2.0, 5.0)),
    ],
)
def test_reward_edges_are_means_of_up_to_five_steps_that_do_not_overlap(rewards, edges):
    assert reward_edges(rewards) == edges


def test_a_summary_reads_back(tmp_path: Path):
    make_run(tmp_path, steps=3)
    written = json.loads((tmp_path / "summary.json").read_bytes())
    summary = read_summary(tmp_path)
    assert summary is not None
    assert written["staleness"] == {"mean": summary.staleness.mean, "max": summary.staleness.max, "bound": 1}
    assert written["command"] == ["asyncrl", "train"]
    assert written["ledger"] == {"consumed": 48, "surplus": 3}
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary


def test_a_summary_is_there_whole_or_not_at_all(tmp_path: Path):
    recorder = Recorder(tmp_path, make_recipe(), Clock())
    recorder.close()
    summary = recorder.summary(exit="finished", started="", command=[], ledger={})
    with files_at_most(50), pytest.raises(RunDirError, match=r"summary\.json: cannot write"):
        write_summary(tmp_path, summary)
    assert read_summary(tmp_path) is None
    assert not list(tmp_path.glob("summary*"))


def test_versions_are_those_installed():
    versions = package_versions()
    assert versions["msgspec"] == metadata.version("msgspec")
    assert versions["torch"] == metadata.version("torch")
    assert versions["python"].startswith("3.")


def test_durations():
    assert [duration(s) for s in (0, 59.6, 61, 3725.2)] == ["0:00:00", "0:01:00", "0:01:01", "1:02:05"]
