"""What a larger staleness bound saves (StaleFlow fig. 3, §2.2).

    python bench/figures/staleflow_fig3.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

Qwen2.5-7B on 64 H20s, as the paper's Qwen2.5-MATH-7B, by a system that caps what is in flight (VeRL-Async): seconds a
step, and how long of them the trainer waits. One server a GPU, by core/hardware.py's estimate. Lengths and trainer are
those of all figures; 40 of the 64 GPUs train, as with a quarter of them a dense model's trainer never waits at all,
from η = 1 on. That a large bound slows convergence, the figure's other half, no simulation can show.
"""

from __future__ import annotations

import msgspec
from common import Point, main
from matplotlib.figure import Figure
from staleflow import FORWARDS, GPU, Run, runs

from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens, training_tokens_per_s

ETAS = (0, 1, 2, 3, 4)
CLUSTER = 64
SERVERS, TRAINING = 6, 10
"""Of a quarter of the cluster: 16 GPUs."""


def measure(quick: bool) -> list[Point]:
    shape, card = MODELS["qwen2.5-7b"], GPUS[GPU]
    over = {
        "engine": {"count": SERVERS, "max_total_tokens": kv_tokens(shape, card)},
        "sim": {
            "instance": {"cost": msgspec.to_builtins(cost_model(shape, card)), "gpus": 1},
            "trainer": {"gpus": TRAINING, "tokens_per_s": training_tokens_per_s(shape, card, forwards=FORWARDS)},
            "weights": {"gigabytes": shape.parameters * 2e-9},
        },
    }
    etas = (0, 1) if quick else ETAS
    cases = [(f"η = {eta}", "VeRL-Async", eta, {"gpus": CLUSTER, "over": over}) for eta in etas]
    measured = runs("staleflow-3", cases)
    points = []
    for run in measured:
        for what, value in (
            ("seconds a step", run.period),
            ("seconds the trainer waits", run.period * run.trainer_idle),
        ):
            points.append(Point(figure="staleflow-3", point=f"{run.system}: {what}", paper=None, ours=value))
    return [*points, *measured]


def draw(figure: Figure, points: list[Point]) -> None:
    measured = [p for p in points if isinstance(p, Run)]
    axes = figure.subplots()
    x = [r.eta for r in measured]
    waits = [r.period * r.trainer_idle for r in measured]
    busy = [r.period - wait for r, wait in zip(measured, waits, strict=True)]
    axes.bar(x, busy, 0.6, color="tab:blue", label="trains, and hands over weights")
    axes.bar(x, waits, 0.6, bottom=busy, color="tab:orange", label="waits for trajectories")
    axes.set_xticks(x, [f"η = {eta}" for eta in x])
    axes.set_ylabel("seconds of a step")
    axes.set_title("The trainer's time, Qwen2.5-7B on 64 H20s", fontsize=10)
    axes.legend(fontsize=9)
    axes.grid(alpha=0.3, axis="y")


if __name__ == "__main__":
    main("staleflow_fig3", measure, draw, size=(8.0, 4.5))
