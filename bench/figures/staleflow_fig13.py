"""Throughput of six systems under staleness bounds η = 1, 2, 3 (StaleFlow fig. 13, §6.2).

    python bench/figures/staleflow_fig13.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Qwen3-30B-A3B on 128 H20s, responses of up to 20k tokens; the paper's averages and maxima are over four models. A system
is a row of recipe columns (staleflow.py); VeRL (synchronous) and VeRL-Pipeline (one step) have no η.

One more row, not in the paper: what table 4 allows (``staleflow.ceiling``). It leaves a coordinator little to win where
the responses' own work fills the servers, and more where few long ones are left to decode by themselves.
"""

from __future__ import annotations

from common import Point, main
from matplotlib.figure import Figure
from staleflow import BOUNDED, Run, ceiling, gain, runs

ETAS = (1, 2, 3)
PAPER = {"VeRL": (2.01, 2.68), "VeRL-Pipeline": (1.52, 1.95), "VeRL-Async": (1.17, 1.42)}
"""StaleFlow's gain over them, on average and at most (§6.2)."""


def measure(quick: bool) -> list[Point]:
    etas = (1,) if quick else ETAS
    names = ("VeRL-Async", "StaleFlow") if quick else BOUNDED
    cases: list[tuple[str, str, int, dict[str, object]]] = [("VeRL", "VeRL", 0, {})]
    if not quick:
        cases.append(("VeRL-Pipeline", "VeRL-Pipeline", 1, {}))
    cases += [(name, name, eta, {}) for name in names for eta in etas]
    measured = runs("staleflow-13", cases)
    limits = [
        Point(figure="staleflow-13", point=f"all responses at one speed, η = {eta}: tokens/s", paper=None, ours=limit)
        for eta in etas
        for limit in [ceiling(eta)]
    ]
    return [*_gains(measured, etas), *limits, *measured]


def _of(measured: list[Run], system: str, etas: tuple[int, ...]) -> list[Run]:
    """Its runs at these η; one that has no η is the same at all."""
    own = [r for r in measured if r.system == system]
    return own * len(etas) if system in ("VeRL", "VeRL-Pipeline") else own


def _gains(measured: list[Run], etas: tuple[int, ...]) -> list[Point]:
    points = []
    staleflow = _of(measured, "StaleFlow", etas)
    for baseline in dict.fromkeys(r.system for r in measured if r.system != "StaleFlow"):
        gains = gain(staleflow, _of(measured, baseline, etas))
        mean, most = PAPER.get(baseline, (None, None))
        name = f"StaleFlow over {baseline}"
        points += [
            Point(figure="staleflow-13", point=f"{name}, mean over η", paper=mean, ours=sum(gains) / len(gains)),
            Point(figure="staleflow-13", point=f"{name}, at most", paper=most, ours=max(gains)),
        ]
    return points


def draw(figure: Figure, points: list[Point]) -> None:
    measured = [p for p in points if isinstance(p, Run)]
    axes = figure.subplots()
    systems = list(dict.fromkeys(r.system for r in measured))
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        own = _of(measured, system, ETAS)
        x = [eta + (i - (len(systems) - 1) / 2) * width for eta in ETAS]
        bars = axes.bar(x, [r.ours / 1000 for r in own], 0.95 * width, label=system)
        axes.bar_label(bars, [f"{r.ours / 1000:.0f}" for r in own], fontsize=7)
    limits = [p.ours / 1000 for p in points if p.point.startswith("all responses")]
    axes.hlines(limits, [eta - 0.4 for eta in ETAS], [eta + 0.4 for eta in ETAS], "k", "dashed", label="at one speed")
    axes.set_xticks(ETAS, [f"η = {eta}" for eta in ETAS])
    axes.set_ylabel("thousand tokens a second, 128 GPUs")
    axes.set_title("Qwen3-30B-A3B, responses up to 20k tokens; VeRL and VeRL-Pipeline have no η", fontsize=10)
    axes.set_ylim(0, 1.2 * max(r.ours for r in measured) / 1000)
    axes.legend(fontsize=8, ncols=4, loc="upper left")
    axes.grid(alpha=0.3, axis="y")


if __name__ == "__main__":
    main("staleflow_fig13", measure, draw, size=(11.0, 5.0))
