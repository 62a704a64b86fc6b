"""Step time, throughput and what of rollout training does not hide, on 64 and 128 GPUs (DORA fig. 10, §5.2).

    python bench/figures/dora_fig10.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Throughput is of prompts and responses. Rollout-only is the share of a step in which nothing is trained.
"""

from __future__ import annotations

from typing import Any

from common import Point, Result, main, simulate_all
from dora import ASSUMPTION, SCALE, STEPS, SYSTEMS, WARM_UP, train_seconds, world
from matplotlib.figure import Figure

PAPER = {
    64: {
        "synchronous": (22.91, 0.65, 14_143.0),
        "one-off": (22.94, 0.33, 14_141.0),
        "partial rollout": (17.38, 0.46, 19_872.0),
        "DORA": (14.67, 0.12, 23_327.0),
    },
    128: {
        "synchronous": (20.23, 0.73, 16_070.0),
        "one-off": (14.0, None, 23_200.0),
        "partial rollout": (13.95, 0.52, 30_750.0),
        "DORA": (10.46, 0.24, 34_135.0),
    },
}
"""Minutes a step, rollout-only share, tokens/s. On 128 GPUs those of one-off and partial rollout follow from the text's
ratios to DORA."""
SPEEDUPS = {64: (1.56, 1.65, 8.2), 128: (1.93, 2.12, 5.9)}
"""DORA over synchronous: step time, throughput, rollout."""


def summed_up(system: str, gpus: int, result: Result) -> tuple[float, float, float]:
    """Seconds of a step, rollout-only seconds of it, tokens/s, over the measured steps."""
    steps = result.steps[WARM_UP : WARM_UP + STEPS]
    period = (steps[-1]["time/at"] - result.steps[WARM_UP - 1]["time/at"]) / len(steps)
    tokens = sum(line["trainer/tokens"] for line in steps) / len(steps)
    training = train_seconds(gpus, tokens) if system == "partial rollout" else 0.0
    hidden = sum(line["time/train"] for line in steps) / len(steps)
    rollout = period if training else period - hidden
    return period + training, rollout, SCALE * tokens / (period + training)


def measure(quick: bool) -> list[Point]:
    sizes = [64] if quick else list(PAPER)
    cases = [(system, gpus) for gpus in sizes for system in SYSTEMS]
    points, ours = [], {}
    for (system, gpus), result in zip(cases, simulate_all([world(*case) for case in cases]), strict=True):
        step, rollout, tokens_s = ours[system, gpus] = summed_up(system, gpus, result)
        minutes, share, speed = PAPER[gpus][system]
        name = f"{gpus} GPUs, {system}"
        points += [
            _point(f"{name}: step, min", minutes, step / 60),
            _point(f"{name}: rollout-only share", share, rollout / step),
            _point(f"{name}: tokens/s", speed, tokens_s),
            _point(f"{name}: staleness, mean", None, result.mean("staleness/mean", WARM_UP)),
        ]
    for gpus in sizes:
        sync, dora = ours["synchronous", gpus], ours["DORA", gpus]
        step, throughput, rollout = SPEEDUPS[gpus]
        points += [
            _point(f"{gpus} GPUs: step time, synchronous over DORA", step, sync[0] / dora[0]),
            _point(f"{gpus} GPUs: throughput, DORA over synchronous", throughput, dora[2] / sync[2]),
            _point(f"{gpus} GPUs: rollout-only, synchronous over DORA", rollout, sync[1] / max(1.0, dora[1])),
        ]
    return points


def _point(name: str, paper: float | None, ours: float) -> Point:
    return Point(figure="dora-10", point=name, paper=paper, ours=ours, assumption=ASSUMPTION)


def draw(figure: Figure, points: list[Point]) -> None:
    by_name = {p.point: p for p in points}
    what: dict[str, tuple[str, float]] = {
        "step, min": ("minutes a step", 1.0),
        "tokens/s": ("thousand tokens/s", 1e-3),
        "rollout-only share": ("rollout-only, %", 100.0),
    }
    axes: Any = figure.subplots(1, 3)
    for ax, (key, (label, factor)) in zip(axes, what.items(), strict=True):
        for i, gpus in enumerate(PAPER):
            found = [by_name[f"{gpus} GPUs, {system}: {key}"] for system in SYSTEMS]
            x = [k + (i - 0.5) * 0.4 for k in range(len(found))]
            ax.bar(x, [factor * p.ours for p in found], 0.36, label=f"{gpus} GPUs", color=["tab:blue", "tab:red"][i])
            paper = [(at, factor * p.paper) for at, p in zip(x, found, strict=True) if p.paper is not None]
            ax.plot(*zip(*paper, strict=True), "k_", ms=12, label="paper" if i else None)
        ax.set_xticks(range(len(SYSTEMS)), [system.replace(" ", "\n") for system in SYSTEMS], fontsize=8)
        ax.set_ylabel(label)
        ax.grid(alpha=0.3, axis="y")
    axes[0].legend()
    figure.suptitle("DORA and its baselines, Qwen2.5-32B on H800s (figure 10)")


if __name__ == "__main__":
    main("dora_fig10", measure, draw, size=(11.0, 4.0))
