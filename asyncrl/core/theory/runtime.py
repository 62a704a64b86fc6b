"""What follows for this runtime, derived here: staleness and period under the in-flight cap α, and the no-bubble bound.

**Mean staleness is a count.** Step v trains version v into v + 1, and *switch* v + 1 is the moment from which groups
start on version v + 1. A group that started on version s and is trained in step n has staleness n − s: it
was live (started, not yet trained) at the switches s + 1 … n, and at no other. So the staleness summed over all trained
groups is the number of live groups summed over all switches (but for those that are never trained), whatever the
scheduling:

    mean staleness  =  mean number of groups live at a switch / groups a batch.                                     (1)

**Under the cap.** At a switch at most α·B are live (``core/staleness/inflight_cap.py``), so the mean is ≤ α, with
equality exactly when admission is exhausted at every switch. With C slots, a first-come queue and nothing dropped:

* train-bound (ρ ≥ 1): the queue grows until the cap stops it. Admission is exhausted at every switch: the mean is α.
* rollout-bound (ρ < 1), α large: C·M_tail/B batches are in generation (Little's law: groups in generation = group rate
  × t_generate), and what finished since the last batch was taken waits; the switch comes the share ρ of a period after
  that, so ρ batches. Together C·M_tail/B + ρ, the staleness paper's PQS + IQS: the *natural* staleness.
* rollout-bound, α below natural: the cap holds slots empty, admission is exhausted: α.
* Stragglers. A group that starts on v is trained at step v + ⌈α⌉ at the latest, so that step waits for it. It started
  after switch v, the end of step v − 1, so from batch v − 1 to batch v + ⌈α⌉ at least the longest generation on v and
  one train step pass:

      period  ≥  (E[longest generation of a batch] + train step) / (⌈α⌉ + 1)                                        (2)

  (where every version starts a batch). In natural periods this is ``straggler_load``. It is the L_gen/(α + 1) of ROLL
  Flash's Eq. 9, with a batch's expected maximum for L_gen. At a load above 1 every step waits, meanwhile admission is
  exhausted, and the mean is α, *also where α is above natural*; the period simulated is load to 1.3·load natural ones
  (for whole α). At a load up to ½ nothing waits. In between rare stragglers make some steps wait, a trainer with little
  slack (ρ near 1) does not catch up soon, and the mean is anywhere from natural to α: for load 0.84, ρ = 0.9, natural
  2.3, α = 4 we simulated 3.9; for load 0.72, ρ = 0.3, natural 1.7, α = 4 it was 1.75.
"""

from __future__ import annotations

import math

from asyncrl.core.distributions import require_positive
from asyncrl.core.theory.staleness import pre_queue_staleness
from asyncrl.core.types import Record


def natural_staleness(*, concurrency: float, batch: float, tailness: float, rho: float) -> float:
    """C·M_tail/(B·max(1, ρ)) + min(1, ρ): mean staleness where nobody waits and no more is in flight than is needed.

    ``concurrency`` C are the slots in use when no cap binds: rollouts in generation, or episodes of agents in progress;
    ``batch`` B in rollouts; ``tailness`` of what holds a slot (lengths, or durations of episodes); ``rho`` = v_R/v_T,
    where v_T counts all seconds from one batch to the switch after it.
    """
    pre_queue = pre_queue_staleness(concurrency=concurrency, batch=batch, tailness=tailness, rho=rho)
    return pre_queue + min(1.0, rho)


def straggler_load(*, alpha: float, concurrency: float, batch: float, batch_tailness: float, rho: float) -> float:
    """(C·M_B/(B·max(1, ρ)) + min(1, ρ)) / (⌈α⌉ + 1): the period that stragglers force under the in-flight cap, in
    periods without stragglers (Eq. 2 above). Above 1 every step waits for the longest generation of its batch.

    ``batch_tailness`` M_B = E[longest of the batch's B lengths] / E[length], ``tailness_multiplier(lengths, B)``.
    """
    _ratio(alpha)
    longest = natural_staleness(concurrency=concurrency, batch=batch, tailness=batch_tailness, rho=rho)
    return longest / (math.ceil(alpha) + 1)


class CapStaleness(Record, frozen=True, kw_only=True):
    """Mean staleness to expect lies in ``low`` … ``high``, which are equal where the formulas decide it."""

    low: float
    high: float


def inflight_cap_staleness(
    *, alpha: float, concurrency: float, batch: float, tailness: float, batch_tailness: float, rho: float
) -> CapStaleness:
    """Mean staleness under ROLL Flash's async ratio α: α where ρ ≥ 1 or ``straggler_load`` ≥ 1; min(α, natural) at a
    load up to ½; between these two at a load between (module docstring). Never above α."""
    load = straggler_load(alpha=alpha, concurrency=concurrency, batch=batch, batch_tailness=batch_tailness, rho=rho)
    natural = natural_staleness(concurrency=concurrency, batch=batch, tailness=tailness, rho=rho)
    bound = rho >= 1.0 or load >= 1.0
    low = alpha if bound else min(alpha, natural)
    return CapStaleness(low=low, high=low if load <= 0.5 else alpha)


def needed_alpha(*, concurrency: float, batch: float, tailness: float, batch_tailness: float, rho: float) -> int:
    """Smallest whole α that hardly slows a run: natural staleness fits under it, and ``straggler_load`` ≤ 0.8, where
    the simulated period is within 5 % of the one without a cap."""
    natural = natural_staleness(concurrency=concurrency, batch=batch, tailness=tailness, rho=rho)
    longest = natural_staleness(concurrency=concurrency, batch=batch, tailness=batch_tailness, rho=rho)
    return math.ceil(max(natural, longest / 0.8 - 1.0))


def no_bubble_period(
    *, batch_tokens: float, v_r: float, v_t: float, fixed_s: float = 0.0, update_s: float = 0.0, pause_s: float = 0.0
) -> float:
    """Shortest possible seconds a step: update + max(tokens/v_R + pause, tokens/v_T + fixed).

    ``batch_tokens`` are what a batch holds; ``v_r`` tokens/s of all servers with every slot in use; ``v_t`` tokens/s of
    the trainer; ``fixed_s`` seconds of a train step that do not depend on tokens; ``update_s`` seconds of a weight
    update in which *neither* side works (0 for a transport that lets both go on), ``pause_s`` those in which only the
    servers stand still. Each side must do a batch's work a step, so no schedule is shorter.
    """
    require_positive("no-bubble period", batch_tokens=batch_tokens, v_r=v_r, v_t=v_t)
    if not all(0.0 <= seconds < math.inf for seconds in (fixed_s, update_s, pause_s)):
        given = f"fixed_s = {fixed_s:g}, update_s = {update_s:g}, pause_s = {pause_s:g}"
        raise ValueError(f"{given}; give seconds, at least 0")
    return update_s + max(batch_tokens / v_r + pause_s, batch_tokens / v_t + fixed_s)


def bubble(*, period: float, shortest: float) -> float:
    """How much of a ``period`` is above the ``shortest`` one, as a share of the shortest: 0.03 is 3 % above the bound.

    Negative when the measured period is below the bound: then the throughputs in the bound were too low.
    """
    require_positive("bubble", period=period, shortest=shortest)
    return period / shortest - 1.0


def _ratio(alpha: float) -> None:
    if not 0.0 <= alpha < math.inf:
        raise ValueError(f"alpha = {alpha:g}; the async ratio is a number from 0")
