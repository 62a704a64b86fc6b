"""What a model folder says of its architecture, and whether this engine can serve it.

``read_spec`` turns a Hugging Face ``config.json`` (and ``generation_config.json``) into a frozen ``ModelSpec``, or
raises ``ServeError`` with one line that names the folder and the remedy. Imports no torch, so that a bad folder is
refused at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.core.types import Record


class ServeError(Exception):
    """The server cannot start, or refuses what it was asked; one line with the remedy."""


class RopeSpec(Record, frozen=True, kw_only=True):
    """Rotary embedding: ``default``, ``linear`` (positions divided by ``factor``) or ``llama3`` (by wavelength)."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class ModelSpec(Record, frozen=True, kw_only=True):
    """Shape of a decoder-only model of the Llama family. ``heads`` are query heads, ``kv_heads`` divide them."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    context_length: int
    eos_ids: frozenset[int]

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads


_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def read_spec(folder: Path) -> ModelSpec:
    """Read ``folder``/config.json. Raises ``ServeError`` for a bad folder or an architecture not served here."""
    if not folder.is_dir():
        raise ServeError(f"{folder}: no such model folder; give the path of a Hugging Face model folder")
    config = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    model_type = str(config.get("model_type", ""))
    architecture = _ARCHITECTURES.get(model_type)
    if architecture is None:
        named = ", ".join(config.get("architectures") or []) or model_type or "no model_type"
        raise ServeError(f"{folder}: {named} is not served by the embedded engine; use one of "
                         f"{', '.join(_ARCHITECTURES.values())}, or engine.kind = \"sglang\"")  # fmt: skip
    _refuse_unsupported(folder, config)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        spec = ModelSpec(
            model_type=model_type,
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(folder, config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2" or bool(config.get("attention_bias", False)),
            out_bias=model_type != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
            context_length=int(config["max_position_embeddings"]),
            eos_ids=_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
        )
    except KeyError as error:
        raise ServeError(f"{folder}/config.json: no key {error}; is this a {architecture} folder?") from None
    except (TypeError, ValueError) as error:
        raise ServeError(f"{folder}/config.json: {error}") from None
    if spec.heads % spec.kv_heads or spec.head_dim % 2:
        raise ServeError(f"{folder}/config.json: num_key_value_heads {spec.kv_heads} must divide num_attention_heads "
                         f"{spec.heads}, and head_dim {spec.head_dim} must be even")  # fmt: skip
    return spec


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise ServeError(f"{path.parent}: no {path.name}; give the path of a Hugging Face model folder") from None
        return {}
    except (OSError, ValueError) as error:
        raise ServeError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ServeError(f"{path}: must hold a JSON object")
    return value


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    if config.get("quantization_config"):
        raise ServeError(f"{folder}: quantised weights are not served; use the unquantised model")
    if config.get("use_sliding_window"):
        raise ServeError(f"{folder}: sliding-window attention is not served; set use_sliding_window to false")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ServeError(f"{folder}: hidden_act {act!r} is not served; the embedded engine knows silu only")


def _rope(folder: Path, config: dict[str, Any]) -> RopeSpec:
    """Both spellings: transformers 5's ``rope_parameters``, and ``rope_theta`` beside ``rope_scaling`` before it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, factor=float(scaling["factor"]))
    if kind == "llama3":
        return RopeSpec(
            kind=kind,
            theta=theta,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context=int(scaling["original_max_position_embeddings"]),
        )
    raise ServeError(f"{folder}: rope type {kind!r} is not served; the embedded engine knows default, linear, llama3")


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))
