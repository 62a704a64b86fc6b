"""How good a trajectory was, or each of its turns or tokens, against others. Pure Python: no torch, no numpy.

A trajectory is seen as steps, each with a reward: the whole of it is one step, or every turn, or every generated token
(``credit``). Rewards become returns (the discounted sum of what follows), returns become advantages by comparing them,
and every generated token gets its step's. ``Advantages`` does all of it for a batch; it owns the running baseline.
Only the trainer knows the values that ``gae`` needs: for it, the shaped rewards of the turns are all that is made here.

A user's own estimator is a function of a batch, called with the rewards as shaped by the recipe::

    def my_advantage(batch: Batch) -> list[float | Sequence[float] | None]:      # one a trajectory, as Advantage below
        return [t.reward - 0.5 for t in batch.trajectories]
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from statistics import fmean, pstdev
from typing import Any, TypeAlias

import msgspec

from asyncrl.core.types import Batch, Record, Trajectory

EPSILON = 1e-6
"""Added to a standard deviation, so that almost equal rewards do not explode."""


class TurnRewards(Record, frozen=True, kw_only=True):
    """What each turn of a trajectory brought, as shaped by the recipe, and how many tokens there are up to its end."""

    ends: tuple[int, ...]
    rewards: tuple[float, ...]


Advantage: TypeAlias = "float | array[float] | TurnRewards | None"
"""Of one trajectory: that of all its generated tokens; or a float32 column with one entry a token, 0 where it observed;
or the rewards that the trainer makes it from (``gae``); or None: it is not trained, and does not count in any mean."""

Steps: TypeAlias = Sequence[Sequence[float]]
"""Returns of each step of each trajectory of a group."""


# --- from rewards to returns ------------------------------------------------------------------------------------------


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, after: float = 0.0) -> list[float]:
    """Generalised advantage estimation over the steps of one trajectory (Schulman et al. 2016, Eq. 16)::

        δ_t = r_t + γ V_{t+1} − V_t        A_t = δ_t + γ λ A_{t+1}        V and A are 0 behind the end

    With V = 0 and λ = 1 it gives the returns Σ γ^k r_{t+k}; with λ = 1 the returns minus V. Of a part of a trajectory,
    ``after`` is γ (V + λ A) of the step that comes next.
    """
    advantages = [0.0] * len(rewards)
    for t in range(len(rewards) - 1, -1, -1):
        advantages[t] = rewards[t] - values[t] + after
        after = gamma * (values[t] + lam * advantages[t])
    return advantages


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Discounted sum of the rewards from each step on."""
    return gae(rewards, [0.0] * len(rewards), gamma, 1.0)


def token_rewards(rewards: Sequence[float], counts: Sequence[int]) -> list[float]:
    """One a generated token, of turns that brought ``rewards`` with ``counts`` tokens: each with the turn's last token,
    or, if it has none, with the token before, whose doing it was."""
    by_token: list[float] = []
    for reward, count in zip(rewards, counts, strict=True):
        by_token += [0.0] * count
        if by_token:
            by_token[-1] += reward
    return by_token


def split_rewards(turns: TurnRewards, loss_mask: bytes, segment_ends: Sequence[int]) -> list[TurnRewards]:
    """``turns`` of each segment of a trajectory, their ends counted from where it begins; the mask is int8. As in
    ``token_rewards`` a turn's reward comes with its last generated token, or the last before it."""
    placed = [(loss_mask.rfind(1, 0, end), reward) for end, reward in zip(turns.ends, turns.rewards, strict=True)]
    parts = []
    for start, stop in pairwise((0, *segment_ends)):
        ends = [*(end for end in turns.ends if start < end < stop), stop]
        rewards = [0.0] * len(ends)
        for place, reward in placed:
            if start <= place < stop:
                rewards[bisect_right(ends, place)] += reward
        parts.append(TurnRewards(ends=tuple(end - start for end in ends), rewards=tuple(rewards)))
    return parts


def generated_per_turn(loss_mask: bytes, turn_ends: Sequence[int]) -> list[int]:
    """How many tokens of each turn the policy generated; the mask is int8. Without turns, it is all one."""
    start, counts = 0, []
    for end in turn_ends or (len(loss_mask),):
        counts.append(loss_mask.count(1, start, end))
        start = end
    return counts


# --- from returns to advantages ---------------------------------------------------------------------------------------


def group_mean(group: Steps) -> list[list[float]]:
    """Return minus the mean of all steps of the group, not scaled: a group's weight grows with its spread."""
    mean = _mean(group)
    return [[g - mean for g in steps] for steps in group]


def group_norm(group: Steps) -> list[list[float]]:
    """GRPO's advantage (ROLL Flash Eq. 2): ``(G − mean) / (std + eps)``, population's standard deviation, over all
    steps of the group. A group whose returns are all equal teaches nothing: zeros."""
    every = list(chain.from_iterable(group))
    if not every or min(every) == max(every):
        return [[0.0] * len(steps) for steps in group]
    mean, std = fmean(every), pstdev(every)
    return [[(g - mean) / (std + EPSILON) for g in steps] for steps in group]


def rloo(group: Steps) -> list[list[float]]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, Eq. 7): return minus the mean over the steps of the *other*
    trajectories of the group, which does not depend on the one that is judged. Alone: zeros."""
    total, count = math.fsum(chain.from_iterable(group)), sum(map(len, group))
    advantages = []
    for steps in group:
        others = count - len(steps)
        baseline = (total - math.fsum(steps)) / others if others else 0.0
        advantages.append([g - baseline for g in steps] if others else [0.0] * len(steps))
    return advantages


ESTIMATORS: dict[str, Callable[[Steps], list[list[float]]]] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "rloo": rloo,
}
"""The recipe's ``algorithm.advantage`` by name, of those that look at one group. ``reinforce`` looks at batches, and
``gae`` at one trajectory."""


def _mean(group: Steps) -> float:
    every = list(chain.from_iterable(group))
    return math.fsum(every) / len(every) if every else 0.0


# --- a batch ----------------------------------------------------------------------------------------------------------


class Advantages:
    """What ``compute`` gives for one batch after the other. Keywords are the keys of the recipe's ``[algorithm]``;
    ``own`` is a user's estimator, in place of ``advantage``; ``running`` the running mean of returns that
    ``baseline = "running"`` subtracts, as a run that is resumed had it; None before the first batch.
    """

    def __init__(
        self,
        *,
        advantage: str = "group_norm",
        credit: str = "trajectory",
        gamma: float = 1.0,
        baseline: str = "batch",
        baseline_decay: float = 0.95,
        reward_norm: str = "none",
        overlong_limit: int = 0,
        overlong_buffer: int = 0,
        overlong_penalty: float = 1.0,
        overlong_filter: bool = False,
        own: Callable[[Batch], Any] | None = None,
        running: float | None = None,
    ) -> None:
        if own is None and advantage not in (*ESTIMATORS, "reinforce", "gae"):
            raise ValueError(
                f"algorithm.advantage: unknown {advantage!r}; known are {', '.join(ESTIMATORS)}, reinforce, gae"
            )
        self._running = running
        self._before: tuple[int, float | None] = (-1, None)
        """The step that was computed last, and the running mean that was subtracted in it."""
        self._advantage = advantage
        self._credit = credit
        self._gamma = gamma
        self._baseline = baseline
        self._decay = baseline_decay
        self._reward_norm = reward_norm
        self._overlong = (overlong_limit, overlong_buffer, overlong_penalty)
        self._overlong_filter = overlong_filter
        self._own = own

    def running(self, step: int) -> float | None:
        """The running mean that is subtracted in ``step``, which is the one computed last or the next."""
        last, before = self._before
        return before if step == last else self._running

    def compute(self, batch: Batch) -> list[Advantage]:
        """One entry a trajectory, in ``batch.trajectories``' order. The same batch again gives the same.

        Raises ``ValueError`` for a group without trajectories, a reward that is not finite, or a user's estimator that
        returns something else.
        """
        for number, group in enumerate(batch.groups):
            if not group.trajectories:
                raise ValueError(f"group {number} of the batch has no trajectories")
            if not all(math.isfinite(r) for t in group.trajectories for r in (t.reward, *t.turn_rewards)):
                raise ValueError(f"group {number} of the batch has a reward that is not finite: {group.rewards}")
        shaped = self._shape(batch)
        if self._own is not None:
            advantages = _checked(self._own(shaped), shaped.trajectories)
        elif self._advantage == "gae":
            advantages = [
                TurnRewards(ends=t.turn_ends or (len(t.tokens),), rewards=t.turn_rewards or (t.reward,))
                for t in shaped.trajectories
            ]
        else:
            groups = [[self._returns(t) for t in group.trajectories] for group in shaped.groups]
            judged = chain.from_iterable(self._judge(groups, batch.step))
            advantages = [self._spread(t, steps) for t, steps in zip(shaped.trajectories, judged, strict=True)]
        if self._overlong_filter:
            cut = [t.finish_reason == "length" for t in batch.trajectories]
            if all(cut):  # a mean over nothing: keep them as a step that teaches nothing
                return [0.0] * len(cut)
            advantages = [None if out else a for a, out in zip(advantages, cut, strict=True)]
        return advantages

    def _judge(self, groups: Sequence[Steps], step: int) -> list[list[list[float]]]:
        if self._advantage != "reinforce":
            return [ESTIMATORS[self._advantage](group) for group in groups]
        mean = _mean([steps for group in groups for steps in group])
        running = self.running(step)  # of the batches before: independent of this one
        self._before = (step, running)
        self._running = mean if running is None else self._decay * running + (1 - self._decay) * mean
        baseline = 0.0
        if self._baseline == "batch" or (self._baseline == "running" and running is None):
            baseline = mean
        elif self._baseline == "running" and running is not None:
            baseline = running
        return [[[g - baseline for g in steps] for steps in group] for group in groups]

    # --- rewards

    def _shape(self, batch: Batch) -> Batch:
        """The batch with its rewards punished for length and normalised, as the recipe says."""
        limit, buffer, penalty = self._overlong
        if limit:
            batch = _with_rewards(batch, 1.0, lambda t: -penalty * overlong(t.generated, limit, buffer))
        if self._reward_norm == "batch":
            rewards = [t.reward for t in batch.trajectories]
            spread, largest = pstdev(rewards), max(map(abs, rewards))
            # Totals that are equal, but for rounding, give no scale: what single turns brought would explode.
            scale = 1 / (spread + EPSILON) if spread > EPSILON * max(1.0, largest) else 1.0
            shift = -fmean(rewards) * scale
            batch = _with_rewards(batch, scale, lambda t: shift)
        return batch

    def _returns(self, trajectory: Trajectory) -> list[float]:
        if self._credit == "trajectory":
            return [trajectory.reward]
        rewards = trajectory.turn_rewards or (trajectory.reward,)
        if self._credit == "turn":
            return returns(rewards, self._gamma)
        return returns(token_rewards(rewards, _counts(trajectory)), self._gamma)

    def _spread(self, trajectory: Trajectory, steps: Sequence[float]) -> Advantage:
        if self._credit == "trajectory":
            return steps[0]
        if self._credit == "turn":
            per_turn = zip(steps, _counts(trajectory), strict=True)
            steps = list(chain.from_iterable([advantage] * count for advantage, count in per_turn))
        given = iter(steps)
        return array("f", [next(given) if m else 0.0 for m in trajectory.loss_mask])


def overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, Eq. 13) as a positive number: 0 up to ``limit − buffer`` tokens,
    growing linearly to 1 at ``limit``, and 1 beyond."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _with_rewards(batch: Batch, scale: float, extra: Callable[[Trajectory], float]) -> Batch:
    """Every reward times ``scale``; ``extra`` comes on top of the trajectory's, with its last turn."""
    replace = msgspec.structs.replace

    def changed(t: Trajectory) -> Trajectory:
        more = extra(t)
        turns = [scale * r for r in t.turn_rewards]
        if turns:
            turns[-1] += more
        return replace(t, reward=scale * t.reward + more, turn_rewards=tuple(turns))

    groups = tuple(replace(g, trajectories=tuple(map(changed, g.trajectories))) for g in batch.groups)
    return replace(batch, groups=groups)


def _counts(trajectory: Trajectory) -> list[int]:
    return generated_per_turn(trajectory.loss_mask.tobytes(), trajectory.turn_ends)


def _checked(values: Any, trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """A user's advantages, one a trajectory. Raises ``ValueError``."""
    values = list(values)
    if len(values) != len(trajectories):
        raise ValueError(f"returned {len(values)} advantages for {len(trajectories)} trajectories; return one for each")
    advantages: list[Advantage] = []
    for number, (value, trajectory) in enumerate(zip(values, trajectories, strict=True)):
        if value is None:
            advantages.append(None)
            continue
        column = array("f", [value] if isinstance(value, (int, float)) else value)
        if not all(map(math.isfinite, column)):
            raise ValueError(f"returned a value that is not finite for trajectory {number}")
        if isinstance(value, (int, float)):
            advantages.append(float(value))
        elif len(column) == len(trajectory.tokens):
            advantages.append(column)
        else:
            raise ValueError(
                f"returned {len(column)} values for trajectory {number}, which has {len(trajectory.tokens)} tokens; "
                "return a number, or one for each token"
            )
    return advantages
