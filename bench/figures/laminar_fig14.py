"""How long a server waits for new weights, from relays and by a global broadcast (Laminar fig. 14, §8.3).

    python bench/figures/laminar_fig14.py [--quick] [--json FILE] [--plot FILE] [--jobs N]

As many GPUs generate as train. A server of Laminar pulls from its own host when its batch has ended; what it waits is
from when it begins to pull until it has the weights. The best case is weights that are there already. By the global
broadcast all servers wait until the last of them has got the weights, by the formula (core/transfer.py).

The speeds of links are ours (laminar.py), so how the best case stands to the broadcast is an assumption; how near the
mean is to the best case is not. A server's batch is one group of 8 here, so that 128 servers can be simulated. Pulls
count while there is something to begin: at the end of a run servers that have nothing take each version at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import Point, main, merge
from laminar import AHEAD, ARRIVAL_GB_S, PULL_GB_S, TENSOR_PARALLEL, watched, world
from matplotlib.figure import Figure

from asyncrl.config import WeightsModel, load_table
from asyncrl.core.transfer import seconds_to_deliver

CLUSTER = {"32B": 512, "72B": 1024}
"""Whose trainer it is; pulls do not depend on it."""
SIZES = (64, 256, 1024)
MEAN, BEST = 0.37, 0.47
"""By how much Laminar waits less, at most."""
GROUP_SIZE, STEPS = 8, 6
ASSUMPTION = (
    f"relay to relay {ARRIVAL_GB_S:g} GB/s, {PULL_GB_S:g} GB/s a GPU from its host and in a broadcast, 0.1 s a load"
)


def table(model: str, gpus: int) -> dict[str, Any]:
    servers = gpus // 2 // TENSOR_PARALLEL[model]
    rollout = {"batch_groups": servers, "group_size": GROUP_SIZE, "num_envs": servers * GROUP_SIZE}
    over = {"engine": {"count": servers}, "rollout": rollout, "run": {"steps": STEPS + AHEAD["Laminar"]}}
    return merge(world(model=model, gpus=CLUSTER[model]), over)


def pulls(model: str, gpus: int) -> list[float]:
    """Seconds of each, in ``STEPS`` steps."""
    result, seen = watched(table(model, gpus))
    end = seen.start + result.steps[STEPS - 1]["time/at"]
    return [seconds for begin, seconds in seen.pulls if begin < end]


def broadcast(model: str, gpus: int) -> float:
    """Seconds that every server waits for a global broadcast."""
    sim = load_table(world("one-step", model, CLUSTER[model])).sim
    return _delivered(sim.weights, sim.instance.load_s, gpus // 2 // TENSOR_PARALLEL[model])


def _delivered(weights: WeightsModel, load_s: float, servers: int) -> float:
    assert weights.transport == "collective"
    return load_s + seconds_to_deliver(weights, "collective", servers)


def compared(model: str, gpus: int, pulls: Sequence[float]) -> list[Point]:
    """The mean and the best of ``pulls``, in seconds, beside a broadcast."""
    everyone, mean, best = broadcast(model, gpus), sum(pulls) / len(pulls), min(pulls)
    named = (("broadcast", everyone), ("mean", mean), ("best", best))
    return [_point(f"{model} on {gpus} GPUs: {name}, s", None, seconds) for name, seconds in named]


def less(points: Sequence[Point]) -> list[Point]:
    """The most by which pulls take less than a broadcast."""
    seconds = [p.ours for p in points]
    everyone, means, bests = seconds[::3], seconds[1::3], seconds[2::3]
    mean = max(1 - m / e for m, e in zip(means, everyone, strict=True))
    best = max(1 - b / e for b, e in zip(bests, everyone, strict=True))
    over = max(m / b for m, b in zip(means, bests, strict=True))
    return [
        _point("mean below the broadcast, at most", MEAN, mean),
        _point("best below the broadcast, at most", BEST, best),
        _point("mean over best, at most", None, over),
    ]


def measure(quick: bool) -> list[Point]:
    cases = [("32B", 64)] if quick else [(model, gpus) for model in CLUSTER for gpus in SIZES]
    points = [p for model, gpus in cases for p in compared(model, gpus, pulls(model, gpus))]
    return [*less(points), *points]


def _point(name: str, paper: float | None, ours: float) -> Point:
    return Point(figure="laminar-14", point=name, paper=paper, ours=ours, assumption=ASSUMPTION)


def draw(figure: Figure, points: list[Point]) -> None:
    """Of the sizes that were run."""
    seconds = {p.point: p.ours for p in points}
    for axes, model in zip(figure.subplots(1, len(CLUSTER)), CLUSTER, strict=True):
        sizes = [gpus for gpus in SIZES if f"{model} on {gpus} GPUs: mean, s" in seconds]
        for i, name in enumerate(("broadcast", "mean", "best")):
            own = [seconds[f"{model} on {gpus} GPUs: {name}, s"] for gpus in sizes]
            label = name if name == "broadcast" else f"relay, {name}"
            axes.bar([at + 0.27 * (i - 1) for at in range(len(sizes))], own, 0.25, label=label)
        axes.set_xticks(range(len(sizes)), [f"{gpus} GPUs" for gpus in sizes])
        axes.set_title(f"Qwen2.5-{model}", fontsize=10)
        axes.set_ylabel("seconds that a server waits")
        axes.set_ylim(0, 1.2 * max(seconds[f"{model} on {gpus} GPUs: mean, s"] for gpus in sizes))
        axes.grid(alpha=0.3, axis="y")
    figure.axes[0].legend(fontsize=8, ncols=3, loc="upper left")


if __name__ == "__main__":
    main("laminar_fig14", measure, draw, size=(9.0, 4.0))
