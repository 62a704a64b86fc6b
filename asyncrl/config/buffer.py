"""The recipe's ``[buffer]`` table: which finished groups are trained, when, and how often."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncrl.config.base import RecipeError, Section, require
from asyncrl.core.experience import SAMPLERS

if TYPE_CHECKING:
    from asyncrl.config.recipe import Recipe


class BufferConfig(Section, frozen=True, kw_only=True):
    """The experience buffer with its writer and sampler (Laminar §3.1, §6); ``core/experience.py`` says what your own
    functions get and give. All but the writer is for ``staleness.control`` = ``inflight_cap``, which follows a sampler
    as far as its bound allows, and ``inherent`` and ``queue_drop``, which have none. Plans reckon without it."""

    sampler: str = "fifo"
    """Which groups make the next batch, where there are more: a name, or your own ``package.module:function`` or
    ``file.py:function``. ``fifo``: in the control's order, first in, first out. ``staleness``: the freshest first.
    ``advantage``: the largest mean |reward − mean of the group| first. ``importance_ratio``: the smallest mean age of
    the tokens first, for π/μ is nearest to 1 there."""
    writer: str = ""
    """Your function that lets finished groups in, filters them or gives them other rewards. Empty: all enter."""
    capacity: float = 0.0
    """Batches of finished groups that may wait; of more, the sampler's last leaves (with ``fifo`` the oldest of those
    used most). 0: no limit. For ``inherent``, set it below ``staleness.queue``, at which nothing starts any more."""
    reuse: int = 1
    """E: how often a group may be trained, each time in another step; what was not trained yet fills the batch first
    with ``fifo``. Each use counts with its own staleness, and none is beyond the bound."""

    @property
    def samples(self) -> bool:
        """Whether a sampler decides, in place of the control alone."""
        return self.sampler != "fifo" or self.capacity > 0 or self.reuse > 1


def check_buffer(recipe: Recipe) -> None:
    """Raises ``RecipeError`` for what is impossible, or does not go with the staleness control."""
    b, control = recipe.buffer, recipe.staleness.control
    if b.sampler not in SAMPLERS and ":" not in b.sampler:
        raise RecipeError(
            f"buffer.sampler: unknown {b.sampler!r}; known are {', '.join(SAMPLERS)}, or your own file.py:function"
        )
    require(not b.writer or ":" in b.writer, "buffer.writer", b.writer, "name your function: file.py:function")
    require(b.reuse >= 1, "buffer.reuse", b.reuse, "must be at least 1")
    require(
        b.capacity == 0 or (math.isfinite(b.capacity) and b.capacity >= 1),
        "buffer.capacity",
        b.capacity,
        "must hold at least one batch; 0: no limit",
    )
    require(
        b.sampler != "advantage" or recipe.rollout.group_size >= 2,
        "buffer.sampler",
        b.sampler,
        "compares the trajectories of a group; set rollout.group_size to at least 2",
    )
    if not b.samples:
        return
    key = next(key for key in ("sampler", "reuse", "capacity") if getattr(b, key) != getattr(BufferConfig(), key))
    require(
        control in ("inflight_cap", "inherent", "queue_drop"),
        f"buffer.{key}",
        getattr(b, key),
        f'staleness.control = "{control}" needs its own order to keep its word; set that to inflight_cap, which has a '
        "bound too, or inherent or queue_drop, or leave this out",
    )
    require(
        control != "queue_drop" or not b.capacity,
        "buffer.capacity",
        b.capacity,
        "queue_drop has one already; set staleness.queue",
    )
    require(
        b.reuse == 1 or recipe.staleness.limit != 0,
        "buffer.reuse",
        b.reuse,
        "a second use would be one version staler, but staleness.bound is 0; set that to at least 1",
    )
    require(
        not recipe.trainer.stream,
        "trainer.stream",
        "true",
        f"no group is certain of its batch while a sampler decides; set it to false, or leave out buffer.{key}",
    )
