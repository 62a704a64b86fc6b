"""The load of each server over 3,000 seconds, by StaleFlow's strategies and vanilla ones (StaleFlow fig. 17, §6.5).

    python bench/figures/staleflow_fig17.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Responses of up to 40k tokens, η = 3: requests that each server has, its weight updates (green) and their versions. The
paper's example: with the vanilla strategies all requests are on servers at once, and servers update with many of them
running; with StaleFlow's each server "initially receives only about 100", and updates at its own pace.
"""

from __future__ import annotations

from bisect import bisect_right

from common import Point, main
from matplotlib.figure import Figure
from staleflow import ASSUMPTION, LONG_RESPONSE_TOKENS, WARM_UP, Watched, system, watched
from staleflow_fig16 import ETA, strategies

SECONDS = 3000.0
TITLES = {False: "vanilla strategies", True: "StaleFlow's strategies"}


class Load(Point, kw_only=True):
    """One server: what it had at each moment, and when it updated to what."""

    throughput: bool
    server: str
    at: list[float]
    running: list[int]
    updates: list[tuple[float, int]]


def _series(
    seen: Watched, begin: float, end: float
) -> list[tuple[str, list[float], list[int], list[tuple[float, int]]]]:
    found = []
    for name, changes in sorted(seen.loads.items()):
        times = [at for at, _, _ in changes]
        grid = [begin + 10.0 * i for i in range(int((end - begin) / 10.0) + 1)]
        running = [changes[i - 1][1] if (i := bisect_right(times, at)) else 0 for at in grid]
        updates = [
            (done - begin, version) for who, _, done, version, _ in seen.pulls if who == name and begin <= done <= end
        ]
        found.append((name, [at - begin for at in grid], running, updates))
    return found


def measure(quick: bool) -> list[Point]:
    points: list[Point] = []
    for on in (True,) if quick else (False, True):
        table = system("StaleFlow", eta=ETA, response=LONG_RESPONSE_TOKENS, over=strategies(on, on, on))
        result, seen = watched(table)
        begin = result.steps[WARM_UP - 1]["time/at"]
        first = [running for _, _, running, _ in _series(seen, 0.0, 60.0)]
        series = _series(seen, begin, begin + SECONDS)
        steps = sum(begin < line["time/at"] <= begin + SECONDS for line in result.steps)
        cut = [n for _, _, done, _, n in seen.pulls if begin <= done <= begin + SECONDS]
        spread = [max(column) - min(column) for column in zip(*(running for _, _, running, _ in series), strict=True)]
        values = {
            "requests a server, after one minute": sum(r[-1] for r in first) / len(first),
            "requests cut by an update": sum(cut) / max(len(cut), 1),
            "updates of a server, per step": len(cut) / len(series) / steps,
            "requests of the fullest server less the emptiest, mean": sum(spread) / len(spread),
        }
        for what, value in values.items():
            paper = 100.0 if on and what.startswith("requests a server") else None
            points.append(
                Point(
                    figure="staleflow-17", point=f"{TITLES[on]}: {what}", paper=paper, ours=value, assumption=ASSUMPTION
                )
            )
        for name, at, running, updates in series:
            points.append(
                Load(
                    figure="staleflow-17",
                    point=f"{TITLES[on]}, {name}: mean requests",
                    paper=None,
                    ours=sum(running) / len(running),
                    throughput=on,
                    server=name,
                    at=at,
                    running=running,
                    updates=updates,
                )
            )
    return points


def draw(figure: Figure, points: list[Point]) -> None:
    loads = [p for p in points if isinstance(p, Load)]
    columns = [[p for p in loads if p.throughput == on] for on in (False, True)]
    axes = figure.subplots(len(columns[0]), 2, sharex=True, sharey="col", squeeze=False)
    for j, column in enumerate(columns):
        for i, load in enumerate(column):
            here = axes[i][j]
            here.fill_between(load.at, load.running, step="post", color="tab:blue", alpha=0.6, lw=0)
            for at, version in load.updates:
                here.axvline(at, color="tab:green", lw=1)
                here.text(at, here.get_ylim()[1], f"v{version}", color="tab:green", fontsize=7, va="top")
            here.set_ylim(0)
            if j == 0:
                here.set_ylabel(load.server, fontsize=8)
        axes[0][j].set_title(f"{TITLES[bool(j)]}: requests of each server", fontsize=10)
        axes[-1][j].set_xlabel("seconds")


if __name__ == "__main__":
    main("staleflow_fig17", measure, draw, size=(12.0, 8.0))
