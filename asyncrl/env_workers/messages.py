"""Messages between the controller and a worker process: msgpack, each behind its length (4 bytes, big-endian)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.core.types import Record, Task
from asyncrl.env import Action, Observation, Step

LENGTH_BYTES = 4


class Reset(Record, frozen=True, kw_only=True, tag=True):
    """Begin an episode in object ``env``, which is made if there is none yet."""

    call: int
    env: int
    task: Task


class Act(Record, frozen=True, kw_only=True, tag=True):
    """``arguments``: those of the action's tool calls, as JSON, as msgpack has no whole numbers beyond 64 bits."""

    call: int
    env: int
    action: Action
    arguments: str

    @classmethod
    def of(cls, action: Action, *, call: int, env: int) -> Act:
        """Raises ``TypeError`` for arguments that are no plain data."""
        arguments = json.dumps([dict(c.arguments) for c in action.tool_calls])
        return cls(call=call, env=env, action=_with_arguments(action, repeat({})), arguments=arguments)

    def whole(self) -> Action:
        """The action as it was."""
        return _with_arguments(self.action, json.loads(self.arguments))


class Close(Record, frozen=True, kw_only=True, tag=True):
    call: int
    env: int


class Interrupt(Record, frozen=True, kw_only=True, tag=True):
    """Nobody waits for ``call`` any more."""

    call: int


Call = Reset | Act | Close


class Answer(Record, frozen=True, kw_only=True, tag=True):
    """What the method returned; of ``close``, neither."""

    observation: Observation | str | None = None
    step: Step | None = None


class Raised(Record, frozen=True, kw_only=True, tag=True):
    """What the method raised, in one line, and its traceback. ``down``: it was ``EnvDown``."""

    error: str
    details: str
    down: bool


def _with_arguments(action: Action, arguments: Iterable[Mapping[str, Any]]) -> Action:
    calls = [replace(call, arguments=its) for call, its in zip(action.tool_calls, arguments, strict=False)]
    return replace(action, tool_calls=calls) if calls else action


def encode(message: Record) -> bytes:
    """Raises ``TypeError`` for what is no plain data."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _plain(value: Any) -> Any:
    """Arrays and NumPy scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain data (text, numbers, lists, dicts)")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
decode_order = msgspec.msgpack.Decoder(Reset | Act | Close | Interrupt).decode
decode_answer = msgspec.msgpack.Decoder(Answer | Raised).decode
