"""The recipe's ``[algorithm]`` table: how rewards become advantages, and advantages a loss."""

from __future__ import annotations

import difflib
import math
from typing import Literal

from asyncrl.config.base import RecipeError, Section

LOSSES = ("ppo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr", "gspo", "reinforce")
"""Names that ``train/loss.py`` knows."""

ADVANTAGES = ("group_norm", "group_mean", "rloo", "reinforce", "gae")
"""Names that ``core/advantage.py`` knows."""


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Losses are defined in ``train/loss.py``, advantages in ``core/advantage.py``; both say what each key does in
    their formulas."""

    loss: str = "ppo"
    """A name, or your own: ``package.module:function`` or ``file.py:function``. GRPO's clipped objective is ``ppo``
    with the ``group_norm`` advantage."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    mini_batches: int = 1
    """Updates that a batch is cut into; each is a mean over its own sequences."""
    epochs: int = 1
    """How often a batch is gone through."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """DAPO's clip-higher is 0.28."""
    dual_clip: float = 0.0
    """c > 1 of dual-clip PPO; 0: off. For ``ppo``, ``decoupled_ppo`` and ``gspo``."""
    importance_cap: float = 5.0
    """C of truncated importance sampling against the engine's logprobs (ROLL Flash Eq. 12)."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whose probability the ratio of ``tis``, ``topr`` and ``weighted_topr`` is of."""
    positive_weight: float = 1.0
    negative_weight: float = 1.0
    """Of the two sets of ``weighted_topr``."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """π_prox of ``decoupled_ppo`` and of your own loss: the policy at the start of the step, by a forward pass where a
    batch has several updates, or estimated from the versions without one."""
    reject: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens or whole sequences whose π_θ/μ lies outside [reject_low, reject_high]."""
    reject_low: float = 0.5
    reject_high: float = 2.0
    max_ratio: float = 100.0
    """A step whose first update finds a larger mean of π_θ/μ over its tokens is not done, and ends the run: under μ
    that mean has an expectation of 1 whatever π_θ is, so the logprobs are wrong. 0: train on."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """Weight of the KL to a frozen reference model, which is loaded only if this is more than 0."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    reference: str = ""
    """Folder of the reference model. Empty: the policy as it was at the start, ``model.path``."""

    advantage: str = "group_norm"
    """A name, or your own: ``package.module:function`` or ``file.py:function``."""
    credit: Literal["trajectory", "turn", "token"] = "trajectory"
    """What gets an advantage of its own, from the rewards that follow it."""
    gamma: float = 1.0
    """Discount from one turn or token to the next, as ``credit`` says."""
    baseline: Literal["none", "batch", "running"] = "batch"
    """Of ``reinforce``: nothing, the batch's mean return, or a running mean over the batches before it."""
    baseline_decay: float = 0.95
    """How much of the running mean a new batch leaves."""
    gae_lambda: float = 0.95
    """λ of ``gae``, over turns or tokens as ``credit`` says."""
    advantage_norm: Literal["none", "batch"] = "batch"
    """Of ``gae``: ``batch`` brings the advantages to mean 0 and standard deviation 1 over the batch's tokens."""
    critic: Literal["value_head", "model"] = "value_head"
    """Where the values of ``gae`` come from: a head on the policy's last hidden state, which shares its forward pass
    and shapes its trunk too, or a model of its own."""
    critic_path: str = ""
    """Folder that ``critic = "model"`` starts from. Empty: ``model.path``."""
    critic_learning_rate: float = 0.0
    """Of the value head, or of the critic's own model. 0: ``trainer.learning_rate``."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float = 0.2
    """How far one step may move a value before its loss has no more gradient; 0: as far as it likes."""
    reward_norm: Literal["none", "batch"] = "none"
    """``batch``: rewards are first brought to mean 0 and standard deviation 1 over the batch's trajectories; to mean 0
    alone where all are equal."""
    overlong_limit: int = 0
    """L_max of DAPO's soft overlong punishment, in generated tokens of a trajectory; 0: no punishment."""
    overlong_buffer: int = 0
    """L_cache: how many tokens before ``overlong_limit`` the punishment begins."""
    overlong_penalty: float = 1.0
    """What a trajectory at ``overlong_limit`` loses."""
    overlong_filter: bool = False
    """DAPO's overlong filtering: trajectories that were cut off at a length limit are not trained."""

    @property
    def uses_proximal(self) -> bool:
        """True if the loss makes use of π_prox, as far as is known."""
        return self.loss == "decoupled_ppo" or ":" in self.loss

    @property
    def of_whole_batch(self) -> str:
        """The first setting that makes an advantage depend on more than its group; empty if there is none."""
        if not self.compares_groups and (self.advantage != "reinforce" or self.baseline != "none"):
            return (
                f'baseline = "{self.baseline}"' if self.advantage == "reinforce" else f'advantage = "{self.advantage}"'
            )
        if self.reward_norm == "batch":
            return 'reward_norm = "batch"'
        return "overlong_filter = true" if self.overlong_filter else ""

    @property
    def compares_groups(self) -> bool:
        """True if the advantage needs at least two trajectories of a task."""
        return self.advantage in ("group_norm", "group_mean", "rloo")

    @property
    def uses_critic(self) -> bool:
        """True if the trainer makes the advantages, from the values of a critic."""
        return self.advantage == "gae"


def check_algorithm(a: AlgorithmConfig) -> None:
    """Raises ``RecipeError`` for the first value that cannot work."""
    _named("loss", a.loss, LOSSES)
    _named("advantage", a.advantage, ADVANTAGES)
    for key in ("mini_batches", "epochs"):
        _require(getattr(a, key) >= 1, key, getattr(a, key), "must be at least 1")
    for key in ("clip_high", "importance_cap", "reject_low"):
        _require(_finite(getattr(a, key)) and getattr(a, key) > 0, key, getattr(a, key), "must be more than 0")
    not_negative = (
        "positive_weight",
        "negative_weight",
        "entropy_coef",
        "kl_coef",
        "overlong_limit",
        "overlong_penalty",
        "critic_learning_rate",
        "value_coef",
        "value_clip",
    )
    for key in not_negative:
        _require(_finite(getattr(a, key)) and getattr(a, key) >= 0, key, getattr(a, key), "must be 0 or more")
    _require(0 < a.clip_low <= 1, "clip_low", a.clip_low, "must be in (0, 1]")
    _require(a.dual_clip == 0 or a.dual_clip > 1, "dual_clip", a.dual_clip, "must be more than 1, or 0 for none")
    _require(
        _finite(a.max_ratio) and (a.max_ratio == 0 or a.max_ratio > 1),
        "max_ratio",
        a.max_ratio,
        "must be more than 1, which a healthy mean is near, or 0 for none",
    )
    _require(
        _finite(a.reject_high) and a.reject_high > a.reject_low,
        "reject_high",
        a.reject_high,
        f"must be more than algorithm.reject_low = {a.reject_low}",
    )
    _require(0 <= a.gamma <= 1, "gamma", a.gamma, "must be in [0, 1]")
    _require(
        a.gamma == 1 or a.credit != "trajectory", "gamma", a.gamma, 'discounts nothing; set algorithm.credit = "turn"'
    )
    _require(
        not a.uses_critic or a.credit != "trajectory",
        "credit",
        a.credit,
        'gae needs steps within a trajectory; set algorithm.credit = "token" or "turn"',
    )
    _require(0 <= a.gae_lambda <= 1, "gae_lambda", a.gae_lambda, "must be in [0, 1]")
    _require(
        not a.critic_path or (a.uses_critic and a.critic == "model"),
        "critic_path",
        a.critic_path,
        'is not used; set algorithm.advantage = "gae" and algorithm.critic = "model"',
    )
    _require(
        not a.uses_critic or a.value_coef > 0, "value_coef", a.value_coef, "must be more than 0 for the critic to learn"
    )
    _require(0 <= a.baseline_decay < 1, "baseline_decay", a.baseline_decay, "must be in [0, 1)")
    _require(
        0 <= a.overlong_buffer <= a.overlong_limit and (a.overlong_limit == 0) == (a.overlong_buffer == 0),
        "overlong_buffer",
        a.overlong_buffer,
        f"must be from 1 to algorithm.overlong_limit = {a.overlong_limit}, or both 0",
    )
    _require(
        a.proximal == "recompute" or a.uses_proximal,
        "proximal",
        a.proximal,
        f"has no meaning for the loss {a.loss}; use decoupled_ppo",
    )


def _named(key: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    module, colon, name = value.partition(":")
    if colon:
        _require(bool(module and name), key, repr(value), "write package.module:function or file.py:function")
        return
    close = difflib.get_close_matches(value, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    raise RecipeError(f"algorithm.{key}: unknown {value!r}; {hint} (or your own: file.py:function)")


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(condition: bool, key: str, value: object, remedy: str) -> None:
    if not condition:
        raise RecipeError(f"algorithm.{key} = {value}: {remedy}")
