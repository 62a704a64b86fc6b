"""StaleFlow's coordination in multi-turn work, which the paper leaves to the future: SWE and ALFWorld, simulated.

Synchronous training, ROLL Flash (α = 1 and 2, turns sent to the server that holds their prefix or not) and StaleFlow
(η = 1 and 2; without migration) on figure 11's environments, several to a server: 64 trajectories a
step on 4 servers, 128 or 192 environments. Four steps are measured, of one seed: differences of 2 % mean nothing.

What it shows. *Where contexts outgrow the servers' KV caches* (SWE, 14B, up to 32k tokens each), ROLL Flash sends each
turn on at once, conversations push each other out of the caches, and 6.3 tokens are prefilled for each that is
generated; StaleFlow sends a turn where its prefix is or where prefill costs least, groups start as servers can keep
pace, and 2.9 are. That makes it 1.16 times as fast at the same bound (576 tokens/s, 497). *A higher bound hurts both
there*, as more conversations begin: with 2 ROLL Flash does 406 tokens/s and StaleFlow 370, and 17 to 18 tokens are
prefilled. Neither counts what conversations hold while their environments think. *Where caches suffice* (ALFWorld, 8B),
nothing is to be won: 1,148 against 1,173 tokens/s. Prefix affinity is worth more than all of this: without it ROLL
Flash does 322 and 1,045. (When turns too were kept back, by μ of an idle server's gain, it was 567 and 1,143: 1.9
tokens prefilled on SWE, but later turns waited a third of the time.)

Staleness is the bound in all these runs: groups wait for a version that may start them, so all servers pull as soon as
there is one, and are never of different versions. Selective synchronization has nothing to select here.

    python bench/figures/staleflow_agentic.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from agentic import world
from common import Point, each, main, merge
from fig11 import TASKS
from matplotlib.figure import Figure

from asyncrl.build.virtual import simulated
from asyncrl.config import Recipe
from asyncrl.core.types import Trajectory
from asyncrl.observe.tally import NO_ARGS, Tally
from asyncrl.ports import StepMetrics
from asyncrl.sim.loop import run

SERVERS, TRAINING_GPUS = 4, 4
PROMPTS, GROUP = 8, 8
STEPS, SKIP = 6, 2
ROLL, STALE = {"preset": "roll-flash"}, {"preset": "staleflow", "engine": {"routing": "waterfall"}}
SCHEMES: dict[str, tuple[int, dict[str, Any]]] = {
    "sync": (0, {}),
    "roll-flash, 1": (1, ROLL),
    "roll-flash, 1, no affinity": (1, merge(ROLL, {"engine": {"routing": "least_loaded"}})),
    "staleflow, 1": (1, STALE),
    "staleflow, 1, no migration": (1, merge(STALE, {"engine": {"migration": "none"}})),
    "roll-flash, 2": (2, ROLL),
    "staleflow, 2": (2, STALE),
}
"""α or η, and what is laid over the world, where servers are chosen by prefix."""
VALUES = {
    "tokens_s": "tokens/s",
    "period": "seconds a step",
    "staleness": "staleness",
    "prefill": "prefilled tokens for each generated",
    "cut": "interruptions for each turn",
    "waited": "share of the time that later turns wait",
    "idle": "servers' idle share",
    "apart": "share of the time with several versions",
}
ASSUMPTION = (
    f"{SERVERS} H20 generate and {TRAINING_GPUS} train, {PROMPTS} groups of {GROUP} a step, (1 + bound) as many "
    "environments, latencies, turns and lengths of figure 11, none fails; weights are loaded while the trainer trains"
)


class Bar(Point, kw_only=True):
    task: str
    scheme: str
    value: str


class Measured(msgspec.Struct, kw_only=True):
    """A run, from the end of its ``SKIP``-th step to that of its last but η."""

    tokens_s: float
    period: float
    staleness: float
    prefill: float
    """Tokens prefilled for each that was generated."""
    cut: float
    """Times that a server cut a request short, of each turn."""
    waited: float
    """Share of the turns' time that they waited for a server, but for first turns."""
    idle: float
    """Share of the time that a server ran nothing."""
    began: float
    """The same share that first turns waited, for the staleness control and a server."""
    apart: float
    """Share of the time that servers were of different versions."""


class Counts(Tally):
    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.lines: list[dict[str, float]] = []
        self.attempts = self.turns = 0
        self.began = self.waited = self.ran = self.in_env = self.apart = 0.0
        self._at = 0.0
        self._differ = False
        self.prefilled: Callable[[], int] = lambda: 0
        self.generated = 0

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        own = {
            "prefilled": self.prefilled(),
            "generated": self.generated,
            "waited": self.waited,
            "ran": self.ran,
            "in_env": self.in_env,
            "apart": self.apart,
            "began": self.began,
        }
        for trajectory in metrics.batch.trajectories:
            for number, turn in enumerate(trajectory.turn_seconds):
                self.began += turn[0] if not number else 0.0
                self.waited += turn[0] if number else 0.0
                self.ran += turn[1]
                self.in_env += turn[2]
        self.lines.append(self.metrics | own)

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        super().trajectory(trajectory, state)
        self.turns += trajectory.turns

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        self.apart += (at - self._at) * self._differ
        self._at = at
        super().server(name, at, running, version, up)
        self._differ = len({server.version for server in self.servers.values()}) > 1

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().span(track, name, start, end, args)
        if name == "generate":
            self.attempts += 1
            self.generated += args["tokens"]


def measured(recipe: Recipe) -> Measured:
    async def play() -> Counts:
        counts = Counts(recipe, asyncio.get_running_loop().time)
        simulation = await simulated(recipe, observer=counts)
        counts.prefilled = lambda: sum(engine.server.prefilled for engine in simulation.engines)
        await simulation.play()
        return counts

    counts = run(play(), limit=1e8)
    lines = counts.lines
    lines = lines[: len(lines) - int(recipe.staleness.bound)]
    skip = min(SKIP, len(lines) - 1)
    first, last = lines[skip - 1], lines[-1]

    def over(key: str) -> float:
        return last[key] - first[key]

    steady = lines[skip:]
    seconds = over("time/at")
    return Measured(
        tokens_s=over("tokens/total") / seconds,
        period=seconds / len(steady),
        staleness=sum(s["staleness/mean"] for s in steady) / len(steady),
        prefill=over("prefilled") / over("generated"),
        cut=counts.attempts / counts.turns - 1.0,
        waited=over("waited") / (over("waited") + over("ran") + over("in_env")),
        began=over("began") / (over("waited") + over("ran") + over("in_env")),
        idle=sum(s["bubble/share"] for s in steady) / len(steady),
        apart=over("apart") / seconds,
    )


def table(task: str, bound: int, scheme: dict[str, Any], steps: int) -> dict[str, Any]:
    return merge(
        world(prompts=PROMPTS, group_size=GROUP, **TASKS[task]),
        {
            "engine": {"count": SERVERS},
            "rollout": {"num_envs": (1 + bound) * PROMPTS * GROUP},
            "staleness": {"bound": bound},
            "update": {"overlap": True},
            "sim": {"trainer": {"gpus": TRAINING_GPUS}, "stall_s": 1e7},
            "run": {"steps": steps + bound},
        },
        scheme,
    )


def measure(quick: bool) -> list[Bar]:
    tasks, names = (["ALFWorld"], ["roll-flash, 1", "staleflow, 1"]) if quick else (list(TASKS), list(SCHEMES))
    wanted = [(task, name) for task in tasks for name in names]
    results = each(measured, [table(task, *SCHEMES[name], 4 if quick else STEPS) for task, name in wanted])
    return [
        Bar(
            figure="staleflow-agentic",
            point=f"{task}: {name}: {what}",
            paper=None,
            ours=getattr(result, value),
            assumption=ASSUMPTION,
            task=task,
            scheme=name,
            value=value,
        )
        for (task, name), result in zip(wanted, results, strict=True)
        for value, what in VALUES.items()
    ]


def draw(figure: Figure, points: list[Bar]) -> None:
    shown = ("tokens_s", "prefill", "cut", "idle")
    panels = figure.subplots(len(TASKS), len(shown), sharey="row")
    names = list(SCHEMES)[::-1]
    for row, task in zip(panels, TASKS, strict=True):
        for axes, value in zip(row, shown, strict=True):
            heights = {p.scheme: p.ours for p in points if (p.task, p.value) == (task, value)}
            colors = ["C4" if "staleflow" in name else "C0" if "roll" in name else "0.7" for name in names]
            bars = axes.barh(names, [heights[name] for name in names], color=colors)
            axes.bar_label(bars, fmt="{:,.3g}", fontsize=8, padding=2)
            axes.margins(x=0.25)
            axes.tick_params(labelsize=8)
            axes.set_title(f"{task}: {VALUES[value]}", fontsize=9)
            axes.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    main("staleflow_agentic", measure, draw, size=(13.0, 6.0))
