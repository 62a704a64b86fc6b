"""Queue scheduling against batch rollout under dynamic filtering (ROLL Flash §5.1.1, figure 7).

Bars: the mean time to generate a batch of N prompts × 8 responses, when groups whose rewards are all equal are dropped
and replaced. Batch rollout (preset ``sync-naive``) judges nothing before a whole wave of prompts has ended, and then
sends out as many prompts as are missing; queue scheduling judges every response as it ends, replaces a dropped group at
once, and has 16 or 0 prompts run beside those that the batch needs. The time is that from a step's weights to its
batch; training is not part of it.

    python bench/figures/fig7.py

The paper does not say how often a group is dropped, nor how many GPUs generate. Taken: tasks' chances to be solved are
Beta-distributed with mean and spread 0.5, so 39 % of the groups of 8 have equal rewards; 16 servers and the lengths of
Qwen3-8B-Base (appendix A.1). A second series has the lengths of Qwen3-8B-Think, the paper's other model.

Queue scheduling gains more here than in the paper with Base (7.5 against 3.4 times at 8 × 8), about as much with Think
(4.0). Batch rollout pays for the longest response of three or four waves in turn, so the gain hangs on the tail. The
paper's runs had a lighter one: a single response at appendix A's limit of 30,720 tokens takes 450 s here, more than
three times what its batch rollout needs in all. As in the paper, most of the gain is that of the additional prompts.
"""

from __future__ import annotations

from typing import Any

from common import Point, main, merge, simulate_all
from matplotlib.figure import Figure
from roll_flash import ASSUMPTION, world

GROUP = 8
GPUS = 16
BATCHES = (8, 16, 32, 64, 128)
LENGTHS = {"Base": "qwen3-8b-base", "Think": "qwen3-8b-think"}
BARS = {"batch rollout": (False, 0), "queue + 16": (True, 16), "queue + 0": (True, 0)}
"""Queue scheduling?, additional prompts."""
PAPER = {(8, "batch rollout"): 125.0, (8, "queue + 16"): 37.0}
SPEEDUP = {8: 3.4}


class Bar(Point, kw_only=True):
    batch: int
    lengths: str
    value: str


def table(prompts: int, lengths: str, queue: bool, additional: int, steps: int) -> dict[str, Any]:
    return merge(
        {"preset": "sync" if queue else "sync-naive"},
        world(servers=GPUS, training_gpus=GPUS, lengths=LENGTHS[lengths], shared=True),
        {
            "rollout": {
                "batch_groups": prompts,
                "group_size": GROUP,
                "filter_zero_variance": True,
                "max_additional_running_prompts": additional,
                "num_envs": (prompts + additional) * GROUP,
            },
            "sim": {"env": {"success": 0.5, "spread": 0.5}},
            "run": {"steps": steps},
        },
    )


def measure(quick: bool) -> list[Bar]:
    where = [(n, lengths) for lengths in LENGTHS for n in BATCHES]
    if quick:
        where = [(8, "Base")]
    steps = {n: 4 if quick else max(6, 320 // n) for n in BATCHES}
    results = iter(
        simulate_all([table(n, lengths, *bar, steps=steps[n]) for n, lengths in where for bar in BARS.values()])
    )
    points = []
    for n, lengths in where:
        seconds = {name: next(results).mean("time/wait") for name in BARS}
        values = [(f"{name}, s", PAPER.get((n, name)), ours) for name, ours in seconds.items()]
        speedup = seconds["batch rollout"] / seconds["queue + 16"]
        points += [
            Bar(
                figure="7",
                point=f"{n} × {GROUP}, {lengths}: {value}",
                paper=paper,
                ours=ours,
                assumption=f"{ASSUMPTION}; 16 servers; 39 % of the groups have equal rewards",
                batch=n,
                lengths=lengths,
                value=value,
            )
            for value, paper, ours in [*values, ("speed-up", SPEEDUP.get(n), speedup)]
        ]
    return points


def draw(figure: Figure, points: list[Bar]) -> None:
    at = {(p.batch, p.lengths, p.value): p for p in points}
    panels = figure.subplots(1, len(LENGTHS))
    for axes, lengths in zip(panels, LENGTHS, strict=True):
        for number, name in enumerate(BARS):
            bars = [at[n, lengths, f"{name}, s"] for n in BATCHES]
            places = [i + 0.27 * (number - 1) for i in range(len(BATCHES))]
            axes.bar(places, [p.ours for p in bars], 0.25, color=("C0", "C4", "#c5a9dd")[number], label=name)
            for place, p in zip(places, bars, strict=True):
                if p.paper is not None and lengths == "Base":
                    axes.plot(place, p.paper, "*", ms=11, color="white", mec="black")
        for i, n in enumerate(BATCHES):
            top = at[n, lengths, "batch rollout, s"].ours
            axes.annotate(f"{at[n, lengths, 'speed-up'].ours:.1f}×", (i, top), ha="center", va="bottom", color="C3")
        if lengths == "Base":
            axes.plot([], [], "*", ms=11, color="white", mec="black", label="paper (8 × 8)")
        axes.set_xticks(range(len(BATCHES)), [f"{n} × {GROUP}" for n in BATCHES])
        axes.set(title=f"lengths of Qwen3-8B-{lengths}", xlabel="prompts × responses")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(loc="upper left")
    panels[0].set_ylabel("seconds to generate a batch")


if __name__ == "__main__":
    main("fig7", measure, draw, size=(11.0, 4.5))
