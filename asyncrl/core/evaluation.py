"""What held-out samples say of a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncrl.core.types import Record, Task

RIGHT = 1.0
"""The score from which a sample counts as right."""


class Score(Record, frozen=True, kw_only=True):
    """One task, played several times: the environment's metric ``accuracy`` where it gives one, else the reward."""

    task: Task
    samples: list[float]


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that any of ``k`` samples is right, without bias, from ``n`` ≥ ``k`` of which ``right`` are (Chen et
    al., arXiv:2107.03374, Eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def accuracy(scores: Sequence[Score]) -> float:
    """Mean over the samples."""
    samples = [sample for score in scores for sample in score.samples]
    return math.fsum(samples) / len(samples)


def details(scores: Sequence[Score]) -> Mapping[str, float]:
    """``pass@k`` for k = 1, 2, 4 … up to the number of samples, where there are several; ``accuracy/NAME`` of each of
    several sources."""
    found: dict[str, float] = {}
    n = min(len(score.samples) for score in scores)
    k = 1
    while n > 1 and k <= n:
        chances = [pass_at_k(len(s.samples), sum(x >= RIGHT for x in s.samples), k) for s in scores]
        found[f"pass@{k}"] = math.fsum(chances) / len(chances)
        k *= 2
    sources: dict[str, list[Score]] = {}
    for score in scores:
        sources.setdefault(score.task.source, []).append(score)
    if len(sources) > 1:
        found |= {f"accuracy/{name}": accuracy(own) for name, own in sorted(sources.items())}
    return found
