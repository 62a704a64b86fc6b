"""PPO proper: from the values of a critic to advantages (GAE) and value targets, and the loss by which values learn.

Values exist only in the trainer, so advantages are made here, at the start of a train step, by each rank for its own
sequences; only their normalisation looks at the whole batch. A trajectory's steps are its generated tokens or turns, as
``algorithm.credit`` says. The value of a step is that of the state before its first token, and only there it learns;
behind the end of a trajectory it is 0, also where that was cut off at a length limit.

Segments of a trajectory follow each other in time, so after the last step of one comes the first of the next, in the
state that the model is shown there (with earlier thoughts left out, perhaps). They may be on different ranks. GAE runs
backwards, and what a segment passes on to the one before is an affine function of what it gets from the one behind;
that function (``Link``) is all that ranks tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config import AlgorithmConfig
from asyncrl.core.advantage import EPSILON, gae, generated_per_turn, token_rewards
from asyncrl.core.types import Record
from asyncrl.train.loss import KLS
from asyncrl.train.work import Share, step_lengths


class Judged(Record, frozen=True, kw_only=True):
    """What the critic makes of the trained tokens of a micro-batch, as columns ``[tokens]``.

    ``values`` are those before the first update of the step. ``returns`` is what they are to become, of tokens that
    begin a step; ``weights`` their share in the mini-batch's mean of the value loss, 0 for all other tokens.
    ``moments`` are sums in float64: of tokens, A, A²; steps, R, R², R − V, (R − V)², V.
    """

    advantages: Tensor
    values: Tensor
    returns: Tensor
    weights: Tensor
    moments: Tensor


def no_moments() -> Tensor:
    return torch.zeros(9, dtype=torch.float64)


class Seen(Record, frozen=True, kw_only=True):
    """What is known of a micro-batch before any advantage is: the values of its trained tokens ``[tokens]`` before the
    first update, and what is taken off their rewards, ``[tokens]`` or None."""

    shares: Sequence[Share]
    values: Tensor
    penalties: Tensor | None


class _Steps(NamedTuple):
    """Of one sequence: which of the micro-batch's trained tokens are its own, how many each step has, at which of its
    own each begins, and what each brought and is worth; float64."""

    share: Share
    part: slice
    lengths: list[int]
    first: NDArray[np.int64]
    rewards: NDArray[np.float64]
    values: NDArray[np.float64]

    def advantages(self, algorithm: AlgorithmConfig, after: float) -> NDArray[np.float64]:
        rewards, values = self.rewards.tolist(), self.values.tolist()
        return np.array(gae(rewards, values, algorithm.gamma, algorithm.gae_lambda, after))


def _steps(seen: Seen, credit: str) -> Iterator[_Steps]:
    """Of the sequences that have rewards."""
    values = seen.values.double().cpu().numpy()
    rewards = np.zeros_like(values) if seen.penalties is None else -seen.penalties.double().cpu().numpy()
    start = 0
    for share in seen.shares:
        sequence = share.sequence
        counts = generated_per_turn(sequence.loss_mask, sequence.turn_ends)
        part = slice(start, start + sum(counts))
        start = part.stop
        if lengths := step_lengths(sequence, credit):
            first = np.cumsum([0, *lengths[:-1]])
            brought = np.add.reduceat(rewards[part] + token_rewards(sequence.turn_rewards, counts), first)
            yield _Steps(share, part, lengths, first, brought, values[part][first])


Link: TypeAlias = tuple[float, float]
"""(offset, slope): where ``after`` comes behind a segment, offset + slope · after comes behind the one before it."""


def links(seen: Seen, algorithm: AlgorithmConfig) -> dict[int, Link]:
    """Of each sequence that has rewards, by its number."""
    gamma, lam = algorithm.gamma, algorithm.gae_lambda
    found = {}
    for steps in _steps(seen, algorithm.credit):
        advantages = steps.advantages(algorithm, 0.0)
        offset = gamma * (steps.values[0] + lam * advantages[0])
        found[steps.share.number] = (float(offset), (gamma * lam) ** len(advantages))
    return found


def behind(chains: Sequence[Sequence[int]], links: Sequence[Link]) -> dict[int, float]:
    """What comes after each sequence of ``chains``, whose ``links`` come one after the other: ``gae``'s ``after``."""
    of = dict(zip(chain.from_iterable(chains), links, strict=True))
    found = {}
    for numbers in chains:
        after = 0.0
        for number in reversed(numbers):
            found[number] = after
            offset, slope = of[number]
            after = offset + slope * after
    return found


def judge(seen: Seen, algorithm: AlgorithmConfig, after: Mapping[int, float]) -> Judged:
    """In float64. ``after``: of sequences that another follows, by their numbers. A sequence without rewards has
    advantages of 0."""
    values = seen.values.double().cpu().numpy()
    advantages, returns, weights = (np.zeros_like(values) for _ in range(3))
    moments = no_moments().numpy()
    for steps in _steps(seen, algorithm.credit):
        value, part, first = steps.values, steps.part, steps.first
        advantage = steps.advantages(algorithm, after.get(steps.share.number, 0.0))
        advantages[part] = a = np.repeat(advantage, steps.lengths)
        returns[part][first] = g = advantage + value
        weights[part][first] = steps.share.value_weight
        moments += [len(a), a.sum(), a @ a, len(g), g.sum(), g @ g, advantage.sum(), advantage @ advantage, value.sum()]
    columns = (advantages, values, returns, weights, moments)
    return Judged(**dict(zip(Judged.__struct_fields__, map(torch.from_numpy, columns), strict=True)))


def normalise(judged: Judged, moments: Tensor, algorithm: AlgorithmConfig, device: torch.device) -> Judged:
    """With advantages as ``advantage_norm`` says, by the ``moments`` of the whole batch; columns in float32."""
    advantages = judged.advantages
    if algorithm.advantage_norm == "batch":
        mean, deviation = _spread(moments[:3])
        advantages = (advantages - mean) / (deviation + EPSILON)
    columns = {"advantages": advantages, "values": judged.values, "returns": judged.returns, "weights": judged.weights}
    columns = {name: column.to(device, torch.float32) for name, column in columns.items()}
    return Judged(**columns, moments=judged.moments)


def summarise(moments: Tensor) -> dict[str, float]:
    """Metrics of a batch. ``explained_variance`` is 1 − Var(R − V) / Var(R): 1 where the critic knew all returns, 0
    where it knew no more than a constant. The advantages are those before they are normalised."""
    steps, returned, squared, left, left_squared, value = moments[3:].tolist()
    advantage_mean, advantage_std = _spread(moments[:3])
    return_mean, return_std = _spread([steps, returned, squared])
    _, left_std = _spread([steps, left, left_squared])
    return {
        "advantage_mean": advantage_mean,
        "advantage_std": advantage_std,
        "return_mean": return_mean,
        "return_std": return_std,
        "value_mean": value / max(1.0, steps),
        "explained_variance": 1 - (left_std / return_std) ** 2 if return_std > EPSILON else 0.0,
    }


def _spread(sums: Tensor | Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation from (count, sum, sum of squares)."""
    count, total, squared = (float(x) for x in sums)
    mean = total / max(1.0, count)
    return mean, math.sqrt(max(0.0, squared / max(1.0, count) - mean * mean))


def value_loss(values: Tensor, judged: Judged, clip: float) -> tuple[Tensor, Tensor]:
    """The weighted sum of PPO's value loss, and the weight of the tokens whose clip took effect::

        L_t = ½ max((V − R)², (V_old + clamp(V − V_old, −clip, clip) − R)²)

    A value that has moved further than ``clip`` towards its return has no more gradient (Engstrom et al. 2020, §3);
    with ``clip`` 0 it is plain ½ (V − R)².
    """
    error = (values - judged.returns).square()
    clipped = torch.zeros_like(error, dtype=torch.bool)
    if clip:
        moved = values - judged.values
        held = (judged.values + moved.clamp(-clip, clip) - judged.returns).square()
        clipped = (moved.abs() > clip) & (held > error)
        error = torch.where(clipped, held, error)
    return (judged.weights * error).sum() / 2, (judged.weights * clipped).sum()


def kl_penalties(logprobs: Tensor, reference: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """What the reward of each token is lowered by with ``kl_in`` = ``reward``: its KL at the start of the step."""
    return algorithm.kl_coef * KLS[algorithm.kl](logprobs - reference)
