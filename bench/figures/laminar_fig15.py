"""Generation with and without repack (Laminar fig. 15, table 1, §8.4).

    python bench/figures/laminar_fig15.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Throughput of generation, latency of trajectories, what a repack takes, and how much of the KV cache is used, over five
steps. Latency is the time on servers; a server's own queue counts, waiting for a batch does not.
"""

from __future__ import annotations

from common import Point, Result, main
from laminar import ASSUMPTION, LAST, STEPS, WARM_UP, Watched, watched
from matplotlib.figure import Figure

PAPER = {"repack": (290.0, 828.0, 0.822), "none": (296.0, 826.0, 0.716)}
"""Mean and largest latency in seconds, share of the KV cache."""
GAIN, OVERHEAD_S = 1.26, 0.69


def summed_up(result: Result, seen: Watched) -> tuple[float, float, float, float]:
    """Generated tokens/s, mean and largest latency, KV use, over the measured steps."""
    steps = result.steps[: WARM_UP + STEPS]
    begin, end = (seen.start + steps[i - 1]["time/at"] for i in (WARM_UP, len(steps)))
    seconds = sum(line["time/step"] for line in steps[WARM_UP:])
    tokens = sum(line["time/step"] * line["tokens/s"] for line in steps[WARM_UP:])
    latency = [lasted for lasted, _ in seen.finished()]
    return tokens / seconds, sum(latency) / len(latency), max(latency), seen.kv_use(begin, end)


def measure(quick: bool) -> list[Point]:
    assert LAST >= 1, "the last step begins nothing new"
    points, throughput = [], {}
    for migration, (mean, longest, kv) in PAPER.items():
        result, seen = watched(migration=migration, small=quick)
        throughput[migration], *ours = summed_up(result, seen)
        named = zip(("mean latency, s", "longest latency, s", "KV use"), (mean, longest, kv), ours, strict=True)
        points += [_point(f"{migration}: {name}", paper, value) for name, paper, value in named]
        points.append(_point(f"{migration}: generated tokens/s", None, throughput[migration]))
        if seen.moved:
            points.append(
                _point("a repack of a server, s", OVERHEAD_S, sum(s for s, _ in seen.moved) / len(seen.moved))
            )
            points.append(_point("servers repacked", None, len(seen.moved)))
    return [_point("throughput with repack over without", GAIN, throughput["repack"] / throughput["none"]), *points]


def _point(name: str, paper: float | None, ours: float) -> Point:
    return Point(figure="laminar-15", point=name, paper=paper, ours=ours, assumption=ASSUMPTION)


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
