"""Agent programs in processes of their own, over the gateway; at the end with mini-swe-agent, where it is installed.

python -m venv /tmp/mini && /tmp/mini/bin/pip install mini-swe-agent==2.4.6 mcp
MINI_SWE_AGENT=/tmp/mini/bin/mini python -m pytest tests/runtime/test_program.py
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.env import Agent, EnvDown
from asyncrl.envs.program import MAX_OUTPUT, Finished, run_program

from .speaking import Answer
from .test_gateway import play
from .test_rollout import Played

PROGRAM = str(Path(__file__).with_name("agent_program.py"))
MINI = os.environ.get("MINI_SWE_AGENT") or shutil.which("mini")


def children() -> set[str]:
    """Process ids of the programs' own children."""
    return {
        file.parent.name
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if b"import time; time.sleep(60)" in _read(file)
    }


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    deadline = time.monotonic() + 10
    while not children() <= before and time.monotonic() < deadline:  # killed, and not gone yet
        time.sleep(0.05)
    assert children() <= before


def replies(*texts: str) -> Answer:
    it = iter(texts)
    return lambda prompt: next(it)


async def run_it(folder: Path, answer: Answer, *, finished: list[Finished], **limits: Any) -> Played:
    async def program(agent: Agent, client: object) -> None:
        command = [sys.executable, PROGRAM, "hi"]
        finished.append(await run_program(agent, command, cwd=folder, env={"X": "1"}))

    return await play(folder, program, answer, **limits)


async def test_a_program_s_conversation_is_one_sequence(tmp_path: Path) -> None:
    finished: list[Finished] = []
    played = await run_it(tmp_path, replies("one", "two", "done"), finished=finished)
    assert finished == [Finished(code=3, output="one\ntwo\ndone\n")]
    played.check_prompts()
    assert len(played.segments) == 1 and len(played.episode.turns) == 3


async def test_a_program_that_wants_more_than_it_may_have_is_ended(tmp_path: Path) -> None:
    finished: list[Finished] = []
    played = await run_it(tmp_path, lambda prompt: "more", finished=finished, max_turns=2)
    assert not finished and len(played.episode.turns) == 2
    assert (played.episode.finish_reason, played.episode.reward) == ("length", 0.0)


async def test_a_program_is_ended_with_its_episode(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        finished: list[Finished] = []
        task = group.create_task(run_it(tmp_path, lambda prompt: "more", finished=finished, max_turns=10**6))
        await asyncio.sleep(1.0)
        task.cancel()
    assert not finished


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    async def program(agent: Agent, client: object) -> None:
        with pytest.raises(EnvDown, match="cannot start /no/such"):
            await run_program(agent, ["/no/such"])
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])  # type: ignore[attr-defined]

    await play(tmp_path, program)


class NoLimit:
    base_url, api_key = "http://127.0.0.1:1/v1", "k"

    async def over(self) -> None:
        await asyncio.Event().wait()


async def ended(script: str) -> Finished:
    descriptors = len(os.listdir("/proc/self/fd"))
    async with asyncio.timeout(20):
        finished = await run_program(NoLimit(), ["bash", "-c", script])  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    return finished


async def test_of_long_output_the_end_is_kept_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    finished = await ended("yes | head -c 50000000; echo; echo the end >&2; exit 3")
    assert finished.code == 3
    assert len(finished.output) == MAX_OUTPUT and finished.output.endswith("y\n\nthe end\n")


async def test_output_may_end_before_the_program_does() -> None:
    assert await ended("echo said; exec >&- 2>&-; sleep 0.3; exit 4") == Finished(code=4, output="said\n")


@pytest.mark.parametrize("writes", ["sleep 5", "timeout 5 yes"])
async def test_who_left_the_program_s_group_is_not_waited_for(writes: str) -> None:
    began = time.monotonic()
    finished = await ended(f"echo said; setsid {writes} & sleep 0.2; exit 0")
    assert finished.code == 0 and time.monotonic() - began < 4
    assert ("said" in finished.output) == (writes == "sleep 5")


@pytest.mark.skipif(not MINI, reason="mini-swe-agent is not installed; see the top of this file")
async def test_mini_swe_agent(tmp_path: Path) -> None:
    """The real program, with its own local environment, mends a file through the gateway. It forgets a reply without a
    call, and so goes on from the one before: a segment, which copies the ids up to there."""
    assert MINI is not None
    work = tmp_path / "work"
    work.mkdir()
    (work / "sum.py").write_text("def add(a, b):\n    return a - b\n")

    def call(said: str, command: str) -> str:
        body = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"{said}\n<tool_call>\n{body}\n</tool_call>"

    answer = replies(
        call("I look.", "cat sum.py"),
        "I forgot how to call.",
        call("I mend it.", "sed -i 's/a - b/a + b/' sum.py"),
        call("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    )
    ended: list[Finished] = []

    async def rollout(agent: Agent, client: object) -> None:
        options = ["-m", "openai/tiny", "-y", "--exit-immediately", "-o", str(tmp_path / "out.json")]
        home = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "HOME": str(tmp_path)}
        home["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing from outside
        command = [str(MINI), *options, "-t", "add() in sum.py subtracts; mend it."]
        ended.append(await run_program(agent, command, cwd=work, env=home))
        agent.reward(float("a + b" in (work / "sum.py").read_text()))

    played = await play(tmp_path, rollout, answer, max_tokens=50_000, idle_timeout_s=100.0)
    assert ended[0].code == 0, ended[0].output
    assert played.episode.reward == 2.0, "the task's, and one for the end"
    played.check_prompts()
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, True, False]
