"""How long N samples take with and without asynchrony (papers: ROLL Flash §3.1, propositions 1 and 2).

K workers (slots or GPUs; a worker has one sample at a time) draw tasks from a queue. Symbols, times in seconds:

| symbol | field | |
|---|---|---|
| N | samples | samples a train step |
| K | workers | all workers; sync uses them in turn, async gives βK to training |
| μ_gen, L_gen | mean_gen, max_gen | mean and largest generation time of a sample |
| μ_train | mean_train | training time of a sample on one worker |
| E | reuse | how often a sample is trained on |
| α | alpha | async ratio: (α + 1)·N samples are in the pool |

**What is loose or wrong in the propositions** (each is shown in the tests)

* Eq. 4 can be tightened to Q/K·μ + (1 − 1/K)·L: when the last sample to end starts, the K workers have been busy with
  the others (Graham 1966). With one worker it is exact.
* The "maximum speed-up" (L + μ)/μ at K = N is a quotient of bounds. There sync takes at most L: L/μ cannot be passed.
* Eq. 9 divides the tail by (1 − β): L/((α + 1)(1 − β)). Proposition 1 with (1 − β)K workers gives L/(α + 1): a sample
  does not take longer because there are fewer workers. Eq. 9 holds but is loose, and so are the β* of Eq. 10 and
  the bound of Eq. 11; ``tight_async_bound`` and ``tight_train_share`` are the same without that factor.
* Eq. 9 takes the longer of two stages that overlap completely. At α = 0 nothing may overlap, so there Eq. 9 is too low:
  a synchronous run on split workers takes the *sum* of the two. From α = 1 on, a whole batch may be generated while
  another is trained. Between 0 and 1 read it as optimistic; "strictly improves when α > 0" (Eq. 11) is not shown there.
* The limit speed-ups are for α → ∞ and bounds that are met; a run is faster than its sync bound, so it sees less.
"""

from __future__ import annotations

import math

from asyncrl.core.distributions import require_positive
from asyncrl.core.types import Record


class Step(Record, frozen=True, kw_only=True):
    """What one train step has to do; fields as in the module's table."""

    samples: float
    workers: float
    mean_gen: float
    max_gen: float
    mean_train: float
    reuse: float = 1.0

    def __post_init__(self) -> None:
        require_positive("step", samples=self.samples, workers=self.workers, mean_gen=self.mean_gen)
        require_positive("step", mean_train=self.mean_train, reuse=self.reuse)
        # The mean of equal times may be their maximum's neighbour.
        if not self.mean_gen * (1.0 - 1e-9) <= self.max_gen < math.inf:
            raise ValueError(f"step: max_gen = {self.max_gen:g}; it must be finite and at least mean_gen")

    @property
    def generation(self) -> float:
        """N·μ_gen/K: all workers busy with generation, no tail."""
        return self.samples * self.mean_gen / self.workers

    @property
    def training(self) -> float:
        """E·N·μ_train/K: all workers busy with training."""
        return self.reuse * self.samples * self.mean_train / self.workers


# --- proposition 1 ----------------------------------------------------------------------------------------------------


def completion_bound(*, samples: float, workers: float, mean_gen: float, max_gen: float) -> float:
    """Q/K·μ_gen + L_gen: seconds in which Q = ``samples`` are done by queue scheduling (Eq. 4)."""
    require_positive("completion", samples=samples, workers=workers)
    return samples * mean_gen / workers + max_gen


def sample_bound(*, samples: float, workers: float, mean_gen: float, max_gen: float, alpha: float = 0.0) -> float:
    """μ_gen/K + L_gen/((α + 1)·N): seconds a sample, of pools of (α + 1)·N (Eq. 5 and 7; sync is α = 0, Eq. 6)."""
    _ratio(alpha)
    pool = (alpha + 1.0) * samples
    return completion_bound(samples=pool, workers=workers, mean_gen=mean_gen, max_gen=max_gen) / pool


def generation_speedup_limit(step: Step) -> float:
    """1 + K·L_gen/(N·μ_gen): Eq. 6 over its limit for α → ∞. For K = N the paper's (L_gen + μ_gen)/μ_gen."""
    return 1.0 + step.max_gen / step.generation


# --- proposition 2 ----------------------------------------------------------------------------------------------------


def sync_bound(step: Step) -> float:
    """N/K·(μ_gen + E·μ_train) + L_gen (Eq. 8)."""
    return step.generation + step.training + step.max_gen


def async_bound(step: Step, *, alpha: float, train_share: float) -> float:
    """max(N·μ_gen/((1 − β)K) + L_gen/((α + 1)(1 − β)), E·N·μ_train/(βK)), with β = ``train_share`` (Eq. 9)."""
    _ratio(alpha)
    _share(train_share)
    rollout = (step.generation + step.max_gen / (alpha + 1.0)) / (1.0 - train_share)
    return max(rollout, step.training / train_share)


def best_train_share(step: Step, *, alpha: float) -> float:
    """β* = E·N·μ_train / (N·μ_gen + K·L_gen/(α + 1) + E·N·μ_train): least ``async_bound`` (Eq. 10)."""
    return step.training / best_async_bound(step, alpha=alpha)


def best_async_bound(step: Step, *, alpha: float) -> float:
    """N/K·(μ_gen + E·μ_train) + L_gen/(α + 1): ``async_bound`` at β* (Eq. 11)."""
    _ratio(alpha)
    return step.generation + step.training + step.max_gen / (alpha + 1.0)


def speedup(step: Step, *, alpha: float) -> float:
    """Eq. 8 over Eq. 11: what α brings, as far as both bounds are met."""
    return sync_bound(step) / best_async_bound(step, alpha=alpha)


def speedup_limit(step: Step) -> float:
    """1 + K·L_gen/(N·(μ_gen + E·μ_train)): ``speedup`` for α → ∞ (end of proposition 2)."""
    return 1.0 + step.max_gen / (step.generation + step.training)


def tight_async_bound(step: Step, *, alpha: float, train_share: float) -> float:
    """Eq. 9 with the tail that proposition 1 gives: max(N·μ_gen/((1 − β)K) + L_gen/(α + 1), E·N·μ_train/(βK))."""
    _ratio(alpha)
    _share(train_share)
    rollout = step.generation / (1.0 - train_share) + step.max_gen / (alpha + 1.0)
    return max(rollout, step.training / train_share)


def tight_train_share(step: Step, *, alpha: float) -> float:
    """The β with least ``tight_async_bound``, at least ``best_train_share``.

    Where both stages are equal: with A = N·μ_gen/K, T = E·N·μ_train/K, ℓ = L_gen/(α + 1), the root in (0, 1) of
    ℓβ² − (A + ℓ + T)β + T = 0.
    """
    _ratio(alpha)
    tail = step.max_gen / (alpha + 1.0)
    total = step.generation + tail + step.training
    return 2.0 * step.training / (total + math.sqrt(total * total - 4.0 * tail * step.training))


def _ratio(alpha: float) -> None:
    if not alpha >= 0.0:
        raise ValueError(f"alpha = {alpha:g}; the async ratio is at least 0")


def _share(train_share: float) -> None:
    if not 0.0 < train_share < 1.0:
        raise ValueError(f"train_share = {train_share:g}; both sides need workers, so it lies between 0 and 1")
