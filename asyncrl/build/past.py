"""A past run under the formulas: its speeds and lengths as it logged them, and what should have come of them.

As the staleness paper does it: concurrency, tailness and both throughputs are taken from the metrics, staleness and
period are predicted from these and put beside what was measured. Long runs are taken in phases, as lengths drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Recipe, loads_json
from asyncrl.core.observed import Observed, expected_staleness
from asyncrl.core.theory.staleness import measured_tailness
from asyncrl.core.types import OBSERVED_VERSION, Record
from asyncrl.observe.run_dir import METRICS, RECIPE, TRAJECTORIES, RunDirError, read_lines

PHASES = 4
STEPS_A_PHASE = 10

Row = dict[str, Any]


class Phase(Record, frozen=True, kw_only=True):
    """Steps ``first`` to ``last``: what was seen of the run, what was measured, and what was to be expected."""

    first: int
    last: int
    observed: Observed
    staleness: float
    period: float
    tokens_per_s: float
    """Generated tokens that were trained on."""
    expected_staleness: float
    expected_period: float
    expected_tokens_per_s: float


class _Line(Record, frozen=True, kw_only=True):
    """What is read of a line of ``trajectories.jsonl``."""

    group: int
    state: str
    versions: list[tuple[int, int]]


def read_recipe(run_dir: Path) -> Recipe:
    """The run's recipe, as resolved. Raises ``RunDirError``."""
    path = run_dir / RECIPE
    try:
        return loads_json(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{path}: not the recipe of a run ({error}); give a run directory") from None


def read_past(run_dir: Path) -> tuple[Recipe, list[Phase]]:
    """The run's recipe, and the run in at most ``PHASES`` parts, without its first and last steps, in which not all
    places were in use. Raises ``RunDirError``."""
    recipe = read_recipe(run_dir)
    rows = list(read_lines(run_dir / METRICS))
    if len(rows) < 2:
        raise RunDirError(f"{run_dir / METRICS}: {len(rows)} steps; at least 2 are needed to say anything")
    tailness = None if "response/tailness" in rows[-1] else _tailness(run_dir / TRAJECTORIES)
    edge = 1 + math.ceil(recipe.staleness.bound)
    inner = range(edge, len(rows) - edge + 1) if len(rows) > 6 * edge else range(1, len(rows))
    count = max(1, min(PHASES, len(inner) // STEPS_A_PHASE))
    borders = [inner.start + len(inner) * i // count for i in range(count + 1)]
    return recipe, [_phase(recipe, rows[a - 1], rows[a:b], tailness) for a, b in pairwise(borders)]


def _tailness(path: Path) -> float:
    """M_tail of all groups that were trained, of a run whose metrics do not have it."""
    groups: dict[int, list[float]] = {}
    if not path.exists():
        raise RunDirError(f"{path}: missing, and {METRICS} has no response/tailness; give a complete run directory")
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            found = msgspec.json.decode(line, type=_Line)
            if found.state == "consumed":
                tokens = sum(n for version, n in found.versions if version != OBSERVED_VERSION)
                groups.setdefault(found.group, []).append(tokens)
    return measured_tailness(list(groups.values()))


def _phase(recipe: Recipe, before: Row, rows: Sequence[Row], tailness: float | None) -> Phase:
    r, control = recipe.rollout, recipe.staleness
    last, n = rows[-1], len(rows)
    seconds: float = last["time/at"] - before["time/at"]
    slots = r.num_envs * (1 if r.expand_num_return_sequences else r.group_size)
    weights = [row["time/at"] - earlier["time/at"] for row, earlier in zip(rows, [before, *rows], strict=False)]

    def mean(key: str, missing: float = 0.0) -> float:
        """Over time."""
        return math.fsum(w * row.get(key, missing) for w, row in zip(weights, rows, strict=True)) / seconds

    trained = math.fsum(row["tokens/batch"] for row in rows)
    cycle_s = math.fsum(row["time/train"] + row["time/update"] for row in rows) / n
    consumed, filtered = (last.get(f"ledger/{k}", 0) - before.get(f"ledger/{k}", 0) for k in ("consumed", "filtered"))
    kept = consumed / (consumed + filtered) if consumed > 0 else 1.0
    seen = Observed(
        episodes=mean("rollout/episodes", float(slots)),
        tailness=tailness if tailness is not None else mean("response/tailness"),
        v_r=(last["tokens/total"] - before["tokens/total"]) / seconds / max(1e-9, 1.0 - mean("bubble/share")),
        v_t=trained / n / cycle_s,
        kept=kept,
    )
    batch = recipe.batch_trajectories
    period = seconds / n
    expected = max(trained / n / (kept * seen.v_r), cycle_s)
    if control.family == "inflight_cap":
        episode_s = seen.episodes * period * kept / batch
        guesses = (row["response/max"] / row["response/mean"] * episode_s for row in rows)
        longest = math.fsum(row.get("rollout/longest_s", guess) for row, guess in zip(rows, guesses, strict=True)) / n
        expected = max(expected, (longest + cycle_s) / (math.ceil(control.bound) + 1))
    return Phase(
        first=int(rows[0]["step"]),
        last=int(last["step"]),
        observed=seen,
        staleness=math.fsum(row["staleness/mean"] for row in rows) / n,
        period=period,
        tokens_per_s=trained / seconds,
        expected_staleness=expected_staleness(
            seen, control=control.family, bound=control.bound, queue=control.queue, batch=batch, slots=slots
        ),
        expected_period=expected,
        expected_tokens_per_s=trained / n / expected,
    )


def past_report(run_dir: Path, recipe: Recipe, phases: Sequence[Phase]) -> Iterator[str]:
    """Predicted beside measured, a line a phase."""
    r = recipe.rollout
    yield f"{run_dir}: {recipe.name}, {r.batch_groups} groups of {r.group_size} a batch, {r.num_envs} slots"
    yield ""
    yield f"  {'':11}{'seen in the run':^41}{'staleness':^18}{'period s':^18}{'trained tokens/s':^20}"
    names = ("C", "M_tail", "v_R", "v_T", "ρ")
    pair = f"{'predicted':>10}{'meas.':>8}"
    yield f"  {'steps':11}" + "".join(f"{name:>8}" for name in names) + f" {pair}{pair}{'predicted':>12}{'meas.':>8}"
    for p in phases:
        o = p.observed
        yield (
            f"  {f'{p.first}-{p.last}':11}{o.episodes:8,.0f}{o.tailness:8.2f}{o.v_r:8,.0f}{o.v_t:8,.0f}{o.rho:8.2f}"
            f" {p.expected_staleness:10.2f}{p.staleness:8.2f}{p.expected_period:10.1f}{p.period:8.1f}"
            f"{p.expected_tokens_per_s:12,.0f}{p.tokens_per_s:8,.0f}"
        )
    yield ""
    yield "  C: mean episodes in progress; v_R: tokens/s of busy servers; v_T: of a trainer that never waits."
    yield "  The period is a bound of means, to which chance adds. See asyncrl/core/planning.py."
