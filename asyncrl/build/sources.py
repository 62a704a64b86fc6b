"""The kinds of tasks that a recipe names, in ``[task]`` and ``[env]`` or in ``[sources]``: loaded, checked, and given
their places to be played."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from asyncrl.build.assemble import Played
from asyncrl.config import Recipe, RecipeError, Source
from asyncrl.core.types import Task
from asyncrl.env_workers.pool import EnvProcesses
from asyncrl.loading import Environment, load_environment, load_tasks
from asyncrl.ports import EnvSource
from asyncrl.runtime.env_source import LocalEnvs


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A source whose environment and rows are good."""

    source: Source
    environment: Environment
    train: Sequence[Task]
    heldout: Sequence[Task]

    def played(self, recipe: Recipe, log: Path) -> Played:
        """With its places. Worker processes write to ``log``."""
        return Played(
            weight=self.source.weight,
            train=self.train,
            heldout=self.heldout,
            envs=_places(recipe, self.source, self.environment, log),
            replayable=self.environment.kind.deterministic or self.environment.reward is not None,
            rollout=self.environment.rollout,
            reward=self.environment.reward,
            config=self.source.env,
        )


def load_environments(recipe: Recipe) -> dict[str, Environment]:
    """Those of all sources, by name. Raises ``RecipeError``."""
    environments = {name: load_environment(s.env, _table(name, "env")) for name, s in recipe.mixture.items()}
    for name, environment in environments.items():
        limited = recipe.mixture[name].env.memory_mb and environment.kind.cost.memory_mb
        if (environment.make_sync is not None or limited) and not recipe.rollout.expand_num_return_sequences:
            raise RecipeError(
                "rollout.expand_num_return_sequences = false: the members of a group would wait for each other's "
                "places; set it to true for a SyncEnv, and with env.memory_mb"
            )
        if environment.rollout is not None and not recipe.rollout.expand_num_return_sequences:
            raise RecipeError(
                "rollout.expand_num_return_sequences = false: an agent program makes its requests one by one; set it "
                "to true for a rollout function"
            )
    return environments


def load_sources(recipe: Recipe, environments: Mapping[str, Environment]) -> dict[str, Loaded]:
    """Read the rows of all sources. Raises ``RecipeError``."""
    loaded: dict[str, Loaded] = {}
    for name, source in recipe.mixture.items():
        task, environment = source.task, environments[name]
        rows = [
            load_tasks(path, f"{_table(name, 'task')}.{key}", environment.required, name, environment.parse_row)
            if path or key == "train"
            else []
            for key, path in (("train", task.train), ("heldout", task.heldout))
        ]
        loaded[name] = Loaded(source=source, environment=environment, train=rows[0], heldout=rows[1])
    return loaded


def _table(name: str, table: str) -> str:
    return f"sources.{name}" if name else table


def _places(recipe: Recipe, source: Source, environment: Environment, log: Path) -> EnvSource:
    """Places for the environments: in worker processes, or on the loop."""
    env, cost = source.env, environment.kind.cost
    if environment.make is not None:
        limit = max(1, env.memory_mb // cost.memory_mb) if env.memory_mb and cost.memory_mb else 0
        return LocalEnvs(environment.make, limit=limit)
    objects = recipe.rollout.num_envs
    workers = env.workers or max(min(objects, len(os.sched_getaffinity(0))), math.ceil(objects / cost.per_process))
    return EnvProcesses(
        env.target,
        env.kwargs,
        cost=cost,
        reusable=environment.kind.reusable,
        workers=workers,
        memory_mb=env.memory_mb,
        reset_timeout_s=env.reset_timeout_s,
        step_timeout_s=env.step_timeout_s,
        log=log,
    )
