"""bench/envs.py: what it injects, and (``-m figures``) a small run of everything it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.distributions import Constant, Normal
from asyncrl.env import Action, Task
from asyncrl.runtime.env_source import LocalEnvs

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch, script: Any) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return script("injected")


async def play(source: Any, task: str) -> tuple[list[float], str]:
    """An episode's latencies, and how it ended."""
    env = await source.acquire()
    ended = "done"
    await env.reset(Task(id=task, data={}))
    try:
        for turn in range(source.max_turns):
            if (await env.step(Action(text="", token_ids=(), finish_reason="stop", turn=turn))).done:
                break
    except RuntimeError as error:
        ended = str(error)
    source.release(env, whole=ended == "done")
    return env._latencies, ended


def make(injected: Any, **options: Any) -> Any:
    latency = Normal(mean=1e-4, std=1e-4)
    return injected.Injected(
        LocalEnvs(injected.Cheap), latency=latency, turns=Constant(value=3), max_turns=5, **options
    )


async def test_two_runs_are_given_the_same_episodes_and_an_episode_is_not_the_one_before(injected: Any) -> None:
    first, second = make(injected), make(injected)
    episodes = [await play(first, "task 0") for _ in range(2)]
    assert episodes == [await play(second, "task 0") for _ in range(2)]
    assert episodes[0] != episodes[1]
    assert [len(latencies) for latencies, _ in episodes] == [3, 3]


async def test_work_of_injected_faults_is_told_from_work_that_was_cut(injected: Any) -> None:
    source = make(injected, faults=injected.Faults(crash=1.0))
    _, ended = await play(source, "task 0")
    assert ended == "injected crash"
    cut = make(injected)
    env = await cut.acquire()
    await env.reset(Task(id="task 0", data={}))
    await env.step(Action(text="", token_ids=(), finish_reason="stop"))
    cut.release(env, whole=False)
    assert source.played.faulty == 1 and source.played.failed_share == 1.0
    assert (cut.played.cut, cut.played.failed, cut.played.failed_share) == (1, 0, 0.0)


@pytest.mark.figures
def test_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "envs.json"
    subprocess.run([sys.executable, str(BENCH / "envs.py"), "--quick", "--json", str(out)], check=True, timeout=280)
    results = json.loads(out.read_text())
    assert {"scale", "chaos", "lock-step", "redundant", "machine"} <= results.keys()
    assert results["scale"] and results["chaos"]
    for row in results["chaos"]:
        clean, faulty = (run["played"] for run in row["runs"])
        assert clean["faulty"] == 0 < faulty["episodes"]
