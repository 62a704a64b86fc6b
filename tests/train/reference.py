"""The losses once more, in float64 NumPy, token by token from the papers' formulas, without a tensor in sight.

What a formula puts under stop-gradient is held at ``now``, the point where the gradient is taken; ``new`` alone varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Columns = dict[str, Any]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, a: float, o: Any) -> float:
    value = min(ratio * a, clip(ratio, 1 - o.clip_low, 1 + o.clip_high) * a)
    return max(value, o.dual_clip * a) if o.dual_clip and a < 0 else value


def sequences(c: Columns) -> list[range]:
    ends = np.cumsum(c["lengths"])
    return [range(int(end - n), int(end)) for n, end in zip(c["lengths"], ends, strict=True)]


def importance(c: Columns, now: Column, o: Any) -> list[float]:
    """π/μ at ``now``, of each token or of its whole sequence."""
    if o.importance_level == "token":
        return [math.exp(n - e) for n, e in zip(now, c["behaviour"], strict=True)]
    ratios = [0.0] * len(now)
    for part in sequences(c):
        product = math.prod(math.exp(now[t] - c["behaviour"][t]) for t in part)
        for t in part:
            ratios[t] = product
    return ratios


def ppo(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    losses = []
    for t, a in enumerate(c["advantages"]):
        s = min(math.exp(now[t] - c["behaviour"][t]), o.importance_cap) * math.exp(new[t] - now[t])
        losses.append(-surrogate(s, a, o))
    return losses


def decoupled_ppo(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    losses = []
    for t, a in enumerate(c["advantages"]):
        weight = min(math.exp(c["proximal"][t] - c["behaviour"][t]), o.importance_cap)
        losses.append(-weight * surrogate(math.exp(new[t] - c["proximal"][t]), a, o))
    return losses


def tis(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    ratios = importance(c, now, o)
    return [-min(r, o.importance_cap) * a * n for r, a, n in zip(ratios, c["advantages"], new, strict=True)]


def cispo(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    losses = []
    for t, a in enumerate(c["advantages"]):
        losses.append(-clip(math.exp(now[t] - c["behaviour"][t]), 1 - o.clip_low, 1 + o.clip_high) * a * new[t])
    return losses


def topr(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    ratios = importance(c, now, o)
    return [
        -(1.0 if a > 0 else min(r, o.importance_cap)) * a * n
        for r, a, n in zip(ratios, c["advantages"], new, strict=True)
    ]


def weighted_topr(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    plain = topr(c, new, now, o)
    return [
        loss * (o.positive_weight if a > 0 else o.negative_weight)
        for loss, a in zip(plain, c["advantages"], strict=True)
    ]


def gspo(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    """GSPO-token: the sequence's ratio in value, each token's own in gradient."""
    losses = [0.0] * len(new)
    for part in sequences(c):
        s = math.exp(sum(now[t] - c["behaviour"][t] for t in part) / len(part))
        for t in part:
            ratio = min(s, o.importance_cap) * math.exp(new[t] - now[t])
            losses[t] = -surrogate(ratio, c["advantages"][t], o)
    return losses


def reinforce(c: Columns, new: Column, now: Column, o: Any) -> list[float]:
    return [-a * n for a, n in zip(c["advantages"], new, strict=True)]


LOSSES: dict[str, Callable[[Columns, Column, Column, Any], list[float]]] = {
    f.__name__: f for f in (ppo, decoupled_ppo, tis, cispo, topr, weighted_topr, gspo, reinforce)
}


def k1(log_ratio: float) -> float:
    return log_ratio


def k2(log_ratio: float) -> float:
    return 0.5 * log_ratio**2


def k3(log_ratio: float) -> float:
    return math.exp(-log_ratio) - 1 + log_ratio


KLS = {"k1": k1, "k2": k2, "k3": k3}


def rejected(c: Columns, now: Column, o: Any) -> list[bool]:
    if o.reject == "none":
        return [False] * len(now)
    out = []
    for part in sequences(c):
        gaps = [now[t] - c["behaviour"][t] for t in part]
        if o.reject == "sequence":
            gaps = [sum(gaps) / len(gaps)] * len(gaps)
        out += [not o.reject_low <= math.exp(gap) <= o.reject_high for gap in gaps]
    return out


def objective(name: str, c: Columns, new: Column, now: Column, o: Any) -> float:
    """The whole weighted sum, with regularisers. ``entropy`` is taken as constant."""
    out = rejected(c, now, o)
    if o.kl_coef and o.kl_in == "reward":
        advantages = np.array(c["advantages"])
        for part in sequences(c):
            for t in part:
                to_go = sum(KLS[o.kl](now[u] - c["reference"][u]) for u in part if u >= t)
                advantages[t] -= o.kl_coef * to_go
        c = c | {"advantages": advantages}
    if any(out):  # counts as on-policy in its sequence's ratio
        c = c | {"behaviour": np.where(out, now, c["behaviour"]), "proximal": np.where(out, now, c["proximal"])}
    total = 0.0
    for t, loss in enumerate(LOSSES[name](c, new, now, o)):
        if out[t]:
            continue
        if o.kl_coef and o.kl_in == "loss":
            loss += o.kl_coef * KLS[o.kl](new[t] - c["reference"][t])
        total += c["weights"][t] * (loss - o.entropy_coef * c["entropy"][t])
    return float(total)


# --- PPO's critic -----------------------------------------------------------------------------------------------------


def estimate(
    mask: Column, turns: list[tuple[int, float]], values: Column, penalties: Column, o: Any
) -> tuple[Column, dict[int, float]]:
    """GAE, summed out, of one trajectory of turns (end, reward): the advantage of each trained token, and the return of
    each of those at which a value learns. ``values`` and ``penalties`` are of the trained tokens."""
    trained = [int(t) for t in np.flatnonzero(mask)]
    rewards = [-float(p) for p in penalties]
    turn_of = []
    for t in trained:
        turn_of.append(next(i for i, (end, _) in enumerate(turns) if t < end))
    for end, reward in turns:
        before = [k for k, t in enumerate(trained) if t < end]
        if before:
            rewards[before[-1]] += reward
    steps: list[list[int]] = []
    for k in range(len(trained)):
        if o.credit == "token" or k == 0 or turn_of[k] != turn_of[k - 1]:
            steps.append([])
        steps[-1].append(k)
    r = [sum(rewards[k] for k in step) for step in steps]
    v = [float(values[step[0]]) for step in steps] + [0.0]
    advantages, targets = np.zeros(len(trained)), {}
    for i, step in enumerate(steps):
        a = sum((o.gamma * o.gae_lambda) ** (j - i) * (r[j] + o.gamma * v[j + 1] - v[j]) for j in range(i, len(steps)))
        advantages[step] = a
        targets[step[0]] = a + v[i]
    return advantages, targets


def value_loss(new: float, old: float, target: float, clip: float) -> float:
    losses = [0.5 * (new - target) ** 2]
    if clip:
        losses.append(0.5 * (min(max(new, old - clip), old + clip) - target) ** 2)
    return max(losses)
