"""What follows for this runtime, derived here: the mean staleness under the in-flight cap α, and the no-bubble bound.

**Mean staleness is a count.** Step v trains version v into v + 1, and *switch* v + 1 is the moment from which groups
start on version v + 1. A group that started on version s and is trained in step n has staleness n − s: it
was live (started, not yet trained) at the switches s + 1 … n, and at no other. So the staleness summed over all trained
groups is the number of live groups summed over all switches (but for those that are never trained), whatever the
scheduling:

    mean staleness  =  mean number of groups live at a switch / groups a batch.                                     (1)

**Under the cap.** At a switch at most α·B are live (``core/staleness/inflight_cap.py``), so the mean is ≤ α, with
equality exactly when admission is exhausted at every switch. Without the cap, with C slots and a first-come queue:

* rollout-bound (ρ < 1): C·M_tail/B batches are being generated (Little's law: groups in generation = group rate ×
  t_generate), and what finished since the last batch was taken waits: the switch comes the share ρ of a period after
  it, so ρ batches. Together the PQS + IQS of the staleness paper, ``natural`` below.
* train-bound (ρ ≥ 1): nothing is dropped, the queue grows until the cap stops it. Admission is exhausted at every
  switch, and the mean is α.

So mean staleness ≈ min(α, natural). That is an upper estimate: live groups fluctuate, and E[min(α, X)] ≤ min(α, E[X]),
most where α ≈ natural. Below natural the cap holds slots empty; α = natural is where that ends, on average.
"""

from __future__ import annotations

import math

from asyncrl.core.distributions import require_positive
from asyncrl.core.theory.staleness import mean_staleness


def inflight_cap_staleness(*, alpha: float, concurrency: float, batch: float, tailness: float, rho: float) -> float:
    """min(α, C·M_tail/B + ρ) for ρ < 1, α for ρ ≥ 1: mean staleness under ROLL Flash's async ratio, FIFO, nothing
    dropped (derived in the module's docstring).

    ``concurrency`` C are the slots in use when the cap does not bind: rollouts in generation, or for agents episodes in
    progress; ``batch`` B in rollouts; ``tailness`` of what a slot is held for (lengths, or durations of episodes);
    ``rho`` = v_R/v_T, where v_T counts all seconds from one batch to the switch after it. ``alpha`` = inf gives the
    natural staleness, the α from which on the cap holds no slot empty on average.
    """
    if not alpha >= 0.0:
        raise ValueError(f"alpha = {alpha:g}; the async ratio is at least 0")
    natural = mean_staleness(concurrency=concurrency, batch=batch, tailness=tailness, rho=rho, q=1.0).total
    return min(alpha, natural) if rho < 1.0 else alpha


def no_bubble_period(
    *, batch_tokens: float, v_r: float, v_t: float, fixed_s: float = 0.0, update_s: float = 0.0
) -> float:
    """Shortest possible seconds a step: update + max(tokens/v_R, tokens/v_T + fixed).

    ``batch_tokens`` are what a batch holds; ``v_r`` tokens/s of all servers with every slot in use; ``v_t`` tokens/s of
    the trainer; ``fixed_s`` seconds of a train step that do not depend on tokens; ``update_s`` seconds of a weight
    update in which *neither* side works (0 for a transport that lets both go on). Each side must do a batch's work a
    step, and neither works during the update, so no schedule is shorter.
    """
    require_positive("no-bubble period", batch_tokens=batch_tokens, v_r=v_r, v_t=v_t)
    if not 0.0 <= fixed_s < math.inf or not 0.0 <= update_s < math.inf:
        raise ValueError(f"fixed_s = {fixed_s:g}, update_s = {update_s:g}; give seconds, at least 0")
    return update_s + max(batch_tokens / v_r, batch_tokens / v_t + fixed_s)


def bubble(*, period: float, shortest: float) -> float:
    """How much of a ``period`` is above the ``shortest`` one, as a share of the shortest: 0.03 is 3 % above the bound.

    Negative when the measured period is below the bound: then the throughputs in the bound were too low.
    """
    require_positive("bubble", period=period, shortest=shortest)
    return period / shortest - 1.0
