"""What ``asyncrl env check`` holds an environment's answers against. Each finding is (what is wrong, what to do)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.env import Observation, Step

Finding = tuple[str, str]
ROLES = ("system", "user", "assistant", "tool")


def wrong_observation(observation: Any, *, first: bool) -> Iterator[Finding]:
    if isinstance(observation, str):
        observation = Observation(text=observation)
    if not isinstance(observation, Observation):
        yield f"gave {type(observation).__name__} as observation", "give text or an asyncrl.Observation"
        return
    if not isinstance(observation.text, str):
        yield f"gave {type(observation.text).__name__} as the observation's text", "text is a str"
        return
    for name, given in (("messages", observation.messages), ("tools", observation.tools)):
        if not isinstance(given, (list, tuple)):
            yield f"gave {type(given).__name__} as the observation's {name}", "give a list"
            return
    if observation.text and observation.messages:
        yield "gave both text and messages", "give one of them"
    if not observation.text and not observation.messages:
        yield "gave an empty observation", "say something: the model continues from it"
    for message in observation.messages:
        yield from _wrong_message(message)
    if observation.tools and not first:
        yield "gave tools after the first observation", "give them with reset's: only those go to the template"
    for tool in observation.tools:
        yield from _wrong_tool(tool)


def _wrong_message(message: Any) -> Iterator[Finding]:
    if not isinstance(message, Mapping):
        yield f"gave {type(message).__name__} as a message", 'write {"role": "user", "content": "…"}'
        return
    if message.get("role") not in ROLES:
        yield f"gave a message with role {message.get('role')!r}", f"roles are {', '.join(ROLES)}"
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
        yield f"gave a message with {type(content).__name__} as content", "content is text"


def _wrong_tool(tool: Any) -> Iterator[Finding]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        yield (
            "gave a tool that is none of OpenAI's",
            'write {"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema}}',
        )
        return
    schema = function.get("parameters")
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        yield f"tool {function['name']}: parameters are no JSON schema of an object", 'begin with {"type": "object", …}'
        return
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(p, Mapping) for p in properties.values()):
        yield f"tool {function['name']}: properties are no JSON schemas", 'write {"properties": {NAME: {"type": …}}}'
    elif not isinstance(required := schema.get("required", []), (list, tuple)):
        yield f"tool {function['name']}: required is {type(required).__name__}", "list the names of properties"
    elif missing := [name for name in required if name not in properties]:
        yield f"tool {function['name']}: requires {missing[0]!r}, which has no schema", "describe it in properties"


def wrong_step(step: Any) -> Iterator[Finding]:
    if not isinstance(step, Step):
        yield f"returned {type(step).__name__}", "return asyncrl.Step"
        return
    yield from wrong_reward(step.reward)
    if not isinstance(step.done, bool):
        yield f"gave {type(step.done).__name__} as done", "done is True or False"
    metrics = step.metrics if isinstance(step.metrics, Mapping) else {}
    if metrics is not step.metrics:
        yield f"gave {type(step.metrics).__name__} as metrics", "give a dict of numbers"
    for name, value in metrics.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            yield f"gave {value!r} as metric {name!r}", "metrics are finite numbers"
    if step.done is not True:
        yield from wrong_observation(step.observation, first=False)


def wrong_reward(reward: Any) -> Iterator[Finding]:
    try:
        finite = math.isfinite(float(reward))
    except (TypeError, ValueError):
        yield f"gave {reward!r:.40} as the reward", "it must be a number"
        return
    if not finite:
        yield f"gave {reward} as the reward", "it must be finite"
