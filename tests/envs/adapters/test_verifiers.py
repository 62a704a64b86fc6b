"""verifiers: an environment of its v1 interface is played by the real package, over the gateway.

python -m venv /tmp/verifiers && /tmp/verifiers/bin/pip install verifiers==0.4.0
VERIFIERS_PYTHON=/tmp/verifiers/bin/python python -m pytest tests/envs/adapters/test_verifiers.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime.speaking import Answer
from runtime.test_gateway import play
from runtime.test_rollout import Played

from asyncrl.core.types import Task
from asyncrl.env import Agent, EnvDown
from asyncrl.envs.adapters.verifiers import PROGRAM, rollout
from asyncrl.runtime.user_code import EpisodeFailed

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
TASKSETS = Path(__file__).with_name("tasksets")
CONFIG = {"taskset": {"id": "tiny_sums"}, "agent": {"runtime": {"type": "subprocess"}}}
real = pytest.mark.skipif(not PYTHON, reason="verifiers is not installed; see the top of this file")


def replies(*texts: str) -> Answer:
    it = iter(texts)
    return lambda prompt: next(it)


async def play_one(folder: Path, index: int, answer: Answer, *, python: str = PYTHON, **limits: Any) -> Played:
    async def program(agent: Agent, client: object) -> None:
        task = Task(id="t", data={"index": index})
        agent.reward(await rollout(task, agent, python=python, config=CONFIG, path=str(TASKSETS)))
        said.update(agent.metrics)

    said: dict[str, float] = {}
    played = await play(folder, program, answer, **{"max_tokens": 4000, "idle_timeout_s": 100.0, **limits})
    assert played.episode.metrics == said
    return played


@real
async def test_an_episode_is_one_sequence_with_their_reward(tmp_path: Path) -> None:
    played = await play_one(tmp_path, 2, replies("It is 4", "no, 5", "done"))
    played.check_prompts()
    assert len(played.segments) == 1 and len(played.episode.turns) == 3
    assert played.episode.reward == 2.0, "theirs, and one for the end of the test's own program"
    assert played.episode.metrics == {"right": 1.0, "replies": 3.0}
    assert played.speaker.requests[0].temperature == 1.0


@real
async def test_limits_end_it_and_its_failures_are_named(tmp_path: Path) -> None:
    played = await play_one(tmp_path / "turns", 2, lambda prompt: "more", max_turns=2)
    assert (len(played.episode.turns), played.episode.finish_reason) == (2, "length")
    played = await play_one(tmp_path / "tokens", 2, lambda prompt: "4 " * 20, max_tokens=100)
    assert (played.episode.reward, played.episode.finish_reason) == (1.0, "length")
    with pytest.raises(EpisodeFailed, match="ZeroDivisionError: a scorer that breaks"):
        await play_one(tmp_path / "scorer", 3, replies("done"))
    with pytest.raises(EpisodeFailed, match="the verifiers program ended with code 1"):
        await play_one(tmp_path / "row", 99, replies("done"))


@real
def test_tasks_become_rows() -> None:
    command = [PYTHON, *PROGRAM, "rows", json.dumps(CONFIG), "--limit", "3"]
    made = subprocess.run(command, capture_output=True, env={"PYTHONPATH": str(TASKSETS)}, text=True, check=True)
    assert [json.loads(line) for line in made.stdout.splitlines()] == [{"index": 0}, {"index": 1}, {"index": 2}]


async def test_a_python_without_the_library(tmp_path: Path) -> None:
    async def program(agent: Agent, client: Any) -> None:
        with pytest.raises(EnvDown, match="has no verifiers; pip install"):
            await rollout(Task(id="t", data={"index": 0}), agent, python=sys.executable, config=CONFIG)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    await play(tmp_path, program, idle_timeout_s=60.0)
