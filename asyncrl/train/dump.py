"""The batch of a step that went wrong, for whoever has to find out why: a safetensors file in the run directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from asyncrl.train.work import token_advantages
from asyncrl.wire import TrainReq


def save_batch(folder: Path, request: TrainReq, reason: str) -> Path:
    """Write ``bad-batch-STEP.safetensors``: the columns of all sequences end to end (``tokens``, ``loss_mask``,
    ``logprobs``, ``versions``; ``advantages`` is 0 where the mask is), ``lengths`` ``[sequences]``, and step and reason
    as metadata. Raises ``OSError`` or ``SafetensorError``."""
    sequences = request.sequences
    advantages = []
    for sequence in sequences:
        mask = np.frombuffer(sequence.loss_mask, "i1") != 0
        column = np.zeros(len(mask), np.float32)
        column[mask] = token_advantages(sequence)
        advantages.append(column)
    columns = {
        "tokens": np.frombuffer(b"".join(s.tokens for s in sequences), "<i4"),
        "loss_mask": np.frombuffer(b"".join(s.loss_mask for s in sequences), "i1"),
        "logprobs": np.frombuffer(b"".join(s.logprobs for s in sequences), "<f4"),
        "versions": np.frombuffer(b"".join(s.versions for s in sequences), "<i4"),
        "advantages": np.concatenate(advantages),
        "lengths": np.array([len(s.loss_mask) for s in sequences], "<i4"),
    }
    path = folder / f"bad-batch-{request.step}.safetensors"
    save_file(columns, path, metadata={"step": str(request.step), "reason": reason})
    return path
