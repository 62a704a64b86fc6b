"""The picture of a plan: staleness against step period over every split of the same GPUs. Loads matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from asyncrl.core.choices import splits
from asyncrl.core.planning import Prediction, System, predict
from asyncrl.core.workload import Workload

SIZE_IN = (13.0, 6.2)
DPI = 110
COLOURS = ("#8b6fb0", "#3b6fb6", "#2a9d8f", "#4f9d69", "#d9822b", "#b02a2a")
HERE, MEASURED, FRONT = "#111111", "#d03030", "#c9ced6"


def draw(file: Path, name: str, system: System, work: Workload, measured: Sequence[tuple[float, float]] = ()) -> None:
    """Write the picture; ``measured`` are (period, staleness) of a past run. Raises ``OSError``, and ``ValueError`` for
    a kind of picture that there is not."""
    buffer, kind = io.BytesIO(), file.suffix.removeprefix(".") or "png"
    figure = build_figure(name, system, work, measured)
    if kind not in (kinds := sorted(figure.canvas.get_supported_filetypes())):
        raise ValueError(f"no picture can be a .{kind}; there are {', '.join(kinds)}")
    figure.savefig(buffer, format=kind, dpi=DPI)
    file.write_bytes(buffer.getvalue())


def build_figure(name: str, system: System, work: Workload, measured: Sequence[tuple[float, float]] = ()) -> Figure:
    """Two panels, labelled ``batch`` and ``control``: a curve each for a few batch sizes, and for a few bounds or
    queues. Along a curve the GPUs go from rollout to training; dashed where training is the slower side. The grey line
    is what no other point of the panel beats in both."""
    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    here = predict(system, work)
    star = f"{system.servers} × {system.server_gpus} GPU for rollout, {system.trainer_gpus} for training"
    title = {"queue_drop": "queue (staleness.queue, in batches)"}.get(system.control, "bound (staleness.bound)")
    panels = ((left, "batch", "batch (rollout.batch_groups)", _batches), (right, "control", title, _controls))
    for ax, label, heading, curves in panels:
        ax.set_label(label)
        ax.set_title(heading)
        highest, lines = _draw_curves(ax, curves(system), work)
        (mark,) = ax.plot(here.period, here.staleness, "*", color=HERE, ms=17, mec="white", zorder=6, label=star)
        lines.append(mark)
        if measured:
            (mark,) = ax.plot(*zip(*measured, strict=True), "D", color=MEASURED, ms=8, mec="white", zorder=7)
            mark.set_label("measured")
            lines.append(mark)
        highest = max([highest, here.staleness, *(staleness for _, staleness in measured)])
        ax.set_ylim(-0.05 * highest - 0.02, 1.1 * highest + 0.05)
        ax.legend(handles=lines, frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    left.set_ylabel("mean staleness (versions)")
    figure.suptitle(
        f"{name}: staleness against step period in all splits of {system.gpus} GPUs, predicted", fontsize=12
    )
    return figure


def _batches(system: System) -> list[tuple[str, System]]:
    sizes = sorted({max(1, system.batch_groups * k // 2) for k in (1, 2, 4, 8)})
    return [(f"{groups} groups", msgspec.structs.replace(system, batch_groups=groups)) for groups in sizes]


def _controls(system: System) -> list[tuple[str, System]]:
    replace = msgspec.structs.replace
    if system.control == "queue_drop":
        return [(f"q = {q:g}", replace(system, queue=q)) for q in sorted({1.0, 2.0, 4.0, system.queue})]
    least, text = (0.0, "α =") if system.control == "inflight_cap" else (1.0, "at most")
    return [(f"{text} {b:g}", replace(system, bound=b)) for b in sorted({least, 1.0, 2.0, 4.0, 8.0, system.bound})]


def _draw_curves(ax: Axes, curves: Sequence[tuple[str, System]], work: Workload) -> tuple[float, list[Line2D]]:
    """The highest staleness in view, and the legend's lines."""
    found: list[Prediction] = []
    lines: list[Line2D] = []
    for (text, system), colour in zip(curves, COLOURS, strict=False):
        points = [predict(s, work) for s in splits(system)]
        found += points
        for a, b in pairwise(points):
            style = "--" if a.rho > 1 and b.rho > 1 else "-"
            ax.plot((a.period, b.period), (a.staleness, b.staleness), style, color=colour, lw=1.6)
        ax.plot([p.period for p in points], [p.staleness for p in points], "o", color=colour, ms=3.5)
        lines.append(Line2D([], [], color=colour, marker="o", ms=3.5, label=text))
    best = unbeaten(found)
    ax.plot(*zip(*best, strict=True), "-", color=FRONT, lw=7, alpha=0.6, zorder=0, drawstyle="steps-post")
    lines += [
        Line2D([], [], color="#777777", ls="--", label="training is slower"),
        Line2D([], [], color=FRONT, lw=5, label="best of all"),
    ]
    shortest = min(p.period for p in found)
    in_view = [p for p in found if p.period < 12 * shortest]
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlim(0.85 * shortest, 1.15 * max(p.period for p in in_view))
    ax.set_xlabel("period (seconds a step)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return max(p.staleness for p in in_view), lines


def unbeaten(points: Sequence[Prediction]) -> list[tuple[float, float]]:
    """(period, staleness) of the points of which none is both faster and fresher, fastest first."""
    best: list[tuple[float, float]] = []
    for p in sorted(points, key=lambda p: (p.period, p.staleness)):
        if not best or p.staleness < best[-1][1]:
            best.append((p.period, p.staleness))
    return best
