"""A cost model for a model and a GPU that nobody has profiled: a roofline, scaled by what StaleFlow measured.

StaleFlow's table 4 gives k1…k4 for Qwen3-30B-A3B on an H20 (appendix B.1 names the GPU). Held against the roofline of
that pair (bytes over bandwidth, operations over peak) the table says which share of the hardware a real server gets:
about a third of the bandwidth for attention, all of it for the weights, a third of the peak for matrix products, and
10.7 ms a step for everything else. These shares are assumed for other pairs too, so a figure from here is an estimate;
``asyncrl plan --fit`` measures.

Training takes 6 operations a parameter and token (8 with activation checkpointing) at an assumed share of the peak.
"""

from __future__ import annotations

from asyncrl.core.cost_model import CostModel
from asyncrl.core.types import Record

WEIGHT_BYTES = 2
"""bfloat16, as is the KV cache."""


class Gpu(Record, frozen=True, kw_only=True):
    """Data sheet: memory bandwidth in bytes/s, dense bf16 operations/s, memory in bytes."""

    bandwidth: float
    peak: float
    memory: float


class Model(Record, frozen=True, kw_only=True):
    """From the model's config.json: parameters in all, those that one token uses, and the KV cache's shape."""

    parameters: float
    active: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """KV cache of one token, bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * WEIGHT_BYTES


GPUS = {
    "h20": Gpu(bandwidth=4.0e12, peak=148e12, memory=96e9),
    "h800": Gpu(bandwidth=3.35e12, peak=989e12, memory=80e9),
    "h100": Gpu(bandwidth=3.35e12, peak=989e12, memory=80e9),
    "h200": Gpu(bandwidth=4.8e12, peak=989e12, memory=141e9),
    "a100": Gpu(bandwidth=2.04e12, peak=312e12, memory=80e9),
}

MODELS = {
    "qwen3-0.6b": Model(parameters=0.6e9, active=0.6e9, layers=28, kv_heads=8, head_dim=128),
    "qwen3-1.7b": Model(parameters=1.7e9, active=1.7e9, layers=28, kv_heads=8, head_dim=128),
    "qwen3-4b": Model(parameters=4.0e9, active=4.0e9, layers=36, kv_heads=8, head_dim=128),
    "qwen3-8b": Model(parameters=8.2e9, active=8.2e9, layers=36, kv_heads=8, head_dim=128),
    "qwen3-14b": Model(parameters=14.8e9, active=14.8e9, layers=40, kv_heads=8, head_dim=128),
    "qwen3-32b": Model(parameters=32.8e9, active=32.8e9, layers=64, kv_heads=8, head_dim=128),
    "qwen3-30b-a3b": Model(parameters=30.5e9, active=3.3e9, layers=48, kv_heads=4, head_dim=128),
    "qwen2.5-7b": Model(parameters=7.6e9, active=7.6e9, layers=28, kv_heads=4, head_dim=128),
    "qwen2.5-32b": Model(parameters=32.5e9, active=32.5e9, layers=64, kv_heads=8, head_dim=128),
    "qwen2.5-72b": Model(parameters=72.7e9, active=72.7e9, layers=80, kv_heads=8, head_dim=128),
}

TABLE_4 = CostModel()
"""Measured for this pair, which sets the shares."""
TABLE_4_PAIR = ("qwen3-30b-a3b", "h20")
TRAINING_SHARE = 0.35
"""Of the peak, in training: an assumption, middling for dense models under FSDP."""
PREFILL_SHARE = 0.5
"""Of the peak, in prefill: an assumption; StaleFlow gives no figure."""
KV_SHARE = 0.8
"""Of the memory that weights leave free, for the KV cache."""


def cost_model(model: Model, gpu: Gpu, tensor_parallel: int = 1) -> CostModel:
    """k1…k5 of one server over ``tensor_parallel`` GPUs, whose bandwidths and peaks are taken to add up."""
    reference, card = MODELS[TABLE_4_PAIR[0]], GPUS[TABLE_4_PAIR[1]]
    attention = TABLE_4.k1 / (reference.kv_bytes / card.bandwidth)
    weights = TABLE_4.k2 / (reference.active * WEIGHT_BYTES / card.bandwidth)
    products = TABLE_4.k3 / (2 * reference.active / card.peak)
    return CostModel(
        k1=attention * model.kv_bytes / (gpu.bandwidth * tensor_parallel),
        k2=weights * model.active * WEIGHT_BYTES / (gpu.bandwidth * tensor_parallel),
        k3=products * 2 * model.active / (gpu.peak * tensor_parallel),
        k4=TABLE_4.k4,
        k5=2 * model.active / (PREFILL_SHARE * gpu.peak * tensor_parallel),
    )


def kv_tokens(model: Model, gpu: Gpu, tensor_parallel: int = 1) -> int:
    """Tokens of KV cache that one server holds beside its weights. Raises ``ValueError`` if the weights do not fit."""
    free = gpu.memory * tensor_parallel - model.parameters * WEIGHT_BYTES
    if free <= 0:
        raise ValueError(
            f"{model.parameters * WEIGHT_BYTES / 1e9:.0f} GB of weights do not fit into {tensor_parallel} × "
            f"{gpu.memory / 1e9:.0f} GB; use more GPUs a server"
        )
    return int(KV_SHARE * free / model.kv_bytes)


def training_tokens_per_s(model: Model, gpu: Gpu, *, forwards: float = 0.0) -> float:
    """Tokens that one GPU trains in a second: forward and backward (6 operations a parameter and token) and
    ``forwards`` further passes over each token (reference, proximal policy: 2 each)."""
    return TRAINING_SHARE * gpu.peak / ((6.0 + 2.0 * forwards) * model.active)


def named(profile: str) -> tuple[Model, Gpu, int]:
    """``qwen3-8b@h800`` or ``qwen2.5-72b@h800x4``: model, GPU, GPUs a server. Raises ``ValueError``."""
    model, _, card = profile.partition("@")
    card, _, count = card.partition("x")
    if model not in MODELS:
        raise ValueError(
            f"unknown model {model!r}; known are {', '.join(MODELS)}, or give a file of asyncrl plan --fit"
        )
    if card not in GPUS:
        raise ValueError(f"unknown GPU {card!r}; known are {', '.join(GPUS)}; write MODEL@GPU or MODEL@GPUxN")
    if count and not count.isdecimal():
        raise ValueError(f"{count!r} is no number of GPUs; write MODEL@GPUxN")
    return MODELS[model], GPUS[card], int(count or 1)
