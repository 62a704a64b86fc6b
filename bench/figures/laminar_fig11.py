"""Throughput of five systems on single-turn work, small cluster and large (Laminar fig. 11, table 2, §8.1).

    python bench/figures/laminar_fig11.py [--quick] [--json FILE] [--plot FILE] [--jobs N] [--cache DIR]

All clusters of table 2, with its splits. A system is a row of recipe columns (laminar.py). Throughput is prompts and
responses of a batch over the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import Point, each_kept, main, simulated
from laminar import STEPS, SYSTEMS, TABLE_2, assumption, scale_of, warm_up, world
from matplotlib.figure import Figure

from asyncrl.config import Recipe

CLUSTERS = tuple((model, size.gpus) for model, sizes in TABLE_2.items() for size in sizes)
GAINS = {"verl": (2.56, 5.49), "one-step": (1.98, 4.09), "stream generation": (1.93, 4.06), "AReaL": (1.39, 1.81)}
"""Laminar's gain over them, on average and at most."""
LARGEST = 3.34
"""On average over all baselines and models, each at its largest cluster."""


class Run(Point, kw_only=True):
    """A simulated run; ``ours`` is tokens/s of the whole cluster. Seconds a step; shares of the time that the trainer
    waits and that servers have nothing to do; the most that a trajectory of a batch was stale."""

    system: str
    model: str
    gpus: int
    period: float
    trainer_idle: float
    bubbles: float
    staleness: float


Steps = list[dict[str, float]]


def steps_of(recipe: Recipe) -> Steps:
    """What a run says of each of its steps."""
    return simulated(recipe).steps


def summed_up(lines: Steps, **fields: Any) -> Run:
    before = warm_up(fields["system"])
    steps = lines[before : before + STEPS]
    seconds = steps[-1]["time/at"] - lines[before - 1]["time/at"]
    scale = scale_of(fields["model"], fields["gpus"])
    name = f"{fields['system']}, {fields['model']} on {fields['gpus']} GPUs: tokens/s"
    return Run(
        point=name,
        paper=None,
        ours=scale * sum(line["tokens/batch"] for line in steps) / seconds,
        period=seconds / STEPS,
        trainer_idle=sum(line["time/step"] * line["bubble/trainer_idle"] for line in steps) / seconds,
        bubbles=sum(line["time/step"] * line["bubble/share"] for line in steps) / seconds,
        staleness=max(line["staleness/max"] for line in steps),
        assumption=assumption(scale),
        **fields,
    )


def runs(figure: str, clusters: Sequence[tuple[str, int]], systems: Sequence[str], **of: Any) -> list[Run]:
    cases = [(system, model, gpus) for model, gpus in clusters for system in systems]
    tables = [world(system, model, gpus, scale=scale_of(model, gpus), **of) for system, model, gpus in cases]
    return [
        summed_up(steps, figure=figure, system=system, model=model, gpus=gpus)
        for (system, model, gpus), steps in zip(cases, each_kept(steps_of, tables, Steps), strict=True)
    ]


def gains(
    figure: str, measured: list[Run], paper: dict[str, tuple[float, float]], largest: float | None
) -> list[Point]:
    """Laminar's gain over each baseline, and over all in the largest clusters."""
    found, last = [], []
    ours = {(r.model, r.gpus): r.ours for r in measured if r.system == "Laminar"}
    most = {model: max(gpus for m, gpus in ours if m == model) for model, _ in ours}
    for baseline in dict.fromkeys(r.system for r in measured if r.system != "Laminar"):
        gain = {(r.model, r.gpus): ours[r.model, r.gpus] / r.ours for r in measured if r.system == baseline}
        last += [value for (model, gpus), value in gain.items() if gpus == most[model]]
        mean, longest = paper.get(baseline, (None, None))
        named = (("on average", mean, sum(gain.values()) / len(gain)), ("at most", longest, max(gain.values())))
        found += [
            Point(figure=figure, point=f"Laminar over {baseline}, {what}", paper=theirs, ours=value)
            for what, theirs, value in named
        ]
    mean = sum(last) / len(last)
    return [Point(figure=figure, point="Laminar over all, largest clusters", paper=largest, ours=mean), *found]


def measure(quick: bool) -> list[Point]:
    clusters = (("32B", 512),) if quick else CLUSTERS
    systems = ("one-step", "Laminar") if quick else tuple(SYSTEMS)
    measured = runs("laminar-11", clusters, systems)
    return [*gains("laminar-11", measured, GAINS, LARGEST), *measured]


def draw(figure: Figure, points: list[Point]) -> None:
    measured = [p for p in points if isinstance(p, Run)]
    models = list(dict.fromkeys(r.model for r in measured))
    widths = [len({r.gpus for r in measured if r.model == model}) for model in models]
    systems = list(dict.fromkeys(r.system for r in measured))
    width = 0.8 / len(systems)
    for model, axes in zip(models, figure.subplots(1, len(models), width_ratios=widths, squeeze=False)[0], strict=True):
        sizes = list(dict.fromkeys(r.gpus for r in measured if r.model == model))
        for i, system in enumerate(systems):
            own = [r.ours / 1000 for r in measured if r.system == system and r.model == model]
            x = [at + (i - (len(systems) - 1) / 2) * width for at in range(len(sizes))]
            bars = axes.bar(x, own, 0.95 * width, label=system)
            axes.bar_label(bars, [f"{value:.0f}" for value in own], fontsize=6)
        axes.set_xticks(range(len(sizes)), [f"{size} GPUs" for size in sizes])
        axes.set_title(f"Qwen2.5-{model}", fontsize=10)
        axes.grid(alpha=0.3, axis="y")
    figure.axes[0].set_ylabel("thousand tokens a second")
    figure.axes[0].legend(fontsize=8)


if __name__ == "__main__":
    main("laminar_fig11", measure, draw, size=(17.0, 4.5))
