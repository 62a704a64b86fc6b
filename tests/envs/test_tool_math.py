"""Tool-using maths: what a model may run, what it is told, and when its answer counts."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import Action, EnvDown, Observation, Step, Task, ToolCall
from asyncrl.config import EnvConfig
from asyncrl.envs.maths import parse_row
from asyncrl.envs.tool_math import MAX_CALLS, TOOLS, ToolMath
from asyncrl.loading import load_environment

TASK = Task(id="t", data=parse_row({"question": "What is 6 times 7?", "answer": "#### 42"}))
Begin = Callable[..., Awaitable[ToolMath]]

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """An episode of TASK."""
    envs: list[ToolMath] = []

    async def made(**kwargs: Any) -> ToolMath:
        envs.append(ToolMath(**kwargs))
        await envs[-1].reset(TASK)
        return envs[-1]

    yield made
    for env in envs:
        await env.close()


def said(text: str, turn: int = 0) -> Action:
    return Action(text=text, token_ids=[], finish_reason="stop", turn=turn)


def program(code: str, turn: int = 0) -> Action:
    return said(f"Let me see.\n```python\n{code}\n```", turn)


def call(*calls: ToolCall) -> Action:
    return Action(text="", token_ids=[], finish_reason="stop", tool_calls=calls)


def python(code: str) -> ToolCall:
    return ToolCall(id="c", name="python", arguments={"code": code})


def text_of(step: Step) -> str:
    assert isinstance(step.observation, Observation) and not step.done
    return step.observation.text


async def test_the_first_prompt_of_each_protocol() -> None:
    tools = await ToolMath(protocol="tools").reset(TASK)
    assert tools.messages == TASK.data["prompt"] and tools.tools == TOOLS
    fenced = await ToolMath(protocol="fenced").reset(TASK)
    assert "```python" in fenced.messages[0]["content"] and not fenced.tools
    assert TASK.data["prompt"][0]["content"] in fenced.messages[0]["content"]
    text = await ToolMath(protocol="text").reset(TASK)
    assert text.text == "What is 6 times 7?" and not text.messages
    with pytest.raises(ValueError, match="protocol must be"):
        ToolMath(protocol="xml")  # type: ignore[arg-type]


@needs_bubblewrap
async def test_a_program_is_run_and_the_answer_judged(begin: Begin) -> None:
    env = await begin(protocol="text")
    assert text_of(await env.step(program("print(6 * 7)"))) == "\n```output\n42\n```\n"
    step = await env.step(said("#### 42", turn=1))
    assert step.done and step.reward == 1.0
    assert step.metrics.pop("tool_s") > 0  # type: ignore[attr-defined]
    assert step.metrics == {"solved": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}


@needs_bubblewrap
async def test_tool_calls_are_answered_one_by_one(begin: Begin) -> None:
    env = await begin()
    wrong = [ToolCall(id="n", name="bash", arguments={"code": "1"}), ToolCall(id="a", name="python")]
    unread = ToolCall(id="e", name="python", error="the call is no valid JSON")
    step = await env.step(call(python("print(1)"), *wrong, unread, python("print(2)")))
    assert isinstance(step.observation, Observation)
    told = [(m["role"], m["tool_call_id"], m["content"]) for m in step.observation.messages]
    assert told == [
        ("tool", "c", "1\n"),
        ("tool", "n", "[not run: no tool 'bash'; call python with code]\n"),
        ("tool", "a", "[not run: code must be text; call python with code]\n"),
        ("tool", "e", "[not run: the call is no valid JSON; call python with code]\n"),
        ("tool", "c", f"[not run: at most {MAX_CALLS} calls in a turn]\n"),
    ]
    step = await env.step(said(r"\boxed{41}"))
    assert step.done and step.reward == 0.0
    assert (step.metrics["tool_calls"], step.metrics["tool_errors"]) == (4.0, 3.0)


@needs_bubblewrap
async def test_what_goes_wrong_in_a_program_is_told(begin: Begin) -> None:
    env = await begin(protocol="text", timeout_s=1.5, output_bytes=200)
    assert "ZeroDivisionError" in text_of(await env.step(program("1 / 0")))
    assert "[killed: no end within 1.5 s]" in text_of(await env.step(program("while True: pass")))
    long = text_of(await env.step(program("print('x' * 100_000)")))
    assert "bytes left out" in long and len(long) < 400
    assert "[no output]" in text_of(await env.step(program("")))
    assert "[exit code 3]" in text_of(await env.step(program("raise SystemExit(3)")))
    assert "unreachable" in text_of(await env.step(program("import socket; socket.create_connection(('1.1.1.1', 80))")))


@needs_bubblewrap
async def test_episodes_do_not_see_each_others_files(begin: Begin) -> None:
    one, other = await begin(protocol="text"), await begin(protocol="text")
    await one.step(program("open('note', 'w').write('42')"))
    assert text_of(await one.step(program("print(open('note').read())"))) == "\n```output\n42\n```\n"
    assert "FileNotFoundError" in text_of(await other.step(program("print(open('note').read())")))


async def test_only_a_whole_block_outside_of_thoughts_is_a_program(begin: Begin) -> None:
    for text in ("```python\nprint(42)", "<think>\n```python\nprint(42)\n```\n</think>\n", "`python`", ""):
        step = await (await begin(protocol="text")).step(said(text))
        assert step.done and step.reward == 0.0 and step.metrics["tool_calls"] == 0.0


async def test_the_last_turn_is_the_answer_even_with_a_call(begin: Begin) -> None:
    env = await begin(protocol="text", turns=3)
    step = await env.step(said("```python\nprint(1)\n```\n\\boxed{42}", turn=2))
    assert step.done and step.reward == 1.0 and step.metrics["tool_calls"] == 0.0


async def test_without_bubblewrap_it_says_what_to_install(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    env = await begin(protocol="text")
    with pytest.raises(EnvDown, match="no bwrap here; install bubblewrap"):
        await env.step(program("print(1)"))


def test_the_recipes_environment_reads_rows_of_maths(tmp_path: Path) -> None:
    environment = load_environment(EnvConfig(target="asyncrl.envs.tool_math:ToolMath"))
    assert environment.parse_row is not None
    assert environment.parse_row({"question": "1+1?", "answer": "#### 2"})["answer"] == "2"
