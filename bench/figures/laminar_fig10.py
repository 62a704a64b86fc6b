"""Inherent staleness of trajectories by how long their generation took (Laminar fig. 10, §6).

    python bench/figures/laminar_fig10.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

The trainer's version when a trajectory had ended less the version that generated it: Qwen2.5-7B on 64 GPUs. The paper
prints no numbers but "typically under 3", and at most 4 in all of its experiments.
"""

from __future__ import annotations

from collections import Counter

from common import Point, main
from laminar import WARM_UP, assumption, scale_of, watched, world
from matplotlib.figure import Figure

MODEL, GPUS = "7B", 64
RANGES = 4


def measure(quick: bool) -> list[Point]:
    result, seen = watched(world(model=MODEL, gpus=GPUS, scale=32 if quick else scale_of(MODEL, GPUS)))
    return distribution(seen.finished(since=seen.start + result.steps[WARM_UP - 1]["time/at"]))


def distribution(finished: list[tuple[float, int]]) -> list[Point]:
    """Shares of each staleness, of trajectories by quarters of the longest time of generation."""
    points = [
        _point("largest inherent staleness", 4, max(staleness for _, staleness in finished)),
        _point("share under 3", None, sum(staleness < 3 for _, staleness in finished) / len(finished)),
    ]
    longest = max(seconds for seconds, _ in finished)
    for part in range(RANGES):
        begin, end = part * longest / RANGES, (part + 1) * longest / RANGES
        counted = Counter(s for seconds, s in finished if begin < seconds <= end)
        total = sum(counted.values())
        points += [_point(f"{begin:.0f} to {end:.0f} s: {s}", None, n / total) for s, n in sorted(counted.items())]
    return points


def _point(name: str, paper: float | None, ours: float) -> Point:
    return Point(figure="laminar-10", point=name, paper=paper, ours=ours, assumption=assumption(scale_of(MODEL, GPUS)))


def draw(figure: Figure, points: list[Point]) -> None:
    axes = figure.subplots()
    shares: dict[str, dict[int, float]] = {}
    for p in points[2:]:
        times, staleness = p.point.split(": ")
        shares.setdefault(times, {})[int(staleness)] = p.ours
    below = [0.0] * len(shares)
    for staleness in sorted({s for found in shares.values() for s in found}):
        heights = [found.get(staleness, 0.0) for found in shares.values()]
        axes.bar(list(shares), heights, 0.7, bottom=below, label=f"{staleness}")
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylabel("share of the trajectories")
    axes.set_xlabel("seconds of generation")
    axes.set_ylim(0, 1.15)
    axes.legend(title="inherent staleness", loc="upper center", ncols=5, fontsize=8, title_fontsize=8)
    figure.suptitle("Laminar: inherent staleness by finishing time (figure 10)")


if __name__ == "__main__":
    main("laminar_fig10", measure, draw, size=(7.0, 4.5))
