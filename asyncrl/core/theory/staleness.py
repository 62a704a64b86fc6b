"""Mean staleness of fully asynchronous training, in closed form (papers: "Predicting and Controlling Staleness in Fully
Asynchronous RL Training"; section titles in quotes below).

The model: C slots generate without pause, each one rollout at a time; a group of S rollouts enters the queue when its
last one ends; the queue holds at most Q rollouts and drops its oldest group to admit a new one (*queue-drop*); the
trainer takes the B oldest rollouts when B are there; new weights take no time.

| symbol | argument | unit | |
|---|---|---|---|
| C | concurrency | rollouts | slots that generate |
| B = G·S | batch | rollouts | groups a batch × samples a group |
| q = Q/B | q | – | queue factor, ≥ 1 (below, a batch never gathers) |
| M_tail | tailness | – | E[max of a group's lengths] / E[length] |
| v_R, v_T | v_r, v_t | tokens/s | rollout and train throughput |
| ρ = v_R/v_T | rho | – | trainer utilisation; below 1 rollout-bound, above 1 train-bound |
| c_R, c_T | c_r, c_t | tokens/s/GPU | constant throughput a rollout GPU, a train GPU |
| β* = c_T/c_R | beta | – | rollout GPUs a train GPU at ρ = 1 |

**The printed predictions** of the paper's real runs do not follow from the inputs printed beside them. Of the six runs
with all inputs, one does to two decimals (B = 240: 1.34); the others are printed 0.36 too low to 0.08 too high, where
rounding of the inputs explains at most 0.02. The totals are the sums of the printed parts, and IQS follows from the
printed ρ, but in one run (q = 2, ρ = 1.07: 1.93 is printed, 1.90 follows; 1.93 is ρ = 1.05). The rest is in PQS: it
takes M_tail from 1.24 to 1.49 where 1.42 to 1.45 is printed. So PQS was computed from quantities that are not printed;
the concurrency really in flight, or a mean of the steps' own ratios, would do it. The tests list every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.core.distributions import Distribution, require_positive
from asyncrl.core.types import Record


class Staleness(Record, frozen=True, kw_only=True):
    """Mean policy updates between a rollout's first token and its training, in two parts."""

    pre_queue: float
    in_queue: float

    @property
    def total(self) -> float:
        return self.pre_queue + self.in_queue


# --- the lengths ------------------------------------------------------------------------------------------------------


def tailness_multiplier(lengths: Distribution, group_size: int, share: float = 0.0) -> float:
    """M_tail = E[max(L_1 … L_S)] / E[L] ("Approximating staleness in async RL"), at least 1.

    ``share``: part of the variance that the samples of a task have in common (``core/distributions.py``); the paper
    takes independent lengths, which is 0.
    """
    return lengths.expected_max(group_size, share) / lengths.expected


def measured_tailness(groups: Sequence[Sequence[float]]) -> float:
    """M_tail of observed groups: the mean of their maxima over the mean of all lengths. Needs no model of the lengths,
    and sees what the samples of a task have in common."""
    if not groups or not all(groups):
        raise ValueError("tailness of no lengths; give at least one group, and no empty one")
    mean = math.fsum(map(math.fsum, groups)) / sum(map(len, groups))
    require_positive("tailness", mean_length=mean)
    return math.fsum(map(max, groups)) / len(groups) / mean


# --- staleness --------------------------------------------------------------------------------------------------------


def generation_time(*, concurrency: float, tailness: float, mean_length: float, v_r: float) -> float:
    """t_generate = C·M_tail·E[L] / v_R, seconds from a group's start to its last token ("Pre-queue staleness")."""
    require_positive("generation time", concurrency=concurrency, tailness=tailness, mean_length=mean_length, v_r=v_r)
    return concurrency * tailness * mean_length / v_r


def train_period(*, batch: float, mean_length: float, v_r: float, v_t: float) -> float:
    """t_period = B·E[L] / min(v_R, v_T), seconds between two policy updates ("Pre-queue staleness")."""
    require_positive("train period", batch=batch, mean_length=mean_length, v_r=v_r, v_t=v_t)
    return batch * mean_length / min(v_r, v_t)


def pre_queue_staleness(*, concurrency: float, batch: float, tailness: float, rho: float) -> float:
    """PQS = t_generate / t_period = C·M_tail / (B·max(1, ρ)): updates while a group is generated ("Pre-queue
    staleness")."""
    require_positive("pre-queue staleness", concurrency=concurrency, batch=batch, tailness=tailness, rho=rho)
    return concurrency * tailness / (batch * max(1.0, rho))


def in_queue_staleness(*, rho: float, q: float) -> float:
    """IQS: updates while a group waits in the queue ("In-queue staleness"). ρ below 1; (2q + ρ − 1)/2ρ above.

    The paper leaves ρ = 1 out, where the cases meet in 1 and in q. There the queue has no drift: it wanders between B
    and Q when a batch is taken, evenly in the long run, so we return the middle, (1 + q)/2. That is the limit of many
    groups a batch; near ρ = 1 a real queue goes over from one case to the other smoothly.
    """
    require_positive("in-queue staleness", rho=rho)
    _queue_factor(q)
    if rho == 1.0:
        return 0.5 * (1.0 + q)
    return rho if rho < 1.0 else (2.0 * q + rho - 1.0) / (2.0 * rho)


def mean_staleness(*, concurrency: float, batch: float, tailness: float, rho: float, q: float) -> Staleness:
    """PQS and IQS of queue-drop; their sum is the mean staleness ("Total staleness"). Independent of E[L]."""
    return Staleness(
        pre_queue=pre_queue_staleness(concurrency=concurrency, batch=batch, tailness=tailness, rho=rho),
        in_queue=in_queue_staleness(rho=rho, q=q),
    )


def smooth_arrival(*, age: float, period: float) -> float:
    """Expected policy updates in the ``age`` seconds (mean) before a rollout is trained, its own step's included:
    age/period + ½ ("Smooth-arrival approximation proof").

    Holds where training starts with an update (train-bound) and the start times are spread over a period or more:
    then the phase of the start is uniform. A constant age instead counts ⌈age/period⌉.
    """
    require_positive("smooth arrival", period=period)
    if age < 0:
        raise ValueError(f"age {age:g} s; a rollout cannot be trained before it starts")
    return age / period + 0.5


# --- a fixed number of GPUs -------------------------------------------------------------------------------------------


def utilisation(*, n_r: float, n_t: float, c_r: float, c_t: float) -> float:
    """ρ = c_R·N_R / (c_T·N_T) of ``n_r`` rollout and ``n_t`` train GPUs ("Train period under fixed GPU budget")."""
    require_positive("utilisation", n_r=n_r, n_t=n_t, c_r=c_r, c_t=c_t)
    return c_r * n_r / (c_t * n_t)


def split(*, rho: float, gpus: float, c_r: float, c_t: float) -> tuple[float, float]:
    """(N_R, N_T) of ``gpus`` GPUs that give ρ, not rounded: the inverse of ``utilisation``."""
    require_positive("split", rho=rho, gpus=gpus, c_r=c_r, c_t=c_t)
    n_t = gpus * c_r / (c_r + rho * c_t)
    return gpus - n_t, n_t


def train_period_of_budget(
    *, rho: float, gpus: float, c_r: float, c_t: float, batch: float, mean_length: float
) -> float:
    """t_period(ρ) = B·E[L]·(1/c_T + ρ/c_R) / (N·min(1, ρ)), seconds: least at ρ = 1, rising to both sides ("Train
    period under fixed GPU budget")."""
    require_positive("train period", rho=rho, gpus=gpus, c_r=c_r, c_t=c_t, batch=batch, mean_length=mean_length)
    return batch * mean_length * (1.0 / c_t + rho / c_r) / (gpus * min(1.0, rho))


# --- the frontier: rollout-bound against train-bound ------------------------------------------------------------------


def rollout_bound_twin(*, rho: float, beta: float) -> float:
    """ρ₋ = 1 / (1 + β*(ρ₊ − 1)): the rollout-bound utilisation with the train period of ρ₊ = ``rho`` ≥ 1 ("Does
    rollout-bound always lead to better trade-off?")."""
    require_positive("twin", beta=beta)
    if not 1.0 <= rho < math.inf:
        raise ValueError(f"rho = {rho:g}; a train-bound utilisation is at least 1")
    return 1.0 / (1.0 + beta * (rho - 1.0))


def train_bound_twin(*, rho: float, beta: float) -> float:
    """ρ₊ = 1 + (1/ρ₋ − 1)/β*: the inverse of ``rollout_bound_twin``, for 0 < ``rho`` ≤ 1. It always exists."""
    require_positive("twin", rho=rho, beta=beta)
    if rho > 1.0:
        raise ValueError(f"rho = {rho:g}; a rollout-bound utilisation is at most 1")
    return 1.0 + (1.0 / rho - 1.0) / beta


def gap(*, z: float, beta: float, q: float) -> float:
    """Staleness at ρ₊ = 1 + z minus staleness at its twin ρ₋: (z + 2q)/(2(1 + z)) − 1/(1 + β*z), for z > 0.

    Negative: train-bound is better at that period. The paper drops PQS as equal on both sides. That needs slots to grow
    with the rollout GPUs (a constant decode speed a slot, v_R/C); with the same C on both sides PQS is lower at ρ₊ by
    the factor ρ₊.
    """
    require_positive("gap", z=z, beta=beta)
    _queue_factor(q)
    return (z + 2.0 * q) / (2.0 * (1.0 + z)) - 1.0 / (1.0 + beta * z)


def gap_min(*, beta: float, q: float) -> float:
    """inf over z > 0 of ``gap`` (the paper's gap_min, which it does not solve).

    With κ = √(q − ½) the slope vanishes only at z* = (κ − √β)/(√β·(1 − κ√β)). The infimum is there, or the limit for
    z → 0, which is q − 1, or for z → ∞, which is ½.
    """
    require_positive("gap_min", beta=beta)
    _queue_factor(q)
    least = min(q - 1.0, 0.5)
    root, kappa = math.sqrt(beta), math.sqrt(q - 0.5)
    if (slope := root * (1.0 - kappa * root)) != 0.0 and (z := (kappa - root) / slope) > 0.0:
        least = min(least, gap(z=z, beta=beta, q=q))
    return least


def critical_beta(q: float) -> float:
    """β*_crit(q) = 1 / (6q − 4 + 4√((q − 1)(2q − 1))): for β* below it some train-bound split has less staleness than
    the rollout-bound one of the same period (``gap_min`` < 0). ½ for q = 1, 0.067 for q = 2."""
    _queue_factor(q)
    return 1.0 / (6.0 * q - 4.0 + 4.0 * math.sqrt((q - 1.0) * (2.0 * q - 1.0)))


def _queue_factor(q: float) -> None:
    if not 1.0 <= q < math.inf:
        raise ValueError(f"queue factor {q:g}; the queue must hold at least one batch, so q ≥ 1")
