"""Actions for ``asyncrl env check``: scripted where somebody wrote some, else drawn from what a model might say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.env import Action, Observation, Task, ToolCall

ODD = ("", " ", "\n", "yes", "0", "-1", "{}", "<think>\n\n</think>", "é漢字🙂", "\x00", "a" * 20_000)
"""What a model says when it does not know what to say."""


class Actor:
    """``examples`` are actions that the environment understands: a list, or a function of the task."""

    def __init__(self, examples: Sequence[str] | Callable[[Task], Sequence[str]], rng: random.Random) -> None:
        self._examples = examples
        self._rng = rng

    def script(self, task: Task) -> list[str]:
        return list(self._examples(task) if callable(self._examples) else self._examples)

    def drawn(self, task: Task, observation: Observation | str, tools: Sequence[Any], turn: int) -> Action:
        """A random action: one that was given, words of the observation, a call of a tool, or something odd."""
        rng, script = self._rng, self.script(task)
        shown = observation if isinstance(observation, str) else observation.text
        if not isinstance(observation, str):
            shown += " ".join(str(m.get("content", "")) for m in observation.messages if isinstance(m, dict))
        words = shown.split() or ["?"]
        sayings: list[Callable[[], str]] = [
            lambda: rng.choice(ODD),
            lambda: " ".join(rng.choices(words, k=rng.randint(1, 4))),
        ]
        if script:
            sayings += [lambda: rng.choice(script)] * 4
        calls: list[ToolCall] = []
        if tools and rng.random() < 0.7:
            calls.append(self._call(rng.choice(tools), turn))
        return said(rng.choice(sayings)(), turn, calls)

    def _call(self, tool: Any, turn: int) -> ToolCall:
        function = tool.get("function", {}) if isinstance(tool, dict) else {}
        name = str(function.get("name", ""))
        if self._rng.random() < 0.2:
            return ToolCall(id=f"call {turn}", name=name, error="the arguments are not JSON")
        if self._rng.random() < 0.1:
            return ToolCall(id=f"call {turn}", name="no_such_tool", arguments={})
        return ToolCall(id=f"call {turn}", name=name, arguments=self._value(function.get("parameters", {})))

    def _value(self, schema: Any) -> Any:
        """Something that a JSON schema allows, or nearly."""
        rng = self._rng
        if not isinstance(schema, dict):
            return "x"
        if schema.get("enum"):
            return rng.choice(list(schema["enum"]))
        match schema.get("type"):
            case "object":
                needed = schema.get("required", ())
                properties = schema.get("properties", {}).items()
                return {name: self._value(s) for name, s in properties if name in needed or rng.random() < 0.5}
            case "array":
                return [self._value(schema.get("items")) for _ in range(rng.randint(0, 3))]
            case "integer":
                return rng.randint(-1, 10)
            case "number":
                return rng.uniform(-1, 10)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return rng.choice(["x", "", "ls", "1 + 1"])


def said(text: str, turn: int, calls: Sequence[ToolCall] = (), *, finish_reason: str = "stop") -> Action:
    ids = [ord(c) % 1000 for c in text[:100]] or [0]
    return Action(text=text, token_ids=ids, finish_reason=finish_reason, turn=turn, tool_calls=calls)
