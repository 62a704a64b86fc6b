"""Agent programs in a SWE task's box: any that speak to its socket, and mini-swe-agent, where it is installed.

python -m venv /tmp/mini && /tmp/mini/bin/pip install mini-swe-agent==2.4.6 mcp
MINI_SWE_AGENT=/tmp/mini/bin/mini python -m pytest tests/envs/swe/test_mini.py
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime.speaking import Answer
from runtime.test_gateway import play_rollout
from runtime.test_rollout import Played

from asyncrl import EnvDown
from asyncrl.envs.sandbox import Completed
from asyncrl.envs.swe import mini
from asyncrl.envs.swe.bridge import MAX_LINE, serve_commands
from asyncrl.runtime.user_code import EpisodeFailed

from .test_env import SWE, TASK, Quick, root

__all__ = ["root"]  # a fixture

MINI = os.environ.get("MINI_SWE_AGENT")
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
REPAIR = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def processes() -> set[str]:
    """Ids of the processes that these tests start."""
    marks = (b"asyncrl-mini-", b"sleep\x0061.5")
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if any(mark in file.read_bytes() for mark in marks):
                found.add(file.parent.name)
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = processes()
    yield
    assert processes() <= before


# --- the bridge


@pytest.fixture
async def env(root: Path) -> AsyncIterator[SWE]:
    env = Quick(root=str(root), command_timeout_s=1.0, test_timeout_s=30, output_bytes=4096)
    await env.reset(TASK)
    yield env
    await env.close()


async def ask(path: Path, line: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(line)
        writer.write_eof()
        answer = json.loads(await reader.read())
    finally:
        writer.close()
    assert isinstance(answer, dict)
    return answer


def command(text: str) -> bytes:
    return json.dumps({"command": text}).encode() + b"\n"


async def test_a_program_s_commands_run_in_the_box(env: SWE, tmp_path: Path) -> None:
    path = tmp_path / "box"
    async with serve_commands(env.run, path):
        assert await ask(path, command("pwd; exit 3")) == {"output": "/testbed\n", "returncode": 3, "timed_out": False}
        seen = await ask(path, command(f"ls {tmp_path} {Path(__file__).parent}; ls /sys/class/net; cat /etc/passwd"))
        assert "calc" not in seen["output"] and seen["output"].count("No such file") >= 3, "nothing of the host"
        late = await ask(path, command("echo on; sleep 61.5"))
        assert late == {"output": "on\n", "returncode": 124, "timed_out": True}
        long = await ask(path, command("yes | head -c 1000000"))
        assert len(long["output"]) < 5000 and "bytes left out" in long["output"]
        for bad in (b"no JSON\n", b'{"command": 1}\n', b"", command("x" * MAX_LINE)):
            assert "write {" in (await ask(path, bad))["error"]
        await ask(path, command(REPAIR))
    step = await env.finish()
    assert (step.reward, step.metrics["commands"]) == (1.0, 5.0)


async def test_what_runs_at_the_end_is_ended(env: SWE, tmp_path: Path) -> None:
    env.command_timeout_s = 60.0
    path = tmp_path / "box"
    async with serve_commands(env.run, path):
        silent = await asyncio.open_unix_connection(path)
        busy = await asyncio.open_unix_connection(path)
        busy[1].write(command("sleep 61.5"))
        await asyncio.sleep(0.3)
    for reader, writer in (silent, busy):
        assert await reader.read() == b""
        writer.close()
    with pytest.raises(OSError):
        await asyncio.open_unix_connection(path)


async def test_a_broken_box_ends_the_program(tmp_path: Path) -> None:
    async def run(command: str) -> Completed:
        raise EnvDown("sandbox: the box is closed")

    with pytest.raises(EnvDown, match="the box is closed"):
        async with serve_commands(run, tmp_path / "box"):
            await ask(tmp_path / "box", command("ls"))


# --- the rollout, with a program in mini's place

STAND_IN = """\
import json, os, socket, subprocess, sys, time, urllib.request
output = sys.argv[sys.argv.index("-o") + 1]
while True:
    body = json.dumps({"messages": [{"role": "user", "content": sys.argv[sys.argv.index("-t") + 1]}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    command = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if command == "crash":
        sys.exit("it broke")
    if command == "hang":
        subprocess.Popen(["sleep", "61.5"])
        time.sleep(61.5)
    if command == "submit":
        break
    with socket.socket(socket.AF_UNIX) as box:
        box.connect(os.environ["ASYNCRL_BOX"])
        box.sendall(json.dumps({"command": command}).encode() + b"\\n")
        box.makefile().readline()
with open(output, "w") as file:
    json.dump({"info": {"exit_status": "Submitted"}}, file)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(mini, "SWE", Quick)
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    return str(program)


async def episode(folder: Path, root: Path, program: str, answer: Answer, **limits: Any) -> Played:
    rollout = partial(mini.rollout, mini=program, step_limit=3, root=str(root), test_timeout_s=60)
    limits = {"max_tokens": 50_000, "idle_timeout_s": 100.0, **limits}
    return await play_rollout(folder, rollout, answer, task=TASK, **limits)


def replies(*texts: str) -> Answer:
    it = iter(texts)
    return lambda prompt: next(it)


def check_tokens(played: Played) -> None:
    played.check_prompts()
    assert [turn.output_ids.tolist() for turn in played.episode.turns] == played.speaker.sampled


@pytest.mark.parametrize(("work", "reward"), [(REPAIR, 1.0), ("ls", 0.0)])
async def test_a_program_is_judged_by_what_it_left_in_the_box(
    tmp_path: Path, root: Path, stand_in: str, work: str, reward: float
) -> None:
    played = await episode(tmp_path, root, stand_in, replies(work, "submit"))
    assert played.episode.reward == played.episode.metrics["resolved"] == reward
    assert played.episode.metrics["commands"] == 1
    check_tokens(played)


async def test_a_program_that_breaks_is_the_machine_s_fault(tmp_path: Path, root: Path, stand_in: str) -> None:
    with pytest.raises(EpisodeFailed, match=f"{stand_in} ended with exit code 1: it broke") as caught:
        await episode(tmp_path, root, stand_in, replies("crash"))
    assert caught.value.infra


@pytest.mark.parametrize("last", ["hang", "sleep 61.5"])
async def test_a_cancelled_episode_leaves_nothing(tmp_path: Path, root: Path, stand_in: str, last: str) -> None:
    asked = asyncio.Event()

    def answer(prompt: str) -> str:
        asked.set()
        return last

    async with asyncio.TaskGroup() as group:
        task = group.create_task(episode(tmp_path, root, stand_in, answer))
        await asked.wait()
        await asyncio.sleep(0.5)
        assert processes()
        task.cancel()


# --- the real one


def call(said: str, command: str) -> str:
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{said}\n<tool_call>\n{body}\n</tool_call>"


@pytest.mark.skipif(not MINI, reason="MINI_SWE_AGENT names no mini-swe-agent; see the top of this file")
@pytest.mark.parametrize(
    ("answer", "reward", "finish_reason"),
    [
        (replies(call("I look.", "cat calc.py"), call("I mend it.", REPAIR), call("Done.", SUBMIT)), 1.0, "stop"),
        (replies("What?", call("I tidy up.", "rm -f x"), call("Done.", SUBMIT)), 0.0, "stop"),
        (lambda prompt: call("On and on.", REPAIR), 1.0, "stop"),
        (replies(call("I mend it.", REPAIR), call("I read.", "seq 100000")), 1.0, "length"),
    ],
    ids=["repaired", "useless", "step limit", "context full"],
)
async def test_mini_swe_agent(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[str], str],
    reward: float,
    finish_reason: str,
) -> None:
    assert MINI is not None
    monkeypatch.setattr(mini, "SWE", Quick)
    limits = {"max_tokens": 9000} if finish_reason == "length" else {}
    played = await episode(tmp_path, root, MINI, answer, **limits)
    assert (played.episode.reward, played.episode.finish_reason) == (reward, finish_reason)
    check_tokens(played)
