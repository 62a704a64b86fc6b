"""The Tokenizer port over transformers' fast tokenizers. Loads no torch."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
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
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        except Exception as error:  # the Rust library raises nothing narrower
            raise RecipeError(f"model.path: cannot load the tokenizer in {folder}: {_one_line(error)}") from None
        # Encoding and decoding go straight to the Rust tokenizer; the wrapper around it costs several times as much.
        self._fast = self._tokenizer.backend_tokenizer
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self.eos_ids = _eos_ids(folder, self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ValueError(f"no text that can be encoded: {text!r:.100}") from None
        return ids

    def beginning(self, text: str, tokens: int) -> str:
        if len(text) <= tokens or self._longest is None or len(text) <= (most := tokens * self._longest):
            return text
        # A character is composed of four at most.
        return unicodedata.normalize("NFC", text[: 4 * most])[:most] if self._composes else text[:most]

    @cached_property
    def _longest(self) -> int | None:
        """The most characters that a token stands for. None where more of a text can vanish: all but BPE over all bytes
        pass over what they do not know, other normalizers shorten, and some added tokens take the blanks around."""
        from tokenizers.pre_tokenizers import ByteLevel

        state = json.loads(self._fast.to_str())
        model, added = state["model"], state["added_tokens"]
        normalizers, splits = _steps(state["normalizer"]), _steps(state["pre_tokenizer"])
        if any(split["type"] == "ByteLevel" for split in splits):
            every_byte = ByteLevel.alphabet()
        else:
            every_byte = [f"<0x{i:02X}>" for i in range(256)] if model.get("byte_fallback") else [""]
        if model["type"] != "BPE" or not all(byte in model["vocab"] for byte in every_byte):
            return None
        if not all(map(_keeps_length, normalizers + splits)) or any(t["lstrip"] or t["rstrip"] for t in added):
            return None
        return max(map(len, [*model["vocab"], *(token["content"] for token in added)]))

    @cached_property
    def _composes(self) -> bool:
        state = self._fast.normalizer
        return state is not None and any(s["type"] == "NFC" for s in _steps(json.loads(state.__getstate__())))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def chat_template(self) -> str:
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())  # several, by name

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template; observations must be plain text")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program, and the messages are a user's
            raise ValueError(f"the chat template refuses the messages: {_one_line(error)}") from error
        return text


def _steps(state: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if state is None:
        return []
    parts = state.get("normalizers", state.get("pretokenizers")) if state["type"] == "Sequence" else None
    return [state] if parts is None else [step for part in parts for step in _steps(part)]


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether no text has fewer characters behind it (but for NFC)."""
    match step["type"]:
        case "ByteLevel" | "NFC" | "Digits" | "Metaspace" | "Prepend":
            return True
        case "Split":
            return bool(step["behavior"] != "Removed")
        case "Replace":
            return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + "x"))
    return False


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The ids that end generation: generation_config.json's, config.json's and the tokenizer's."""
    ids: list[int] = [] if tokenizer_eos is None else [tokenizer_eos]
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            try:
                eos = json.loads(file.read_text()).get("eos_token_id")
            except (ValueError, AttributeError):
                raise RecipeError(f"model.path: {file} is not a JSON object") from None
            ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(ids))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
