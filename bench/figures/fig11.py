"""Environment-level asynchrony and redundant environments on SWE and ALFWorld (ROLL Flash §5.2, figure 11).

End-to-end time of the same number of train steps, as a share of that of synchronous training in lock-step turns
(agentic.py): with environment-level asynchrony, with redundant environments on top (9 groups of 17 for a batch of 8 of
16: appendix A.2), and both with asynchronous training, α = 1. 32 GPUs generate and 32 train; in all schemes only as
many environments run as appendix A.2 says, so what asynchronous training wins is that they never pause.

    python bench/figures/fig11.py

Of the real environments the paper gives the limits alone (50 and 30 turns, 8,192 and 4,096 tokens a turn, 32,768 a
trajectory). Taken for both: Gaussian latencies of figure 9's grid, turns that vary by a third, lengths of a turn's
response that vary little. Hours are not compared, as the number of steps is not stated.

The schemes come in the paper's order, each gain of the paper is a gain. Environment-level asynchrony brings as much as
there on ALFWorld and more on SWE, where 50 turns of long responses make lock-step dear. Asynchronous training brings
more, because training is a smaller part of a step here (13 % on SWE). Redundancy brings half as much on SWE, as much on
ALFWorld, and hardly anything there with asynchronous training: these environments never fail, and only slow ones are
left behind (figure 10 has those that fail).
"""

from __future__ import annotations

from typing import Any

from agentic import ASSUMPTION as SERVED
from agentic import gaussian, in_lock_step, world
from common import Point, each, main, merge, simulate_all
from matplotlib.figure import Figure

PROMPTS, GROUP = 8, 16
TASKS: dict[str, dict[str, Any]] = {
    "SWE": {
        "model": "qwen3-14b",
        "turns": 50,
        "tokens": {"kind": "long-tail", "mean": 500, "sigma": 0.3, "cap": 8192},
        "env": {
            "reset": gaussian(60, 20),
            "step": gaussian(30, 5),
            "turns": gaussian(30, 10),
            "observation_tokens": {"kind": "constant", "value": 300},
        },
    },
    "ALFWorld": {
        "model": "qwen3-8b",
        "turns": 30,
        "tokens": {"kind": "long-tail", "mean": 400, "sigma": 0.3, "cap": 4096},
        "env": {
            "reset": gaussian(10, 5),
            "step": gaussian(10, 5),
            "turns": gaussian(20, 7),
            "observation_tokens": {"kind": "constant", "value": 60},
        },
    },
}
SCHEMES = {
    "Sync, lock-step": (0, 0.0),
    "Sync, env-level async": (0, 0.0),
    "Sync, + redundant": (1, 0.0),
    "Async": (0, 1.0),
    "Async, + redundant": (1, 1.0),
}
"""Redundant groups and members a group; α. Only the first plays in lock-step."""
HOURS = {"SWE": (10.22, 8.32, 7.66, 6.09, 5.65), "ALFWorld": (13.37, 8.44, 7.85, 5.87, 4.91)}
GAINS = (("env-level async", 0, 1), ("redundant, Sync", 1, 2), ("Async over Sync", 1, 3), ("redundant, Async", 3, 4))
"""Of which scheme over which."""
LOCKED, SYNC, ASYNC, SKIP = 3, 7, 12, 3
"""Steps; the first three of asynchronous training fill its pool."""
ASSUMPTION = (
    "SWE: Qwen3-14B, latency (30, 5) s, reset (60, 20) s, (30, 10) turns, 500 tokens a response and 300 an "
    "observation; ALFWorld: Qwen3-8B, latency (10, 5) s, reset (10, 5) s, (20, 7) turns, 400 and 60 tokens; "
    f"{SERVED.replace('Qwen3-8B on ', '')}; trainer at 35 % of the peak with two further forward passes, 32 H20"
)


class Bar(Point, kw_only=True):
    task: str
    value: str


def table(task: str, redundant: int, alpha: float, steps: int) -> dict[str, Any]:
    return merge(
        world(prompts=PROMPTS, group_size=GROUP, **TASKS[task]),
        {
            "rollout": {
                "max_additional_running_prompts": redundant,
                "group_size_redundancy": redundant,
                "num_envs": (PROMPTS + redundant) * (GROUP + redundant),
            },
            "staleness": {"bound": alpha},
            "update": {"running": "interrupt"},
            "run": {"steps": steps},
        },
    )


def measure(quick: bool) -> list[Bar]:
    tasks = ["ALFWorld"] if quick else list(TASKS)
    locked, sync, ahead, skip = (2, 2, 4, 2) if quick else (LOCKED, SYNC, ASYNC, SKIP)
    together = each(in_lock_step, [table(task, 0, 0.0, locked) for task in tasks])
    free = list(SCHEMES.values())[1:]
    alone = simulate_all([table(task, *s, steps=ahead if s[1] else sync) for task in tasks for s in free])
    points = []
    for number, task in enumerate(tasks):
        results = [together[number], *alone[number * len(free) : (number + 1) * len(free)]]
        seconds = [r.period(skip if alpha else 0) for r, (_, alpha) in zip(results, SCHEMES.values(), strict=True)]
        hours = HOURS[task]
        rows = [
            (f"{name}, share of the time", hours[i] / hours[0], seconds[i] / seconds[0])
            for i, name in enumerate(SCHEMES)
        ]
        rows += [(f"{name}, speed-up", hours[a] / hours[b], seconds[a] / seconds[b]) for name, a, b in GAINS]
        points += [
            Bar(
                figure="11",
                point=f"{task}: {value}",
                paper=paper,
                ours=ours,
                assumption=ASSUMPTION,
                task=task,
                value=value,
            )
            for value, paper, ours in rows
        ]
    return points


def draw(figure: Figure, points: list[Bar]) -> None:
    at = {(p.task, p.value): p for p in points}
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for axes, task in zip(panels, TASKS, strict=True):
        bars = [at[task, f"{name}, share of the time"] for name in SCHEMES]
        for i, p in enumerate(bars):
            assert p.paper is not None
            for place, height, color in ((i - 0.2, p.paper, "0.7"), (i + 0.2, p.ours, "C4")):
                axes.bar(place, height, 0.38, color=color)
                axes.annotate(f"{height:.2f}", (place, height), ha="center", va="bottom", fontsize=8)
        axes.bar([0], [0], color="0.7", label="paper")
        axes.bar([0], [0], color="C4", label="simulated")
        axes.set_xticks(range(len(SCHEMES)), [name.replace(", ", ",\n") for name in SCHEMES], fontsize=8)
        axes.set_title(task)
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("end-to-end time, Sync in lock-step = 1")


if __name__ == "__main__":
    main("fig11", measure, draw, size=(11.0, 4.5))
