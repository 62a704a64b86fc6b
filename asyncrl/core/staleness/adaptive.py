"""A budget for the mean staleness, held while a run drifts: which bound, and how many environment slots, to use next.

Two levers move the mean. The bound (α or η) limits admission: where that leaves slots empty, the mean follows it; under
the in-flight cap it *is* α, and never above (core/staleness/inflight_cap.py). Else the slots limit, and the mean is the
natural staleness, C·M_tail/(B·max(1, ρ)) + min(1, ρ) of core/theory/runtime.py, whose slope in C the live prediction
gives. From what a stretch of the run was like, ``propose`` moves one lever by what the mean is off its target:

| the mean is | α (real) | η (whole) |
|---|---|---|
| too high | lower α; at its least, fewer slots | lower η, not below the target; then fewer slots; then lower η |
| too low, admission limits | raise α | more slots; at their most, raise η |
| too low, slots limit | more slots | the same |

η moves by whole steps of staleness, too coarse for a mean, so there the slots do the work between two of them. What the
user's limits do not allow is not done, and said. Raising a bound helps at once; what was started under a higher one
keeps it (core/staleness), so lowering shows after as many steps. Hence a stretch should be longer than the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from asyncrl.core.observed import Observed, admission_limits
from asyncrl.core.theory.staleness import pre_queue_staleness
from asyncrl.core.types import Record

TOLERANCE = 0.05
"""Versions, or share of the target if that is more, that the mean may be off without a move."""

MOST = 2.0
"""At most by this factor the slots in use change at once: the slope holds near by."""


class Budget(Record, frozen=True, kw_only=True):
    """The target and what the user allows. ``envs_*`` count environment slots."""

    target: float
    """Mean staleness to hold, in versions."""
    bound_min: float
    bound_max: float
    envs_min: int
    envs_max: int
    whole: bool
    """The control takes whole bounds only (η)."""
    batch: int
    """Trajectories a step."""
    episodes_a_slot: int = 1


class Setting(Record, frozen=True, kw_only=True):
    bound: float
    num_envs: int
    reason: str = ""
    """One line: what moved and why, or why nothing did."""


_Lever = Callable[[Budget, Observed, float, Setting], Setting | None]


def propose(budget: Budget, seen: Observed, staleness: float, now: Setting) -> Setting:
    """The setting after ``now``, under which a stretch of the run was like ``seen`` and had the mean ``staleness``."""
    error = budget.target - staleness
    mean = f"mean staleness {staleness:.2f}, target {budget.target:g}"
    if abs(error) <= max(TOLERANCE, TOLERANCE * budget.target):
        return Setting(bound=now.bound, num_envs=now.num_envs, reason=f"{mean}: held")
    slots = budget.episodes_a_slot * now.num_envs
    waiting = admission_limits(seen, slots=slots)
    levers: tuple[_Lever, ...]
    if error < 0:
        bound_first = not budget.whole or now.bound - 1 >= budget.target
        levers = (_lower_bound, _fewer_slots) if bound_first else (_fewer_slots, _lower_bound)
    elif budget.whole:
        levers = (_more_slots, _raise_bound) if waiting else (_more_slots,)
    else:
        levers = (_raise_bound,) if waiting else (_more_slots,)
    for lever in levers:
        if (moved := lever(budget, seen, staleness, now)) is not None:
            return Setting(bound=moved.bound, num_envs=moved.num_envs, reason=f"{mean}: {moved.reason}")
    stuck = "bound_min and the least num_envs" if error < 0 else "bound_max" if waiting else "rollout.num_envs"
    return Setting(bound=now.bound, num_envs=now.num_envs, reason=f"{mean}: no lever left, for {stuck} is reached")


def _lower_bound(budget: Budget, seen: Observed, staleness: float, now: Setting) -> Setting | None:
    wanted = now.bound - 1 if budget.whole else min(now.bound, staleness) + budget.target - staleness
    return _bound(budget, max(wanted, budget.bound_min), now, "more is admitted than the budget allows")


def _raise_bound(budget: Budget, seen: Observed, staleness: float, now: Setting) -> Setting | None:
    wanted = now.bound + (1 if budget.whole else budget.target - staleness)
    return _bound(budget, min(wanted, budget.bound_max), now, "admission leaves slots empty")


def _bound(budget: Budget, bound: float, now: Setting, why: str) -> Setting | None:
    bound = round(bound, 3)
    if bound == now.bound:
        return None
    return Setting(bound=bound, num_envs=now.num_envs, reason=f"bound {now.bound:g} → {bound:g}, {why}")


def _fewer_slots(budget: Budget, seen: Observed, staleness: float, now: Setting) -> Setting | None:
    return _slots(budget, seen, staleness, now, "fewer at once are generated across fewer updates")


def _more_slots(budget: Budget, seen: Observed, staleness: float, now: Setting) -> Setting | None:
    return _slots(budget, seen, staleness, now, "the budget has room")


def _slots(budget: Budget, seen: Observed, staleness: float, now: Setting, why: str) -> Setting | None:
    """By the slope of the natural staleness, from what was in progress."""
    begun = budget.batch / seen.kept
    slope = pre_queue_staleness(concurrency=1.0, batch=begun, tailness=seen.tailness, rho=seen.rho)
    in_use = min(seen.episodes / budget.episodes_a_slot, now.num_envs)
    wanted = round(in_use + (budget.target - staleness) / slope / budget.episodes_a_slot)
    wanted = max(math.ceil(in_use / MOST), min(wanted, math.ceil(in_use * MOST)))
    num_envs = max(budget.envs_min, min(wanted, budget.envs_max))
    if num_envs == now.num_envs or (num_envs > now.num_envs) != (budget.target > staleness):
        return None
    return Setting(bound=now.bound, num_envs=num_envs, reason=f"slots {now.num_envs} → {num_envs}, {why}")
