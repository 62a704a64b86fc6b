"""One train step on one rank: forward and backward passes over its work, and the optimiser's updates.

Collective: every rank runs the same passes in the same order. Of one batch, each mini-batch is one update, gone through
``epochs`` times; all updates together take the weights from version n to n + 1. A loss sees staleness in versions; what
is reported counts the updates within a step too (``statistics.summarise``).

Streaming: what is certain of the first mini-batch may be gone through before the rest of it is there (``begin``). The
gradient of a mean is the gradient of the sum divided by what the mean is over, which is known in the end; so parts add
up sums, and ``step`` scales them and adds the rest.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.types import Record
from asyncrl.train import critic as critics
from asyncrl.train import statistics
from asyncrl.train.channel import all_gather
from asyncrl.train.critic import Judged, Seen
from asyncrl.train.effort import Effort, cost_of
from asyncrl.train.loss import LOSSES, LossFunction, Tokens, interpolated, policy_loss
from asyncrl.train.model import Critic, Policy, Scores, critic_parameters
from asyncrl.train.offload import Offload
from asyncrl.train.work import Packed, Part, Share, StepRefused, Work, pack

NAMED_SEQUENCES = 3
"""So many sequences are named in an error about the ratios of a batch."""


class BadBatch(StepRefused):
    """The first update of a step has a loss or gradient that is not finite, or its ratios have exploded."""


class StepBroken(Exception):
    """A later update of a step has a loss or gradient that is not finite: the weights are no version, and the job has
    to end. One line."""


class Prepared(Record, frozen=True, kw_only=True):
    """A micro-batch with what the frozen policies say of its tokens, and the critic as it is before the first update.
    ``proximal`` is None where it is not needed, or is π_θ itself; ``judged`` comes when all have been ``seen``."""

    batch: Packed
    proximal: Tensor | None
    reference: Tensor | None
    seen: Seen | None
    judged: Judged | None = None


class Outcome(Record, frozen=True, kw_only=True):
    """Of one update, over all ranks: its losses, the share of values that were clipped, the norms of the gradients, and
    the statistics of its tokens."""

    loss: float
    value_loss: float
    value_clipped: float
    norm: Tensor
    critic_norm: Tensor | None
    sums: Tensor
    maxima: Tensor


class Totals:
    """What passes have added up on this rank; their gradient is in ``.grad``."""

    def __init__(self) -> None:
        self.losses = torch.zeros(3, dtype=torch.float64)
        """The policy's, the values', and the share of values that were clipped."""
        self.sums, self.maxima = statistics.empty()
        self.worst: list[tuple[float, int]] = []
        """The largest mean ratios of sequences, and the sequences' numbers."""

    def note(self, ratios: Sequence[float], numbers: Sequence[int]) -> None:
        self.worst = heapq.nlargest(NAMED_SEQUENCES, [*self.worst, *zip(ratios, numbers, strict=True)])


class Begun:
    """The parts of a step that is not complete."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.effort = Effort()
        self.micro_batches = 0
        self.batches: list[Prepared] = []
        """Kept only where they are gone through again."""


class Learner:
    """One rank's policy and optimiser. ``control`` is a gloo group of all ranks, for statistics. ``loss`` is the
    recipe's, or a user's own; ``reference`` the frozen model that a KL term needs; ``critic`` the model of its own that
    gives values where the policy has no head for them."""

    def __init__(
        self,
        policy: Policy,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        device: torch.device,
        control: dist.ProcessGroup,
        *,
        loss: LossFunction | None = None,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.version = 0
        self.effort = Effort()
        """Of the newest step."""
        self.doing = ""
        """What it is at, for whoever asks on another thread."""
        self._begun = Begun()
        self.trainer = trainer
        self._algorithm = algorithm
        self.device = device
        self._control = control
        self._loss = loss or LOSSES[algorithm.loss]
        self._reference = reference
        self._costs = {id(m): cost_of(m) for m in (policy, reference, critic) if m is not None}
        policy.entropy_gradient = algorithm.entropy_coef > 0
        rates = (
            (policy.lm.parameters(), trainer.learning_rate),
            (
                (p for _, p in critic_parameters(policy, critic)),
                algorithm.critic_learning_rate or trainer.learning_rate,
            ),
        )
        groups: list[dict[str, Any]] = []
        for parameters, rate in rates:
            trained = [p for p in parameters if p.requires_grad]
            # Norms and biases are not decayed: pulling a scale to zero is no regularisation.
            for matrices, decay in ((True, trainer.weight_decay), (False, 0.0)):
                if chosen := [p for p in trained if (p.ndim >= 2) == matrices]:
                    groups.append({"params": chosen, "weight_decay": decay, "full_lr": rate})
        self.optimizer = torch.optim.AdamW(groups, lr=trainer.learning_rate, betas=trainer.betas)
        self.offload = Offload(self.optimizer) if trainer.offload == "optimizer" else None

    @property
    def learning_rate(self) -> float:
        """The policy's in the next step."""
        return self.trainer.learning_rate * self._warmth

    @property
    def _warmth(self) -> float:
        """What learning rates are multiplied with: linear warm-up, then constant."""
        return min(1.0, (self.version + 1) / (self.trainer.warmup_steps + 1))

    def begin(self, part: Part) -> None:
        """The passes of sequences that will be in the next step's first mini-batch. A collective. ``step`` takes what
        they gave into its first update, or drops it."""
        if part.first:
            self._drop()
        begun = self._begun
        started = time.perf_counter()
        batches = self._prepare(part.micro_batches, part.step, begun.effort, several=self._algorithm.epochs > 1)
        begun.effort.prepare += time.perf_counter() - started
        self._pass(batches, begun.totals, begun.effort)
        self.doing = ""
        begun.effort.seconds += time.perf_counter() - started
        begun.micro_batches += len(batches)
        if self._algorithm.epochs > 1:
            begun.batches += batches

    def _drop(self) -> None:
        self.optimizer.zero_grad()
        self._begun = Begun()

    def _take(self, scale: float, places: Sequence[int]) -> Begun:
        """What was begun of this step, as part of its first mini-batch's mean."""
        if not scale:
            self._drop()
        begun, self._begun = self._begun, Begun()
        if begun.micro_batches:
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            begun.totals.losses *= scale
            begun.totals.worst = [(ratio, places[number]) for ratio, number in begun.totals.worst]
            begun.batches = [_scaled(prepared, scale) for prepared in begun.batches]
        return begun

    def step(self, work: Work) -> dict[str, float]:
        """Train one batch: version + 1. A collective; every rank returns the same metrics, but for its seconds.

        ``loss`` and ``grad_norm`` are means over the updates. Raises ``BadBatch`` (on every rank) when the first
        update's loss or gradient is not finite, or its mean ratio is above ``max_ratio``, and nothing has changed;
        ``StepBroken`` when a later one's loss or gradient is not finite.
        """
        started = time.perf_counter()
        begun = self._take(work.scale, work.places)
        effort, totals = begun.effort, begun.totals
        count = len(work.updates) * self._algorithm.epochs
        updates = [self._prepare(update, work.step, effort, several=count > 1) for update in work.updates]
        metrics: dict[str, float] = {}
        if self._algorithm.uses_critic:
            updates, metrics = self._judge(updates, work.chains)
        effort.prepare += time.perf_counter() - started
        rate = self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * self._warmth
        maxima = statistics.empty()[1]
        outcomes: list[Outcome] = []
        for _ in range(self._algorithm.epochs):
            for update in updates:
                self._pass(update, totals, effort)
                outcome = self._outcome(totals)
                self._demand_finite(outcome, len(outcomes), count)
                if not outcomes:
                    self._demand_ratios(outcome, totals.worst)
                totals = Totals()
                began = time.perf_counter()
                self.doing = f"step {work.step}: update {len(outcomes) + 1} of {count}"
                clip_grads_with_norm_(list(self.policy.parameters()), self.trainer.grad_clip, outcome.norm)
                if self.critic is not None and outcome.critic_norm is not None:
                    clip_grads_with_norm_(list(self.critic.parameters()), self.trainer.grad_clip, outcome.critic_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                effort.optimizer += time.perf_counter() - began
                maxima = torch.maximum(maxima, outcome.maxima)
                outcomes.append(outcome)
            updates[0] = begun.batches + updates[0]
            begun.batches = []
        self.version += 1
        self.doing = ""
        effort.seconds += time.perf_counter() - started
        self.effort = effort
        metrics |= statistics.summarise([o.sums for o in outcomes], maxima)
        if self._algorithm.uses_critic:
            metrics["value_loss"] = math.fsum(o.value_loss for o in outcomes) / count
            metrics["value_clip_fraction"] = math.fsum(o.value_clipped for o in outcomes) / count
        if self.critic is not None:
            metrics["critic_grad_norm"] = math.fsum(float(o.critic_norm or 0) for o in outcomes) / count
        return metrics | {
            "loss": math.fsum(o.loss for o in outcomes) / count,
            "grad_norm": math.fsum(float(o.norm) for o in outcomes) / count,
            "lr": rate,
            "updates": float(count),
            "micro_batches": float(sum(map(len, work.updates)) + begun.micro_batches),
            "prepare_seconds": effort.prepare,
            "forward_seconds": effort.forward,
            "backward_seconds": effort.backward,
            "optimizer_seconds": effort.optimizer,
            "seconds": time.perf_counter() - started,
        }

    def _prepare(
        self, micro_batches: Sequence[Sequence[Share]], step: int, effort: Effort, several: bool
    ) -> list[Prepared]:
        """Pack, and ask the frozen policies: the reference, and the policy as it is before the first of ``several``
        updates, and its critic. In the first update π_prox is π_θ itself, which the training pass computes anyway."""
        algorithm = self._algorithm
        proximal = several and algorithm.proximal == "recompute" and algorithm.uses_proximal
        asked = proximal or self.policy.value_head is not None or (algorithm.uses_critic and self._kl_in_reward)
        prepared = []
        for number, shares in enumerate(micro_batches, 1):
            self.doing = f"step {step}: prepares micro-batch {number} of {len(micro_batches)}"
            batch = pack(shares, step, self.device)
            before = _scores(self.policy, batch) if asked else None
            reference = None if self._reference is None else _scores(self._reference, batch).logprobs
            for scorer in (self.policy if asked else None, self._reference, self.critic):
                if scorer is not None:
                    effort.scoring += self._operations(scorer, batch)[0]
            prepared.append(
                Prepared(
                    batch=batch,
                    proximal=before.logprobs if before is not None and proximal else None,
                    reference=reference,
                    seen=self._seen(shares, batch, before, reference) if algorithm.uses_critic else None,
                )
            )
        for scorer in (self.policy if asked else None, self._reference, self.critic):
            # FSDP keeps the root's parameters whole for a backward, which may not come: a first update that was begun
            # whole has no pass left. Its norm would miss the root's gradients, and the next pass use the old weights.
            if isinstance(scorer, FSDPModule):
                scorer.reshard()
        return prepared

    @property
    def _kl_in_reward(self) -> bool:
        return self._reference is not None and self._algorithm.kl_in == "reward"

    @torch.no_grad()
    def _seen(self, shares: Sequence[Share], batch: Packed, before: Scores | None, reference: Tensor | None) -> Seen:
        """By the critic, or the value head of the policy that gave ``before``."""
        values = None if before is None else before.values
        if self.critic is not None:
            values = self.critic(batch.tokens, batch.layout, batch.positions)
        assert values is not None
        penalties = None
        if self._kl_in_reward:
            assert before is not None and reference is not None
            penalties = critics.kl_penalties(before.logprobs, reference, self._algorithm)
        return Seen(shares=shares, values=values, penalties=penalties)

    def _judge(
        self, updates: Sequence[Sequence[Prepared]], chains: Sequence[Sequence[int]]
    ) -> tuple[list[list[Prepared]], dict[str, float]]:
        """With advantages as they are trained, which takes the whole batch, on all ranks; and metrics of it."""
        every = [prepared.seen for update in updates for prepared in update if prepared.seen is not None]
        after = self._behind(every, chains)
        judged = [critics.judge(seen, self._algorithm, after) for seen in every]
        moments = critics.no_moments()
        if self.policy.counts:
            moments = sum((one.moments for one in judged), moments)
        dist.all_reduce(moments, group=self._control)
        normal = (critics.normalise(one, moments, self._algorithm, self.device) for one in judged)
        replace = msgspec.structs.replace
        complete = [[replace(prepared, judged=next(normal), seen=None) for prepared in update] for update in updates]
        return complete, critics.summarise(moments)

    def _behind(self, every: Sequence[Seen], chains: Sequence[Sequence[int]]) -> dict[int, float]:
        """What comes after each segment that another follows, on whatever rank that is."""
        if not chains:
            return {}
        rows = {number: row for row, number in enumerate(chain.from_iterable(chains))}
        links = torch.zeros(len(rows), 2, dtype=torch.float64)
        for seen in every if self.policy.counts else ():
            for number, link in critics.links(seen, self._algorithm).items():
                if number in rows:
                    links[rows[number]] = torch.tensor(link, dtype=torch.float64)
        dist.all_reduce(links, group=self._control)
        return critics.behind(chains, links.tolist())

    def _pass(self, batches: Sequence[Prepared], totals: Totals, effort: Effort) -> None:
        """Forward and backward of each: gradients into ``.grad``, everything else into ``totals``."""
        # FSDP averages gradients over the ranks; the batch's loss is their sum.
        ranks = dist.get_world_size()
        for number, prepared in enumerate(batches, 1):
            self.doing = f"step {self.version}: passes of micro-batch {number} of {len(batches)}"
            began = time.perf_counter()
            batch, judged = prepared.batch, prepared.judged
            logprobs, entropy, values = self.policy(batch.tokens, batch.layout, batch.positions, batch.targets)
            tokens = Tokens(
                logprobs=logprobs,
                behaviour=batch.behaviour,
                proximal=self._proximal(prepared, logprobs),
                entropy=entropy,
                advantages=batch.advantages if judged is None else judged.advantages,
                weights=batch.weights,
                staleness=batch.staleness,
                lengths=batch.lengths,
                reference=prepared.reference,
            )
            loss, per_token, rejected = policy_loss(tokens, self._loss, self._algorithm)
            if batch.real and self.policy.counts:
                part, largest = statistics.measure(tokens, per_token, rejected, self._algorithm.importance_cap)
                totals.sums, totals.maxima = totals.sums + part, torch.maximum(totals.maxima, largest)
                totals.losses[0] += loss.detach().double().cpu()
                totals.note(statistics.sequence_ratios(tokens), batch.numbers)
            if judged is not None and values is not None:
                loss = loss + self._value_loss(values, judged, totals)
            self._count(batch, effort)
            turned = time.perf_counter()
            (loss * ranks).backward()
            effort.forward += turned - began
            effort.backward += time.perf_counter() - turned
            if judged is not None and self.critic is not None:
                # After the policy's backward, so that only one model's activations are held at a time.
                began = time.perf_counter()
                value_loss = self._value_loss(self.critic(batch.tokens, batch.layout, batch.positions), judged, totals)
                turned = time.perf_counter()
                (value_loss * ranks).backward()
                effort.forward += turned - began
                effort.backward += time.perf_counter() - turned

    def _operations(self, trunk: Policy | Critic, batch: Packed) -> tuple[float, float]:
        """Of a forward pass and a backward pass on this rank, which may share its rows with others."""
        if not batch.real:
            return 0.0, 0.0
        cost, lengths, scored = self._costs[id(trunk)], batch.layout.lengths, len(batch.targets)
        return cost.forward(lengths, scored) / trunk.sharing, cost.backward(lengths, scored) / trunk.sharing

    def _count(self, batch: Packed, effort: Effort) -> None:
        trained = (self.policy,) if self.critic is None else (self.policy, self.critic)
        effort.passes.append(math.fsum(n for trunk in trained for n in self._operations(trunk, batch)))
        if batch.real:
            effort.micro_batches += 1
            effort.tokens += batch.layout.tokens / self.policy.sharing

    def _value_loss(self, values: Tensor, judged: Judged, totals: Totals) -> Tensor:
        """To be minimised beside the policy's; bare, it is added to ``totals``."""
        loss, clipped = critics.value_loss(values, judged, self._algorithm.value_clip)
        if self.policy.counts:
            totals.losses[1:] += torch.stack([loss.detach(), clipped]).double().cpu()
        return self._algorithm.value_coef * loss

    def _outcome(self, totals: Totals) -> Outcome:
        """Of a whole mini-batch, over the ranks."""
        added = torch.cat([totals.losses, totals.sums])
        dist.all_reduce(added, group=self._control)
        dist.all_reduce(totals.maxima, op=dist.ReduceOp.MAX, group=self._control)
        loss, value_loss, value_clipped = added[: len(totals.losses)].tolist()
        return Outcome(
            loss=loss,
            value_loss=value_loss,
            value_clipped=value_clipped,
            norm=_grad_norm(self.policy),
            critic_norm=None if self.critic is None else _grad_norm(self.critic),
            sums=added[len(totals.losses) :],
            maxima=totals.maxima,
        )

    def _proximal(self, prepared: Prepared, logprobs: Tensor) -> Tensor:
        if prepared.proximal is not None:
            return prepared.proximal
        if self._algorithm.proximal == "interpolate":
            return interpolated(logprobs, prepared.batch.behaviour, prepared.batch.staleness)
        return logprobs.detach()

    def _demand_finite(self, outcome: Outcome, done: int, count: int) -> None:
        loss = outcome.loss + outcome.value_loss
        norm = math.hypot(float(outcome.norm), float(outcome.critic_norm or 0))
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.optimizer.zero_grad()
        name = "gradient" if math.isfinite(loss) else "loss"
        where = f"step {self.version}" + (f", update {done + 1} of {count}" if count > 1 else "")
        what = f"{where}: the {name} is not finite (loss {loss:.6g}, gradient norm {norm:.6g})"
        remedy = "lower trainer.learning_rate or look at the batch"
        if done:
            raise StepBroken(f"{what} after {done} of them were made: {remedy}")
        raise BadBatch(f"{what}; the weights are unchanged: {remedy}")

    def _demand_ratios(self, outcome: Outcome, worst: Sequence[tuple[float, int]]) -> None:
        limit, mean = self._algorithm.max_ratio, statistics.mean_ratio(outcome.sums)
        if not limit or mean <= limit:
            return
        self.optimizer.zero_grad()
        of_ranks = all_gather(worst, list[tuple[float, int]], self._control)
        named = heapq.nlargest(NAMED_SEQUENCES, (pair for pairs in of_ranks for pair in pairs))
        listed = ", ".join(f"sequence {number}: {ratio:.3g}" for ratio, number in named)
        raise BadBatch(
            f"step {self.version}: the mean ratio of the trainer's probabilities to the engine's is {mean:.3g}, above "
            f"algorithm.max_ratio = {limit:g} (largest: {listed}); the weights are unchanged: check that the engines "
            "have the trainer's weights, temperature and precision, or raise algorithm.max_ratio (0: no limit)"
        )


def _scaled(prepared: Prepared, scale: float) -> Prepared:
    replace = msgspec.structs.replace
    return replace(prepared, batch=replace(prepared.batch, weights=prepared.batch.weights * scale))


@torch.no_grad()
def _scores(policy: Policy, batch: Packed) -> Scores:
    scores: Scores = policy(batch.tokens, batch.layout, batch.positions, batch.targets)
    return scores


def _grad_norm(module: torch.nn.Module) -> Tensor:
    norm = get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
