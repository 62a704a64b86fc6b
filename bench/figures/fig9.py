"""Environment-level asynchronous rollout against lock-step turns (ROLL Flash §5.2.1, figure 9).

Left: the mean of the environments' latency is 10 s, its standard deviation grows. Right: the deviation is 5 s, the mean
grows. Latencies are Gaussian, as in the paper. The baseline steps all environments of the batch together
(agentic.py), environment-level asynchrony is the runtime as it is. The time of a step is the time from its weights to
its batch; training is not part of it. Both play the same episodes: latencies are a function of seed, task and episode.

    python bench/figures/fig9.py

The paper states neither turns nor tokens of its simulated agents. 20 turns of 100 tokens are taken everywhere: with a
mean of 10 s, its 892 and 362 seconds leave room for about 20 turns with a short response each. All printed speed-ups
are met within 7 %, but for (10, 1): there latencies hardly differ, and what remains (1.30 against 1.16) is the burst of
prefills and responses that lock-step turns ask of the servers at once.
"""

from __future__ import annotations

from typing import Any

from agentic import ASSUMPTION as SERVED
from agentic import gaussian, in_lock_step, world
from common import Point, each, main, merge, simulate_all
from matplotlib.figure import Figure

GROUP = 8
TURNS, TOKENS = 20, 100
STEPS = 2
BATCHES = (32, 64, 128, 256, 512)
LEFT = tuple((10, std) for std in (1, 3, 5, 7, 10))
RIGHT = tuple((mean, 5) for mean in (10, 20, 30, 40, 50))
SPEEDUPS = {(10, 1): 1.16, (10, 10): 2.46, (10, 7): 2.12, (50, 5): 1.20}
SECONDS = {(10, 10): (892.0, 362.0)}
"""Of batch 512, as the text prints them."""
ASSUMPTION = f"20 turns of 100 tokens (constant), 50 tokens an observation; negative latencies are 0; {SERVED}"


class Cell(Point, kw_only=True):
    """``value`` of a latency (mean, std) at a batch of so many trajectories."""

    latency: tuple[int, int]
    batch: int
    value: str


def table(latency: tuple[int, int], batch: int, steps: int) -> dict[str, Any]:
    env = {"step": gaussian(*latency), "observation_tokens": {"kind": "constant", "value": 50}}
    lengths = {"kind": "constant", "value": TOKENS}
    return merge(
        world(prompts=batch // GROUP, group_size=GROUP, turns=TURNS, tokens=lengths, env=env), {"run": {"steps": steps}}
    )


def measure(quick: bool) -> list[Cell]:
    latencies = [(10, 1), (10, 10)] if quick else list(dict.fromkeys(LEFT + RIGHT))
    where = [(latency, batch) for latency in latencies for batch in ((32,) if quick else BATCHES)]
    tables = [table(latency, batch, 1 if quick else STEPS) for latency, batch in where]
    points = []
    for (latency, batch), locked, free in zip(where, each(in_lock_step, tables), simulate_all(tables), strict=True):
        seconds = locked.mean("time/wait"), free.mean("time/wait")
        printed = batch == BATCHES[-1]
        papers = SECONDS.get(latency, (None, None)) if printed else (None, None)
        values = {
            "lock-step, s": (papers[0], seconds[0]),
            "asynchronous, s": (papers[1], seconds[1]),
            "speed-up": (SPEEDUPS.get(latency) if printed else None, seconds[0] / seconds[1]),
        }
        points += [
            Cell(
                figure="9",
                point=f"latency ({latency[0]}, {latency[1]}) s, batch {batch}: {value}",
                paper=paper,
                ours=ours,
                assumption=ASSUMPTION,
                latency=latency,
                batch=batch,
                value=value,
            )
            for value, (paper, ours) in values.items()
        ]
    return points


def draw(figure: Figure, points: list[Cell]) -> None:
    at = {(p.latency, p.batch, p.value): p for p in points}
    panels = figure.subplots(1, 2, sharey=True)
    titles = "std of the latency grows, mean 10 s", "mean of the latency grows, std 5 s"
    for axes, latencies, title in zip(panels, (LEFT, RIGHT), titles, strict=True):
        for number, latency in enumerate(latencies):
            speedups = [at[latency, batch, "speed-up"] for batch in BATCHES]
            axes.plot(
                BATCHES, [p.ours for p in speedups], "o-", color=f"C{number}", label=f"({latency[0]}, {latency[1]}) s"
            )
            for p in speedups:
                if p.paper is not None:
                    axes.plot(p.batch, p.paper, "*", ms=13, mec="black", color=f"C{number}")
        axes.plot([], [], "*", ms=13, mec="black", color="white", label="paper")
        axes.set(xscale="log", title=title, xlabel="trajectories a batch", ylim=(1.0, 3.0))
        axes.set_xticks(BATCHES, [str(b) for b in BATCHES], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(title="latency (mean, std)", loc="upper left", ncols=3)
    panels[0].set_ylabel("speed-up over lock-step turns")


if __name__ == "__main__":
    main("fig9", measure, draw)
