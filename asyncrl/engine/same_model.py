"""Whether a server's model can take the weights that are trained. SGLang does not ask: tensors of other
shapes end it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.wire import ModelInfo, ServerInfo

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)
"""In config.json."""


def difference(model_type: str | None, folder: str, server: ServerInfo, theirs: ModelInfo) -> str:
    """What a server serves that is another model than the recipe's, of ``model_type`` in ``folder`` (None, empty: not
    known); empty where nothing says so. Sizes are compared where the folder that the server was started with can be
    read from here: what it was given since may be weights alone, or gone."""
    path = server.model_path or theirs.model_path
    if model_type is not None and theirs.model_type != model_type:
        return f"serves a {theirs.model_type} model ({path}), the recipe trains a {model_type}"
    ours, other = _config(folder), _config(path)
    for key in SIZES:
        if key in ours and key in other and ours[key] != other[key]:
            return f"serves a model with {key} = {other[key]} ({path}), the recipe's has {ours[key]}"
    return ""


def _config(folder: str) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        table = json.loads((Path(folder) / "config.json").read_text())
        if isinstance(table, dict):
            return {**table, **table.get("text_config", {})}
    return {}
