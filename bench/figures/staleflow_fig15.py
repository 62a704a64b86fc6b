"""Throughput against response length, batch size and GPUs (StaleFlow fig. 15, §6.4).

    python bench/figures/staleflow_fig15.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Around 20k tokens, 128 groups and 128 H20s one factor changes at a time, with η = 3. The paper draws throughputs,
absolute and relative to VeRL, without numbers: StaleFlow is the fastest everywhere, and its gain over VeRL grows with
the length and the batch; with more GPUs it "scales at least comparably".
"""

from __future__ import annotations

from typing import Any

from common import Point, main
from matplotlib.figure import Figure
from staleflow import Run, runs

FACTORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "response": ("response limit, tokens", (10_000, 20_000, 40_000)),
    "groups": ("groups a batch", (64, 128, 256)),
    "gpus": ("GPUs", (64, 128, 256)),
}
MIDDLE = {"response": 20_000, "groups": 128, "gpus": 128}
SYSTEMS = (
    ("VeRL", "VeRL", 0),
    ("VeRL-Async", "VeRL-Async", 3),
    ("StaleFlow", "StaleFlow", 3),
)
COLOURS = ("tab:grey", "tab:blue", "tab:red")


class Scaled(Run, kw_only=True):
    """``factor`` is ``value``, the others are as in the middle."""

    factor: str
    value: int


def measure(quick: bool) -> list[Point]:
    systems = SYSTEMS[::2] if quick else SYSTEMS
    settings = [{**MIDDLE, factor: value} for factor, (_, values) in FACTORS.items() for value in values]
    settings = [MIDDLE] if quick else [s for i, s in enumerate(settings) if s not in settings[:i]]
    cases: list[tuple[str, str, int, dict[str, Any]]] = [
        (label, name, eta, dict(setting)) for setting in settings for label, name, eta in systems
    ]
    points: list[Point] = []
    measured = runs("staleflow-15", cases)
    for (label, _, _, setting), run in zip(cases, measured, strict=True):
        verl = next(r for r, c in zip(measured, cases, strict=True) if c[0] == "VeRL" and c[3] == setting)
        fields = {name: getattr(run, name) for name in run.__struct_fields__ if name != "point"}
        for factor, (_, values) in FACTORS.items():
            if setting[factor] in values and all(setting[f] == MIDDLE[f] for f in FACTORS if f != factor):
                where = f"{FACTORS[factor][0]} {setting[factor]:,}, {label}"
                points.append(Scaled(**fields, point=f"{where}: tokens/s", factor=factor, value=setting[factor]))
                if label != "VeRL":
                    points.append(
                        Point(figure="staleflow-15", point=f"{where}: over VeRL", paper=None, ours=run.ours / verl.ours)
                    )
    return points


def draw(figure: Figure, points: list[Point]) -> None:
    scaled = [p for p in points if isinstance(p, Scaled)]
    rows = figure.subplots(2, 3, sharex="col", sharey="row")
    for column, (factor, (title, values)) in enumerate(FACTORS.items()):
        verl = {p.value: p.ours for p in scaled if p.factor == factor and p.system == "VeRL"}
        for (label, _, _), colour in zip(SYSTEMS, COLOURS, strict=True):
            own = sorted((p for p in scaled if p.factor == factor and p.system == label), key=lambda p: p.value)
            x = [values.index(p.value) for p in own]
            rows[0][column].plot(x, [p.ours / 1000 for p in own], "o-", color=colour, label=label)
            rows[1][column].plot(x, [p.ours / verl[p.value] for p in own], "o-", color=colour)
        rows[1][column].set_xticks(range(len(values)), [f"{value:,}" for value in values])
        rows[1][column].set_xlabel(title)
        for row in rows:
            row[column].grid(alpha=0.3)
    rows[0][0].set_ylabel("thousand tokens/s")
    rows[0][0].set_ylim(0)
    rows[1][0].set_ylabel("over VeRL")
    rows[0][0].legend(fontsize=7)


if __name__ == "__main__":
    main("staleflow_fig15", measure, draw, size=(11.0, 6.5))
