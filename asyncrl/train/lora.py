"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: only they are trained, and they leave merged.

The frozen weights are held in the servers' precision. Servers and checkpoints' Hugging Face folders get
W + α/r · B·A under W's own name, so that neither of them knows of adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config import RecipeError, TrainerConfig

_BASE, _A, _B = ".base_layer.", ".lora_A.", ".lora_B."


def inject(lm: PreTrainedModel, config: TrainerConfig, dtype: torch.dtype, seed: int) -> None:
    """Put adapters into ``lm`` in place, the same on every rank, and freeze the rest. Raises ``RecipeError``."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise RecipeError("trainer.lora_rank needs peft; pip install 'asyncrl[lora]'") from None
    targets = config.lora_targets or "all-linear"
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets, lora_dropout=0.0)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(lora, lm)
    except ValueError as error:
        raise RecipeError(f"trainer.lora_targets: {' '.join(str(error).split())[:200]}") from None
    if hasattr(lm.get_output_embeddings(), "base_layer"):
        raise RecipeError("trainer.lora_targets: the output layer cannot have adapters (it is fused with the softmax)")
    for name, module in lm.named_modules():
        if isinstance(module, BaseTunerLayer) and not _has_matrix(module):
            what = f"{name} ({type(module.get_base_layer()).__name__})"
            raise RecipeError(
                f"trainer.lora_targets: adapters of {what} cannot be merged; name linear layers (q_proj, …)"
            )
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _has_matrix(adapted: Any) -> bool:
    """True if ``adapted`` has a weight W of the shape of B · A. Experts are often one tensor of three dimensions, and
    some layers hold W transposed."""
    base = adapted.get_base_layer()
    of_weight = getattr(adapted, "parameter_name", "") == "weight"  # a router's, mostly
    return isinstance(base, nn.Linear) or (of_weight and base.weight.ndim == 2)


def is_factor(name: str) -> bool:
    """True for the name of an adapter's A or B, which stays in float32 until it is merged."""
    return _A in name or _B in name


def merged(parameters: Iterable[tuple[str, Tensor]], scale: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters in the model's order, as those of the model without adapters, in ``dtype``. Holds one layer's
    weight at a time: its factors come right behind it."""
    held: list[tuple[str, Tensor]] = []
    a = torch.empty(0)
    for name, tensor in parameters:
        if _BASE in name:
            held.append((name.replace(_BASE, "."), tensor))
        elif _A in name:
            a = tensor
        elif _B in name:
            weight, whole = held[0]
            held[0] = (weight, whole.float() + scale * (tensor.float() @ a.float()))
            yield from ((n, t.to(dtype)) for n, t in held)
            held = []
        else:
            yield name, tensor.to(dtype)
