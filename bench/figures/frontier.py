"""Staleness against train period under a fixed number of GPUs: split, batch size, queue and rollout concurrency.

Four figures of the staleness paper ("Moving along the staleness frontier"), of which it prints no numbers. Each curve
moves GPUs from training to rollout; rollout-bound (ρ < 1) is drawn solid, train-bound dashed, a star is ρ = 1.

* GPU split: staleness and period, predicted and simulated.
* Batch size: against the noise-adjusted period t_period/√B ("different batch sizes trace roughly the same Pareto
  frontier, but larger batches are able to achieve lower staleness").
* Queue of 1, 2, 4 batches, simulated near ρ = 1 ("using q=1 decreases staleness … but also slightly increases the
  effective train period").
* Slots per rollout GPU ("the frontiers largely overlap").

Lines are the formulas (core/theory/staleness.py), dots this runtime in the world of the paper's simulator
(staleness_paper.py): slots and v_R grow with the rollout GPUs, the train step shrinks with the training GPUs.

What it shows. But for ρ = 1 itself, formula and runtime agree within 0.13 of a step and 3.6 % of a period. At ρ = 1 a
queue of 1 drops groups that the trainer then waits for: the period is 4 % longer and staleness 2.30, against 2.74
with q = 2, which is the paper's own finding. Longer queues wander there, with this short tail so slowly that in 300
steps neither q = 2 nor q = 4 got to 2 batches: their two points at ρ = 1 are one, and not that of the long run.
Rollout-bound is better than train-bound at every period. Batch sizes share a frontier roughly, as the paper says;
numbers of slots less than it says. For the same period fewer slots a GPU need more rollout GPUs, so ρ is higher, and
with it the wait in the queue: staleness 1.44, 1.19 and 1.1 at 50 s a step for 2, 4 and 8 slots.

    python bench/figures/frontier.py
"""

from __future__ import annotations

from typing import Any

from common import main, simulate_all
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from staleness_paper import (
    BATCH,
    BUDGET,
    REAL_TAILNESS,
    SLOTS,
    WITHIN,
    Run,
    budget_prediction,
    budget_rho,
    budget_table,
    period_of,
    staleness_of,
)

SPLITS = (16, 20, 24, 28, 31, 33, 36, 40, 44)
"""Rollout GPUs; β* = 1, so half of the GPUs is ρ = 1."""
NEAR = (29, 31, 32, 33, 35)
SPARSE = (16, 24, 31, 33, 40)
BY_SLOTS = {2: (28, 36, 41, 44, 50), 4: SPARSE, 8: (8, 14, 20, 23, 30)}
"""With other slots other splits give the same ρ."""


class Place(Run, kw_only=True):
    """A point of a frontier: ``x`` are rollout GPUs, ``ours`` is staleness."""

    period: float
    predicted: float
    predicted_period: float
    panel: str


def places(quick: bool) -> list[tuple[str, str, int, dict[str, Any]]]:
    """(panel, series, rollout GPUs, what differs)."""
    if quick:
        return [("split", "q = 1", n, {}) for n in (24, 40)]
    found: list[tuple[str, str, int, dict[str, Any]]] = [("split", "q = 1", n, {}) for n in SPLITS]
    found += [("batch", f"B = {b}", n, {"batch": b}) for b in (64, 128, 256) for n in SPARSE]
    found += [("queue", f"q = {q}", n, {"queue": q}) for q in (1, 2, 4) for n in NEAR]
    found += [("slots", f"{s} slots a GPU", n, {"slots": s}) for s, splits in BY_SLOTS.items() for n in splits]
    return found


def measure(quick: bool) -> list[Place]:
    wanted = places(quick)
    setups: dict[str, tuple[int, dict[str, Any]]] = {}
    for _, _, n, change in wanted:
        setups.setdefault(key(n, change), (n, change))
    tables = [
        budget_table(n, tailness=REAL_TAILNESS, steps=steps_of(n, change, quick)[0], **_sim(change))
        for n, change in setups.values()
    ]
    results = dict(zip(setups, simulate_all(tables), strict=True))
    points = []
    for panel, series, n, change in wanted:
        result, skip = results[key(n, change)], steps_of(n, change, quick)[1]
        mean, error = staleness_of(result, skip)
        period, _ = period_of(result, skip)
        rho = budget_rho(n, change.get("slots", SLOTS))
        predicted, predicted_period = budget_prediction(rho, tailness=REAL_TAILNESS, **change)
        points.append(
            Place(
                figure="frontier",
                point=(
                    f"{panel}: {series}, {n} rollout GPUs (ρ = {rho:.2f}): predicted {predicted:.2f}, ± {error:.2f}; "
                    f"period {period:.1f} s, predicted {predicted_period:.1f} s"
                ),
                paper=None,
                ours=mean,
                assumption=f"{BUDGET}; {WITHIN}",
                series=series,
                x=n,
                error=error,
                panel=panel,
                period=period,
                predicted=predicted,
                predicted_period=predicted_period,
            )
        )
    return points


def key(n: int, change: dict[str, Any]) -> str:
    """The same for two places that are the same system."""
    return str((n, change.get("batch", BATCH), change.get("slots", SLOTS), change.get("queue", 1)))


def _sim(change: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in change.items() if k != "queue"}
    return rest | {"control": "queue_drop", "queue": change.get("queue", 1)}


def steps_of(n: int, change: dict[str, Any], quick: bool) -> tuple[int, int]:
    """Steps, and those of them that are skipped: a long queue near balance takes long to forget how it began."""
    if quick:
        return 50, 20
    return (300, 100) if n in NEAR and "queue" in change else (110, 20)


def draw(figure: Figure, points: list[Place]) -> None:
    panels = figure.subplots(2, 2).flat
    titles = {
        "split": "GPU split (q = 1)",
        "batch": "batch size (q = 1)",
        "queue": "queue, near ρ = 1",
        "slots": "slots per rollout GPU (q = 1)",
    }
    for axes, (panel, title) in zip(panels, titles.items(), strict=True):
        mine = [p for p in points if p.panel == panel]
        for number, series in enumerate(dict.fromkeys(p.series for p in mine)):
            change = next(c for where, name, _, c in places(False) if (where, name) == (panel, series))
            root = change.get("batch", BATCH) ** 0.5 if panel == "batch" else 1.0
            curve(axes, change, f"C{number}", root, (0.8, 1.25) if panel == "queue" else (0.3, 2.5))
            here = [p for p in mine if p.series == series]
            axes.errorbar(
                [p.period / root for p in here],
                [p.ours for p in here],
                [2 * p.error for p in here],
                fmt="o",
                ms=4,
                color=f"C{number}",
                label=series,
            )
        axes.set(title=title, xlabel="train period / √B (s)" if panel == "batch" else "train period (s)")
        axes.grid(alpha=0.2)
        axes.legend(fontsize=8)
        axes.set(ylabel="mean staleness (steps)")


def curve(axes: Axes, change: dict[str, Any], color: str, root: float, between: tuple[float, float]) -> None:
    low, high = between
    for begin, end, style in ((low, 0.9999, "-"), (1.0001, high, "--")):
        line = [budget_prediction(begin + (end - begin) * i / 60, tailness=REAL_TAILNESS, **change) for i in range(61)]
        axes.plot([period / root for _, period in line], [stale for stale, _ in line], style, color=color, lw=1)
        star = line[-1] if style == "-" else line[0]
        axes.plot(star[1] / root, star[0], "*", color=color, ms=8)


if __name__ == "__main__":
    main("frontier", measure, draw, size=(9.0, 7.2))
