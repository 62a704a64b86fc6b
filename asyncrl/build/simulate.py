"""``asyncrl sim``: a recipe on virtual time, as a run directory, a sweep of seeds, or a comparison of recipes.

The runtime is the real one; build/virtual.py puts the simulated world under it. A simulation that fails names the
command that replays it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TextIO

import msgspec

from asyncrl.build.errors import leaves, one_line
from asyncrl.build.profile import cost_of
from asyncrl.build.samples import read_samples
from asyncrl.build.virtual import Simulation, simulated
from asyncrl.config import Recipe, dumps
from asyncrl.core.ledger import Ledger
from asyncrl.core.types import Record
from asyncrl.env import Env
from asyncrl.garbage import rare_collections
from asyncrl.observe.compare import comparison_lines, read_compared, write_comparison
from asyncrl.observe.progress import closing_lines
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.report import write_report
from asyncrl.observe.run_dir import RECIPE, write_atomic
from asyncrl.observe.summary import Summary, duration, write_summary
from asyncrl.observe.tally import Tally
from asyncrl.ports import EngineError, Observer, StepMetrics, TrainerError
from asyncrl.runtime.fleet import FleetDown
from asyncrl.runtime.user_code import EnvFailing
from asyncrl.sim.loop import run
from asyncrl.sim.trace import TraceRecorder

DISPLAY_S = 0.25
YOUNG_OBJECTS = 200_000
"""Between two garbage collections. Nobody waits for a virtual loop; at Python's 700 a third of its time goes there."""
EXPECTED = (TrainerError, EngineError, FleetDown, EnvFailing)
"""What a world full of faults may do to a run; anything else is a bug of ours."""


class Outcome(Record, frozen=True, kw_only=True):
    """One simulated run of a sweep. ``error`` is empty for a run that reached its last step; ``bug`` says that the
    error is none that a fault of the world explains. ``cpu_s`` is what it cost here."""

    seed: int
    error: str
    bug: bool
    cpu_s: float
    summary: Summary


def check(recipe: Recipe) -> None:
    """Raises ``RecipeError`` for a world that cannot be built, before anything is written."""
    cost_of(recipe.sim.instance)
    read_samples(recipe)


def play(
    recipe: Recipe,
    observe: Callable[[Callable[[], float]], Observer],
    wrap_env: Callable[[Env], Env] = lambda env: env,
) -> tuple[Ledger, BaseException | None]:
    """The whole run on virtual time, seen by the observer that ``observe`` makes of the loop's clock, its environments
    inside ``wrap_env``. The books, and what ended it early."""
    simulations: list[Simulation] = []

    async def main() -> None:
        observer = observe(asyncio.get_running_loop().time)
        simulations.append(await simulated(recipe, observer=observer, wrap_env=wrap_env))
        await simulations[0].play()

    error: BaseException | None = None
    try:
        with rare_collections(YOUNG_OBJECTS):
            run(main())
    except Exception as failure:
        error = failure
    return (simulations[0].run.buffer.ledger if simulations else Ledger()), error


def is_bug(error: BaseException | None) -> bool:
    return error is not None and not all(isinstance(e, EXPECTED) for e in leaves(error))


# --- one run ----------------------------------------------------------------------------------------------------------


class _Shown(Recorder):
    """Writes the run directory, and tells now and then how far it is."""

    out: TextIO
    shown = 0.0

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        now = time.monotonic()
        if now - self.shown >= DISPLAY_S:
            self.shown = now
            _tell(self.out, f"{len(self.rewards)}/{self.recipe.run.steps} steps, {duration(self.clock())} simulated")


def _tell(out: TextIO, text: str) -> None:
    """A line that the next one takes the place of; nothing where there is no terminal."""
    if out.isatty():
        out.write(f"\r\x1b[K{text}")
        out.flush()


def simulate(
    recipe: Recipe, run_dir: Path, *, command: Sequence[str], started: str, out: TextIO
) -> tuple[Summary, BaseException | None]:
    """One run into ``run_dir``: the files of a real run, in virtual time. Raises ``RunDirError``."""
    recorders: list[_Shown] = []
    began = time.process_time()

    def observe(clock: Callable[[], float]) -> Observer:
        recorder = _Shown(run_dir, recipe, clock, tokens=False)
        recorder.out = out
        recorders.append(recorder)
        write_atomic(run_dir / RECIPE, dumps(recipe))
        return recorder

    books, error = play(recipe, observe)
    if not recorders:
        assert error is not None
        raise error
    [recorder] = recorders
    recorder.close()
    ended = "finished" if error is None else f"failed: {one_line(error)}"
    summary = recorder.summary(
        exit=ended, started=started, command=command, ledger=books.counts(), reasons=books.reasons()
    )
    write_summary(run_dir, summary)
    report = write_report(run_dir) if recorder.rewards else None
    _tell(out, "")
    for line in closing_lines(summary, report, unicode=True):
        print(line, file=out)
    print(f"  simulated   {duration(summary.seconds)} in {time.process_time() - began:.1f} s of CPU", file=out)
    return summary, error


# --- determinism ------------------------------------------------------------------------------------------------------


def first_difference(recipe: Recipe) -> tuple[int, str | None]:
    """Play twice; the number of events, and where the two traces part, if they do."""
    traces: list[TraceRecorder] = []

    def observe(clock: Callable[[], float]) -> Observer:
        traces.append(TraceRecorder())
        return traces[-1]

    errors = [play(recipe, observe)[1] for _ in range(2)]
    first, second = (trace.events for trace in traces)
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return len(first), f"event {number}: {a} in the first run, {b} in the second"
    if len(first) != len(second) or [str(e) for e in errors[:1]] != [str(e) for e in errors[1:]]:
        return len(first), f"{len(first)} events in the first run, {len(second)} in the second"
    return len(first), None


# --- many seeds -------------------------------------------------------------------------------------------------------


def outcome(recipe: Recipe) -> Outcome:
    """One seed of a sweep, in memory."""
    tallies: list[Tally] = []
    began = time.process_time()

    def observe(clock: Callable[[], float]) -> Observer:
        tallies.append(Tally(recipe, clock))
        return tallies[0]

    books, error = play(recipe, observe)
    tally = tallies[0] if tallies else Tally(recipe, lambda: 0.0)
    text = "" if error is None else one_line(error)
    return Outcome(
        seed=recipe.seed,
        error=text,
        bug=is_bug(error),
        cpu_s=time.process_time() - began,
        summary=tally.summary(
            exit=text or "finished", started="", command=(), ledger=books.counts(), reasons=books.reasons()
        ),
    )


def sweep(recipe: Recipe, seeds: Sequence[int], jobs: int = 0) -> Iterator[Outcome]:
    """The recipe with each of these seeds, on ``jobs`` processes (0: one a core), as they end."""
    recipes = [msgspec.structs.replace(recipe, seed=seed) for seed in seeds]
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield from map(outcome, recipes)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(outcome, r) for r in recipes]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def table_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What a sweep came to: quantiles over the seeds, and how runs ended."""
    lines = [f"{'':22}{'min':>12}{'median':>12}{'max':>12}"]
    rows: list[tuple[str, Callable[[Summary], float | None], str]] = [
        ("steps", lambda s: s.steps, ",.0f"),
        ("virtual seconds", lambda s: s.seconds, ",.1f"),
        ("tokens/s", lambda s: s.tokens / s.seconds if s.seconds else None, ",.0f"),
        ("staleness, mean", lambda s: s.staleness.mean, ".3f"),
        ("staleness, max", lambda s: s.staleness.max, ".0f"),
        ("server bubbles", lambda s: s.bubble_share, ".1%"),
        ("trainer idle", lambda s: s.trainer_idle_share, ".1%"),
    ]
    for name, of, form in rows:
        values = sorted(v for o in outcomes if (v := of(o.summary)) is not None)
        if values:
            picked = (values[0], values[len(values) // 2], values[-1])
            lines.append(f"{name:22}" + "".join(f"{format(v, form):>12}" for v in picked))
    ends: dict[str, list[int]] = {}
    for o in outcomes:
        ends.setdefault(o.error or "finished", []).append(o.seed)
    lines.append("")
    for text, ended in sorted(ends.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(ended):6} × {text}" + (f"  (first seed {min(ended)})" if text != "finished" else ""))
    return lines


# --- side by side -----------------------------------------------------------------------------------------------------


def compare(
    recipes: Sequence[tuple[str, Recipe]], folder: Path, *, command: Sequence[str], started: str, out: TextIO
) -> int:
    """Simulate each recipe into ``folder/NAME``, print the table and draw ``comparison.png``. The number of runs that
    failed. Raises ``RunDirError``."""
    compared, failed = [], 0
    for name, recipe in recipes:
        _, error = simulate(recipe, folder / name, command=command, started=started, out=out)
        failed += error is not None
        compared.append(read_compared(folder / name, name))
    for line in comparison_lines(compared):
        print(line, file=out)
    print(f"  comparison  {write_comparison(compared, folder / 'comparison.png')}", file=out)
    return failed
