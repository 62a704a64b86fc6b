"""Tool calls as the usual families of models write them; what cannot be read says why."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.runtime.tool_calls import Parser, parse_tool_calls, parser_for, without_tool_calls

LS = ("bash", {"command": "ls"})


def read(text: str, parser: Parser) -> list[tuple[str, Any]]:
    calls = parse_tool_calls(text, parser)
    assert not any(call.error for call in calls), calls
    return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', [LS]),
        ("hermes", 'I look.\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call> so', [LS]),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', [LS]),
        ("hermes", '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>', [LS]),
        ("hermes", '<tool_call>{"name": "look"}</tool_call><tool_call>{"name": "go"}', [("look", {}), ("go", {})]),
        (
            "hermes",
            "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            [("bash", {"command": "ls", "n": 3})],
        ),
        ("hermes", "<think>\n<tool_call>{</tool_call>\n</think>\n\nIt is 4.", []),
        ("hermes", '{"name": "bash", "arguments": {}}', []),
        ("json", '{"name": "bash", "parameters": {"command": "ls"}}', [LS]),
        ("json", '[{"name": "bash", "arguments": {"command": "ls"}}, {"name": "go"}]', [LS, ("go", {})]),
        ("json", '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "go"}', [LS, ("go", {})]),
        ("json", '{"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}', [LS]),
        ("json", '```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```', [LS]),
        ("json", "The answer is {4}.", []),
        ("json", "[1, 2]", []),
        ("json", "", []),
        ("pythonic", "[bash(command='ls'), add(a=1, b=[2.5, None])]", [LS, ("add", {"a": 1, "b": [2.5, None]})]),
        ("pythonic", "[fs.look()]", [("fs.look", {})]),
        ("pythonic", '{"name": "bash", "parameters": {"command": "ls"}}', [LS]),
        ("pythonic", "[I would (perhaps) go]", []),
        ("none", '{"name": "bash", "parameters": {}}', []),
    ],
)
def test_calls_are_read(parser: Parser, text: str, calls: list[tuple[str, Any]]) -> None:
    assert read(text, parser) == calls


@pytest.mark.parametrize(
    ("parser", "text", "name", "why"),
    [
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"comm', "", "no valid JSON"),
        ("hermes", "<tool_call></tool_call>", "", "empty"),
        ("hermes", "<tool_call>[3]</tool_call>", "", "an object"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": [1]}</tool_call>', "bash", "no JSON object"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "bash", "no JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "", "no valid JSON"),
        ("json", '{"name": "bash", "parameters": {"command": "ls', "", "no valid JSON"),
        ("pythonic", "[bash(command='ls'", "", "no valid Python"),
        ("pythonic", "[bash('ls')]", "bash", "name=value"),
        ("pythonic", "[bash(1is 1)]", "bash", "name=value"),
        ("pythonic", "[bash(**x)]", "bash", "name=value"),
        ("pythonic", "[bash(command=ls)]", "bash", "plain value"),
        ("pythonic", "[bash(command=__import__('os').getcwd())]", "bash", "plain value"),
    ],
)
def test_what_cannot_be_read_says_why(parser: Parser, text: str, name: str, why: str) -> None:
    [call] = parse_tool_calls(text, parser)
    assert (call.name, call.arguments) == (name, {}) and why in call.error and "\n" not in call.error


@pytest.mark.parametrize(
    ("parser", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>', "half of a surrogate pair"),
        ("json", '{"name": "f", "arguments": {"\\udcff": 1}}', "half of a surrogate pair"),
        ("pythonic", "[f(x='\\ud83d')]", "half of a surrogate pair"),
        ("pythonic", "[f(x=1j)]", "not a plain value"),
        ("pythonic", "[f(x=...)]", "not a plain value"),
        ("pythonic", "[f(x=b'a')]", "not a plain value"),
        ("pythonic", "[f(x={(1, 2): 3})]", "not a plain value"),
    ],
)
def test_what_no_json_can_say_is_the_call_s_error(parser: Parser, text: str, why: str) -> None:
    [call] = parse_tool_calls(text, parser)
    assert (call.name, call.arguments) == ("f", {}) and why in call.error


def test_a_name_that_is_no_text() -> None:
    [call] = parse_tool_calls('{"name": "f\\ud83d", "arguments": {"x": 1}}', "json")
    assert (call.name, call.arguments) == ("f?", {}) and call.error


def test_whole_numbers_may_be_large() -> None:
    [call] = parse_tool_calls(f'{{"name": "f", "arguments": {{"x": {2**100}}}}}', "json")
    assert (call.arguments, call.error) == ({"x": 2**100}, "")


def test_ids_count_and_are_what_the_strictest_templates_take() -> None:
    calls = parse_tool_calls('{"name": "a"} {"name": "b"}', "json", turn=12)
    assert [call.id for call in calls] == ["call01200", "call01201"]


def test_what_was_said_beside_the_calls() -> None:
    text = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "a"}\n</tool_call>'
    assert without_tool_calls(text, "hermes") == "<think>\nhm\n</think>\n\nI look."
    assert without_tool_calls('{"name": "a"}', "json") == ""


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("… return within <tool_call></tool_call> tags: …", "hermes"),
        ('… Respond in the format {"name": function name, "parameters": …}', "json"),
        ("… in the format [func_name1(params_name1=params_value1, …), func_name2(params)]", "pythonic"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "json"),
    ],
)
def test_the_template_tells_the_family(template: str, parser: Parser) -> None:
    assert parser_for(template) == parser


REPEATED = (
    "\n",
    " \n",
    "```\n",
    "```json\n",
    "<tool_call>",
    "<parameter=a>",
    "<parameter=",
    "</function>x",
    "[",
    "f(",
    "-",
)


@given(
    st.lists(st.characters() | st.sampled_from(REPEATED)).map("".join), st.sampled_from(["hermes", "json", "pythonic"])
)
@example("a={[]: 1})]", "pythonic")
@example("a=1), " + "-" * 2000 + "1]", "pythonic")
def test_no_text_breaks_the_parser(text: str, parser: Parser) -> None:
    for start in ("", "<tool_call>", '{"name": ', "[f("):
        parse_tool_calls(start + text, parser)


@pytest.mark.parametrize("repeated", REPEATED)
@pytest.mark.parametrize("parser", ["hermes", "json", "pythonic"])
def test_a_model_that_repeats_itself_is_read_at_once(repeated: str, parser: Parser) -> None:
    """It would hold the event loop, and all other episodes with it."""
    began = time.process_time()
    parse_tool_calls("<tool_call><function=f>" + repeated * 20_000 + "</function></tool_call>", parser)
    parse_tool_calls(repeated * 20_000 + "x", parser)
    assert time.process_time() - began < 1
