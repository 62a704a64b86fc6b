"""Generation with and without repack (Laminar fig. 15, table 1, §8.4).

    python bench/figures/laminar_fig15.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Qwen2.5-32B on 128 GPUs at a quarter of the size, 4 servers of 512 trajectories, and a trainer twice as fast as
laminar.py's, so that generation is what limits. Throughput of generation, latency of trajectories, what a repack takes,
and how much of the KV cache is used. Latency is the time on servers; a server's own queue counts, waiting for a batch
does not.
"""

from __future__ import annotations

from common import Point, Result, main, merge
from laminar import STEPS, WARM_UP, Watched, assumption, watched, world
from matplotlib.figure import Figure

PAPER = {"repack": (290.0, 828.0, 0.822), "none": (296.0, 826.0, 0.716)}
"""Mean and largest latency in seconds, share of the KV cache."""
GAIN = 1.26
SCALE, FASTER = 4, 2


def summed_up(result: Result, seen: Watched) -> tuple[float, float, float, float]:
    """Generated tokens/s of all servers, mean and largest latency, KV use, over the measured steps."""
    begin, end = (seen.start + result.steps[i - 1]["time/at"] for i in (WARM_UP, WARM_UP + STEPS))
    latency = [seconds for seconds, _ in seen.finished()]
    return (
        seen.tokens(begin, end) / (end - begin),
        sum(latency) / len(latency),
        max(latency),
        seen.kv_use(begin, end),
    )


def case(migration: str, quick: bool) -> tuple[tuple[float, float, float, float], list[tuple[float, int]]]:
    """``summed_up`` of a run, and its repacks."""
    scale = 16 if quick else SCALE
    table = world(scale=scale)
    speed = FASTER * table["sim"]["trainer"]["tokens_per_s"]
    over = {"engine": {"migration": migration}, "sim": {"trainer": {"tokens_per_s": speed}}}
    result, seen = watched(merge(table, over))
    throughput, *others = summed_up(result, seen)
    return (scale * throughput, *others), seen.moved


def measure(quick: bool) -> list[Point]:
    points, throughput = [], {}
    for migration, (mean, longest, kv) in PAPER.items():
        (throughput[migration], *ours), moved = case(migration, quick)
        named = zip(("mean latency, s", "longest latency, s", "KV use"), (mean, longest, kv), ours, strict=True)
        points += [_point(f"{migration}: {name}", paper, value) for name, paper, value in named]
        points.append(_point(f"{migration}: generated tokens/s", None, throughput[migration]))
        if moved:
            points.append(_point("servers repacked", None, len(moved)))
            points.append(_point("trajectories repacked", None, sum(n for _, n in moved)))
    return [_point("throughput with repack over without", GAIN, throughput["repack"] / throughput["none"]), *points]


def _point(name: str, paper: float | None, ours: float) -> Point:
    return Point(figure="laminar-15", point=name, paper=paper, ours=ours, assumption=assumption(SCALE))


def draw(figure: Figure, points: list[Point]) -> None:
    by_name = {p.point: p.ours for p in points}
    left, right = figure.subplots(1, 2)
    labels = ["with repack", "without"]
    left.bar(labels, [by_name[f"{m}: generated tokens/s"] / 1000 for m in PAPER], 0.6, color=["tab:red", "tab:grey"])
    left.set_ylabel("thousand generated tokens a second")
    right.bar(labels, [100 * by_name[f"{m}: KV use"] for m in PAPER], 0.6, color=["tab:red", "tab:grey"])
    right.set_ylabel("KV cache in use, %")
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
    figure.suptitle("Laminar with and without repack, Qwen2.5-32B (figure 15, table 1)")


if __name__ == "__main__":
    main("laminar_fig15", measure, draw, size=(8.0, 4.0))
