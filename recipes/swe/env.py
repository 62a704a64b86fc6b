"""SWE for a model of 0.4M parameters: it is told the broken line, and writes the line that belongs there.

Everything else is as in the real task: the edit is made in the sandbox, and the project's own tests decide.
"""

from __future__ import annotations

import contextlib

from asyncrl import Action, Observation, Step, ToolCall
from asyncrl.envs.swe import SWE, Instance
from asyncrl.envs.swe.tools import ToolError, call_tool


def broken_line(instance: Instance) -> tuple[str, str, str]:
    """File, the line with the bug, and what it should be. Raises ``ValueError`` for a bug of more lines."""
    lines = instance.bug.splitlines()
    new = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")]
    old = [line[1:] for line in lines if line.startswith("-") and not line.startswith("--- ")]
    if len(new) != 1 or len(old) != 1:
        raise ValueError(f"{instance.id}: its bug is not one line; play it with asyncrl.envs.swe:SWE")
    path = instance.bug.partition("+++ b/")[2].partition("\n")[0]
    return path, new[0], old[0]


class OneLine(SWE):
    """An episode is one turn: the broken line in, the repaired one out."""

    def opening(self) -> Observation:
        return Observation(text=f"{broken_line(self.instance)[1].strip()}\n")

    async def step(self, action: Action) -> Step:
        assert self.box is not None
        path, bad, _ = broken_line(self.instance)
        indent = bad[: len(bad) - len(bad.lstrip())]
        lines = [line[1:] for line in self.instance.bug.splitlines() if line[:1] in (" ", "+") and line[:4] != "+++ "]
        old = "\n".join(lines)
        new = "\n".join(indent + action.text.strip() if line == bad else line for line in lines)
        arguments = {"command": "str_replace", "path": path, "old_str": old, "new_str": new}
        with contextlib.suppress(ToolError):  # then nothing is repaired
            await call_tool(self.box, ToolCall(id="0", name="edit", arguments=arguments), self.command_timeout_s)
        return await self.finish()
