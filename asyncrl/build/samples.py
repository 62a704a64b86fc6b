"""Reads the files of ``[sim]``'s empirical distributions, so that a user's own run can be replayed.

A file has one number a line, or is the ``trajectories.jsonl`` of a run (observe/recorder.py), which has something for
each of these keys; of its ``versions``, runs of (version, tokens), those of observed tokens part the turns:

    sim.lengths                  generated tokens of each turn
    sim.prompt_tokens            tokens observed before the first turn
    sim.env.observation_tokens   tokens observed before each later turn
    sim.env.turns                turns of each trajectory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.config import Recipe, RecipeError
from asyncrl.config.base import require
from asyncrl.core.distributions import Empirical
from asyncrl.core.types import OBSERVED_VERSION, Record

S = TypeVar("S", bound=msgspec.Struct)


class _Line(Record, frozen=True, kw_only=True):
    """What is read of a line of ``trajectories.jsonl``."""

    versions: list[tuple[int, int]]
    turns: int


def read_samples(recipe: Recipe) -> Recipe:
    """The recipe with every file of an empirical distribution replaced by its values. Raises ``RecipeError``, also for
    several sources of which ``[sim]``, which describes one kind of tasks, would say something else than the recipe."""
    for name, source in recipe.mixture.items():
        alike = "one kind of tasks is simulated or planned: give all sources the max_turns of [env], set as for most"
        require(source.env.max_turns == recipe.env.max_turns, f"sources.{name}.max_turns", source.env.max_turns, alike)
    env = _read(recipe.sim.env, "sim.env", ("reset", "step", "turns", "observation_tokens"))
    sim = _read(msgspec.structs.replace(recipe.sim, env=env), "sim", ("lengths", "prompt_tokens"))
    return msgspec.structs.replace(recipe, sim=sim)


def _read(section: S, path: str, names: Iterable[str]) -> S:
    values = {name: getattr(section, name) for name in names}
    samples = {
        name: Empirical(values=_values(Path(value.file), f"{path}.{name}"))
        for name, value in values.items()
        if isinstance(value, Empirical) and value.file
    }
    return msgspec.structs.replace(section, **samples) if samples else section


def _values(file: Path, key: str) -> tuple[float, ...]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise RecipeError(f"{key}.file: {file}: {error.strerror}; name a file of numbers, or a run's") from None
    values: list[float] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{key}.file: {file}:{number}"
        try:
            row = msgspec.json.decode(line, type=float | _Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where}: neither a number nor a line of trajectories.jsonl ({error})") from None
        if isinstance(row, _Line):
            if key not in FROM_TRAJECTORY:
                raise RecipeError(f"{where}: a trajectory does not tell {key}; give one number a line")
            values += FROM_TRAJECTORY[key](row)
        elif not 0 <= row < math.inf:
            raise RecipeError(f"{where}: {row:g} is no length or latency; it must be 0 or more")
        else:
            values.append(row)
    if not values:
        raise RecipeError(f"{key}.file: {file} has no values")
    return tuple(values)


def _stretches(line: _Line, *, observed: bool) -> list[float]:
    """Tokens of each stretch of observed or of generated tokens, in order. A response may be of several versions."""
    grouped = groupby(line.versions, key=lambda run: run[0] == OBSERVED_VERSION)
    return [float(sum(n for _, n in runs)) for kind, runs in grouped if kind == observed]


FROM_TRAJECTORY: dict[str, Callable[[_Line], list[float]]] = {
    "sim.lengths": lambda line: _stretches(line, observed=False),
    "sim.prompt_tokens": lambda line: _stretches(line, observed=True)[:1],
    "sim.env.observation_tokens": lambda line: _stretches(line, observed=True)[1:],
    "sim.env.turns": lambda line: [float(line.turns)],
}
