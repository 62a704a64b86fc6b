"""Where a step's time goes on the servers (StaleFlow table 3, §6.5).

    python bench/figures/staleflow_table3.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Responses of up to 40k tokens, η = 3; seconds a step, mean over servers. Prefill is what every attempt had to compute
before its first token, at k5 a token; the paper gives no k5, and 2·10⁻⁵ s is assumed. Route and Interrupt take a server
no time in the virtual world; what it costs to plan them is measured in bench/planning.py. A pull counts from its
command on; what a server still decodes while the weights arrive at its host counts as decoding too.
"""

from __future__ import annotations

from common import Point, main
from matplotlib.figure import Figure
from staleflow import ASSUMPTION, LONG_RESPONSE_TOKENS, WARM_UP, Watched, system, watched

from asyncrl.core.cost_model import CostModel

ETA = 3
PAPER = {"Pull": 7.8, "Route": 2.0, "Interrupt": 0.6, "Prefill": 36.4, "Decode": 413.3}
PAPER_STEP = sum(PAPER.values())


def _busy(seen: Watched, begin: float, end: float) -> float:
    """Seconds in which servers had requests, of all servers together."""
    total = 0.0
    for changes in seen.loads.values():
        for (at, running, _), after in zip(changes, [*(c[0] for c in changes[1:]), end], strict=True):
            if running:
                total += max(0.0, min(after, end) - max(at, begin))
    return total


def measure(quick: bool) -> list[Point]:
    result, seen = watched(system("StaleFlow", eta=ETA, response=LONG_RESPONSE_TOKENS))
    steps = result.steps[WARM_UP : len(result.steps) - ETA]
    begin, end = result.steps[WARM_UP - 1]["time/at"], steps[-1]["time/at"]
    each = len(seen.loads) * len(steps)  # a server's, in a step
    pull = sum(done - start for _, start, done, _, _ in seen.pulls if begin < done <= end) / each
    prefill = CostModel().k5 * sum(tokens for at, tokens in seen.prefilled if begin < at <= end) / each
    busy = _busy(seen, begin, end) / each
    step = (end - begin) / len(steps)
    seconds = {"Pull": pull, "Route": 0.0, "Interrupt": 0.0, "Prefill": prefill, "Decode": busy - prefill}
    cut = sum(n for _, _, done, _, n in seen.pulls if begin < done <= end) / len(steps)
    migrated = sum(n for at, n in seen.migrated if begin < at <= end) / len(steps)
    return [
        *(
            Point(
                figure="staleflow-t3", point=f"{name}: seconds a step", paper=PAPER[name], ours=s, assumption=ASSUMPTION
            )
            for name, s in seconds.items()
        ),
        Point(
            figure="staleflow-t3", point="nothing to do: seconds a step", paper=0.0, ours=max(0.0, step - busy - pull)
        ),
        Point(figure="staleflow-t3", point="a step: seconds", paper=PAPER_STEP, ours=step),
        Point(figure="staleflow-t3", point="commands, % of the step", paper=2.3, ours=100 * pull / step),
        Point(figure="staleflow-t3", point="prefill, % of the step", paper=7.9, ours=100 * prefill / step),
        Point(figure="staleflow-t3", point="requests cut by pulls, a step", paper=None, ours=cut),
        Point(figure="staleflow-t3", point="requests cut by migration, a step", paper=None, ours=migrated),
    ]


def draw(figure: Figure, points: list[Point]) -> None:
    axes = figure.subplots()
    colours = ("tab:green", "tab:olive", "tab:brown", "tab:orange", "tab:blue", "lightgrey")
    parts = points[: len(colours)]
    for y, (name, values) in enumerate(
        {"paper": [p.paper or 0.0 for p in parts], "ours": [max(0.0, p.ours) for p in parts]}.items()
    ):
        left = 0.0
        for point, value, colour in zip(parts, values, colours, strict=True):
            label = point.point.removesuffix(": seconds a step") if name == "paper" else None
            axes.barh(y, value, 0.5, left=left, color=colour, label=label)
            left += value
        axes.text(left, y, f" {left:.0f} s", va="center")
    axes.set_yticks([0, 1], ["paper", "ours"])
    axes.set_ylim(-0.5, 2.0)
    axes.set_xlabel("seconds a step, a server")
    axes.set_xlim(0, 1.12 * max(p.ours for p in points if p.point == "a step: seconds"))
    axes.legend(fontsize=8, ncols=6, loc="upper center")


if __name__ == "__main__":
    main("staleflow_table3", measure, draw, size=(9.0, 3.5))
