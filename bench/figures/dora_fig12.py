"""What orchestration costs (DORA fig. 12, §5.4).

    python bench/figures/dora_fig12.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Shares of the servers' time: load balancing is what a server takes new weights for, with nothing on it; a transfer is a
request on its way to another server, its KV with it. The plans themselves take the controller no virtual time, and to
free a cache takes a simulated server none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common import Lines, Point, main, simulated
from dora import ASSUMPTION, STEPS, WARM_UP, world
from matplotlib.figure import Figure

from asyncrl.config import Recipe, load_table
from asyncrl.observe.tally import NO_ARGS

PAPER = {64: (0.00414, 0.03627, 0.00019), 128: (0.01519, 0.02123, 0.00027)}
"""Load balancing, request transfer, free cache."""


class Spans(Lines):
    """Keeps updates and migrations of servers."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.spans: dict[str, list[tuple[float, float, int]]] = {"update": [], "migrate": []}
        """Start, seconds, requests."""

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().span(track, name, start, end, args)
        if name in self.spans and track != "controller":
            self.spans[name].append((start, end - start, args.get("requests", 0)))


def measure(quick: bool) -> list[Point]:
    points = []
    for gpus in [64] if quick else list(PAPER):
        seen: list[Spans] = []

        def watch(recipe: Recipe, clock: Callable[[], float], seen: list[Spans] = seen) -> Spans:
            seen.append(Spans(recipe, clock))
            return seen[0]

        recipe = load_table(world("DORA", gpus))
        result = simulated(recipe, lines=watch)
        begin, end = result.steps[WARM_UP - 1]["time/at"], result.steps[WARM_UP + STEPS - 1]["time/at"]
        total = recipe.engine.count * (end - begin)
        found = {name: [(s, n) for at, s, n in spans if begin <= at < end] for name, spans in seen[0].spans.items()}
        balancing, moving = (sum(s for s, _ in found[name]) / total for name in ("update", "migrate"))
        paper = PAPER[gpus]
        points += [
            _point(f"{gpus} GPUs: load balancing", paper[0], balancing),
            _point(f"{gpus} GPUs: request transfer", paper[1], moving),
            _point(f"{gpus} GPUs: free cache", paper[2], 0.0),
            _point(
                f"{gpus} GPUs: weight loads a server and step", None, len(found["update"]) / recipe.engine.count / STEPS
            ),
            _point(f"{gpus} GPUs: requests moved a step", None, sum(n for _, n in found["migrate"]) / STEPS),
        ]
    return points


def _point(name: str, paper: float | None, ours: float) -> Point:
    return Point(figure="dora-12", point=name, paper=paper, ours=ours, assumption=ASSUMPTION)


def draw(figure: Figure, points: list[Point]) -> None:
    ax = figure.subplots()
    kinds = ("load balancing", "request transfer", "free cache")
    by_name = {p.point: p for p in points}
    for i, gpus in enumerate(PAPER):
        found = [by_name[f"{gpus} GPUs: {kind}"] for kind in kinds]
        x = [k + (i - 0.5) * 0.4 for k in range(len(kinds))]
        ax.bar(x, [100 * p.ours for p in found], 0.36, label=f"{gpus} GPUs", color=["tab:blue", "tab:red"][i])
        ax.plot(x, [100 * (p.paper or 0.0) for p in found], "k_", ms=14, label="paper" if i else None)
    ax.set_xticks(range(len(kinds)), kinds)
    ax.set_ylabel("% of the servers' time")
    ax.grid(alpha=0.3, axis="y")
    ax.legend()
    figure.suptitle("What DORA's orchestration costs (figure 12)")


if __name__ == "__main__":
    main("dora_fig12", measure, draw, size=(6.5, 4.0))
