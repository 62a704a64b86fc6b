"""One train step: from a batch to new weights.

``plan_work`` (rank 0, no torch collectives) checks a batch and deals it out; ``Learner`` (every rank) runs its share.
The gradient is that of one sum over the whole batch: every token carries its global weight, so that packing, the size
of micro-batches and the number of ranks change only the order of additions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.packing import plan
from asyncrl.core.types import Record
from asyncrl.train.attention import Layout
from asyncrl.train.loss import SUMS, ppo, token_weights
from asyncrl.train.model import Policy
from asyncrl.wire import TrainReq, TrainSequence


class StepRefused(Exception):
    """The step was not done and the weights are as before. One line that names the reason."""


class Share(Record, frozen=True, kw_only=True):
    """One sequence as a rank trains it; ``weight`` is that of each of its trained tokens in the batch's mean."""

    sequence: TrainSequence
    weight: float


class Work(Record, frozen=True, kw_only=True):
    """One rank's part of a step: packed micro-batches, as many as on every other rank."""

    micro_batches: list[list[Share]]


def plan_work(
    request: TrainReq, *, ranks: int, vocabulary: int, hidden: int, trainer: TrainerConfig, algorithm: AlgorithmConfig
) -> list[Work]:
    """Deal a batch out to the ranks. Raises ``StepRefused`` for a sequence that cannot be trained.

    Sequences whose advantage is 0 (a group of equal rewards) keep their place in the mean but have no gradient, and are
    left out: late in a run that is most of a batch.
    """
    masks = [_check(number, sequence, vocabulary) for number, sequence in enumerate(request.sequences)]
    generated = [int(mask.sum()) for mask in masks]
    if not any(generated):
        raise StepRefused(f"step {request.step}: the batch has no generated token; check the environment's loss masks")
    weights = token_weights(generated, algorithm.aggregation)
    kept = [i for i, s in enumerate(request.sequences) if generated[i] and s.advantage != 0.0]
    # The last trained token is only ever a target, and nothing after it matters.
    lengths = [int(np.flatnonzero(masks[i])[-1]) for i in kept]
    shares = [Share(sequence=request.sequences[i], weight=weights[i]) for i in kept]
    dealt = plan(lengths, ranks, trainer.micro_batch_tokens, 1 / (12 * hidden))
    return [Work(micro_batches=[[shares[i] for i in micro] for micro in rank]) for rank in dealt]


def _check(number: int, sequence: TrainSequence, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    tokens = np.frombuffer(sequence.tokens, "<i4")
    mask = np.frombuffer(sequence.loss_mask, "i1")
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    if not len(tokens) == len(mask) == len(logprobs):
        raise StepRefused(
            f"sequence {number}: columns differ in length (tokens {len(tokens)}, loss_mask {len(mask)}, "
            f"logprobs {len(logprobs)})"
        )
    if len(mask) and mask[0]:
        raise StepRefused(f"sequence {number}: its first token is to be trained, but nothing precedes it")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary):
        raise StepRefused(f"sequence {number}: a token id lies outside the vocabulary of {vocabulary}")
    if not np.isfinite(logprobs[mask != 0]).all():
        raise StepRefused(f"sequence {number}: an engine's logprob is not finite")
    if not math.isfinite(sequence.advantage):
        raise StepRefused(f"sequence {number}: its advantage is not finite ({sequence.advantage})")
    return mask


class Packed(Record, frozen=True, kw_only=True):
    """One micro-batch as tensors: a row of tokens and, for each trained token, where and what it is."""

    tokens: Tensor
    layout: Layout
    positions: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor


def pack(shares: Sequence[Share], device: torch.device) -> Packed:
    """Sequences end to end, without padding. No sequences make a dummy of weight 0: every rank must take part."""
    if not shares:
        shares = [
            Share(
                sequence=TrainSequence(
                    tokens=bytes(8), loss_mask=b"\x00\x01", logprobs=bytes(8), versions=bytes(8), advantage=0.0
                ),
                weight=0.0,
            )
        ]
    tokens, lengths, positions, targets, behaviour, repeats = [], [], [], [], [], []
    start = 0
    for share in shares:
        ids = np.frombuffer(share.sequence.tokens, "<i4")
        trained = np.flatnonzero(np.frombuffer(share.sequence.loss_mask, "i1"))
        length = int(trained[-1])
        tokens.append(ids[:length])
        lengths.append(length)
        positions.append(trained - 1 + start)
        targets.append(ids[trained])
        behaviour.append(np.frombuffer(share.sequence.logprobs, "<f4")[trained])
        repeats.append(len(trained))
        start += length

    def column(parts: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)  # type: ignore[arg-type]

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(repeats)).to(device)

    return Packed(
        tokens=column(tokens, torch.long),
        layout=Layout(lengths, device),
        positions=column(positions, torch.long),
        targets=column(targets, torch.long),
        behaviour=column(behaviour, torch.float32),
        advantages=spread([s.sequence.advantage for s in shares]),
        weights=spread([s.weight for s in shares]),
    )


class Learner:
    """One rank's policy and optimiser. ``control`` is a gloo group of all ranks, for statistics."""

    def __init__(
        self,
        policy: Policy,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        device: torch.device,
        control: dist.ProcessGroup,
    ) -> None:
        self.policy = policy
        self.version = 0
        self._trainer = trainer
        self._algorithm = algorithm
        self._device = device
        self._control = control
        parameters = [p for p in policy.parameters() if p.requires_grad]
        # Norms and biases are not decayed: pulling a scale to zero is no regularisation.
        self._optimizer = torch.optim.AdamW(
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

    def step(self, work: Work) -> dict[str, float]:
        """Train one batch: version + 1. A collective; every rank returns the same metrics.

        Raises ``StepRefused`` (on every rank) when the loss or the gradient is not finite; nothing has changed then.
        """
        started = time.perf_counter()
        sums, largest, forward, backward = self._accumulate(work)
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not (math.isfinite(sums["loss"]) and math.isfinite(float(norm))):
            self._optimizer.zero_grad()
            name = "gradient" if math.isfinite(sums["loss"]) else "loss"
            raise StepRefused(
                f"step {self.version}: the {name} is not finite (loss {sums['loss']:.6g}, gradient norm "
                f"{float(norm):.6g}); the weights are unchanged: lower trainer.learning_rate or look at the batch"
            )
        updating = time.perf_counter()
        rate = self.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        clip_grads_with_norm_(list(self.policy.parameters()), self._trainer.grad_clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        ended = time.perf_counter()
        tokens = max(1.0, sums["tokens"])
        return {
            "loss": sums["loss"],
            "grad_norm": float(norm),
            "lr": rate,
            "entropy": sums["entropy"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": largest,
            "clip_fraction": sums["clipped"] / tokens,
            "capped_fraction": sums["capped"] / tokens,
            "kl": sums["kl"] / tokens,
            "engine_gap": sums["gap"] / tokens,
            "trained_tokens": sums["tokens"],
            "micro_batches": float(len(work.micro_batches)),
            "forward_seconds": forward,
            "backward_seconds": backward,
            "optimizer_seconds": ended - updating,
            "seconds": ended - started,
        }

    def _accumulate(self, work: Work) -> tuple[dict[str, float], float, float, float]:
        """Gradients of the whole batch into ``.grad``; statistics summed over ranks; this rank's seconds."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        largest = 0.0
        forward = backward = 0.0
        # FSDP averages gradients over the ranks; the batch's loss is their sum.
        ranks = dist.get_world_size()
        for shares in work.micro_batches:
            began = time.perf_counter()
            batch = pack(shares, self._device)
            logprobs, entropy = self.policy(batch.tokens, batch.layout, batch.positions, batch.targets)
            loss, part, ratio = ppo(
                logprobs,
                batch.behaviour,
                batch.advantages,
                batch.weights,
                clip_low=self._algorithm.clip_low,
                clip_high=self._algorithm.clip_high,
                cap=self._algorithm.importance_cap,
            )
            if shares:
                sums += torch.cat([part, entropy.sum()[None]]).double().cpu()
                largest = max(largest, ratio)
            turned = time.perf_counter()
            (loss * ranks).backward()
            forward += turned - began
            backward += time.perf_counter() - turned
        extreme = torch.tensor([largest], dtype=torch.float64)
        dist.all_reduce(sums, group=self._control)
        dist.all_reduce(extreme, op=dist.ReduceOp.MAX, group=self._control)
        return dict(zip(SUMS, sums.tolist(), strict=True)), float(extreme), forward, backward
