from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from asyncrl.observe.busy import Segment
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.report import BINS, build_figure, draw_timeline, write_report
from asyncrl.observe.run_dir import METRICS, RunDirError, read_lines
from asyncrl.observe.timeline import Lane

from .synthetic import Clock, make_recipe, make_run, tell_run


def axes_of(figure: Figure) -> dict[str, Axes]:
    return {str(ax.get_label()): ax for ax in figure.axes}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "a"
    make_run(path, steps=30)
    return path


def test_the_page_is_a_png_of_its_size_and_can_be_drawn_again(run_dir: Path):
    path = write_report(run_dir)
    assert path == run_dir / "report.png"
    assert imread(path).shape[:2] == (1250, 1400)
    assert write_report(run_dir).stat().st_size == path.stat().st_size


def test_the_axes_show_what_the_files_say(run_dir: Path):
    rows = list(read_lines(run_dir / METRICS))
    axes = axes_of(build_figure(run_dir))
    lines = {str(line.get_label()): line for line in axes["reward"].lines}
    assert lines["reward"].get_ydata().tolist() == [row["reward/mean"] for row in rows]
    assert lines["held-out accuracy"].get_xydata().tolist() == [[0, 0.21], [30, 0.92]]
    smooth = next(line for label, line in lines.items() if label.startswith("mean of 3"))
    assert smooth.get_ydata()[-1] == pytest.approx(sum(row["reward/mean"] for row in rows[-3:]) / 3)
    lines = {str(line.get_label()): line for line in axes["response"].lines}
    for key in ("mean", "p95", "max"):
        assert lines[key].get_ydata().tolist() == [row[f"response/{key}"] for row in rows]
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes["staleness"].patches}
    assert bars == {k: sum(row.get(f"staleness/count/{k}", 0) for row in rows) for k in (0, 1)}
    assert sum(bars.values()) == 30 * 16
    assert axes["staleness"].lines[0].get_xdata() == [1.5, 1.5]
    assert [text.get_text() for text in axes["staleness"].texts if "bound" in text.get_text()] == ["bound 1"]
    for panel, name in (("kl", "kl"), ("clip", "clip_fraction")):
        lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes[panel].lines}
        for age in (0, 1):
            key = f"trainer/{name}_staleness_{age}"
            assert lines[f"{age}"] == [[row["step"], row[key]] for row in rows if key in row]
        assert len(lines["1"]) < 30, "a step without such tokens has no point"
    for panel, name in (("entropy", "entropy"), ("norm", "grad_norm")):
        assert axes[panel].lines[0].get_ydata().tolist() == [row[f"trainer/{name}"] for row in rows]


def test_a_steps_time_stacks_up_to_the_whole_step(run_dir: Path):
    rows = list(read_lines(run_dir / METRICS))
    layers = axes_of(build_figure(run_dir))["time"].collections
    top = max(layer.get_paths()[0].vertices[:, 1].max() for layer in layers)
    assert top == pytest.approx(max(row["time/step"] for row in rows))
    first = layers[0].get_paths()[0].vertices[:, 1].max()
    assert first == pytest.approx(max(row["time/wait"] for row in rows))


def test_the_title_tells_the_outcome(run_dir: Path):
    summary = json.loads((run_dir / "summary.json").read_bytes())
    title = build_figure(run_dir).get_suptitle()
    assert title.startswith("countdown · finished · 30 steps in 0:01:")
    assert f"bubbles {100 * summary['bubble_share']:.1f} %" in title
    assert "held-out 0.21 → 0.92" in title
    assert "max 1 (bound 1)" in title


def test_a_timeline_of_any_length_is_one_image_a_lane_with_idle_white():
    busy = [Segment(start=i / 100, end=i / 100 + 0.005, version=i // 10_000) for i in range(20_000)]
    half = [Segment(start=0.0, end=100.0, version=1)]
    ax = Figure().add_subplot()
    draw_timeline(
        ax, [Lane(name="trainer", segments=half, updates=()), Lane(name="server 0", segments=busy, updates=())]
    )
    images = [image.get_array() for image in ax.images]
    assert [image.shape for image in images] == [(1, BINS, 3)] * 2
    assert np.all(images[0][0, BINS // 2 + 1 :] == 1.0), "idle is white"
    assert np.ptp(images[0][0, : BINS // 2], axis=0).max() == 0, "one version has one colour"
    left, right = images[1][0, BINS // 4], images[1][0, 3 * BINS // 4]
    assert np.abs(left - right).max() > 0.2, "versions differ"
    full = images[0][0, 0]
    assert len(ax.collections) == 2, "no rectangle for each segment"
    assert images[1][0, 3 * BINS // 4].mean() > full.mean(), "half busy is paler"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["trainer", "server 0"]


def test_a_killed_run_has_a_report(tmp_path: Path):
    clock = Clock()
    recorder = Recorder(tmp_path, make_recipe(), clock)
    tell_run(recorder, clock, steps=10)
    recorder.flush()
    for name in ("metrics.jsonl", "trace.json"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-20])
    figure = build_figure(tmp_path)
    assert "not finished · 9 steps" in figure.get_suptitle()
    assert len(axes_of(figure)["timeline"].images) == 3
    assert imread(write_report(tmp_path)).shape[:2] == (1250, 1400)
    recorder.close()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_hardly_began_has_a_report(tmp_path: Path, steps: int):
    make_run(tmp_path, steps=steps)
    assert imread(write_report(tmp_path)).shape[:2] == (1250, 1400)


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    with pytest.raises(RunDirError, match=r"no metrics\.jsonl there: give a run directory"):
        write_report(tmp_path)
