"""The Tokenizer port over transformers' fast tokenizers. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import RecipeError


class HuggingFaceTokenizer:
    """Tokenizer of a model folder. Raises ``RecipeError`` if the folder has none."""

    def __init__(self, folder: Path) -> None:
        # The class behind every fast tokenizer; AutoTokenizer would import torch to find it.
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            raise RecipeError(f"model.path: no tokenizer.json in {folder}; give a folder saved by save_pretrained")
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.eos_ids = _eos_ids(folder, self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; observations must be plain text")
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The ids that end generation: generation_config.json's, config.json's and the tokenizer's."""
    ids: list[int] = [] if tokenizer_eos is None else [tokenizer_eos]
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(ids))
