"""What a step costs each rank: seconds, tokens, operations, memory, and time in which it has nothing to do.

Operations are floating-point operations that the models need (Korthikanti et al. 2022, §6.3, "model FLOPs"): of every
weight that a token meets 2 in a forward pass, 2 more for the gradient of what goes in and 2 for the weight's own where
it is trained; and of causal attention only what is seen. What checkpointing and the vocabulary's head compute a second
time is not counted. MFU is their share of what the device does in the same time in a bare matrix product.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from asyncrl.core.hardware import GPUS
from asyncrl.core.types import Record
from asyncrl.train.model import Critic, Policy


class Cost(Record, frozen=True, kw_only=True):
    """Operations of one model. ``layers`` and ``head``: a token's, in a forward pass, through the layers and through
    the vocabulary's head; ``trained_layers`` and ``trained_head`` of these in weights that are trained. ``attention``:
    a layer's, for a query and a key that it sees; ``windows``: how far each layer sees (inf: as far as there is)."""

    layers: float
    head: float
    trained_layers: float
    trained_head: float
    attention: float
    windows: tuple[float, ...]

    def forward(self, lengths: Sequence[int], scored: int) -> float:
        """Of packed sequences, ``scored`` positions of which meet the vocabulary."""
        return self.layers * sum(lengths) + self.head * scored + self._seen(lengths)

    def backward(self, lengths: Sequence[int], scored: int) -> float:
        layers, head = self.layers + self.trained_layers, self.head + self.trained_head
        return layers * sum(lengths) + head * scored + 2 * self._seen(lengths)

    def _seen(self, lengths: Sequence[int]) -> float:
        return self.attention * sum(_pairs(n, window) for window in self.windows for n in lengths)


def _pairs(length: int, window: float) -> float:
    """Queries and keys of a sequence that see each other."""
    if length <= window:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def cost_of(trunk: Policy | Critic) -> Cost:
    """Of a model, sharded or not. Of an MoE layer's experts a token meets those that it is routed to."""
    config = trunk.lm.config.get_text_config()
    head = trunk.lm.get_output_embeddings() if isinstance(trunk, Policy) else None
    weights = {id(head.weight)} if head is not None else set()
    tables = weights | {id(m.weight) for m in trunk.lm.modules() if isinstance(m, nn.Embedding)}
    layers = trained = 0.0
    for name, parameter in trunk.lm.named_parameters():
        if parameter.ndim < 2 or id(parameter) in tables:
            continue
        routed = parameter.ndim == 3 and ".experts." in name
        met = 2 * parameter.numel() * (config.num_experts_per_tok / parameter.shape[0] if routed else 1.0)
        layers += met
        trained += met * parameter.requires_grad
    of_head = 2.0 * head.weight.numel() if head is not None else 0.0
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or math.inf
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Cost(
        layers=layers,
        head=of_head,
        trained_layers=trained,
        trained_head=of_head if head is not None and head.weight.requires_grad else 0.0,
        attention=4.0 * width,
        windows=tuple(window if kind == "sliding_attention" else math.inf for kind in kinds),
    )


class Effort:
    """One rank's in one step, parts that were begun early included. ``passes`` are the operations of each forward and
    backward pass, as many as on any other rank; ``scoring`` those of passes without gradient."""

    def __init__(self) -> None:
        self.prepare = self.forward = self.backward = self.optimizer = 0.0
        self.seconds = 0.0
        self.tokens = 0.0
        self.micro_batches = 0
        """That hold something."""
        self.passes: list[float] = []
        self.scoring = 0.0


def over_ranks(
    effort: Effort, *, idle: float, memory: float, peak: float, group: dist.ProcessGroup
) -> dict[str, float]:
    """``rank/NAME/min``, ``…/mean`` and ``…/max`` over the ranks; a collective.

    ``tokens`` are what went forward and backward, ``tokens_per_second`` and ``mfu`` are over the seconds of the step,
    ``micro_batches`` those that hold something, ``peak_memory`` bytes. ``idle_seconds`` the rank waited for a command
    since the step before; ``imbalance_seconds`` it spent in passes that were longer elsewhere, taking the ranks to
    advance together and at the same pace: an estimate from their operations, as the waiting is within collectives.
    """
    longest = torch.tensor(effort.passes, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    operations, slowest = math.fsum(effort.passes), float(longest.sum())
    # Not forward + backward: on a GPU these are the seconds of the host, which runs ahead.
    passing = effort.seconds - effort.prepare - effort.optimizer
    mine = {
        "tokens": effort.tokens,
        "tokens_per_second": effort.tokens / effort.seconds,
        "mfu": (operations + effort.scoring) / (effort.seconds * peak),
        "micro_batches": float(effort.micro_batches),
        "peak_memory": memory,
        "idle_seconds": idle,
        "imbalance_seconds": passing * (slowest - operations) / max(1.0, slowest),
    }
    row = torch.tensor([*mine.values()], dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    every = torch.stack(rows)
    metrics = {}
    for name, column in zip(mine, every.unbind(1), strict=True):
        metrics[f"rank/{name}/min"] = float(column.min())
        metrics[f"rank/{name}/mean"] = float(column.mean())
        metrics[f"rank/{name}/max"] = float(column.max())
    return metrics


def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that ``device`` can do: of a GPU that ``core.hardware`` knows by its data sheet, else
    measured."""
    if device.type == "cuda" and dtype != torch.float32:
        words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower())
        for name in words:
            if name in GPUS:
                return GPUS[name].peak
    return matmul_rate(device, dtype)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured, in tens of milliseconds: the best of a few products of square matrices."""
    size = 8192 if device.type == "cuda" else 384
    factor = torch.randn(size, size, device=device).to(dtype)
    best = math.inf
    for _ in range(20):
        started = time.perf_counter()
        (factor @ factor)[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> float:
    """Bytes: what tensors held at most on a GPU since the last call; elsewhere what the process ever held."""
    if device.type == "cuda":
        held = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(held)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
