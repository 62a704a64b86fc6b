"""Prompt replication: n independent requests against one with n responses (ROLL Flash §5.1.2, figure 8).

Left: 16 responses a prompt, more and more prompts. Right: 16 prompts, more and more responses each. Both ways use queue
scheduling; only ``rollout.expand_num_return_sequences`` differs. The time is that from a step's weights to its batch;
training is not part of it.

    python bench/figures/fig8.py

The paper does not say which lengths these runs had, nor how many GPUs generate. Taken: 16 servers and the lengths of
Qwen3-8B-Base (appendix A.1); a second series has those of Qwen3-8B-Think, the paper's other model.

Replication gains in every configuration, and more with more responses a prompt, as in the paper. With Base it gains
less than there (1.05 to 1.30 against 1.30 to 1.95): the servers decode a group of 16 short responses hardly slower than
single ones, so little is lost by keeping it together. With Think, where attention to long contexts dominates and the
responses to a hard prompt fill one server, it is 1.29 to 1.91. The paper's one request loses half its time even where
every server has one prompt (16 × 32), which a server's speed by core/hardware.py does not explain.
"""

from __future__ import annotations

from typing import Any

from common import Point, main, merge, simulate_all
from matplotlib.figure import Figure
from roll_flash import ASSUMPTION, world

GPUS = 16
LEFT = tuple((n, 16) for n in (4, 8, 16, 32, 64))
RIGHT = tuple((16, n) for n in (4, 8, 16, 32, 64))
LENGTHS = {"Base": "qwen3-8b-base", "Think": "qwen3-8b-think"}
PAPER = {(32, 16): (116.0, 89.0, 1.30), (64, 16): (149.0, 81.0, 1.84), (16, 32): (162.0, 83.0, 1.95)}
"""Seconds in one request, seconds replicated, speed-up."""
SPEEDUP = {(16, 64): 1.84}


class Bar(Point, kw_only=True):
    shape: tuple[int, int]
    lengths: str
    value: str


def table(shape: tuple[int, int], lengths: str, replicate: bool, steps: int) -> dict[str, Any]:
    return merge(
        {"preset": "sync"},
        world(servers=GPUS, training_gpus=GPUS, lengths=LENGTHS[lengths], shared=True),
        {
            "rollout": {
                "batch_groups": shape[0],
                "group_size": shape[1],
                "num_envs": shape[0] * shape[1],
                "expand_num_return_sequences": replicate,
            },
            "run": {"steps": steps},
        },
    )


def measure(quick: bool) -> list[Bar]:
    where = [(shape, lengths) for lengths in LENGTHS for shape in dict.fromkeys(LEFT + RIGHT)]
    if quick:
        where = [((16, 16), "Base")]
    steps = {shape: 3 if quick else max(10, 4096 // (shape[0] * shape[1])) for shape, _ in where}
    results = iter(
        simulate_all([table(shape, lengths, way, steps[shape]) for shape, lengths in where for way in (False, True)])
    )
    points = []
    for shape, lengths in where:
        single, replicated = (next(results).mean("time/wait") for _ in range(2))
        papers = PAPER.get(shape, (None, None, SPEEDUP.get(shape)))
        values = zip(("one request, s", "replicated, s", "speed-up"), papers, strict=True)
        points += [
            Bar(
                figure="8",
                point=f"{shape[0]} × {shape[1]}, {lengths}: {value}",
                paper=paper,
                ours=ours,
                assumption=f"{ASSUMPTION}; 16 servers",
                shape=shape,
                lengths=lengths,
                value=value,
            )
            for (value, paper), ours in zip(values, (single, replicated, single / replicated), strict=True)
        ]
    return points


def draw(figure: Figure, points: list[Bar]) -> None:
    at = {(p.shape, p.lengths, p.value): p for p in points}
    grid = figure.subplots(2, 2, sharex="col")
    for row, lengths in zip(grid, LENGTHS, strict=True):
        for axes, shapes in zip(row, (LEFT, RIGHT), strict=True):
            for number, value in enumerate(("one request, s", "replicated, s")):
                places = [i + 0.38 * (number - 0.5) for i in range(len(shapes))]
                bars = [at[shape, lengths, value].ours for shape in shapes]
                axes.bar(places, bars, 0.36, color=("C0", "C4")[number], label=value.removesuffix(", s"))
            for i, shape in enumerate(shapes):
                p = at[shape, lengths, "speed-up"]
                paper = "" if p.paper is None else f"\n(paper {p.paper:.2f}×)"
                top = at[shape, lengths, "one request, s"].ours
                axes.annotate(f"{p.ours:.2f}×{paper}", (i, top), ha="center", va="bottom", fontsize=8, color="C3")
            axes.set_title(f"Qwen3-8B-{lengths}, {'16 responses a prompt' if shapes is LEFT else '16 prompts'}")
            axes.set_xticks(range(len(shapes)), [f"{a} × {b}" for a, b in shapes])
            axes.margins(y=0.2)
            axes.grid(axis="y", alpha=0.3)
        row[0].set_ylabel("seconds to generate a batch")
    grid[0][0].legend(loc="upper left")
    for axes in grid[1]:
        axes.set_xlabel("prompts × responses")


if __name__ == "__main__":
    main("fig8", measure, draw, size=(11.0, 7.0))
