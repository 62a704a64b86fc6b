"""Deadlines that cannot do their work because an outer one comes first. Nothing is wrong with such a recipe, but what
the inner one would have mended costs more; so it is named at the start."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.recipe import Recipe


def inversions(recipe: Recipe) -> Iterator[str]:
    """One line for each, with both keys."""
    engine, env = recipe.engine, recipe.env
    idle_key, idle_s = "engine.idle_timeout_s", engine.idle_timeout_s
    if not engine.stream_interval:
        idle_key, idle_s = "engine.request_timeout_s", engine.request_timeout_s
    pairs = [
        (
            "engine.request_timeout_s",
            engine.request_timeout_s,
            idle_key,
            idle_s,
            "silence is not noticed before",
        ),
        ("env.episode_timeout_s", env.episode_timeout_s, idle_key, idle_s, "on a server that hangs the episode fails"),
        (
            *("engine.patience_s", engine.patience_s, "engine.connect_timeout_s", engine.connect_timeout_s),
            "the run may end while a server is being started again",
        ),
    ]
    for outer, outer_s, inner, inner_s, what in pairs:
        if outer_s < inner_s:
            yield f"{outer} = {outer_s:g} comes before {inner} = {inner_s:g}: {what}; raise the one or lower the other"
