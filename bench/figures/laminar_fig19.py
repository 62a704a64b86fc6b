"""Broadcast of weights down a chain of relays (Laminar fig. 19, appendix C).

    python bench/figures/laminar_fig19.py [--quick] [--json FILE] [--plot FILE]

Left, the formula T(p, k) on the paper's testbed, for its three models in its chunks of 32 MB. The paper prints one
number, "less than 1.6 seconds" for 72B and 127 other relays: four times what all eight links of a machine would allow,
and twice what two of them would.

Right, the formula against relays as processes on this machine, for chains of several lengths and for chunks of several
sizes. Links are paced to 48 MB/s by the kernel, as two cores cannot move more through eight relays at once; that from
the trainer is not, so the master is the first node, as in the paper.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from common import Point, main
from matplotlib.figure import Figure

from asyncrl.core.theory.broadcast import Chain, broadcast_time

sys.path.insert(0, str(Path(__file__).parents[1]))

from relay import LINK_MB_S, START_S, broadcast

MODELS = {"7B": 15.2e9, "32B": 65.5e9, "72B": 145.4e9}
"""Bytes of Qwen2.5 in bfloat16."""
NODES = (2, 4, 8, 16, 32, 64, 128)
LINK_B_S = 8 * 400e9 / 8
PAPER_START_S = 5e-6
CHUNK = 32 * 2**20
PAPER = {("72B", 128): 1.6}
ASSUMPTION = "links of 8 × 400 Gbps (§8) used whole, 5 µs a message (appendix C), chunks of 32 MB (§7)"
HERE = f"links paced to {LINK_MB_S} MB/s, 1 ms a message, on this machine"


class Latency(Point, kw_only=True):
    """Seconds; ``chunk`` in MB. ``panel``: paper, nodes or chunks; ``formula`` beside what was measured."""

    panel: str
    nodes: int
    chunk: float
    model: str = ""
    formula: float = 0.0


def of_formula(model: str, nodes: int) -> Latency:
    chain = Chain(nodes=nodes, size=MODELS[model], byte_s=1 / LINK_B_S, start_s=PAPER_START_S)
    seconds = broadcast_time(chain, MODELS[model] / CHUNK)
    return Latency(
        figure="laminar-19",
        point=f"{model}, {nodes} nodes: seconds",
        paper=PAPER.get((model, nodes)),
        ours=seconds,
        assumption=ASSUMPTION,
        panel="paper",
        nodes=nodes,
        chunk=32,
        model=model,
    )


def measured(panel: str, relays: int, megabytes: int, chunk: int, rounds: int) -> Latency:
    row = asyncio.run(broadcast(relays, megabytes, rounds, chunk_mb=chunk, max_mb_s=LINK_MB_S))
    chain = Chain(nodes=relays, size=row["bytes"], byte_s=1 / (LINK_MB_S * 2**20), start_s=START_S)
    return Latency(
        figure="laminar-19",
        point=f"{relays} relays, {megabytes} MB in chunks of {chunk} MB: seconds over the formula's",
        paper=1.0,
        ours=row["seconds"] / (formula := broadcast_time(chain, row["bytes"] / (chunk * 2**20))),
        assumption=HERE,
        panel=panel,
        nodes=relays,
        chunk=chunk,
        formula=formula,
    )


def measure(quick: bool) -> list[Latency]:
    points = [of_formula(model, nodes) for model in MODELS for nodes in NODES]
    megabytes, rounds = (12, 1) if quick else (48, 2)
    points += [measured("nodes", n, megabytes, 1, rounds) for n in ((2,) if quick else (2, 4, 8))]
    if not quick:
        points += [measured("chunks", 8, megabytes, chunk, rounds) for chunk in (1, 2, 4, 8, 16, 48)]
    return points


def draw(figure: Figure, points: list[Latency]) -> None:
    left, middle, right = figure.subplots(1, 3)
    for model in MODELS:
        row = [p for p in points if p.model == model]
        left.plot([p.nodes for p in row], [p.ours for p in row], marker="o", markersize=3, label=f"{model}, formula")
    left.plot(128, PAPER["72B", 128], "k*", markersize=10, label="72B, the paper's “less than”")
    left.set_xscale("log", base=2)
    left.set_xlabel("nodes in the chain")
    left.set_title("the paper's testbed", fontsize=10)
    for axes, panel, label in ((middle, "nodes", "relays, chunks of 1 MB"), (right, "chunks", "chunk, MB (8 relays)")):
        row = [p for p in points if p.panel == panel]
        where = [p.nodes if panel == "nodes" else p.chunk for p in row]
        axes.plot(where, [p.formula for p in row], "k--", label="formula")
        axes.plot(where, [p.ours * p.formula for p in row], "o", color="tab:red", label="measured")
        axes.set_xlabel(label)
        axes.set_title(f"here, links of {LINK_MB_S} MB/s", fontsize=10)
    right.set_xscale("log", base=2)
    for axes in (left, middle, right):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_ylabel("seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("Broadcast down a chain of relays (figure 19)")


if __name__ == "__main__":
    main("laminar_fig19", measure, draw, size=(12.0, 4.0))
