"""PPO proper: from the values of a critic to advantages (GAE) and value targets, and the loss by which values learn.

Values exist only in the trainer, so advantages are made here, at the start of a train step, by each rank for its own
sequences; only their normalisation looks at the whole batch. A trajectory's steps are its generated tokens or turns, as
``algorithm.credit`` says. The value of a step is that of the state before its first token, and only there it learns;
behind the end of a trajectory it is 0, also where that was cut off at a length limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
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


def judge(shares: Sequence[Share], values: Tensor, penalties: Tensor | None, algorithm: AlgorithmConfig) -> Judged:
    """The sequences of one micro-batch, whose trained tokens have ``values`` ``[tokens]``, in float64. ``penalties``
    ``[tokens]`` are taken off the tokens' rewards. A sequence without rewards has advantages of 0."""
    v = values.double().cpu().numpy()
    rewards = np.zeros_like(v) if penalties is None else -penalties.double().cpu().numpy()
    advantages, returns, weights = (np.zeros_like(v) for _ in range(3))
    moments = no_moments().numpy()
    start = 0
    for share in shares:
        sequence = share.sequence
        counts = generated_per_turn(sequence.loss_mask, sequence.turn_ends)
        part = slice(start, start + sum(counts))
        start = part.stop
        lengths = step_lengths(sequence, algorithm.credit)
        if not lengths:
            continue
        rewards[part] += token_rewards(sequence.turn_rewards, counts)
        first = np.cumsum([0, *lengths[:-1]])
        of_steps = np.add.reduceat(rewards[part], first)
        value = v[part][first]
        advantage = np.array(gae(of_steps.tolist(), value.tolist(), algorithm.gamma, algorithm.gae_lambda))
        advantages[part] = a = np.repeat(advantage, lengths)
        returns[part][first] = g = advantage + value
        weights[part][first] = share.value_weight
        moments += [len(a), a.sum(), a @ a, len(g), g.sum(), g @ g, advantage.sum(), advantage @ advantage, value.sum()]
    columns = (advantages, v, returns, weights, moments)
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
