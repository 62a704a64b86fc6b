"""mini-SWE-agent's environment, on its side: each command goes to the box that ``bridge`` serves.

It runs in mini's Python, where asyncrl is not installed: ``mini.rollout`` lays a copy of this file where mini finds it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
from typing import Any

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Box:
    """Of mini's ``environment`` settings only ``env`` counts here; folder, image and deadline are the box's own."""

    def __init__(self, **settings: Any) -> None:
        self.config = settings
        self._exports = "".join(f"export {name}={shlex.quote(v)}; " for name, v in settings.get("env", {}).items())

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """What mini shows the model. Raises ``Submitted`` for the command that says so."""
        command = {"command": f"{self._exports}{action.get('command', '')}"}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ["ASYNCRL_BOX"])
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile() as answers:
                answer = json.loads(answers.readline())
        output = answer.get("output", answer.get("error"))
        returncode = answer.get("returncode", -1)
        first, _, submission = output.lstrip().partition("\n")
        if first.strip() == SUBMIT and returncode == 0:
            from minisweagent.exceptions import Submitted

            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        why = "killed: it did not end in time" if answer.get("timed_out") else ""
        return {"output": output, "returncode": returncode, "exception_info": why}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        return {**self.config, **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"environment": self.config, "environment_type": "asyncrl"}}}
