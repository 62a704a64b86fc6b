"""How a text game speaks with the model: as bare text behind a prompt mark, or in chat messages. Replies are read in
time linear in their length, whatever the model wrote."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Literal

from asyncrl.env import Observation

Style = Literal["plain", "chat"]
ACTION = re.compile(r"^[^\w\n]*action[^\S\n]*:\W*(?P<command>.*)$", re.IGNORECASE | re.MULTILINE)


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
    return found[-1].rstrip(" \t\r*`.") if found else ""


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The closed code blocks of a text: what stands behind the opening fence, and the lines inside."""
    info, lines = "", list[str]()
    for line in io.StringIO(text):
        fence = line.rstrip()
        if not info:
            info, lines = fence[3:] if fence.startswith("```") and fence[3:4].isalnum() else "", []
        elif fence == "```":
            yield info, "".join(lines)
            info = ""
        else:
            lines.append(line)
