"""What the figure scripts share: simulating many recipes on all cores, and the paper's number beside ours.

A script is a module docstring, a ``measure(quick)`` that returns its points, and a ``draw(points)`` that plots them:

    python bench/figures/SCRIPT.py [--quick] [--json FILE] [--plot FILE] [--jobs N] [--cache FOLDER]

``--json`` writes a list of {figure, point, paper, ours, assumption}; ``paper`` is null where the paper prints none.
With ``--cache`` a script that was cut off goes on: the runs that it keeps lie in that folder, by their recipes. Delete
them when the code has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from matplotlib.figure import Figure

from asyncrl.build.simulate import play
from asyncrl.config import Recipe, dumps, load_table
from asyncrl.env import Env
from asyncrl.observe.run_dir import write_atomic
from asyncrl.observe.summary import Summary
from asyncrl.observe.tally import Tally
from asyncrl.ports import StepMetrics

T = TypeVar("T")


class Point(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One number of a figure. ``assumption`` says what the paper leaves open and what was taken for it."""

    figure: str
    point: str
    paper: float | None
    ours: float
    assumption: str = ""


P = TypeVar("P", bound=Point)


class Result(msgspec.Struct, kw_only=True):
    """A simulated run: a metrics line for every step (observe/tally.py), and the summary."""

    steps: list[dict[str, float]]
    summary: Summary

    def mean(self, key: str, skip: int = 0) -> float:
        """Mean of a metric over the steps after the first ``skip``."""
        values = [line[key] for line in self.steps[skip:] if key in line]
        return sum(values) / len(values)

    def period(self, skip: int = 0) -> float:
        """Seconds from one step's end to the next, over the steps after the first ``skip`` (at least one)."""
        begin, last = self.steps[max(skip, 1) - 1]["time/at"], self.steps[-1]["time/at"]
        return (last - begin) / (len(self.steps) - max(skip, 1))


class Lines(Tally):
    """Keeps the metrics line of every step. A subclass may keep more of what it observes."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.lines: list[dict[str, float]] = []

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.lines.append(self.metrics)


def simulated(
    recipe: Recipe,
    wrap_env: Callable[[Env], Env] = lambda env: env,
    lines: Callable[[Recipe, Callable[[], float]], Lines] = Lines,
) -> Result:
    """The whole recipe on virtual time, its environments inside ``wrap_env``, seen by what ``lines`` makes of it and
    the clock. Raises whatever ended it early."""
    tallies: list[Lines] = []

    def observe(clock: Callable[[], float]) -> Tally:
        tallies.append(lines(recipe, clock))
        return tallies[0]

    books, error = play(recipe, observe, wrap_env)
    if error is not None:
        raise error
    [tally] = tallies
    summary = tally.summary(exit="finished", started="", command=(), ledger=books.counts())
    return Result(steps=tally.lines, summary=summary)


def merge(*tables: dict[str, Any]) -> dict[str, Any]:
    """Later tables win, key by key."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            old = merged.get(key)
            merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


JOBS = len(os.sched_getaffinity(0))
CACHE: Path | None = None


def simulate_all(tables: Sequence[dict[str, Any]]) -> list[Result]:
    """Simulate recipes given as tables, on all cores, in their order."""
    return each(simulated, tables)


def each(function: Callable[[Recipe], T], tables: Sequence[dict[str, Any]]) -> list[T]:
    """``function``, of some module, of each of these recipes, on all cores, in their order."""
    recipes = [load_table(table) for table in tables]
    if JOBS == 1 or len(recipes) == 1:
        return [function(recipe) for recipe in recipes]
    with ProcessPoolExecutor(JOBS, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, recipes))


def each_kept(function: Callable[[Recipe], T], tables: Sequence[dict[str, Any]], kind: type[T]) -> list[T]:
    """``each``, of results of a ``kind`` that msgspec can write, kept in the cache as they come."""
    return each(partial(kept, function, kind, CACHE), tables)


def kept(function: Callable[[Recipe], T], kind: type[T], folder: Path | None, recipe: Recipe) -> T:
    """``function`` of the recipe, or what it gave the last time; ``folder`` None: nothing is kept."""
    if folder is None:
        return function(recipe)
    file = folder / f"{hashlib.sha256(dumps(recipe)).hexdigest()[:16]}.json"
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=kind)
    result = function(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, msgspec.json.encode(result))
    return result


def main(
    name: str,
    measure: Callable[[bool], list[P]],
    draw: Callable[[Figure, list[P]], None],
    size: tuple[float, float] = (9.0, 5.0),
) -> None:
    """Run a figure script from its command line."""
    doc = sys.modules["__main__"].__doc__ or name
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few points, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", default=Path(__file__).parent / "plots" / f"{name}.png")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes")
    parser.add_argument("--cache", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    globals().update(JOBS=max(1, args.jobs), CACHE=args.cache)
    began = time.perf_counter()
    points = measure(args.quick)
    _table(points)
    print(f"\n{time.perf_counter() - began:.0f} s on {args.jobs} processes")
    if args.json:
        rows = [msgspec.to_builtins(point) for point in points]
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    if not args.quick:
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        draw(figure, points)
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.plot)
        print(args.plot)


def _table(points: Sequence[Point]) -> None:
    width = max(len(p.point) for p in points) + 2
    print(f"{'':{width}}{'paper':>10}{'ours':>10}")
    for p in points:
        print(f"{p.point:{width}}{'-' if p.paper is None else _number(p.paper):>10}{_number(p.ours):>10}")
    for assumption in dict.fromkeys(p.assumption for p in points if p.assumption):
        print(f"assumption: {assumption}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
