"""Which strategies of a coordinator go together (core/coordinator.py)."""

from __future__ import annotations

import math

from asyncrl.config.base import require
from asyncrl.config.recipe import Recipe

COORDINATOR = 'is the coordinator\'s; set staleness.control = "buffers", "window" or "inherent"'
MIGRATION = {"own_batch": "repack", "newest_first": "repartition"}
"""How trajectories move where each is one version's, by how they are routed."""


def check_coordination(recipe: Recipe) -> None:
    """Raises ``RecipeError`` for columns that exclude each other."""
    engine, update, staleness = recipe.engine, recipe.update, recipe.staleness
    if not recipe.coordinated:
        coordinators = ("waterfall", *MIGRATION)
        require(engine.routing not in coordinators, "engine.routing", engine.routing, COORDINATOR)
        require(engine.migration == "none", "engine.migration", engine.migration, COORDINATOR)
        require(update.synchronization == "all", "update.synchronization", update.synchronization, COORDINATOR)
        return
    symbols = {"buffers": "η of staleness buffers", "window": "τ of a sliding window"}
    if staleness.control in symbols:
        bound, whole = staleness.bound, f"{symbols[staleness.control]} is a whole number"
        require(bound == math.floor(bound), "staleness.bound", bound, whole)
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
    for key in ("rebalance_s", "kv_threshold"):
        value = getattr(engine, key)
        require(math.isfinite(value) and value > 0, f"engine.{key}", value, "must be more than 0")
    require(engine.kv_threshold <= 1, "engine.kv_threshold", engine.kv_threshold, "is a share, at most 1")
    require(engine.roofline_batch >= 1, "engine.roofline_batch", engine.roofline_batch, "must be at least 1")
    if recipe.one_version:
        _check_one_version(recipe)
    else:
        _check_shared(recipe)


def _check_shared(recipe: Recipe) -> None:
    """Requests are cut and go on with newer weights."""
    engine, update, control = recipe.engine, recipe.update, recipe.staleness.control
    drain = 'goes with update.running = "drain"; set that, or another'
    require(
        control == "buffers",
        "update.running",
        update.running,
        f'with staleness.control = "{control}" set it to "drain"',
    )
    require(engine.routing not in MIGRATION, "engine.routing", engine.routing, drain)
    require(update.synchronization != "when_empty", "update.synchronization", "when_empty", drain)
    require(engine.migration not in MIGRATION.values(), "engine.migration", engine.migration, drain)


def _check_one_version(recipe: Recipe) -> None:
    """A trajectory is one version's: a server ends what it has begun, or gives it to another of its version, before it
    takes new weights."""
    engine, update, rollout = recipe.engine, recipe.update, recipe.rollout
    why = 'for update.running = "drain" with a coordinator'
    require(
        engine.routing in MIGRATION, "engine.routing", engine.routing, f'set it to "own_batch" or "newest_first" {why}'
    )
    require(
        update.synchronization == "when_empty",
        "update.synchronization",
        update.synchronization,
        f'set it to "when_empty" {why}',
    )
    its = MIGRATION[engine.routing]
    require(
        engine.migration in ("none", its),
        "engine.migration",
        engine.migration,
        f'does not go with engine.routing = "{engine.routing}"; set it to "{its}" or "none"',
    )
    redundant = rollout.max_additional_running_prompts
    match recipe.staleness.control:
        case "inherent":
            no_meaning = 'has no meaning with staleness.control = "inherent", where rollout.num_envs says how much runs'
            require(not redundant, "rollout.max_additional_running_prompts", redundant, no_meaning)
        case "window":
            trained = 'would be surplus, and staleness.control = "window" abandons nothing; leave it out'
            require(not redundant, "rollout.max_additional_running_prompts", redundant, trained)
            members = rollout.group_size_redundancy
            require(not members, "rollout.group_size_redundancy", members, trained)
