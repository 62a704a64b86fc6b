"""From a batch to each rank's tensors: which sequences it trains in which update, and their packed columns.

``plan_work`` (rank 0, no collectives) checks a batch and deals it out; ``pack`` (every rank) makes a micro-batch of
tensors. Every token carries its weight in the mean over its whole mini-batch, so that packing, the size of
micro-batches and the number of ranks change only the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.core.advantage import generated_per_turn
from asyncrl.core.packing import plan
from asyncrl.core.types import Record
from asyncrl.train.attention import Layout
from asyncrl.train.loss import batch_total, token_weights
from asyncrl.wire import FeedReq, TrainReq, TrainSequence


class StepRefused(Exception):
    """The step was not done and the weights are as before. One line that names the reason."""


class Share(Record, frozen=True, kw_only=True):
    """One sequence as a rank trains it, and its ``number`` in the batch; ``weight`` is that of each of its trained
    tokens in the mini-batch's mean, ``value_weight`` that of each of its steps in the mean of the value loss."""

    sequence: TrainSequence
    number: int
    weight: float
    value_weight: float = 0.0


class Work(Record, frozen=True, kw_only=True):
    """One rank's part of a step: for each update (mini-batch) its packed micro-batches, as many as on every other
    rank. ``step`` is the version being trained. Where a ``Part`` or more of the first mini-batch was trained before,
    ``scale`` is what their sums are multiplied by to be parts of its mean; 0: there is none that counts. ``places`` are
    the numbers in the batch of the sequences that were fed for it. ``chains`` are the numbers, in their order, of
    sequences that are segments of one trajectory, of those that have steps for a critic; on whatever rank."""

    step: int
    updates: list[list[list[Share]]]
    scale: float = 0.0
    places: list[int] = []
    chains: list[list[int]] = []


class Part(Record, frozen=True, kw_only=True):
    """One rank's micro-batches of some of the first mini-batch's sequences, before the others are known: weights are
    those of a sum, numbers count what was fed. ``first``: what was there of a step before is to be forgotten."""

    step: int
    micro_batches: list[list[Share]]
    first: bool


def plan_work(
    request: TrainReq,
    *,
    ranks: int,
    vocabulary: int,
    hidden: int,
    trainer: TrainerConfig,
    algorithm: AlgorithmConfig,
    done: Sequence[int] = (),
) -> list[Work]:
    """Deal a batch out to the ranks. ``done`` are the sequences that were trained in parts, in the order they were fed:
    they count in the mean of their mini-batch, which has to be the first. Raises ``StepRefused`` for a sequence that
    cannot be trained.

    Mini-batches are stretches of the batch in its order, of equal numbers of sequences or one more; one without any
    trained token is no update. Sequences whose advantages are all 0 (a group of equal rewards) keep their place in the
    mean but have no gradient, unless the loss has a KL or entropy term or is a user's own, and are left out: late in a
    run that is most of a batch. With a critic nobody knows their advantages yet.
    """
    columns = [_check(number, sequence, vocabulary) for number, sequence in enumerate(request.sequences)]
    generated = [int(mask.sum()) for mask, _ in columns]
    if not any(generated):
        raise StepRefused(f"step {request.step}: the batch has no generated token; check the environment's loss masks")
    updates: list[list[list[list[Share]]]] = []
    early = frozenset(done)
    cuts = [len(generated) * k // algorithm.mini_batches for k in range(algorithm.mini_batches + 1)]
    if any(i >= cuts[1] for i in done):
        raise StepRefused(f"step {request.step}: a sequence was trained early that is not of the first mini-batch")
    scale = (
        1.0 / batch_total(generated[: cuts[1]], algorithm.aggregation) if done and any(generated[: cuts[1]]) else 0.0
    )
    for start, end in pairwise(cuts):
        if not any(generated[start:end]):
            continue
        weights = token_weights(generated[start:end], algorithm.aggregation)
        steps = [len(step_lengths(s, algorithm.credit)) for s in request.sequences[start:end]]
        value_weights = token_weights(steps, algorithm.aggregation) if any(steps) else [0.0] * len(steps)
        kept = [
            i
            for i in range(start, end)
            if _has_gradient(columns[i], algorithm) or (generated[i] and request.sequences[i].turn_rewards)
        ]
        left = [i for i in kept if i not in early]
        shares = [
            Share(
                sequence=request.sequences[i],
                number=i,
                weight=weights[i - start],
                value_weight=value_weights[i - start],
            )
            for i in left
        ]
        # With nothing to train at all, a dummy is: there must be a gradient to step on.
        dealt = _deal(shares, ranks, hidden, trainer) if left or not kept else [[] for _ in range(ranks)]
        updates.append(dealt)
    chains = _chains(request.sequences, algorithm.credit)
    return [
        Work(
            step=request.step, updates=[update[rank] for update in updates], scale=scale, places=[*done], chains=chains
        )
        for rank in range(ranks)
    ]


def plan_part(
    request: FeedReq,
    sequences: Sequence[TrainSequence],
    *,
    first: bool,
    ranks: int,
    vocabulary: int,
    hidden: int,
    trainer: TrainerConfig,
    algorithm: AlgorithmConfig,
) -> list[Part] | None:
    """Deal ``sequences``, which were fed up to ``request``, out to the ranks; None while they do not fill a micro-batch
    on each of them, as the passes would be many and small. Raises ``StepRefused`` as ``plan_work`` does."""
    first_number = request.start + len(request.sequences) - len(sequences)
    columns = [_check(number, sequence, vocabulary) for number, sequence in enumerate(sequences, first_number)]
    weights = token_weights([int(mask.sum()) for mask, _ in columns], algorithm.aggregation, 1)
    shares = [
        Share(sequence=sequence, number=number, weight=weight)
        for number, (sequence, weight, column) in enumerate(zip(sequences, weights, columns, strict=True), first_number)
        if _has_gradient(column, algorithm)
    ]
    if sum(map(_length, shares)) < ranks * trainer.micro_batch_tokens:
        return None
    dealt = _deal(shares, ranks, hidden, trainer)
    return [Part(step=request.step, micro_batches=dealt[rank], first=first) for rank in range(ranks)]


def _has_gradient(column: tuple[NDArray[np.int8], NDArray[np.float32]], algorithm: AlgorithmConfig) -> bool:
    mask, advantages = column
    regularised = algorithm.kl_coef > 0 or algorithm.entropy_coef > 0 or ":" in algorithm.loss
    return bool(mask.any() and (regularised or advantages.any()))


def _length(share: Share) -> int:
    """Tokens of the forward pass: the last trained token is only ever a target, and nothing after it matters."""
    return int(np.flatnonzero(np.frombuffer(share.sequence.loss_mask, "i1"))[-1])


def _deal(shares: Sequence[Share], ranks: int, hidden: int, trainer: TrainerConfig) -> list[list[list[Share]]]:
    """The micro-batches of each rank; neighbouring ranks that share rows get the same."""
    together = trainer.sequence_parallel
    lengths = [_length(share) for share in shares]
    dealt = plan(lengths, ranks // together, trainer.micro_batch_tokens * together, 1 / (12 * hidden))
    works = [[[shares[i] for i in micro] for micro in rank] for rank in dealt]
    return [works[rank // together] for rank in range(ranks)]


def token_advantages(sequence: TrainSequence) -> NDArray[np.float32]:
    """The advantage of each trained token of a sequence."""
    mask = np.frombuffer(sequence.loss_mask, "i1")
    column: NDArray[np.float32] = np.frombuffer(sequence.advantages, "<f4")
    return column[mask != 0] if len(column) else np.full(np.count_nonzero(mask), sequence.advantage, np.float32)


def step_lengths(sequence: TrainSequence, credit: str) -> list[int]:
    """Trained tokens of each step that ``gae`` sees in a sequence: a token, or a turn that has any. Without rewards of
    turns there are no steps."""
    counts = generated_per_turn(sequence.loss_mask, sequence.turn_ends) if sequence.turn_rewards else []
    return [1] * sum(counts) if credit == "token" else [count for count in counts if count]


def _chains(sequences: Sequence[TrainSequence], credit: str) -> list[list[int]]:
    chains: list[list[int]] = []
    for number, sequence in enumerate(sequences):
        if not (sequence.continues and chains):
            chains.append([])
        if step_lengths(sequence, credit):
            chains[-1].append(number)
    return [chain for chain in chains if len(chain) > 1]


def _check(number: int, sequence: TrainSequence, vocabulary: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The sequence's mask, and the advantages of its trained tokens."""
    tokens = np.frombuffer(sequence.tokens, "<i4")
    mask = np.frombuffer(sequence.loss_mask, "i1")
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    versions = np.frombuffer(sequence.versions, "<i4")
    advantages = np.frombuffer(sequence.advantages, "<f4")
    if not len(tokens) == len(mask) == len(logprobs) == len(versions) or len(advantages) not in (0, len(tokens)):
        raise StepRefused(
            f"sequence {number}: columns differ in length (tokens {len(tokens)}, loss_mask {len(mask)}, "
            f"logprobs {len(logprobs)}, versions {len(versions)}, advantages {len(advantages)})"
        )
    if len(mask) and mask[0]:
        raise StepRefused(f"sequence {number}: its first token is to be trained, but nothing precedes it")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary):
        raise StepRefused(f"sequence {number}: a token id lies outside the vocabulary of {vocabulary}")
    if not np.isfinite(logprobs[mask != 0]).all():
        raise StepRefused(f"sequence {number}: an engine's logprob is not finite")
    trained = token_advantages(sequence)
    if not np.isfinite(trained).all():
        raise StepRefused(f"sequence {number}: its advantage is not finite ({trained[~np.isfinite(trained)][0]})")
    ends, rewards = sequence.turn_ends, sequence.turn_rewards
    if ends and (list(ends) != sorted(ends) or sum(generated_per_turn(sequence.loss_mask, ends)) != len(trained)):
        raise StepRefused(
            f"sequence {number}: its turns, which end at {list(ends)}, do not hold all its trained tokens"
        )
    if len(ends) != len(rewards) or not np.isfinite(rewards).all():
        raise StepRefused(f"sequence {number}: {list(rewards)} are not the finite rewards of {len(ends)} turns")
    return mask, trained


class Packed(Record, frozen=True, kw_only=True):
    """One micro-batch as tensors: a row of tokens and, for each trained token, where it is and its columns, which are
    those of ``loss.Tokens``; ``numbers`` are its sequences'. ``real`` is False for a dummy."""

    tokens: Tensor
    layout: Layout
    positions: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    staleness: Tensor
    lengths: Tensor
    numbers: list[int]
    real: bool


_DUMMY = Share(
    sequence=TrainSequence(tokens=bytes(8), loss_mask=b"\x00\x01", logprobs=bytes(8), versions=bytes(8), advantage=0.0),
    number=-1,
    weight=0.0,
)


def pack(shares: Sequence[Share], step: int, device: torch.device) -> Packed:
    """Sequences end to end, without padding. No sequences make a dummy of weight 0: every rank must take part."""
    tokens, lengths, positions, targets, behaviour, advantages, weights, staleness, counts = ([] for _ in range(9))
    start = 0
    for share in shares or [_DUMMY]:
        sequence = share.sequence
        ids = np.frombuffer(sequence.tokens, "<i4")
        trained = np.flatnonzero(np.frombuffer(sequence.loss_mask, "i1"))
        length = int(trained[-1])
        tokens.append(ids[:length])
        lengths.append(length)
        positions.append(trained - 1 + start)
        targets.append(ids[trained])
        behaviour.append(np.frombuffer(sequence.logprobs, "<f4")[trained])
        advantages.append(token_advantages(sequence))
        weights.append(np.full(len(trained), share.weight, np.float32))
        staleness.append(step - np.frombuffer(sequence.versions, "<i4")[trained])
        counts.append(len(trained))
        start += length

    def column(parts: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)  # type: ignore[arg-type]

    return Packed(
        tokens=column(tokens, torch.long),
        layout=Layout(lengths, device),
        positions=column(positions, torch.long),
        targets=column(targets, torch.long),
        behaviour=column(behaviour, torch.float32),
        advantages=column(advantages, torch.float32),
        weights=column(weights, torch.float32),
        staleness=column(staleness, torch.long),
        lengths=torch.tensor(counts, device=device),
        numbers=[share.number for share in shares],
        real=bool(shares),
    )
