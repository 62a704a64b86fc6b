"""What the figures of the staleness paper share: its simulator's world as a recipe, its workload, and error bars.

The paper's simulator (appendix, "Building an efficient staleness simulator") has C slots that decode at a constant
speed each, s_R = v_R/C, a trainer with a constant time a step, and weights that take no time to travel. The same world
as a recipe, played by the runtime's own controller, slots, proxy and queue: one server whose step takes ``STEP_S``
whatever it runs, prefill that is free, ``num_envs`` = C, and a train step of ρ·B·E[L]/v_R seconds.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from common import Point, Result

from asyncrl.core.distributions import LogNormal
from asyncrl.core.theory.staleness import (
    mean_staleness,
    split,
    tailness_multiplier,
    train_period_of_budget,
    utilisation,
)

MEAN = 1409.0
"""Tokens of a response before the cap: gives the sampled means of the paper's tables on length bias (1,404 and 1,354)
at both of their tailnesses and caps."""
CAP = 8080
CONCURRENCY, GROUP_SIZE, BATCH = 128, 8, 128
"""Of the paper's real runs on queue capacity (C, B) and concurrency (S)."""
STEP_S = 0.02
"""Seconds a token. Only the ratio of the two sides' speeds matters."""
REAL_TAILNESS = 20.0
"""M_tail = 1.42 with 8 samples a group, as in the paper's real runs (1.42 … 1.45)."""

ASSUMED = (
    "the paper gives no C, B, S of its simulations: C = 128, B = 128, S = 8, as in its real runs; "
    "lengths lognormal with mean 1409 (from its tables on length bias), cap 8080"
)
WITHIN = "± is the standard error, from the means of 10 stretches of steps"


class Run(Point, kw_only=True):
    """A simulated point: where it lies in the figure, and the standard error of ``ours``."""

    series: str
    x: float
    error: float


def lengths_of(tailness: float, cap: int = CAP) -> LogNormal:
    return LogNormal(mean=MEAN, tailness=tailness, cap=cap)


def multiplier(tailness: float, group_size: int = GROUP_SIZE) -> float:
    """M_tail."""
    return tailness_multiplier(lengths_of(tailness), group_size)


def table(
    *,
    tailness: float,
    steps: int,
    rho: float = 0.0,
    train_s: float | None = None,
    concurrency: int = CONCURRENCY,
    batch: int = BATCH,
    group_size: int = GROUP_SIZE,
    cap: int = CAP,
    **staleness: Any,
) -> dict[str, Any]:
    """A recipe; ``staleness`` is its section of that name. Give ``rho`` or the seconds of a train step."""
    lengths = lengths_of(tailness, cap)
    if train_s is None:
        train_s = rho * batch * lengths.expected * STEP_S / concurrency
    forever = 1e9
    return {
        "preset": "roll-flash",
        "rollout": {
            "batch_groups": batch // group_size,
            "group_size": group_size,
            "num_envs": concurrency,
            "max_new_tokens": cap,
            "max_tokens": cap + 64,
        },
        "staleness": staleness,
        "env": {"episode_timeout_s": forever},
        "update": {"overlap": False},
        "engine": {
            "max_running_requests": concurrency,
            "max_total_tokens": concurrency * (cap + 64),
            "stream_interval": 0,
            "request_timeout_s": forever,
        },
        "weights": {"transport": "collective"},
        "run": {"steps": steps},
        "sim": {
            "instance": {
                "cost": {"k1": 0.0, "k2": 0.0, "k3": 0.0, "k4": STEP_S, "k5": 0.0},
                "load_s": 0.0,
                "prefix_cache": False,
            },
            "trainer": {"fixed_s": train_s, "tokens_per_s": 1e15, "gpus": 1},
            "weights": {"gigabytes": 1e-12, "hop_s": 0.0},
            "lengths": {"kind": "lognormal", "mean": MEAN, "tailness": tailness, "cap": cap},
            "prompt_tokens": {"kind": "constant", "value": 16},
        },
    }


def with_error(values: list[float], blocks: int = 10) -> tuple[float, float]:
    """Mean and its standard error. Neighbouring steps are not independent, so the error is that of block means."""
    size = len(values) // blocks
    means = [fmean(values[i * size : (i + 1) * size]) for i in range(blocks)]
    return fmean(values), stdev(means) / blocks**0.5


def staleness_of(result: Result, skip: int) -> tuple[float, float]:
    """Mean staleness of the steps after the first ``skip``, and its standard error."""
    return with_error([line["staleness/mean"] for line in result.steps[skip:]])


def period_of(result: Result, skip: int) -> tuple[float, float]:
    """Seconds between two updates, after the first ``skip`` (at least 1), and their standard error."""
    at = [line["time/at"] for line in result.steps[skip - 1 :]]
    return with_error([b - a for a, b in pairwise(at)])


# --- a fixed number of GPUs -------------------------------------------------------------------------------------------

BUDGET_GPUS, SLOTS = 64, 4
"""GPUs for both sides, and slots of a rollout GPU: C = 128 where they are split evenly."""
BUDGET = (
    f"the paper gives no budget, c_R or c_T: {BUDGET_GPUS} GPUs, β* = c_T/c_R = 1, {SLOTS} slots a rollout GPU (so "
    f"C = {SLOTS * BUDGET_GPUS // 2} at ρ = 1), B = {BATCH}, S = {GROUP_SIZE}, M_tail = 1.42 as in its real runs"
)


def budget_table(
    rollout_gpus: int, *, tailness: float, steps: int, batch: int = BATCH, slots: int = SLOTS, **staleness: Any
) -> dict[str, Any]:
    """A recipe for this split. With ``SLOTS`` slots a rollout GPU generates as fast as a training GPU trains; each slot
    has the same speed, whatever their number."""
    tokens = batch * lengths_of(tailness).expected
    train_s = tokens * STEP_S / (SLOTS * (BUDGET_GPUS - rollout_gpus))
    return table(
        train_s=train_s,
        tailness=tailness,
        steps=steps,
        concurrency=slots * rollout_gpus,
        batch=batch,
        **staleness,
    )


def budget_rho(rollout_gpus: int, slots: int = SLOTS) -> float:
    """ρ of a split."""
    return utilisation(n_r=rollout_gpus, n_t=BUDGET_GPUS - rollout_gpus, **_speeds(slots))


def budget_prediction(
    rho: float, *, tailness: float, batch: int = BATCH, slots: int = SLOTS, queue: float = 1
) -> tuple[float, float]:
    """Staleness and period by the formulas, with the GPUs split for ``rho``."""
    rollout_gpus, _ = split(rho=rho, gpus=BUDGET_GPUS, **_speeds(slots))
    stale = mean_staleness(
        concurrency=slots * rollout_gpus, batch=batch, tailness=multiplier(tailness), rho=rho, q=queue
    )
    length = lengths_of(tailness).expected
    period = train_period_of_budget(rho=rho, gpus=BUDGET_GPUS, batch=batch, mean_length=length, **_speeds(slots))
    return stale.total, period


def _speeds(slots: int) -> dict[str, float]:
    """Tokens/s of a rollout GPU and of a training GPU."""
    return {"c_r": slots / STEP_S, "c_t": SLOTS / STEP_S}
