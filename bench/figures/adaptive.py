"""A budget for the mean staleness, held while the lengths drift (``[staleness.adaptive]``; in no paper).

DORA names as its limitation that a user must find the staleness bound by trial. Here responses grow threefold on
average, and their tail with them; with a target of 1.6 the run moves its bound and its slots every ten steps
(core/staleness/adaptive.py), without one both stay. For the in-flight cap (α is real) and for the buffers (η is whole).

What it shows. Without a target the mean is 3.8 (cap) and 3.7 (buffers) over steps 30 to 159, nearly all that
the bound of 4 admits. With it, the same steps have a mean of 1.56 and 1.59. The cap settles on α = 1.6 after 40 steps,
and the mean stays within 0.1 of it while the lengths drift. The buffers have no 1.6: slots do the work below
η = 2, and single stretches lie between 1.1 and 2.2. The budget has its price: a step takes 22.7 s in place of 15.5
(cap), 24.2 in place of 15.4 (buffers). Both begin with a bound of 4, and what has started under it keeps it: so the
first stretch after a move shows it in part, and the cap first goes too low (1.02 in steps 20 to 29).

What the runtime said, among others:

    mean staleness 2.36, target 1.6: bound 1.6 → 0.838, more is admitted than the budget allows
    mean staleness 1.32, target 1.6: bound 1.419 → 1.694, admission leaves slots empty
    mean staleness 2.15, target 1.6: slots 80 → 33, fewer at once are generated across fewer updates

    python bench/figures/adaptive.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from common import Point, each, main
from matplotlib.figure import Figure

from asyncrl.build.virtual import simulated
from asyncrl.config import Recipe
from asyncrl.observe.tally import NO_ARGS, Tally
from asyncrl.ports import StepMetrics
from asyncrl.sim.loop import run

TARGET, EVERY, STEPS = 1.6, 10, 160
FIXED, SLOTS = 4, 80
"""The bound where there is no target, and the first one where there is."""
CONTROLS = {"inflight_cap": "in-flight cap α", "buffers": "buffers η"}
TITLES = {
    "staleness": "mean staleness",
    "seconds a step": "seconds a step",
    "bound": "bound in force",
    "slots": "slots in use",
}
START, END = (300, 30), (900, 90)
"""Mean and tailness of the lengths."""
ASSUMPTION = (
    f"{SLOTS} environment slots, 64 trajectories a step, 4 servers by StaleFlow's table 4; lengths lognormal, a "
    f"mean of {START[0]} tokens and tailness {START[1]} to {END[0]} and {END[1]} over {STEPS} steps; means over {EVERY}"
)


class Place(Point, kw_only=True):
    """A stretch of ``EVERY`` steps from ``step`` on. ``reason``: what moved at its end."""

    control: str
    target: float
    value: str
    step: int
    reason: str


class Played(msgspec.Struct, kw_only=True):
    lines: list[dict[str, float]]
    reasons: list[tuple[int, str]]
    """Step, and what the budget moved at its end and why."""


class Reasons(Tally):
    """Keeps every step's line, and what the budget said."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.played = Played(lines=[], reasons=[])

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.played.lines.append(self.metrics)

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().instant(track, name, at, args)
        if track == "budget":
            self.played.reasons.append((len(self.played.lines) + 1, name))


def played(recipe: Recipe) -> Played:
    async def play() -> Played:
        reasons = Reasons(recipe, asyncio.get_running_loop().time)
        await (await simulated(recipe, observer=reasons)).play()
        return reasons.played

    return run(play(), limit=1e8)


def table(control: str, target: float, steps: int) -> dict[str, Any]:
    adaptive = {"target": target, "bound_min": 0, "bound_max": FIXED, "every_steps": EVERY}
    return {
        "env": {"max_turns": 1},
        "rollout": {"batch_groups": 16, "group_size": 4, "num_envs": SLOTS, "max_new_tokens": 6000, "max_tokens": 6100},
        "engine": {"count": 4, "max_running_requests": 64, "max_total_tokens": 200_000, "stream_interval": 6000},
        "staleness": {"control": control, "bound": FIXED, "adaptive": adaptive if target else {}},
        "run": {"steps": steps, "trace_requests": False},
        "sim": {
            "lengths": {"kind": "lognormal", "mean": START[0], "tailness": START[1]},
            "lengths_end": {"kind": "lognormal", "mean": END[0], "tailness": END[1]},
            "trainer": {"fixed_s": 1.0},
            "weights": {"transport": "relay"},
            "tasks": 4000,
        },
    }


def measure(quick: bool) -> list[Place]:
    controls, steps = (["inflight_cap"], 40) if quick else (list(CONTROLS), STEPS)
    wanted = [(control, target) for control in controls for target in (0.0, TARGET)]
    runs = each(played, [table(*setup, steps) for setup in wanted])
    points = []
    for (control, target), result in zip(wanted, runs, strict=True):
        name = f"{CONTROLS[control]}, {f'target {target:g}' if target else f'bound {FIXED}, no target'}"
        reasons = dict(result.reasons)
        for first in range(0, steps, EVERY):
            stretch = result.lines[first : first + EVERY]
            began = result.lines[first - 1]["time/at"] if first else 0.0
            last = stretch[-1]
            values = {
                "staleness": sum(line["staleness/mean"] for line in stretch) / len(stretch),
                "seconds a step": (last["time/at"] - began) / len(stretch),
                "bound": stretch[0].get("staleness/bound", float(FIXED)),
                "slots": stretch[0].get("rollout/slots", float(SLOTS)),
            }
            points += [
                Place(
                    figure="adaptive",
                    point=f"{name}: {value}, steps {first} to {first + len(stretch) - 1}",
                    paper=None,
                    ours=ours,
                    assumption=ASSUMPTION,
                    control=control,
                    target=target,
                    value=value,
                    step=first,
                    reason=reasons.get(first + EVERY, "") if value == "staleness" else "",
                )
                for value, ours in values.items()
            ]
    return points


def draw(figure: Figure, points: list[Place]) -> None:
    values = ("staleness", "seconds a step", "bound", "slots")
    panels = figure.subplots(len(CONTROLS), len(values), sharex=True)
    for row, (control, title) in zip(panels, CONTROLS.items(), strict=True):
        for axes, value in zip(row, values, strict=True):
            for target, color in ((0.0, "0.55"), (TARGET, "C4")):
                here = [p for p in points if (p.control, p.target, p.value) == (control, target, value)]
                label = f"target {target:g}" if target else "no target"
                edges = [*(p.step for p in here), STEPS]
                axes.stairs([p.ours for p in here], edges, baseline=None, color=color, lw=1.5, label=label)
            if value == "staleness":
                axes.axhline(TARGET, color="C3", ls=":", lw=1, label="the target")
            axes.set(ylim=(0, None))
            axes.set_title(f"{title}: {TITLES[value]}", fontsize=9)
            axes.grid(alpha=0.2)
        row[0].legend(fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("train step")


if __name__ == "__main__":
    main("adaptive", measure, draw, size=(13.0, 5.5))
