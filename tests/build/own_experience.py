"""A user's writer and sampler (recipe keys ``buffer.writer`` and ``buffer.sampler``), good ones and bad ones."""

from __future__ import annotations

import json
from collections.abc import Sequence

from asyncrl.core.experience import Finished


def no_failures(group: Finished) -> bool | Sequence[float]:
    """Groups without any success stay out; in the others a success is worth more, the rarer it is."""
    successes = sum(group.rewards)
    return [reward / successes for reward in group.rewards] if successes else False


def shortest(groups: Sequence[Finished]) -> list[float]:
    return [-sum(group.lengths) for group in groups]


def raising(groups: Sequence[Finished]) -> list[float]:
    raise KeyError("no such score")


def too_few(groups: Sequence[Finished]) -> list[float]:
    return [0.0 for _ in groups][1:]


def not_finite(group: Finished) -> list[float]:
    return [float("nan") for _ in group.rewards]


def nothing(group: Finished) -> None:
    return None


def in_a_library(groups: Sequence[Finished]) -> list[float]:
    return json.loads("oops")
