"""The experience buffer as the recipe's ``[buffer]`` has it, and who is to blame where a user's function fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl.build.errors import of_user
from asyncrl.config import Recipe, RecipeError
from asyncrl.core.experience import SAMPLERS, Finished, Sampler, Writer, checked_rewards, checked_scores
from asyncrl.runtime.experience import Experience


@contextmanager
def blamed(who: str) -> Iterator[None]:
    """What a user's function raises, or its answer's check, is a ``RecipeError``."""
    try:
        yield
    except Exception as error:
        raise RecipeError(f"{who}: {of_user(error)}") from error


def make_experience(recipe: Recipe, own_sampler: Sampler | None, own_writer: Writer | None) -> Experience:
    """``own_…`` are what the recipe names of the user's."""
    config = recipe.buffer
    sampler, writer = None, None
    if config.samples:
        sampler = SAMPLERS[config.sampler] if own_sampler is None else _sampler(own_sampler, config.sampler)
    if own_writer is not None:
        writer = _writer(own_writer, config.writer)
    capacity = config.capacity * recipe.rollout.batch_groups
    return Experience(
        sampler=sampler,
        writer=writer,
        reuse=config.reuse,
        capacity=math.floor(capacity + 1e-9) if capacity else math.inf,
    )


def _sampler(own: Sampler, name: str) -> Sampler:
    def scores(groups: Sequence[Finished]) -> Sequence[float]:
        with blamed(f"buffer.sampler: {name}"):
            return checked_scores(own(groups), groups)

    return scores


def _writer(own: Writer, name: str) -> Writer:
    def rewards(group: Finished) -> bool | Sequence[float]:
        with blamed(f"buffer.writer: {name}"):
            return checked_rewards(own(group), group)

    return rewards
