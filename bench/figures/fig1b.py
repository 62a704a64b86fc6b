"""Throughput from 16 to 128 GPUs: Sync-Naive, Sync-ROLL and Async with α = 2 (ROLL Flash fig. 1b, §3.2 takeaway 1).

    python bench/figures/fig1b.py [--quick] [--json FILE] [--plot FILE]

Qwen3-8B, Think (mean response 11k tokens) and Base (2k). The synchronous two use all GPUs in turn, Async half of them
to train and half to generate. Sync-Naive sends a prompt's 16 responses as one request to the servers in turn.

The paper leaves the batch open (roll_flash.py), so both readings are simulated. Appendix A's 4,096 responses give the
figure: Async scales 7.5-fold with Think (paper 7.6), with Base it goes on where the synchronous two flatten (2.34 times
Sync-Naive, paper 2.24), and 1.63 times Sync-Naive with Think where the paper has 2.13; on 16 GPUs, though, Async gains
nothing with Base (paper 1.53), as a half of the GPUs is the wrong share for either side. With 256 responses 128 GPUs
are too many: 64 servers of 12 sequences hardly decode faster than 32 of 24, and Async comes to the time that α = 2
gives the longest response. It gains more on Sync-Naive than in the paper, on any number of GPUs, and scales less.
"""

from __future__ import annotations

from typing import Any

from common import Point, Result, main, simulate_all
from matplotlib.figure import Figure
from roll_flash import ASSUMPTION, ROLLOUTS, asynchronous, steady, synchronous, throughput

GPUS = (16, 32, 64, 128)
MODELS = {"Think": "qwen3-8b-think", "Base": "qwen3-8b-base"}
SCHEMES = ("Sync-Naive", "Sync-ROLL", "Async")
APPENDIX = 4096
ALPHA = 2.0
MEASURED = {ROLLOUTS: 30, APPENDIX: 4}
FILLING = {ROLLOUTS: 8, APPENDIX: 3}
"""Steps in which the pool of an asynchronous run fills."""
PAPER = {
    "Think, 128 GPUs: Async over Sync-Naive": 2.13,
    "Think: Async on 128 GPUs over 16": 7.6,
    "Base: Async over Sync-Naive, least": 1.53,
    "Base: Async over Sync-Naive, most": 2.24,
}
"""Printed in the caption (2.12 for the first) and in §3.2."""


class Run(Point, kw_only=True):
    """A run of the figure: its place in it."""

    model: str
    scheme: str
    gpus: int
    rollouts: int


def table(model: str, scheme: str, gpus: int, rollouts: int) -> dict[str, Any]:
    lengths, steps = MODELS[model], MEASURED[rollouts]
    if scheme == "Async":
        steps += FILLING[rollouts] + int(ALPHA)
        return asynchronous(gpus // 2, gpus // 2, alpha=ALPHA, steps=steps, rollouts=rollouts, lengths=lengths)
    return synchronous(gpus, naive=scheme == "Sync-Naive", steps=1 + steps, rollouts=rollouts, lengths=lengths)


def measure(quick: bool) -> list[Point]:
    gpus = (GPUS[0], GPUS[-1]) if quick else GPUS
    models = ("Think",) if quick else tuple(MODELS)
    runs = [
        (model, scheme, n, rollouts)
        for rollouts in ((ROLLOUTS,) if quick else (APPENDIX, ROLLOUTS))
        for model in models
        for n in gpus
        for scheme in reversed(SCHEMES)  # the longest simulations first
    ]
    rates = dict(zip(runs, map(_rate, runs, simulate_all([table(*run) for run in runs])), strict=True))
    points: list[Point] = []
    for rollouts in (ROLLOUTS,) if quick else (ROLLOUTS, APPENDIX):
        for model in models:
            points += _ratios(
                model, rollouts, {run[1:3]: r for run, r in rates.items() if run[::3] == (model, rollouts)}
            )
    return points


def _rate(run: tuple[str, str, int, int], result: Result) -> float:
    _, scheme, _, rollouts = run
    return throughput(steady(result, ALPHA), FILLING[rollouts]) if scheme == "Async" else throughput(result, 1)


def _ratios(model: str, rollouts: int, rate: dict[tuple[str, int], float]) -> list[Point]:
    gpus = sorted({n for _, n in rate})
    batch = f"{rollouts:,} responses a batch"
    over = {n: rate["Async", n] / rate["Sync-Naive", n] for n in gpus}
    found = {
        f"{model}, 128 GPUs: Async over Sync-Naive": over[128],
        f"{model}: Async on 128 GPUs over 16": rate["Async", 128] / rate["Async", 16],
        f"{model}: Async over Sync-Naive, least": min(over.values()),
        f"{model}: Async over Sync-Naive, most": max(over.values()),
        f"{model}, 128 GPUs: Async over Sync-ROLL": rate["Async", 128] / rate["Sync-ROLL", 128],
        f"{model}: Sync-Naive on 128 GPUs over 16": rate["Sync-Naive", 128] / rate["Sync-Naive", 16],
    }
    points: list[Point] = [
        Point(
            figure="roll-flash-1b",
            point=f"{name}, {batch}",
            paper=PAPER.get(name),
            ours=ours,
            assumption=f"{ASSUMPTION}; {batch}",
        )
        for name, ours in found.items()
    ]
    points += [
        Run(
            figure="roll-flash-1b",
            point=f"{model}, {scheme}, {n} GPUs, {batch}: tokens/s",
            paper=None,
            ours=r,
            model=model,
            scheme=scheme,
            gpus=n,
            rollouts=rollouts,
        )
        for (scheme, n), r in sorted(rate.items())
    ]
    return points


def draw(figure: Figure, points: list[Point]) -> None:
    runs = [p for p in points if isinstance(p, Run)]
    panels = figure.subplots(len(MODELS), 2, sharex=True)
    for row, model in zip(panels, MODELS, strict=True):
        for axes, rollouts in zip(row, (ROLLOUTS, APPENDIX), strict=True):
            here = [p for p in runs if p.model == model and p.rollouts == rollouts]
            base = next(p.ours for p in here if p.scheme == "Sync-Naive" and p.gpus == GPUS[0])
            for scheme, colour in zip(SCHEMES, ("tab:gray", "tab:blue", "tab:red"), strict=True):
                line = [(p.gpus, p.ours / base) for p in sorted(here, key=lambda p: p.gpus) if p.scheme == scheme]
                axes.plot(*zip(*line, strict=True), "o-", color=colour, label=scheme)
            last = {p.scheme: p.ours / base for p in here if p.gpus == GPUS[-1]}
            paper = 2.13 if model == "Think" else 2.24
            axes.plot(GPUS[-1], paper * last["Sync-Naive"], "D", mfc="none", mec="black", ms=9)
            text = (
                f"on 128 GPUs Async is {last['Async'] / last['Sync-Naive']:.2f}× Sync-Naive\npaper: {paper}× (diamond)"
            )
            axes.text(0.97, 0.03, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8)
            axes.plot(GPUS, [n / GPUS[0] for n in GPUS], ":", color="lightgray", label="linear")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(GPUS, [str(n) for n in GPUS])
            axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
            axes.set_ylim(0.7, 16)
            axes.grid(alpha=0.3)
            axes.set_title(f"{model}, {rollouts:,} responses a batch", fontsize=10)
    for row in panels:
        row[0].set_ylabel("throughput, Sync-Naive\non 16 GPUs = 1")
    for axes in panels[-1]:
        axes.set_xlabel("GPUs")
    panels[0][0].legend(fontsize=8, loc="upper left")


if __name__ == "__main__":
    main("fig1b", measure, draw, size=(9.0, 7.0))
