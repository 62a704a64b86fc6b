"""Real runs of a recipe with each off-policy loss at several α beside synchronous training (ROLL Flash figure 4), and
at excessive staleness, where StaleFlow (§6.3) sees training collapse.

    python bench/convergence.py [RECIPE] [--steps 80] [--losses ppo,tis] [--bounds 2,8] [--seeds 0] [--set KEY=VALUE]

A run that is in the results already is not made again, so the same command goes on where it was stopped, and
``--losses``, ``--bounds`` and ``--seeds`` make a part of the runs. Table and plot show all runs of these settings that
there are. ``--set`` makes a variant, with results of its own.

What is held equal: the model, the tasks and their order, the batch, the learning rate, one update a batch. Weight
updates wait for running requests (``update.running = "drain"``) and all of (1 + α) batches may run at once, so that
every token, not only the start of its trajectory, comes from a version that is α behind. Both are measured: a run whose
staleness is not near its α says nothing about it.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncrl.build.fit import machine
from asyncrl.config import RecipeError, load
from asyncrl.config.algorithm import LOSSES
from asyncrl.observe.run_dir import METRICS, read_lines, write_atomic
from asyncrl.observe.summary import read_summary

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "convergence.json"

SMALLER: dict[str, tuple[str, ...]] = {
    "runsum": ("rollout.batch_groups=16", "engine.count=1", "trainer.ranks=1"),
    "alfworld": (
        "rollout.filter_zero_variance=false",
        "algorithm.mini_batches=1",
        "engine.max_running_requests=1152",
        "engine.max_total_tokens=589824",
        "run.eval_every=0",
    ),
}
"""By recipe: what makes it cheap enough for so many runs, and lets α be reached: groups that are filtered make room for
younger ones, and a server that is full has requests wait and begin on newer weights."""
ALWAYS = ("update.running=drain", "run.trace_requests=false")
OF_LOSS: dict[str, tuple[str, ...]] = {
    "cispo": ("algorithm.clip_low=1",),
    "topr": ("algorithm.importance_level=sequence", "algorithm.importance_cap=1"),
    "weighted_topr": (
        "algorithm.importance_level=sequence",
        "algorithm.importance_cap=1",
        "algorithm.negative_weight=0.5",
    ),
    "gspo": ("algorithm.aggregation=sequence_mean",),
}
"""What a loss's authors set otherwise than the recipe does. CISPO: no lower bound of the weight. TOPR: ratios of whole
trajectories, at most 1. GSPO: a mean over sequences; but its clip ranges of 4e-4, made for steps so much smaller, are
left as the recipe has them."""

BOUNDS = (2.0, 8.0)
EXCESSIVE = (10.0, 16.0)
UNCORRECTED = ("ppo", "reinforce")
"""At ``EXCESSIVE`` bounds: the loss that all of the papers begin with, and the one that does not look at staleness."""

WINDOW = 11
"""Steps of the moving mean, as in ROLL Flash's figure 4."""
LAST = 10
SPIKE = 3.0
"""A gradient norm beyond so many times the median of the ``LAST`` steps before it is a spike."""

DIVERGED = ("is not finite", "algorithm.max_ratio")
"""What a run's exit says when the trainer refuses a step."""

COLUMNS = {
    "reward": "reward/mean",
    "staleness": "staleness/mean",
    "staleness_max": "staleness/max",
    "token_staleness": "trainer/token_staleness",
    "grad_norm": "trainer/grad_norm",
    "kl": "trainer/kl",
    "ratio_max": "trainer/ratio_max",
    "clip_fraction": "trainer/clip_fraction",
    "entropy": "trainer/entropy",
}
"""What is kept of each step, and its name in the metrics."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``settings`` are laid over the recipe in their order."""

    recipe: str
    loss: str
    bound: float
    seed: int
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.loss} α={self.bound:g} seed={self.seed}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``steps`` holds ``COLUMNS``, a value a step; ``exit`` is the summary's."""

    cell: Cell
    machine: str
    exit: str
    seconds: float
    heldout_before: float | None
    heldout_after: float | None
    steps: dict[str, list[float]]

    def last(self, column: str) -> float:
        return fmean(self.steps[column][-LAST:])

    def settled(self, column: str) -> float:
        """Mean over the steps after the first α, in which samples cannot be that old yet."""
        values = self.steps[column]
        return fmean(values[min(math.ceil(self.cell.bound), len(values) - 1) :])

    @property
    def spikes(self) -> int:
        norms = self.steps["grad_norm"]
        return sum(norms[i] > SPIKE * median(norms[i - LAST : i]) for i in range(LAST, len(norms)))


def cells(recipe: Path, seeds: Iterable[int], steps: int, settings: Sequence[str]) -> list[Cell]:
    """Synchronous training first, then what is farthest from it."""
    pairs = [("ppo", 0.0)]
    pairs += [(loss, bound) for bound in sorted(BOUNDS, reverse=True) for loss in LOSSES]
    pairs += [(loss, bound) for bound in EXCESSIVE for loss in UNCORRECTED]
    return [_cell(recipe, loss, bound, seed, steps, settings) for seed in seeds for loss, bound in pairs]


def _cell(recipe: Path, loss: str, bound: float, seed: int, steps: int, settings: Sequence[str]) -> Cell:
    name = load(recipe).name
    given = [*ALWAYS, *SMALLER.get(name, ()), *OF_LOSS.get(loss, ())]
    given += [f"algorithm.loss={loss}", f"staleness.bound={bound:g}", f"seed={seed}", f"run.steps={steps}", *settings]
    batch = load(recipe, overrides=given).batch_trajectories
    given.append(f"rollout.num_envs={math.ceil((1 + bound) * batch)}")
    return Cell(recipe=name, loss=loss, bound=bound, seed=seed, settings=tuple(given))


# --- running ----------------------------------------------------------------------------------------------------------


def train(recipe: Path, cell: Cell, run_dir: Path) -> Outcome:
    """Run it in ``run_dir``. Raises ``SystemExit`` if it failed otherwise than as ``DIVERGED``, which is a result."""
    overrides = [argument for setting in cell.settings for argument in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(recipe), "--run-dir", str(run_dir), *overrides]
    with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    summary = read_summary(run_dir)
    if summary is None or (code and not any(sign in summary.exit for sign in DIVERGED)):
        end = Path(log.name).read_text().strip().splitlines()[-1:]
        raise SystemExit(f"bench/convergence.py: {cell.name}: asyncrl train ended with code {code}: {' '.join(end)}")
    lines = list(read_lines(run_dir / METRICS))
    return Outcome(
        cell=cell,
        machine=machine(),
        exit=summary.exit,
        seconds=summary.seconds,
        heldout_before=summary.heldout_before,
        heldout_after=summary.heldout_after,
        steps={name: [float(f"{line[key]:.5g}") for line in lines] for name, key in COLUMNS.items()},
    )


def read(path: Path) -> list[Outcome]:
    return msgspec.json.decode(path.read_bytes(), type=list[Outcome]) if path.exists() else []


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A run a line."""
    write_atomic(path, b"[\n" + b",\n".join(map(msgspec.json.encode, outcomes)) + b"\n]\n")


# --- showing ----------------------------------------------------------------------------------------------------------

HEADER = (
    "loss",
    "α",
    "staleness, mean / max",
    "of tokens",
    "held-out accuracy",
    f"reward, last {LAST}",
    f"best {WINDOW}",
    "gradient norm, median / max",
    "spikes",
    "π/μ, max",
    "clipped",
)
"""Of several seeds the means, each seed's accuracy, the sum of the spikes, and the extremes. A run that did not finish
says so beside its loss."""


def by_cell(outcomes: Iterable[Outcome]) -> dict[tuple[float, str], list[Outcome]]:
    """(α, loss) → its seeds, by α and then as ``LOSSES`` are ordered."""
    grouped: dict[tuple[float, str], list[Outcome]] = {}
    for o in sorted(outcomes, key=lambda o: (o.cell.bound, LOSSES.index(o.cell.loss), o.cell.seed)):
        grouped.setdefault((o.cell.bound, o.cell.loss), []).append(o)
    return grouped


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Markdown."""
    rows = [HEADER, ("---",) * len(HEADER), *(_row(seeds) for seeds in by_cell(outcomes).values())]
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(seeds: Sequence[Outcome]) -> tuple[str, ...]:
    cell = seeds[0].cell
    ends = [f" ({o.exit})" for o in seeds if o.exit != "finished"]
    norms = [norm for o in seeds for norm in o.steps["grad_norm"]]
    return (
        cell.loss + "".join(ends),
        f"{cell.bound:g}" if cell.bound else "0 (sync)",
        f"{fmean(o.settled('staleness') for o in seeds):.2f} / {max(max(o.steps['staleness_max']) for o in seeds):g}",
        f"{fmean(o.settled('token_staleness') for o in seeds):.2f}",
        f"{_shares([o.heldout_before for o in seeds])} → {_shares([o.heldout_after for o in seeds])}",
        f"{fmean(o.last('reward') for o in seeds):.3f}",
        f"{fmean(max(smooth(o.steps['reward'])) for o in seeds):.3f}",
        f"{median(norms):.2f} / {max(norms):.2f}",
        str(sum(o.spikes for o in seeds)),
        f"{max(max(o.steps['ratio_max']) for o in seeds):.3g}",
        f"{fmean(o.settled('clip_fraction') for o in seeds) * 100:.1f} %",
    )


def _shares(values: Sequence[float | None]) -> str:
    return ", ".join("–" if value is None else f"{value:.2f}" for value in values)


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over ``WINDOW`` steps around each; fewer at both ends."""
    half = WINDOW // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw(figure: Figure, outcomes: Sequence[Outcome]) -> None:
    """Reward over steps, a panel each α and a line each loss (the mean of its seeds), synchronous training in all;
    and held-out accuracies."""
    bounds = sorted({o.cell.bound for o in outcomes} - {0.0}) or [0.0]
    axes = figure.subplots(1, len(bounds) + 1, squeeze=False)[0]
    axes[0].set_ylabel(f"reward, mean of {WINDOW} steps")
    for ax, bound in zip(axes, bounds, strict=False):
        for (at, loss), seeds in by_cell(outcomes).items():
            if at in (0.0, bound):
                steps = zip(*(o.steps["reward"] for o in seeds), strict=False)  # up to the first that failed
                rewards = smooth([fmean(step) for step in steps])
                ax.plot(range(len(rewards)), rewards, label=loss if at else f"{loss}, synchronous", **_style(at, loss))
        ax.set(title=f"α = {bound:g}", xlabel="step")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
    _draw_heldout(axes[-1], outcomes)
    lines = {line.get_label(): line for ax in axes[:-1] for line in ax.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 9), frameon=False)


def _draw_heldout(ax: Axes, outcomes: Sequence[Outcome]) -> None:
    bounds = sorted({o.cell.bound for o in outcomes})
    for o in outcomes:
        at, loss = o.cell.bound, o.cell.loss
        shift = (LOSSES.index(loss) - len(LOSSES) / 2) / (1.5 * len(LOSSES)) if at else 0.0
        for value, marker in ((o.heldout_before, "_"), (o.heldout_after, "o")):
            if value is not None:
                ax.plot(bounds.index(at) + shift, value, marker=marker, markersize=4, color=_style(at, loss)["color"])
    ax.set(title="held-out (–: before)", xlabel="α")
    ax.set_ylim(bottom=0)
    ax.set_xticks(range(len(bounds)), [f"{bound:g}" for bound in bounds])
    ax.grid(alpha=0.25, axis="y")


def _style(bound: float, loss: str) -> dict[str, Any]:
    if bound == 0:
        return {"color": "black", "linestyle": "--", "linewidth": 1.8}
    return {"color": f"C{LOSSES.index(loss)}", "linewidth": 1.3}


# --- the command ------------------------------------------------------------------------------------------------------


def chosen(wanted: Sequence[Cell], losses: Sequence[str], bounds: Sequence[float]) -> list[Cell]:
    """Those of these losses and bounds; empty: all. Raises ``ValueError`` for one that no cell has."""
    for key, asked in (("loss", losses), ("bound", bounds)):
        known = list(dict.fromkeys(getattr(cell, key) for cell in wanted))
        if unknown := [value for value in asked if value not in known]:
            raise ValueError(f"no run with {key} {unknown[0]}; there are {', '.join(map(str, known))}")
    return [c for c in wanted if c.loss in (losses or [c.loss]) and c.bound in (bounds or [c.bound])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=HERE.parent / "recipes" / "runsum")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--losses", default="", help="only these")
    parser.add_argument("--bounds", default="", help="only these; 0: synchronous")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="synchronous ppo and reinforce at α = 2, three steps")
    parser.add_argument("--show", action="store_true", help="make no run, show those that there are")
    parser.add_argument("--json", type=Path, help="results to add to (default: bench/results/convergence.json)")
    parser.add_argument("--plot", type=Path, help="default: beside the results, with the recipe's name")
    args = parser.parse_args()
    try:
        seeds = [int(part) for part in args.seeds.split(",")]
        wanted = cells(args.recipe, seeds, 3 if args.quick else args.steps, args.settings)
        asked = chosen(
            wanted, list(filter(None, args.losses.split(","))), [float(b) for b in args.bounds.split(",") if b]
        )
    except (RecipeError, ValueError) as error:
        parser.error(str(error))
    if args.quick:
        asked = [cell for cell in asked if (cell.loss, cell.bound) in (("ppo", 0.0), ("reinforce", 2.0))]
    with tempfile.TemporaryDirectory() as scratch:
        results: Path = args.json or (Path(scratch) / "quick.json" if args.quick else RESULTS)
        for i, cell in enumerate(() if args.show else asked):
            if any(outcome.cell == cell for outcome in read(results)):
                continue
            outcome = train(args.recipe, cell, Path(scratch) / f"run-{i}")
            write(results, [*read(results), outcome])
            print(f"{cell.name}: {outcome.exit}, {outcome.seconds:.0f} s", flush=True)
        outcomes = [outcome for outcome in read(results) if outcome.cell in wanted]
        print("\n".join(table(outcomes)))
        if outcomes:
            figure = Figure(figsize=(16, 4.5), dpi=100, layout="constrained")
            draw(figure, outcomes)
            figure.savefig(args.plot or results.with_name(f"{results.stem}-{outcomes[0].cell.recipe}.png"))


if __name__ == "__main__":
    main()
