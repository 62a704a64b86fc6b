"""How a text game speaks with the model: as bare text behind a prompt mark, or in chat messages."""

from __future__ import annotations

import re
from typing import Literal

from asyncrl.env import Observation

Style = Literal["plain", "chat"]
ACTION = re.compile(r"^\W*action\s*:\W*(?P<command>.*?)[\s*`.]*$", re.IGNORECASE | re.MULTILINE)


class Dialogue:
    """``plain``: text with a ``>`` behind it, and a reply's first line is the command. ``chat``: user messages, and the
    command is what stands behind the last ``Action:``."""

    def __init__(self, style: Style) -> None:
        if style not in ("plain", "chat"):
            raise ValueError(f"env.kwargs.style = {style!r}: must be plain or chat")
        self.is_chat = style == "chat"

    def say(self, text: str, *, first: bool = False) -> Observation | str:
        if self.is_chat:
            return Observation(messages=[{"role": "user", "content": text}])
        return f"{text}\n>" if first else f"\n{text}\n>"

    def read(self, reply: str) -> str:
        return read_action(reply) if self.is_chat else reply.strip().partition("\n")[0].strip()


def read_action(text: str) -> str:
    """The command of a ReAct-style reply, behind its last ``Action:``; empty if it has none."""
    found = ACTION.findall(text.rpartition("</think>")[2])
    return found[-1].strip() if found else ""
