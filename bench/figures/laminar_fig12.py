"""Throughput of five systems on multi-turn work with tool calls (Laminar fig. 12, table 2, §8.1).

    python bench/figures/laminar_fig12.py [--quick] [--json FILE] [--plot FILE] [--jobs N] [--cache DIR]

As figure 11, Qwen2.5-7B, whose responses are cut in one to nine parts by calls of a sandbox. The paper's
numbers are over all baselines and sizes.
"""

from __future__ import annotations

from common import Point, main
from laminar import SYSTEMS, TABLE_2
from laminar_fig11 import Run, draw, gains, runs

CLUSTERS = tuple(("7B", size.gpus) for size in TABLE_2["7B"])
MEAN, LEAST, MOST = 2.62, 1.21, 5.42


def measure(quick: bool) -> list[Point]:
    clusters = CLUSTERS[-1:] if quick else CLUSTERS
    measured = runs("laminar-12", clusters, ("one-step", "Laminar") if quick else tuple(SYSTEMS), tools=True)
    return [*spread(measured), *gains("laminar-12", measured, {}, None), *measured]


def spread(measured: list[Run]) -> list[Point]:
    ours = {r.gpus: r.ours for r in measured if r.system == "Laminar"}
    gain = [ours[r.gpus] / r.ours for r in measured if r.system != "Laminar"]
    named = (("average", MEAN, sum(gain) / len(gain)), ("least", LEAST, min(gain)), ("most", MOST, max(gain)))
    return [
        Point(figure="laminar-12", point=f"Laminar over all, {what}", paper=theirs, ours=value)
        for what, theirs, value in named
    ]


if __name__ == "__main__":
    main("laminar_fig12", measure, draw, size=(7.0, 4.5))
