"""Runs side by side: a table, and a page with throughput, bubbles, staleness and each run's servers over time.

Reads run directories, real or simulated; all timelines have the same scale of seconds.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncrl.core.types import Record
from asyncrl.observe.report import draw_timeline
from asyncrl.observe.run_dir import METRICS, TRACE, RunDirError, read_lines, write_atomic
from asyncrl.observe.summary import Summary, read_summary
from asyncrl.observe.timeline import TRAINER, Lane, read_timeline

SHOWN_SERVERS = 8
"""Servers of a run that get a lane; the rest look the same."""
SECONDS_PER_RUN_IN = 0.32
COLOURS = ("#3b6fb6", "#d9822b", "#4f9d69", "#8b6fb0", "#b02a2a", "#6b7280", "#c9a227", "#2a9d8f")


class Compared(Record, frozen=True, kw_only=True):
    """One run, from its folder. ``trained`` counts generated tokens that were trained, ``staleness`` trained
    trajectories by versions behind."""

    name: str
    summary: Summary
    trained: float
    staleness: dict[int, int]
    lanes: Sequence[Lane]

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, over the whole run: what was generated in vain does not count."""
        return self.trained / self.summary.seconds if self.summary.seconds > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        return self.summary.seconds / self.summary.steps if self.summary.steps else float("nan")


def read_compared(run_dir: Path, name: str) -> Compared:
    """Raises ``RunDirError`` if the run has not ended."""
    summary = read_summary(run_dir)
    if summary is None:
        raise RunDirError(f"{run_dir}: no summary there: give the directory of a run that has ended")
    staleness: dict[int, int] = {}
    trained = 0.0
    for row in read_lines(run_dir / METRICS):
        trained += row["tokens/batch"]
        for key, n in row.items():
            if key.startswith("staleness/count/"):
                k = int(key.rsplit("/", 1)[1])
                staleness[k] = staleness.get(k, 0) + n
    return Compared(
        name=name, summary=summary, trained=trained, staleness=staleness, lanes=read_timeline(run_dir / TRACE)
    )


def comparison_lines(runs: Sequence[Compared]) -> list[str]:
    """A table with one line a run; ``×`` is the throughput against the first."""
    width = max(len(r.name) for r in runs) + 2
    lines = [
        f"{'':{width}}{'s/step':>10}{'tokens/s':>12}{'×':>7}{'bubbles':>9}{'trainer idle':>14}"
        f"{'staleness':>11}{'max':>5}  ended"
    ]
    for r in runs:
        s = r.summary
        speedup = r.tokens_per_s / runs[0].tokens_per_s if runs[0].tokens_per_s else float("nan")
        lines.append(
            f"{r.name:{width}}{r.seconds_per_step:>10,.2f}{r.tokens_per_s:>12,.0f}{speedup:>7.2f}"
            f"{_percent(s.bubble_share):>9}{_percent(s.trainer_idle_share):>14}"
            f"{'-' if s.staleness.mean is None else format(s.staleness.mean, '.2f'):>11}"
            f"{'-' if s.staleness.max is None else s.staleness.max:>5}  {s.exit}"
        )
    return lines


def write_comparison(runs: Sequence[Compared], path: Path) -> Path:
    """Draw the page to ``path``. Raises ``RunDirError``."""
    buffer = io.BytesIO()
    comparison_figure(runs).savefig(buffer, format="png")
    write_atomic(path, buffer.getvalue())
    return path


def comparison_figure(runs: Sequence[Compared]) -> Figure:
    """Axes are labelled ``throughput``, ``bubbles``, ``staleness`` and ``timeline NAME``."""
    lanes = [_few(run.lanes) for run in runs]
    heights = [2.8, *(0.9 + SECONDS_PER_RUN_IN * len(shown) for shown in lanes)]
    figure = Figure(figsize=(14, sum(heights) + 0.5), dpi=100, layout="constrained")
    grid = figure.add_gridspec(1 + len(runs), 3, height_ratios=heights)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
    _bars(figure.add_subplot(grid[0, 0], label="throughput"), "trained tokens per second", runs, colours,
          [run.tokens_per_s for run in runs], "{:,.0f}")  # fmt: skip
    _shares(figure.add_subplot(grid[0, 1], label="bubbles"), runs)
    _staleness(figure.add_subplot(grid[0, 2], label="staleness"), runs, colours)
    longest = max((s.end for shown in lanes for lane in shown for s in lane.segments), default=1.0)
    for row, (run, shown) in enumerate(zip(runs, lanes, strict=True), start=1):
        ax = figure.add_subplot(grid[row, :], label=f"timeline {run.name}")
        draw_timeline(ax, shown)
        more = len([lane for lane in run.lanes if lane.name != TRAINER]) - SHOWN_SERVERS
        ax.set_title("")
        ax.set_title(f"{run.name}: {run.summary.steps} steps in {run.summary.seconds:,.0f} s"
                     + (f", {more} more servers not shown" if more > 0 else ""), loc="left", fontsize=11)  # fmt: skip
        ax.set_xlim(0, longest)
    return figure


def _few(lanes: Sequence[Lane]) -> list[Lane]:
    """The trainer and the first servers."""
    trainer = [lane for lane in lanes if lane.name == TRAINER]
    return trainer + [lane for lane in lanes if lane.name != TRAINER][:SHOWN_SERVERS]


def _bars(
    ax: Axes, title: str, runs: Sequence[Compared], colours: Sequence[str], values: Sequence[float], form: str
) -> None:
    bars = ax.bar([run.name for run in runs], values, color=colours, width=0.65)
    ax.bar_label(bars, [form.format(value) for value in values], fontsize=9)
    _tidy(ax, title)


def _shares(ax: Axes, runs: Sequence[Compared]) -> None:
    x = np.arange(len(runs))
    for offset, name, colour, values in (
        (-0.19, "servers", COLOURS[0], [run.summary.bubble_share for run in runs]),
        (0.19, "trainer", COLOURS[1], [run.summary.trainer_idle_share for run in runs]),
    ):
        heights = [100 * (value or 0.0) for value in values]
        bars = ax.bar(x + offset, heights, width=0.36, color=colour, label=name)
        ax.bar_label(bars, [f"{height:.0f}" for height in heights], fontsize=9)
    ax.set_xticks(x, [run.name for run in runs])
    ax.legend(frameon=False, fontsize=9)
    _tidy(ax, "idle share of the time, %")


def _staleness(ax: Axes, runs: Sequence[Compared], colours: Sequence[str]) -> None:
    width = 0.8 / len(runs)
    for i, (run, colour) in enumerate(zip(runs, colours, strict=True)):
        total = sum(run.staleness.values()) or 1
        x = [k + (i - (len(runs) - 1) / 2) * width for k in run.staleness]
        ax.bar(x, [100 * n / total for n in run.staleness.values()], width=width, color=colour, label=run.name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("versions behind")
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    _tidy(ax, "staleness of trained trajectories, %")
    ax.margins(y=0.4)


def _tidy(ax: Axes, title: str) -> None:
    ax.set_title(title, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(y=0.15)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
