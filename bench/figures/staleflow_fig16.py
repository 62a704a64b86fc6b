"""Routing, synchronization and migration, StaleFlow's or vanilla (StaleFlow fig. 16, §6.5).

    python bench/figures/staleflow_fig16.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Responses of up to 40k tokens, η = 3. All eight combinations on staleness buffers, and VeRL-Async beside them. Vanilla
routing sends a request to the server with the fewest, vanilla synchronization has every server pull at once, vanilla
migration moves nothing. The paper draws throughputs without numbers: all-vanilla "closely matches" VeRL-Async, each
strategy "consistently improves" it, all three are best.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from common import Point, main
from matplotlib.figure import Figure
from staleflow import LONG_RESPONSE_TOKENS, Run, runs

ETA = 3
BASELINE = "VeRL-Async"


def strategies(routing: bool, synchronization: bool, migration: bool) -> dict[str, Any]:
    """StaleFlow's strategy, or the vanilla one."""
    return {
        "engine": {
            "routing": "waterfall" if routing else "least_loaded",
            "migration": "throughput" if migration else "none",
        },
        "update": {"synchronization": "selective" if synchronization else "all"},
    }


def name(on: tuple[bool, bool, bool]) -> str:
    """``R-M``: StaleFlow's routing and migration, vanilla synchronization."""
    return "".join(letter if is_on else "–" for letter, is_on in zip("RSM", on, strict=True))


def measure(quick: bool) -> list[Point]:
    of = {"response": LONG_RESPONSE_TOKENS}
    combinations = list(product((False, True), repeat=3))
    if quick:
        combinations = [combinations[0], combinations[-1]]
    cases = [(name(on), "StaleFlow", ETA, {**of, "over": strategies(*on)}) for on in combinations]
    if not quick:
        cases.append((BASELINE, BASELINE, ETA, dict(of)))
    measured = runs("staleflow-16", cases)
    by_name = {r.system: r for r in measured}
    vanilla = by_name[name(combinations[0])].ours
    points = [
        Point(
            figure="staleflow-16",
            point=f"{system} over all vanilla",
            paper=None,
            ours=run.ours / vanilla,
            assumption="the paper prints no numbers",
        )
        for system, run in by_name.items()
        if run.ours != vanilla
    ]
    return [*points, *measured]


def draw(figure: Figure, points: list[Point]) -> None:
    measured = [p for p in points if isinstance(p, Run)]
    axes = figure.subplots()
    colours = ["tab:red" if r.system == "RSM" else "tab:grey" if r.system == BASELINE else "tab:blue" for r in measured]
    bars = axes.bar([r.system for r in measured], [r.ours / 1000 for r in measured], 0.7, color=colours)
    axes.bar_label(bars, [f"{r.ours / 1000:.1f}\n{r.period:.0f} s" for r in measured], fontsize=8)
    axes.set_ylabel("thousand tokens a second, 128 GPUs")
    axes.set_ylim(0, 1.2 * max(r.ours for r in measured) / 1000)
    axes.set_title(
        "R, S, M: StaleFlow's routing, synchronization, migration; –: vanilla (40k tokens, η = 3)", fontsize=10
    )
    axes.grid(alpha=0.3, axis="y")


if __name__ == "__main__":
    main("staleflow_fig16", measure, draw, size=(10.0, 4.5))
