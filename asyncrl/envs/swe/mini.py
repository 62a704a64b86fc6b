"""mini-SWE-agent as the agent of SWE tasks: its program, its prompts and its history; our model, box and judgement.

    [env]
    target = "asyncrl.envs.swe.mini:rollout"
    max_turns = 50
    [env.kwargs]
    mini = "/opt/mini/bin/mini"
    step_limit = 50

mini runs in a Python of its own, as a child process: its model is the gateway, its environment the task's box (see
``bridge``). So the commands are confined as those of ``SWE`` are; mini itself is not, as it does what its code says.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.core.types import Task
from asyncrl.env import Agent, EnvDown, rows_by
from asyncrl.envs.program import Finished, run_program
from asyncrl.envs.swe.bridge import serve_commands
from asyncrl.envs.swe.env import SWE, checked_row

ENDINGS = {"Submitted", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError", "ContextWindowExceededError"}
"""How mini ends by what the model did, which is judged; any other exception is the machinery's."""

VARIABLES = {
    "MSWEA_CONFIGURED": "true",  # or it asks who uses it
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",  # our model has no price
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # what fails here, the gateway has tried again already
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing from outside
}


@rows_by(checked_row)
async def rollout(
    task: Task,
    agent: Agent,
    *,
    mini: str = "mini",
    config: str = "swebench.yaml",
    step_limit: int = 50,
    **swe: Any,
) -> float:
    """One episode; 1 if the tests pass that have to, else 0.

    ``mini`` is the executable of mini-swe-agent 2.4, ``config`` one of its configuration files, or a path. The work is
    judged when mini submits it, or after ``step_limit`` replies, at most ``env.max_turns``. ``swe``: ``root``, timeouts
    and limits, as ``SWE`` has them. Raises ``EnvDown`` if mini fails.
    """
    env = SWE(**swe)
    try:
        await env.reset(task)
        with tempfile.TemporaryDirectory(prefix="asyncrl-mini-") as name:
            folder = Path(name)
            shutil.copyfile(Path(__file__).with_name("mini_box.py"), folder / "asyncrl_box.py")
            command = [mini, "-m", "openai/policy", "-c", config, "-c", f"agent.step_limit={step_limit}", "-l", "0"]
            command += ["--agent-class", "default", "--environment-class", "asyncrl_box.Box"]
            command += ["-o", str(folder / "out.json"), "-t", env.instance.problem]
            places = {"PYTHONPATH": name, "ASYNCRL_BOX": f"{name}/box", "MSWEA_GLOBAL_CONFIG_DIR": f"{name}/config"}
            async with serve_commands(env.run, folder / "box"):
                finished = await run_program(agent, command, cwd=name, env={**VARIABLES, **places})
            _check(finished, folder / "out.json", mini)
        step = await env.finish()
    finally:
        await env.close()
    agent.metrics.update(step.metrics)
    return step.reward


def _check(finished: Finished, written: Path, mini: str) -> None:
    try:
        status = json.loads(written.read_text())["info"]["exit_status"]
    except (OSError, ValueError, KeyError):
        status = ""
    if status not in ENDINGS:
        last = finished.output.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise EnvDown(f"{mini} ended with {status or f'exit code {finished.code}'}: {last[0].strip()}")
