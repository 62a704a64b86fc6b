"""What is trained next of the finished groups, and which of them enter the buffer (Laminar §3.1, §6).

Laminar's experience buffer has a *writer* and a *sampler*, which users replace. Both are pure functions here. A writer
looks at one group that has finished::

    def my_writer(group: Finished) -> bool | Sequence[float]:   # False: filtered; or new rewards, one a trajectory
        return [reward - 0.1 * (length > 1000) for reward, length in zip(group.rewards, group.lengths)]

A sampler scores what waits, whenever a batch is taken or the buffer is full::

    def my_sampler(groups: Sequence[Finished]) -> Sequence[float]:    # one a group: the highest are trained first, and
        return [-sum(group.lengths) for group in groups]              # the lowest leaves a full buffer

Of equal scores those that were used least are trained first, then those that entered first; those that were used most
leave first, then again those that entered first. A staleness control with a bound follows the order only as far as the
bound allows (``SampledControl``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, TypeAlias

from asyncrl.core.advantage import group_mean
from asyncrl.core.types import Record, Task, Trajectory


class Generated(Record, frozen=True, kw_only=True):
    """What the policy generated of a trajectory: how many ``tokens``, and the mean ``version`` that sampled them."""

    tokens: int
    version: float


class Finished(Record, frozen=True, kw_only=True):
    """What a sampler and a writer know of a group. ``staleness`` is that of a use by the next step; ``uses`` are those
    that it has had. Rewards, ``lengths`` (tokens that the policy generated) and ``versions`` (the mean version that
    sampled them) are one a trajectory."""

    id: int
    task: Task
    v_traj: int
    staleness: int
    uses: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    versions: tuple[float, ...]


Sampler: TypeAlias = Callable[[Sequence[Finished]], Sequence[float]]
Writer: TypeAlias = Callable[[Finished], "bool | Sequence[float]"]


def generated(trajectory: Trajectory) -> Generated:
    """As its token columns say, which must be in memory. Without tokens its version is V_traj."""
    tokens, versions = trajectory.generated, trajectory.versions
    observed = len(versions) - tokens  # each counts as -1
    return Generated(tokens=tokens, version=(sum(versions) + observed) / tokens if tokens else trajectory.v_traj)


# --- samplers ---------------------------------------------------------------------------------------------------------


def fifo(groups: Sequence[Finished]) -> list[float]:
    """First in, first out. What was not trained yet comes before what is used again."""
    return [-group.uses for group in groups]


def staleness(groups: Sequence[Finished]) -> list[float]:
    """The freshest first. The oldest first is what ``fifo`` comes to; it is the fresh ones that keep π/μ near 1, so
    they come first where there is a choice, as with StaleFlow's and Laminar's reasons to bound staleness at all."""
    return [-group.staleness for group in groups]


def advantage(groups: Sequence[Finished]) -> list[float]:
    """The largest |advantage| first: prioritised replay (Schaul et al. 2016), with the advantage for the TD error. It
    is the mean over the group's trajectories of |reward − mean reward|, whatever the recipe's estimator makes of it."""
    return [fmean(map(abs, chain.from_iterable(group_mean([[r] for r in group.rewards])))) for group in groups]


def importance_ratio(groups: Sequence[Finished]) -> list[float]:
    """Those first whose π/μ is nearest to 1, as far as it can be known without a forward pass of every group before
    every step: by the mean age in versions of the tokens. It is 1 for tokens of the newest version, and each update
    moves it away. Unlike ``staleness`` this sees that most of a group may be younger than its oldest token."""
    return [-_age(group) for group in groups]


def _age(group: Finished) -> float:
    tokens = sum(group.lengths) or 1
    version = sum(n * v for n, v in zip(group.lengths, group.versions, strict=True)) / tokens
    return group.v_traj + group.staleness - version


SAMPLERS: dict[str, Sampler] = {
    "fifo": fifo,
    "staleness": staleness,
    "advantage": advantage,
    "importance_ratio": importance_ratio,
}
"""By their names in the recipe's ``buffer.sampler``."""


def ranked(sampler: Sampler, groups: Sequence[Finished]) -> list[int]:
    """The groups' ids, what is to be trained first at the front."""
    scores = sampler(groups)
    order = sorted(range(len(groups)), key=lambda i: (-scores[i], groups[i].uses))
    return [groups[i].id for i in order]


def least_wanted(sampler: Sampler, groups: Sequence[Finished]) -> int:
    """The id of the group that leaves a full buffer."""
    scores = sampler(groups)
    return groups[min(range(len(groups)), key=lambda i: (scores[i], -groups[i].uses))].id


# --- a user's own -----------------------------------------------------------------------------------------------------


def checked_scores(scores: Any, groups: Sequence[Finished]) -> Sequence[float]:
    """What a user's sampler gave. Raises ``ValueError`` unless there is a finite number for each group."""
    return _numbers(scores, len(groups), "score", "group")


def checked_rewards(answer: Any, group: Finished) -> bool | Sequence[float]:
    """What a user's writer gave. Raises ``ValueError`` unless it is a bool, or a finite number for each trajectory."""
    return answer if isinstance(answer, bool) else _numbers(answer, len(group.rewards), "reward", "trajectory")


def _numbers(values: Any, count: int, what: str, of: str) -> Sequence[float]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"gave {type(values).__name__}; give a list with a {what} for each {of}")
    if len(values) != count:
        raise ValueError(f"gave {len(values)} {what}s; give one for each {of}, {count} here")
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"gave the {what} {value!r}; give finite numbers")
    return [float(value) for value in values]
