"""The in-flight cap α on the staleness–period frontier of queue-drop, for short and for long tails.

Not a figure of the staleness paper: its frontier (frontier.py, same 64 GPUs), with ROLL Flash's async ratio as this
runtime has it (core/staleness/inflight_cap.py) drawn in. Queue-drop never waits and drops what the trainer is too slow
for; its staleness has no bound. The cap starts only what can be trained in time: the mean is at most α, no sample is
staler than ⌈α⌉, nothing is dropped, and a step waits for stragglers that would otherwise miss their bound.

Per tailness: queue-drop (q = 1) and the cap for several α, over splits of the GPUs; and the cap with 2 groups running
beyond the need (``rollout.max_additional_running_prompts``), which may be aborted as surplus instead of waited for. A
point also tells the largest staleness seen, the share of finished or aborted trajectories that was not trained, and how
much shorter trained responses are than sampled ones.

What it shows. With short tails (M_tail = 1.42) the cap lies below queue-drop: a mean staleness of 1 costs 42 s a step
against 58 s, 1.5 costs 34 s against 41 s, 2 costs 31 s against 32 s; and nothing is dropped, where queue-drop loses 7
to 54 % once it is train-bound. With long tails (2.21) α from 2 to 4 lies above queue-drop, for every step waits for
stragglers: 53 s against 42 s at staleness 2. There α is better either 1, where the two meet, or so large that nothing
waits (6, for ρ < 0.8), or redundant groups take the stragglers' place: they bring the cap onto queue-drop's curve and
below, at the price of 8 to 11 % lost and of responses 4 % shorter, the bias of queue-max.

    python bench/figures/inflight_cap_frontier.py
"""

from __future__ import annotations

from typing import Any

from common import Result, main, simulate_all
from matplotlib.figure import Figure
from staleness_paper import (
    BUDGET,
    REAL_TAILNESS,
    WITHIN,
    Run,
    budget_prediction,
    budget_rho,
    budget_table,
    lengths_of,
    multiplier,
    period_of,
    staleness_of,
)

TAILNESSES = (REAL_TAILNESS, 50.0)
QUEUE_SPLITS = (8, 12, 16, 20, 24, 28, 31, 33, 36, 40, 44)
CAP_SPLITS = (24, 28, 32, 36)
ALPHAS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
REDUNDANT = 2


class Place(Run, kw_only=True):
    """A simulated point: ``x`` are rollout GPUs, ``ours`` is mean staleness."""

    tailness: float
    period: float


def places(quick: bool) -> list[tuple[float, str, int, dict[str, Any]]]:
    """(tailness, series, rollout GPUs, what differs from the recipe of queue-drop)."""
    found: list[tuple[float, str, int, dict[str, Any]]] = []
    for tailness in TAILNESSES[:1] if quick else TAILNESSES:
        for n in (28,) if quick else QUEUE_SPLITS:
            found.append((tailness, "queue-drop", n, {"control": "queue_drop", "queue": 1}))
        for n in (28,) if quick else CAP_SPLITS:
            for alpha in (2.0,) if quick else ALPHAS:
                found.append((tailness, f"α = {alpha:g}", n, {"control": "inflight_cap", "bound": alpha}))
        for alpha in () if quick else (1.0, 2.0, 3.0):
            change = {"control": "inflight_cap", "bound": alpha, "redundant": REDUNDANT}
            found.append((tailness, f"α = {alpha:g}, {REDUNDANT} redundant", 28, change))
    return found


def measure(quick: bool) -> list[Place]:
    steps, skip = (50, 20) if quick else (110, 20)
    wanted = places(quick)
    tables = []
    for tailness, _, n, change in wanted:
        staleness = {k: v for k, v in change.items() if k != "redundant"}
        recipe = budget_table(n, tailness=tailness, steps=steps, **staleness)
        recipe["rollout"]["max_additional_running_prompts"] = change.get("redundant", 0)
        tables.append(recipe)
    points = []
    for (tailness, series, n, _), result in zip(wanted, simulate_all(tables), strict=True):
        mean, error = staleness_of(result, skip)
        period, _ = period_of(result, skip)
        points.append(
            Place(
                figure="in-flight cap on the frontier",
                point=(
                    f"M = {multiplier(tailness):.2f}, {series}, {n} rollout GPUs (ρ = {budget_rho(n):.2f}): "
                    f"period {period:.1f} s, {aside(result, skip, tailness)}, ± {error:.2f}"
                ),
                paper=None,
                ours=mean,
                assumption=f"{BUDGET} (or 2.21: tailness 50); {WITHIN}",
                series=series,
                x=n,
                error=error,
                tailness=tailness,
                period=period,
            )
        )
    return points


def aside(result: Result, skip: int, tailness: float) -> str:
    """What a frontier does not show."""
    largest = max(line["staleness/max"] for line in result.steps[skip:])
    trained, lost = (result.steps[-1][f"ledger/{state}"] for state in ("consumed", "surplus"))
    shorter = 1 - result.mean("response/mean", skip) / lengths_of(tailness).expected
    return f"largest {largest:g}, {lost / (trained + lost):.0%} lost, {shorter:+.0%} shorter"


def draw(figure: Figure, points: list[Place]) -> None:
    panels = figure.subplots(1, len(TAILNESSES))
    for axes, tailness in zip(panels, TAILNESSES, strict=True):
        mine = [p for p in points if p.tailness == tailness]
        for begin, end, style in ((0.14, 0.9999, "-"), (1.0001, 2.3, "--")):
            rhos = [begin + (end - begin) * i / 60 for i in range(61)]
            line = [budget_prediction(rho, tailness=tailness) for rho in rhos]
            axes.plot([period for _, period in line], [stale for stale, _ in line], style, color="0.5", lw=1)
        queue = [p for p in mine if p.series == "queue-drop"]
        axes.plot([p.period for p in queue], [p.ours for p in queue], "o", color="0.4", ms=5, label="queue-drop, q = 1")
        for number, n in enumerate(CAP_SPLITS):
            cap = [p for p in mine if p.x == n and p.series in {f"α = {alpha:g}" for alpha in ALPHAS}]
            label = f"cap, {n} rollout GPUs (ρ = {budget_rho(n):.2f})"
            axes.plot(
                [p.period for p in cap], [p.ours for p in cap], "s-", color=f"C{number}", ms=4, lw=0.8, label=label
            )
        redundant = [p for p in mine if "redundant" in p.series]
        axes.plot(
            [p.period for p in redundant],
            [p.ours for p in redundant],
            "D:",
            color="C1",
            mfc="none",
            ms=6,
            label=f"cap, 28 rollout GPUs, {REDUNDANT} redundant groups",
        )
        axes.set(title=f"M_tail = {multiplier(tailness):.2f}", xlabel="train period (s)", ylim=(0, None))
        axes.grid(alpha=0.2)
    panels[0].set(ylabel="mean staleness (steps)")
    panels[1].legend(fontsize=8)


if __name__ == "__main__":
    main("inflight_cap_frontier", measure, draw, size=(11.0, 5.0))
