"""The simulated tokenizer: bytes are ids; generated ids, which count down (sim/engine.py), are no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.sim.engine import GENERATED


class SimTokenizer:
    """Ids below ``GENERATED`` are bytes of text."""

    eos_ids: Sequence[int] = (GENERATED,)
    chat_template = "<role>content"
    vocab_size = GENERATED + 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def beginning(self, text: str, tokens: int) -> str:
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """The runtime decodes stretches that are either text or generated, so the ends tell which; a look at every id
        of every response would cost more than all the rest of a simulation."""
        if ids and ids[0] >= GENERATED and ids[-1] >= GENERATED:
            return ""
        return bytes(i for i in ids if i < GENERATED).decode(errors="replace")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        text = "".join(f"<tool>{tool['function']['name']}\x00" for tool in tools)
        text += "".join(f"<{m['role']}>{m['content']}\x00" for m in messages)
        return text + "<assistant>" if add_generation_prompt else text
