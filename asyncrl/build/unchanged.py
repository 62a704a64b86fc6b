"""What of a recipe a run that goes on must have as it was."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import Recipe, RecipeError


def fixed(recipe: Recipe) -> dict[str, float | str]:
    """What a run cannot change while it has groups under way."""
    rollout = recipe.rollout
    return {
        "staleness.control": recipe.staleness.control,
        "rollout.batch_groups": rollout.batch_groups,
        "rollout.group_size": rollout.group_size,
        "rollout.max_additional_running_prompts": rollout.max_additional_running_prompts,
        "buffer.reuse": recipe.buffer.reuse,
    }


def check_unchanged(recipe: Recipe, notes: Mapping[str, float | str]) -> None:
    """By what a run that is to go on has noted. Raises ``RecipeError``."""
    for key, value in fixed(recipe).items():
        if (before := notes.get(key, value)) != value:
            was = before if isinstance(before, str) else f"{before:g}"
            raise RecipeError(
                f"{key} = {value}: the run that is to go on was begun with {was}; set it back, or begin a new run"
            )
    if recipe.one_version and not notes.get("one_version", True):
        raise RecipeError(
            f'update.running = "drain" with engine.routing = "{recipe.engine.routing}": no trajectory may have several '
            "versions, and some of the run that is to go on have; set the preset back, or begin a new run"
        )
