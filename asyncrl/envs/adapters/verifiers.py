"""Environments of ``verifiers`` (its v1 interface: tasksets, harnesses), each episode a program behind the gateway.

    VENV/bin/python -P asyncrl/envs/adapters/verifiers_program.py rows '{"taskset": {"id": "my_taskset"}}' > train.jsonl

    [env]
    target = "asyncrl.envs.adapters.verifiers:rollout"
    [env.kwargs]
    python = "VENV/bin/python"
    config = { taskset = { id = "my_taskset" }, agent = { runtime = { type = "subprocess" } } }

The library stays in an environment of its own, with the tasksets: its dependencies are many and pinned. ``config`` is
what its command line calls ``env``. A row is the ``index`` of a task. The reward is that of the episode's traces (the
mean of those whose agent is trained), and its single rewards and metrics are logged. Importing the library takes 4 s of
CPU in each episode, so this is for episodes that are longer than that.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.env import Agent, EnvDown, Task
from asyncrl.envs.program import run_program

PROGRAM = ("-P", str(Path(__file__).with_name("verifiers_program.py")))
"""Without its folder in the path, where this module would stand in for the library."""
NOT_INSTALLED = 3
"""The program's exit code where its Python has no ``verifiers``."""


async def rollout(task: Task, agent: Agent, *, python: str, config: dict[str, Any], path: str = "") -> float:
    """``path`` is a folder of tasksets that are not installed. Raises ``EnvDown`` where the library is missing and
    ``RuntimeError`` for an episode that failed in it."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-verifiers-") as folder:
        result = Path(folder, "result.json")
        index = str(task.data["index"])
        command = [python, *PROGRAM, "play", json.dumps(config), "--index", index, "--result", str(result)]
        finished = await run_program(agent, command, cwd=folder, env={"PYTHONPATH": path})
        if finished.code == NOT_INSTALLED:
            raise EnvDown(f"{python} has no verifiers; pip install verifiers==0.4.0 there")
        if not result.exists():
            last = finished.output.strip().rpartition("\n")[2]
            raise RuntimeError(f"the verifiers program ended with code {finished.code}: {last}")
        answer = json.loads(result.read_bytes())
    if answer["error"]:
        raise RuntimeError(answer["error"])
    agent.metrics.update(answer["metrics"])
    return float(answer["reward"])
