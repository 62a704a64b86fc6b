"""Which strategies of a coordinator go together (core/coordinator.py)."""

from __future__ import annotations

import math

from asyncrl.config.base import require
from asyncrl.config.recipe import Recipe

COORDINATOR = 'is the coordinator\'s; set staleness.control = "buffers" or "inherent"'


def check_coordination(recipe: Recipe) -> None:
    """Raises ``RecipeError`` for columns that exclude each other."""
    engine, update, staleness = recipe.engine, recipe.update, recipe.staleness
    if not recipe.coordinated:
        require(engine.routing not in ("waterfall", "own_batch"), "engine.routing", engine.routing, COORDINATOR)
        require(engine.migration == "none", "engine.migration", engine.migration, COORDINATOR)
        require(update.synchronization == "all", "update.synchronization", update.synchronization, COORDINATOR)
        return
    if staleness.control == "buffers":
        bound = staleness.bound
        require(bound == math.floor(bound), "staleness.bound", bound, "η of staleness buffers is a whole number")
    require(
        update.overlap,
        "update.overlap",
        "false",
        f'servers take weights at their own pace; leave it out for staleness.control = "{staleness.control}"',
    )
    require(0 <= engine.mu <= 1, "engine.mu", engine.mu, "is a share, from 0 to 1")
    require(engine.phi_wait >= 0, "engine.phi_wait", engine.phi_wait, "must be 0 or more")
    require(
        math.isfinite(engine.phi_throughput) and engine.phi_throughput > 1,
        "engine.phi_throughput",
        engine.phi_throughput,
        "is how many times as fast, more than 1",
    )
    for key in ("repack_s", "kv_threshold"):
        value = getattr(engine, key)
        require(math.isfinite(value) and value > 0, f"engine.{key}", value, "must be more than 0")
    require(engine.kv_threshold <= 1, "engine.kv_threshold", engine.kv_threshold, "is a share, at most 1")
    require(engine.roofline_batch >= 1, "engine.roofline_batch", engine.roofline_batch, "must be at least 1")
    if recipe.one_version:
        _check_own_batches(recipe)
    else:
        _check_shared(recipe)


def _check_shared(recipe: Recipe) -> None:
    """Requests are cut and go on with newer weights."""
    drain = 'goes with update.running = "drain"; set that, or another'
    require(
        recipe.staleness.control == "buffers",
        "update.running",
        recipe.update.running,
        'with staleness.control = "inherent" set it to "drain"',
    )
    require(recipe.engine.routing != "own_batch", "engine.routing", "own_batch", drain)
    require(recipe.update.synchronization != "when_empty", "update.synchronization", "when_empty", drain)
    require(recipe.engine.migration != "repack", "engine.migration", "repack", drain)


def _check_own_batches(recipe: Recipe) -> None:
    """A trajectory is one version's: a server ends what it has begun before it takes new weights."""
    engine, update, rollout = recipe.engine, recipe.update, recipe.rollout
    why = 'for update.running = "drain" with a coordinator'
    require(engine.routing == "own_batch", "engine.routing", engine.routing, f'set it to "own_batch" {why}')
    require(
        update.synchronization == "when_empty",
        "update.synchronization",
        update.synchronization,
        f'set it to "when_empty" {why}',
    )
    require(
        engine.migration in ("none", "repack"),
        "engine.migration",
        engine.migration,
        f'it would move trajectories to other versions; set it to "repack" or "none" {why}',
    )
    require(
        recipe.staleness.control == "buffers" or not rollout.max_additional_running_prompts,
        "rollout.max_additional_running_prompts",
        rollout.max_additional_running_prompts,
        'has no meaning with staleness.control = "inherent", where rollout.num_envs says how much runs',
    )
