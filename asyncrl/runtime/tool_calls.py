"""The tool calls in what a model wrote, for the usual families of models.

Chat templates teach a model how to write a call, and a parser for it has to know the same. Stock tokenizers do not say
how (transformers' ``response_template`` is not in the models' folders), so the family is read off the template:

    hermes     ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` anywhere in the text (Qwen, Hermes), or with
               ``<function=…><parameter=…>`` inside (Qwen3-Coder, Qwen3.5)
    json       the whole reply is one such object, several of them, or a list (Llama 3, Mistral)
    pythonic   the whole reply is ``[name(argument=value), …]`` (Llama 3.2 and 4)

Whatever a model writes is read in time linear in its length, and nothing it writes raises.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any, Literal

from asyncrl.env import ToolCall

Parser = Literal["hermes", "json", "pythonic", "none"]

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_LOOKS_LIKE_JSON_CALL = re.compile(r'\[?\s*\{\s*"(name|type|function|parameters|arguments)"')
_LOOKS_LIKE_PYTHON_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_FENCE = re.compile(r"```(?:json|python|tool_code)?[ \t]*\n")


def parser_for(template: str) -> Parser:
    """The family that a chat template teaches."""
    if "<tool_call>" in template:
        return "hermes"
    if re.search(r"\[\w*func\w*\(\w+=", template):
        return "pythonic"
    return "json"


def parse_tool_calls(text: str, parser: Parser, turn: int = 0) -> list[ToolCall]:
    """The calls in ``text``, in order; one that cannot be read has ``error``. An answer without a call gives none. Ids
    count turn and call in nine letters and digits, which is what the strictest templates (Mistral's) ask for."""
    said = text.rpartition("</think>")[2]  # what was only thought of is no call
    if parser == "none":
        return []
    read = {"hermes": _hermes, "json": _json, "pythonic": _pythonic}[parser]
    return [
        ToolCall(id=f"call{turn % 1000:03d}{i % 100:02d}", name=name, arguments=arguments, error=error)
        for i, (name, arguments, error) in enumerate(starmap(_plain, read(said)))
    ]


def without_tool_calls(text: str, parser: Parser) -> str:
    """What was said beside the calls, for interfaces that keep the two apart."""
    if parser == "hermes":
        thought, end, said = text.rpartition("</think>")
        return (thought + end + _BLOCK.sub("", said)).strip()
    return ""


_Call = tuple[str, Mapping[str, Any], str]


def _plain(name: str, arguments: Mapping[str, Any], error: str) -> _Call:
    """The call itself, if it can be passed on as JSON."""
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return name.encode(errors="replace").decode(), {}, "half of a surrogate pair is no text"
    except (ValueError, TypeError, RecursionError):
        return name, {}, "an argument is not a plain value"
    return name, arguments, error


def _hermes(text: str) -> Iterator[_Call]:
    for block in _BLOCK.finditer(text):
        body = block.group(1)
        if function := _FUNCTION.match(body):
            yield function.group(1).strip(), dict(_parameters(function.group(2))), ""
        else:
            yield from _objects(body)


def _parameters(text: str) -> Iterator[tuple[str, Any]]:
    at = 0
    while (opened := _PARAMETER.search(text, at)) and (at := text.find("</parameter>", opened.end())) >= 0:
        yield opened.group(1), _value(text[opened.end() : at].removesuffix("\n"))


def _unfenced(text: str) -> str:
    """What stands in the code block that ends a text; all of it where none does."""
    body = text.strip()
    opened = _FENCE.search(body, 0, len(body) - 3) if body.endswith("```") else None
    return body[opened.end() : -3].strip() if opened else body


def _json(text: str) -> Iterator[_Call]:
    body = _unfenced(text)
    if _LOOKS_LIKE_JSON_CALL.match(body):
        yield from _objects(body)


def _pythonic(text: str) -> Iterator[_Call]:
    body = _unfenced(text)
    if not _LOOKS_LIKE_PYTHON_CALL.match(body):
        yield from _json(text)  # these models write JSON too
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of the model's Python
            listed = ast.parse(body, mode="eval").body
        calls = [_python_call(call) for call in (listed.elts if isinstance(listed, ast.List) else ())]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        calls = [("", {}, f"the call is no valid Python: {error}")]
    yield from calls


def _python_call(call: ast.expr) -> _Call:
    if not isinstance(call, ast.Call):
        return "", {}, f"not a call: {ast.unparse(call)[:100]}"
    name = ast.unparse(call.func)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return name, {}, "write every argument as name=value"
    try:
        return name, {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}, ""
    except (ValueError, TypeError):
        return name, {}, "an argument is not a plain value"


def _objects(text: str) -> Iterator[_Call]:
    """Every call of a run of JSON objects or lists, which may stand apart by blanks, commas or semicolons."""
    decoder, at = json.JSONDecoder(), 0
    body = text.strip()
    if not body:
        yield "", {}, "the call is empty"
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            yield "", {}, f"the call is no valid JSON: {error}"
            return
        for one in value if isinstance(value, list) else [value]:
            yield _call(one)
        while at < len(body) and body[at] in " \t\r\n,;":
            at += 1


def _call(value: Any) -> _Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "", {}, 'a call is an object {"name": …, "arguments": {…}}'
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return value["name"], {}, "the arguments are no JSON object"
    return value["name"], arguments, ""


def _value(text: str) -> Any:
    """A parameter as JSON, or else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
