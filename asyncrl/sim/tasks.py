"""The simulated tasks: what each is like, and how long the responses to it get.

A task's traits are a function of (seed, task): its prompt's length, its chance to be solved, and the score that all its
responses' lengths have in common. The i-th response asked of a task has a length that is a function of (seed, task, i),
and the environment's draws follow the same rule (sim/env.py). So two policies that play the same tasks are given the
same work, whatever the order in which servers and slots get to it. Not the same is *which* trajectory of a task gets
the i-th response, where requests of one task overtake each other; and a request that was cut before its first token
asks again.

A prompt begins with its task's name, so that a server knows the task from the ids alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

from asyncrl.config import SimConfig
from asyncrl.core.types import Record, Task

NAME_IDS = 32
"""A name, ``task 17`` or ``heldout 3``, with the space behind it, is shorter."""


class Traits(Record, frozen=True, kw_only=True):
    """One task. ``score`` is standard normal (core/distributions.py)."""

    prompt: str
    success: float
    score: float


class SimTasks:
    """Draws traits from ``seed`` when they are first asked for, and keeps them."""

    def __init__(self, sim: SimConfig, *, seed: int) -> None:
        self._sim = sim
        self._seed = seed
        self._traits: dict[str, Traits] = {}
        self.train = [Task(id=f"task {i}", data={}) for i in range(sim.tasks)]
        self.heldout = [Task(id=f"heldout {i}", data={}) for i in range(sim.heldout)]

    def traits(self, name: str) -> Traits:
        traits = self._traits.get(name)
        if traits is None:
            rng = random.Random(f"{self._seed}/{name}")
            tokens = round(self._sim.prompt_tokens.sample(rng))
            success = beta(rng, self._sim.env.success, self._sim.env.spread)
            traits = Traits(prompt=f"{name} ".ljust(tokens, "."), success=success, score=rng.gauss(0.0, 1.0))
            self._traits[name] = traits
        return traits


class TaskLengths:
    """``Lengths`` of the simulated servers (sim/engine.py): tokens of a response, at least 1."""

    def __init__(
        self, sim: SimConfig, tasks: SimTasks, *, seed: int, progress: Callable[[], float] = lambda: 0.0
    ) -> None:
        """``progress``: how much of the run is done, from 0 to 1, for lengths that drift."""
        self._lengths = sim.lengths
        self._end = sim.lengths_end
        self._progress = progress
        self._share = sim.task_share
        self._tasks = tasks
        self._seed = seed
        self._asked: Counter[str] = Counter()
        self._rng = random.Random()

    def __call__(self, rng: random.Random, input_ids: Sequence[int]) -> int:
        """Takes no draw of the server's own ``rng``: that would make the length depend on what else runs there."""
        name = name_of(input_ids)
        self._rng.seed(f"{self._seed}/{name}/{self._asked[name]}")
        self._asked[name] += 1
        score = self._tasks.traits(name).score
        drawn = self._rng.getstate()
        length = self._lengths.sample_shared(score, self._rng, self._share)
        if self._end is not None:
            self._rng.setstate(drawn)  # the same draw of both, so that a length moves from the one to the other
            length += self._progress() * (self._end.sample_shared(score, self._rng, self._share) - length)
        return max(1, round(length))


def name_of(input_ids: Sequence[int]) -> str:
    """The task that these ids begin with: everything before the second space."""
    kind, number, _ = bytes(i & 255 for i in input_ids[:NAME_IDS]).split(b" ", 2)
    return f"{kind.decode()} {number.decode()}"


def beta(rng: random.Random, mean: float, spread: float) -> float:
    """A draw of the Beta distribution with this mean and variance spread·mean·(1 − mean): a = mean·(1/spread − 1),
    b = (1 − mean)·(1/spread − 1). At its ends it is the constant ``mean`` (0) and a coin (1)."""
    if spread == 0 or mean in (0.0, 1.0):
        return mean
    if spread == 1:
        return float(rng.random() < mean)
    weight = 1 / spread - 1
    odds = _log_gamma(rng, weight * mean) - _log_gamma(rng, weight * (1 - mean))
    return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0


def _log_gamma(rng: random.Random, shape: float) -> float:
    """The logarithm of a Gamma(shape, 1) draw, which for small shapes is itself too small for a float."""
    return math.log(rng.gammavariate(shape + 1, 1.0)) + math.log(1.0 - rng.random()) / shape
