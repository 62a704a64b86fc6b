"""What orchestration costs (DORA fig. 12, §5.4).

    python bench/figures/dora_fig12.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Shares of the servers' time. Load balancing is the time in which servers take new weights, with nothing on them; request
transfer that of KV on its way to a server, while others of its requests go on. The plans themselves take no virtual
time, and neither does it to free a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common import Lines, Point, main, simulated
from dora import ASSUMPTION, PROMPT, STEPS, WARM_UP, world
from matplotlib.figure import Figure

from asyncrl.config import Recipe, load_table
from asyncrl.observe.tally import NO_ARGS

PAPER = {64: (0.00414, 0.03627, 0.00019), 128: (0.01519, 0.02123, 0.00027)}
"""Load balancing, request transfer, free cache."""


class Spans(Lines):
    """Keeps updates of servers, and the requests that came to them with tokens of another."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.updates: list[tuple[float, float]] = []
        """Start, seconds."""
        self.moved: list[tuple[float, int]] = []
        """Start, tokens."""

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().span(track, name, start, end, args)
        if name == "update":
            self.updates.append((start, end - start))
        elif name == "generate" and args["prompt"] > PROMPT:
            self.moved.append((start, args["prompt"]))


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
        servers, instance = recipe.engine.count, recipe.sim.instance
        updates = [seconds for start, seconds in seen[0].updates if begin <= start < end]
        moved = [tokens for start, tokens in seen[0].moved if begin <= start < end]
        total = servers * (end - begin)
        transfer = sum(moved) * instance.kv_bytes / (instance.kv_gb_s * 1e9)
        balancing, moving, freeing = PAPER[gpus]
        points += [
            _point(f"{gpus} GPUs: load balancing", balancing, sum(updates) / total),
            _point(f"{gpus} GPUs: request transfer", moving, transfer / total),
            _point(f"{gpus} GPUs: free cache", freeing, 0.0),
            _point(f"{gpus} GPUs: weight loads of a server in a step", None, len(updates) / servers / STEPS),
            _point(f"{gpus} GPUs: requests moved in a step, of {recipe.batch_trajectories}", None, len(moved) / STEPS),
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
