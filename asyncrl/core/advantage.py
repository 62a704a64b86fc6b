"""How good a trajectory was, against the other trajectories of its group. Pure Python: no torch, no numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

EPSILON = 1e-6
"""Added to the standard deviation, so that a group of almost equal rewards does not explode."""


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, not scaled: a group's weight grows with its spread."""
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def group_norm(rewards: Sequence[float], eps: float = EPSILON) -> list[float]:
    """GRPO's advantage (ROLL Flash Eq. 2): ``(r − mean) / (std + eps)`` with the population's standard deviation.

    A group whose rewards are all equal teaches nothing: zeros.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    centred = group_mean(rewards)
    std = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / (std + eps) for c in centred]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {"group_norm": group_norm, "group_mean": group_mean}
"""The recipe's ``algorithm.advantage`` by name."""


def compute(name: str, groups: Sequence[Sequence[float]]) -> list[float]:
    """Advantages of all trajectories, flat and in order, from the rewards of each group.

    Raises ``ValueError`` for an unknown name, an empty group or a reward that is not finite.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"algorithm.advantage: unknown {name!r}; known are {', '.join(sorted(ADVANTAGES))}")
    advantages: list[float] = []
    for number, rewards in enumerate(groups):
        if not rewards:
            raise ValueError(f"group {number} of the batch has no trajectories")
        if not all(math.isfinite(r) for r in rewards):
            raise ValueError(f"group {number} of the batch has a reward that is not finite: {list(rewards)}")
        advantages += ADVANTAGES[name](rewards)
    return advantages
