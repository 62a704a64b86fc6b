"""Runs side by side: the table, and a page whose axes show what the folders say."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from asyncrl.observe.compare import comparison_figure, comparison_lines, read_compared, write_comparison
from asyncrl.observe.run_dir import SUMMARY, RunDirError

from .synthetic import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_run(path / "a", steps=10)
    make_run(path / "b", steps=20)
    return path


def test_the_table_has_a_line_for_each_run_and_compares_with_the_first(folder: Path):
    runs = [read_compared(folder / name, name) for name in ("a", "b")]
    head, first, second = comparison_lines(runs)
    assert head.split() == ["s/step", "tokens/s", "×", "bubbles", "trainer", "idle", "staleness", "max", "ended"]
    assert first.split()[0] == "a" and first.split()[3] == "1.00"
    assert float(second.split()[3]) == pytest.approx(runs[1].tokens_per_s / runs[0].tokens_per_s, abs=0.005)
    for run, text in zip(runs, (first, second), strict=True):
        assert float(text.split()[1]) == pytest.approx(run.summary.seconds / run.summary.steps, abs=0.005)
        assert text.endswith(run.summary.exit)


def test_staleness_counts_are_those_of_all_steps(folder: Path):
    run = read_compared(folder / "a", "a")
    assert sum(run.staleness.values()) == 10 * 16
    mean = sum(k * n for k, n in run.staleness.items()) / (10 * 16)
    assert mean == pytest.approx(run.summary.staleness.mean)


def test_the_axes_show_each_run(folder: Path):
    runs = [read_compared(folder / name, name) for name in ("a", "b")]
    axes = {str(ax.get_label()): ax for ax in comparison_figure(runs).axes}
    assert [bar.get_height() for bar in axes["throughput"].patches] == [run.tokens_per_s for run in runs]
    servers = [bar.get_height() for bar in axes["bubbles"].patches][:2]
    assert servers == pytest.approx([100 * (run.summary.bubble_share or 0) for run in runs])
    heights = [bar.get_height() for bar in axes["staleness"].patches]
    assert sum(heights) == pytest.approx(200), "per cent of each run"
    assert axes["timeline a"].get_xlim() == axes["timeline b"].get_xlim(), "one scale of time"


def test_the_page_is_a_picture(folder: Path):
    path = write_comparison([read_compared(folder / name, name) for name in ("a", "b")], folder / "comparison.png")
    assert imread(path).shape[1] == 1400


def test_a_run_that_has_not_ended_is_refused(folder: Path, tmp_path: Path):
    make_run(tmp_path / "c", steps=2)
    (tmp_path / "c" / SUMMARY).unlink()
    with pytest.raises(RunDirError, match="no summary there"):
        read_compared(tmp_path / "c", "c")
