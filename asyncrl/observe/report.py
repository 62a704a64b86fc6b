"""The report: one page of curves, drawn from the files of a run directory alone, so it can be drawn again at any time.

Loads matplotlib, so import it when a report is wanted. Works on unfinished and killed runs: it leaves out what is
missing.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncrl.config import loads_json
from asyncrl.observe.run_dir import EVALS, METRICS, RECIPE, REPORT, TRACE, RunDirError, read_lines, write_atomic
from asyncrl.observe.summary import Summary, bound_note, duration, read_summary
from asyncrl.observe.timeline import Lane, bin_segments, read_timeline

SIZE_IN = (14.0, 12.5)
DPI = 100
BINS = 1200
"""Pieces of the timeline: about one a pixel."""
MOST_TICKS = 150
"""A lane with more weight updates shows them by colour only."""
PANELS = {
    "R": "reward",
    "S": "staleness",
    "T": "timeline",
    "L": "response",
    "D": "time",
    "K": "kl",
    "C": "clip",
    "E": "entropy",
}
VERSION_COLOURS = "viridis"
WAIT, TRAIN, UPDATE, OTHER, LIMIT = "#c9ced6", "#3b6fb6", "#d9822b", "#8b6fb0", "#b02a2a"

Rows = Sequence[dict[str, Any]]


def write_report(run_dir: Path) -> Path:
    """Draw ``report.png`` into the run directory. Raises ``RunDirError``."""
    if not (run_dir / METRICS).exists():
        raise RunDirError(f"{run_dir}: no {METRICS} there: give a run directory")
    buffer = io.BytesIO()
    build_figure(run_dir).savefig(buffer, format="png", dpi=DPI)
    write_atomic(run_dir / REPORT, buffer.getvalue())
    return run_dir / REPORT


def build_figure(run_dir: Path) -> Figure:
    """The page, 14 × 12.5 in, with axes labelled as ``PANELS`` says, and ``norm`` on the right of ``entropy``."""
    steps, evals = list(read_lines(run_dir / METRICS)), list(read_lines(run_dir / EVALS))
    summary = read_summary(run_dir)
    name, bound = _recipe(run_dir, summary)
    lanes = read_timeline(run_dir / TRACE)
    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    heights = [3.0, min(3.4, 1.3 + 0.45 * len(lanes)), 2.8, 2.5]
    mosaic = figure.subplot_mosaic("RRRRSS;TTTTTT;LLLDDD;KKCCEE", height_ratios=heights)
    axes = {label: mosaic[letter] for letter, label in PANELS.items()}
    for label, ax in axes.items():
        ax.set_label(label)
        ax.spines[["top", "right"]].set_visible(False)
    draw_reward(axes["reward"], steps, evals)
    draw_staleness(axes["staleness"], steps, bound)
    draw_timeline(axes["timeline"], lanes)
    draw_response(axes["response"], steps)
    draw_time(axes["time"], steps)
    draw_by_staleness(axes["kl"], steps, "kl", "KL(μ ‖ π), by staleness", "nats a token")
    draw_by_staleness(axes["clip"], steps, "clip_fraction", "clipped tokens, by staleness", "share")
    draw_entropy(axes["entropy"], steps)
    figure.suptitle(_title(name, steps, evals, summary), fontsize=13)
    return figure


def draw_reward(ax: Axes, steps: Rows, evals: Rows) -> None:
    x, y = _column(steps, "reward/mean")
    ax.set(title="reward, and accuracy on held-out tasks", xlabel="train step", ylabel="mean of the batch")
    ax.plot(x, y, color=TRAIN, alpha=0.35 if len(x) > 20 else 1.0, lw=1.2, label="reward")
    if len(x) > 20:
        width = max(3, len(x) // 20)
        smooth = np.convolve(y, np.ones(width) / width, mode="valid")
        ax.plot(x[width - 1 :], smooth, color=TRAIN, lw=2, label=f"mean of {width} steps")
    if evals:
        # Version v is what v train steps have made, so it stands before step v.
        points = [(float(e["version"]), float(e["accuracy"])) for e in evals]
        ax.plot(*zip(*points, strict=True), "D", color=UPDATE, ms=8, label="held-out accuracy", clip_on=False, zorder=3)
        for version, accuracy in points:
            ax.annotate(f"{accuracy:.2f}", (version, accuracy), (0, 9), textcoords="offset points", ha="center")
    values = [*y, *(e["accuracy"] for e in evals)]
    if values and min(values) >= 0 and max(values) <= 1:
        ax.set_ylim(-0.03, 1.1)
    ax.grid(alpha=0.25)
    if values:
        ax.legend(loc="lower right", frameon=False)


def draw_staleness(ax: Axes, steps: Rows, bound: int | None) -> None:
    counts: Counter[int] = Counter()
    for row in steps:
        for key, n in row.items():
            if key.startswith("staleness/count/"):
                counts[int(key.rsplit("/", 1)[1])] += n
    total = counts.total()
    title = "staleness of trained trajectories"
    if total:
        title += f": mean {sum(k * n for k, n in counts.items()) / total:.2f}"
    if (predicted := _column(steps, "predicted/staleness")[1]).size:
        title += f", predicted {predicted.mean():.2f}"
    ax.set(title=title, xlabel="versions behind", ylabel="trajectories")
    bars = ax.bar(list(counts), list(counts.values()), width=0.7, color=TRAIN)
    ax.bar_label(bars, [f"{100 * n / total:.0f} %" for n in counts.values()], fontsize=9)
    right = max(counts, default=0)
    if bound is not None:
        right = max(right, bound)
        ax.axvline(bound + 0.5, color=LIMIT, lw=1.5, ls="--")
        ax.annotate(f"bound {bound}", (bound + 0.5, 0.97), (6, 0), ("data", "axes fraction"), "offset points",
                    color=LIMIT, rotation=90, va="top")  # fmt: skip
    ax.set_xlim(-0.6, right + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(y=0.15)


def draw_timeline(ax: Axes, lanes: Sequence[Lane]) -> None:
    """One lane each: hue is the policy version (odd ones a shade darker), strength the busy share, white is idle."""
    ax.set(title="trainer and servers, coloured by policy version (white: idle, tick: new weights)")
    ax.set_xlabel("seconds since the run began")
    labelled = range(0, len(lanes), 1 + len(lanes) // 16)
    ax.set_yticks(labelled, [lanes[row].name for row in labelled])
    drawn = [segment for lane in lanes for segment in lane.segments]
    if not drawn:
        return
    start, end = min(segment.start for segment in drawn), max(segment.end for segment in drawn)
    newest = max(segment.version for segment in drawn)
    colours, scale = colormaps[VERSION_COLOURS], Normalize(0, max(1, newest))
    for row, lane in enumerate(lanes):
        share, version = bin_segments(lane.segments, start, end, BINS)
        colour = colours(scale(version))[:, :3]
        colour[version % 2 == 1] *= 0.82  # so that neighbouring versions can be told apart
        image = np.ones((1, BINS, 3))
        image[0] += share[:, None] * (colour - 1.0)
        ax.imshow(image, extent=(start, end, row + 0.36, row - 0.36), aspect="auto", interpolation="nearest")
        if len(lane.updates) <= MOST_TICKS:
            ax.vlines(lane.updates, row - 0.44, row - 0.36, color="black", lw=0.8)
    ax.set_xlim(start, end)
    ax.set_ylim(len(lanes) - 0.5, -0.55)
    ax.tick_params(axis="y", length=0)
    figure = ax.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=ax, pad=0.01, aspect=12, label="policy version")
    bar.locator = MaxNLocator(nbins=5, integer=True)
    bar.update_ticks()


def draw_response(ax: Axes, steps: Rows) -> None:
    ax.set(title="response length", xlabel="train step", ylabel="generated tokens")
    for key, colour, width in (("max", WAIT, 1.2), ("p95", UPDATE, 1.2), ("mean", TRAIN, 2.0)):
        x, y = _column(steps, f"response/{key}")
        ax.plot(x, y, color=colour, label=key, lw=width)
    ax.margins(y=0.2)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    if steps:
        ax.legend(loc="upper left", frameon=False, ncols=3)


def draw_time(ax: Axes, steps: Rows) -> None:
    ax.set(title="where a step's time goes", xlabel="train step", ylabel="seconds")
    x, _ = _column(steps, "step")
    wait, train, update = (_column(steps, f"time/{key}")[1] for key in ("wait", "train", "update"))
    other = np.maximum(0.0, _column(steps, "time/step")[1] - wait - train - update)
    if len(x):
        ax.stackplot(
            np.append(x, x[-1] + 1) - 0.5,
            *[np.append(y, y[-1]) for y in (wait, train, update, other)],
            labels=["wait for a batch", "train", "weight update", "other"],
            colors=[WAIT, TRAIN, UPDATE, OTHER],
            step="post",
        )
        ax.legend(loc="upper right", frameon=False, ncols=4)
        ax.set_xlim(x[0] - 0.5, x[-1] + 0.5)
    ax.margins(y=0.2)
    ax.set_ylim(bottom=0)


def draw_by_staleness(ax: Axes, steps: Rows, name: str, title: str, unit: str) -> None:
    """A line for each staleness (in versions) that tokens were trained at; the last is of all that were older too."""
    ax.set(title=title, xlabel="train step", ylabel=unit)
    found = {key for row in steps for key in row if key.startswith(f"trainer/{name}_staleness_")}
    ages = sorted(int(key.rsplit("_", 1)[1]) for key in found)
    colours = colormaps[VERSION_COLOURS]
    for rank, age in enumerate(ages):
        x, y = _column(steps, f"trainer/{name}_staleness_{age}")
        ax.plot(
            x, y, color=colours(0.9 * rank / max(1, len(ages) - 1)), lw=1.2, marker="." * (len(x) < 3), label=f"{age}"
        )
    ax.margins(y=0.25)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    if ages:
        ax.legend(loc="upper right", frameon=False, ncols=3, fontsize=9)


def draw_entropy(ax: Axes, steps: Rows) -> None:
    ax.set(title="entropy and gradient norm", xlabel="train step")
    right = ax.twinx()
    right.set_label("norm")
    right.spines["top"].set_visible(False)
    for side, key, label, colour in (
        (ax, "entropy", "entropy (nats a token)", TRAIN),
        (right, "grad_norm", "gradient norm, before clipping", UPDATE),
    ):
        side.plot(*_column(steps, f"trainer/{key}"), color=colour, lw=1.2)
        side.set_ylabel(label, color=colour)
        side.set_ylim(bottom=0)
    ax.grid(alpha=0.25)


def _column(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows that have ``key``."""
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return np.array([p[0] for p in pairs], dtype=float), np.array([p[1] for p in pairs], dtype=float)


def _recipe(run_dir: Path, summary: Summary | None) -> tuple[str, int | None]:
    """Name and staleness bound, from the resolved recipe, else from the summary."""
    path = run_dir / RECIPE
    if path.exists():
        recipe = loads_json(path.read_bytes())
        return recipe.name, recipe.staleness.limit
    return (summary.recipe, summary.staleness.bound) if summary else (run_dir.name, None)


def _title(name: str, steps: Rows, evals: Rows, summary: Summary | None) -> str:
    seconds = summary.seconds if summary else (steps[-1]["time/at"] if steps else 0.0)
    state = summary.exit if summary else "not finished"
    head = f"{name} · {state} · {len(steps)} steps in {duration(seconds)}"
    if summary is None:
        return head
    facts = []
    if summary.reward_first is not None and summary.reward_last is not None:
        facts.append(f"reward {summary.reward_first:.2f} → {summary.reward_last:.2f}")
    if summary.heldout_before is not None and summary.heldout_after is not None:
        facts.append(f"held-out {summary.heldout_before:.2f} → {summary.heldout_after:.2f}")
    if summary.staleness.mean is not None:
        s = summary.staleness
        facts.append(f"staleness mean {s.mean:.2f}, max {s.max}{bound_note(s.bound)}")
    if summary.bubble_share is not None:
        facts.append(f"bubbles {100 * summary.bubble_share:.1f} %")
    if summary.trainer_idle_share is not None:
        facts.append(f"trainer idle {100 * summary.trainer_idle_share:.1f} %")
    facts.append(f"{summary.tokens:,} tokens")
    return head + "\n" + " · ".join(facts)
