"""The batch of a step that went wrong, for whoever has to find out why: a safetensors file in the run directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from asyncrl.core.advantage import generated_per_turn, token_rewards
from asyncrl.train.work import token_advantages
from asyncrl.wire import TrainReq


def save_batch(folder: Path, request: TrainReq, reason: str) -> Path:
    """Write ``bad-batch-STEP.safetensors``: the columns of all sequences end to end (``tokens``, ``loss_mask``,
    ``logprobs``, ``versions``; ``advantages`` is 0 where the mask is; ``rewards``, where a critic makes the advantages,
    is 0 but for the last generated tokens of turns), ``lengths`` ``[sequences]``, and step and reason as metadata.
    Raises ``OSError`` or ``SafetensorError``."""
    sequences = request.sequences
    advantages, rewards = [], []
    for sequence in sequences:
        mask = np.frombuffer(sequence.loss_mask, "i1") != 0
        column, brought = np.zeros((2, len(mask)), np.float32)
        column[mask] = token_advantages(sequence)
        if sequence.turn_rewards:
            counts = generated_per_turn(sequence.loss_mask, sequence.turn_ends)
            brought[mask] = token_rewards(sequence.turn_rewards, counts)
        advantages.append(column)
        rewards.append(brought)
    columns = {
        "tokens": np.frombuffer(b"".join(s.tokens for s in sequences), "<i4"),
        "loss_mask": np.frombuffer(b"".join(s.loss_mask for s in sequences), "i1"),
        "logprobs": np.frombuffer(b"".join(s.logprobs for s in sequences), "<f4"),
        "versions": np.frombuffer(b"".join(s.versions for s in sequences), "<i4"),
        "advantages": np.concatenate(advantages),
        "lengths": np.array([len(s.loss_mask) for s in sequences], "<i4"),
    }
    if any(s.turn_rewards for s in sequences):
        columns["rewards"] = np.concatenate(rewards)
    path = folder / f"bad-batch-{request.step}.safetensors"
    save_file(columns, path, metadata={"step": str(request.step), "reason": reason})
    return path
