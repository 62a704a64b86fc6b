"""One train step on one rank: forward and backward passes over its work, and the optimiser's updates.

Collective: every rank runs the same passes in the same order. Of one batch, each mini-batch is one update, gone through
``epochs`` times; all updates together take the weights from version n to n + 1, and staleness is counted in versions.

Streaming: what is certain of the first mini-batch may be gone through before the rest of it is there (``begin``). The
gradient of a mean is the gradient of the sum divided by what the mean is over, which is known in the end; so parts add
up sums, and ``step`` scales them and adds the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.types import Record
from asyncrl.train import statistics
from asyncrl.train.loss import LOSSES, LossFunction, Tokens, interpolated, policy_loss
from asyncrl.train.model import Policy
from asyncrl.train.work import Packed, Part, Share, StepRefused, Work, pack


class NotFinite(StepRefused):
    """The first update of a step has a loss or gradient that is not finite."""


class StepBroken(Exception):
    """A later update of a step has a loss or gradient that is not finite: the weights are no version, and the job has
    to end. One line."""


class Prepared(Record, frozen=True, kw_only=True):
    """A micro-batch with what the frozen policies say of its tokens. ``proximal`` is None where it is not needed, or is
    π_θ itself."""

    batch: Packed
    proximal: Tensor | None
    reference: Tensor | None


class Seconds:
    """Where a step's time went, on this rank."""

    def __init__(self) -> None:
        self.prepare = self.forward = self.backward = self.optimizer = 0.0


class Totals:
    """What passes have added up on this rank; their gradient is in ``.grad``."""

    def __init__(self) -> None:
        self.loss = torch.zeros(1, dtype=torch.float64)
        self.sums, self.maxima = statistics.empty()


class Begun:
    """The parts of a step that is not complete."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.seconds = Seconds()
        self.micro_batches = 0
        self.batches: list[Prepared] = []
        """Kept only where they are gone through again."""


class Learner:
    """One rank's policy and optimiser. ``control`` is a gloo group of all ranks, for statistics. ``loss`` is the
    recipe's, or a user's own; ``reference`` the frozen model that a KL term needs."""

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
    ) -> None:
        self.policy = policy
        self.version = 0
        self._begun = Begun()
        self._trainer = trainer
        self._algorithm = algorithm
        self._device = device
        self._control = control
        self._loss = loss or LOSSES[algorithm.loss]
        self._reference = reference
        policy.entropy_gradient = algorithm.entropy_coef > 0
        parameters = [p for p in policy.parameters() if p.requires_grad]
        # Norms and biases are not decayed: pulling a scale to zero is no regularisation.
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": trainer.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=trainer.learning_rate,
            betas=trainer.betas,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then constant."""
        warm = min(1.0, (self.version + 1) / (self._trainer.warmup_steps + 1))
        return self._trainer.learning_rate * warm

    def begin(self, part: Part) -> None:
        """The passes of sequences that will be in the next step's first mini-batch. A collective. ``step`` takes what
        they gave into its first update, or drops it."""
        if part.first:
            self._drop()
        begun = self._begun
        started = time.perf_counter()
        batches = self._prepare(part.micro_batches, part.step, several=self._algorithm.epochs > 1)
        begun.seconds.prepare += time.perf_counter() - started
        self._pass(batches, begun.totals, begun.seconds)
        begun.micro_batches += len(batches)
        if self._algorithm.epochs > 1:
            begun.batches += batches

    def _drop(self) -> None:
        self.optimizer.zero_grad()
        self._begun = Begun()

    def _take(self, scale: float) -> Begun:
        """What was begun of this step, as part of its first mini-batch's mean."""
        if not scale:
            self._drop()
        begun, self._begun = self._begun, Begun()
        if begun.micro_batches:
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            begun.totals.loss *= scale
            begun.batches = [_scaled(prepared, scale) for prepared in begun.batches]
        return begun

    def step(self, work: Work) -> dict[str, float]:
        """Train one batch: version + 1. A collective; every rank returns the same metrics, but for its seconds.

        ``loss`` and ``grad_norm`` are means over the updates. Raises ``NotFinite`` (on every rank) when the first
        update's loss or gradient is not finite, and nothing has changed; ``StepBroken`` when a later one's is not.
        """
        started = time.perf_counter()
        begun = self._take(work.scale)
        seconds, totals = begun.seconds, begun.totals
        count = len(work.updates) * self._algorithm.epochs
        updates = [self._prepare(update, work.step, several=count > 1) for update in work.updates]
        seconds.prepare += time.perf_counter() - started
        rate = self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums, maxima = statistics.empty()
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(self._algorithm.epochs):
            for update in updates:
                self._pass(update, totals, seconds)
                loss, norm, part, largest = self._gradient(totals)
                totals = Totals()
                self._demand_finite(loss, norm, len(losses), count)
                began = time.perf_counter()
                clip_grads_with_norm_(list(self.policy.parameters()), self._trainer.grad_clip, norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                seconds.optimizer += time.perf_counter() - began
                sums, maxima = sums + part, torch.maximum(maxima, largest)
                losses.append(loss)
                norms.append(float(norm))
            updates[0] = begun.batches + updates[0]
            begun.batches = []
        self.version += 1
        return statistics.summarise(sums, maxima) | {
            "loss": math.fsum(losses) / count,
            "grad_norm": math.fsum(norms) / count,
            "lr": rate,
            "updates": float(count),
            "micro_batches": float(sum(map(len, work.updates)) + begun.micro_batches),
            "prepare_seconds": seconds.prepare,
            "forward_seconds": seconds.forward,
            "backward_seconds": seconds.backward,
            "optimizer_seconds": seconds.optimizer,
            "seconds": time.perf_counter() - started,
        }

    def _prepare(self, micro_batches: Sequence[Sequence[Share]], step: int, several: bool) -> list[Prepared]:
        """Pack, and ask the frozen policies: the reference, and the policy as it is before the first of ``several``
        updates. In the first update π_prox is π_θ itself, which the training pass computes anyway."""
        algorithm = self._algorithm
        proximal = several and algorithm.proximal == "recompute" and algorithm.uses_proximal
        batches = [pack(shares, step, self._device) for shares in micro_batches]
        prepared = [
            Prepared(
                batch=batch,
                proximal=_logprobs(self.policy, batch) if proximal else None,
                reference=None if self._reference is None else _logprobs(self._reference, batch),
            )
            for batch in batches
        ]
        if isinstance(self._reference, FSDPModule):
            # FSDP keeps the root's parameters whole for a backward that will not come.
            self._reference.reshard()
        return prepared

    def _pass(self, batches: Sequence[Prepared], totals: Totals, seconds: Seconds) -> None:
        """Forward and backward of each: gradients into ``.grad``, everything else into ``totals``."""
        # FSDP averages gradients over the ranks; the batch's loss is their sum.
        ranks = dist.get_world_size()
        for prepared in batches:
            began = time.perf_counter()
            batch = prepared.batch
            logprobs, entropy = self.policy(batch.tokens, batch.layout, batch.positions, batch.targets)
            tokens = Tokens(
                logprobs=logprobs,
                behaviour=batch.behaviour,
                proximal=self._proximal(prepared, logprobs),
                entropy=entropy,
                advantages=batch.advantages,
                weights=batch.weights,
                staleness=batch.staleness,
                lengths=batch.lengths,
                reference=prepared.reference,
            )
            loss, per_token, rejected = policy_loss(tokens, self._loss, self._algorithm)
            if batch.real:
                part, largest = statistics.measure(tokens, per_token, rejected, self._algorithm.importance_cap)
                totals.sums, totals.maxima = totals.sums + part, torch.maximum(totals.maxima, largest)
                totals.loss += loss.detach().double().cpu()
            turned = time.perf_counter()
            (loss * ranks).backward()
            seconds.forward += turned - began
            seconds.backward += time.perf_counter() - turned

    def _gradient(self, totals: Totals) -> tuple[float, Tensor, Tensor, Tensor]:
        """Of a whole mini-batch, over the ranks: its loss, the norm of its gradient, and its statistics."""
        added = torch.cat([totals.loss, totals.sums])
        dist.all_reduce(added, group=self._control)
        maxima = totals.maxima
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._control)
        norm = get_total_norm([p.grad for p in self.policy.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return float(added[0]), norm, added[1:], maxima

    def _proximal(self, prepared: Prepared, logprobs: Tensor) -> Tensor:
        if prepared.proximal is not None:
            return prepared.proximal
        if self._algorithm.proximal == "interpolate":
            return interpolated(logprobs, prepared.batch.behaviour, prepared.batch.staleness)
        return logprobs.detach()

    def _demand_finite(self, loss: float, norm: Tensor, done: int, count: int) -> None:
        if math.isfinite(loss) and math.isfinite(float(norm)):
            return
        self.optimizer.zero_grad()
        name = "gradient" if math.isfinite(loss) else "loss"
        where = f"step {self.version}" + (f", update {done + 1} of {count}" if count > 1 else "")
        what = f"{where}: the {name} is not finite (loss {loss:.6g}, gradient norm {float(norm):.6g})"
        remedy = "lower trainer.learning_rate or look at the batch"
        if done:
            raise StepBroken(f"{what} after {done} of them were made: {remedy}")
        raise NotFinite(f"{what}; the weights are unchanged: {remedy}")


def _scaled(prepared: Prepared, scale: float) -> Prepared:
    replace = msgspec.structs.replace
    return replace(prepared, batch=replace(prepared.batch, weights=prepared.batch.weights * scale))


@torch.no_grad()
def _logprobs(policy: Policy, batch: Packed) -> Tensor:
    logprobs: Tensor = policy(batch.tokens, batch.layout, batch.positions, batch.targets)[0]
    return logprobs
