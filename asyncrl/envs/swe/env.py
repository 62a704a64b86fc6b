"""The environment: an agent repairs a repository in a sandbox, and its tests decide.

    [env]
    target = "asyncrl.envs.swe:SWE"
    max_turns = 50
    [env.kwargs]
    protocol = "tools"
    turns = 50

A turn is a tool call (or several), or one fenced block. The episode ends when the agent submits, or after ``turns``;
then the tests are run in a fresh box (see ``repository``), and the reward is 1 if those that have to pass do, else 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.env import Action, Env, Message, Observation, Step, Task, ToolCall
from asyncrl.envs.sandbox import Completed, Limits, Sandbox, Source, open_sandbox
from asyncrl.envs.swe.repository import Grade, changes, judge, prelude, prepare
from asyncrl.envs.swe.rows import files_of_tests, parse_row
from asyncrl.envs.swe.tools import FENCED_HELP, TOOLS, ToolError, call_tool, parse_fenced

PROMPT = """\
The repository in {workdir} has a problem. Find its cause and repair it in the source. Changes to tests do not count.

{problem}
"""
GO_ON = "Go on with a tool call, or call submit if the work is done."


def checked_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """As it is, if it is a SWE task that can be judged here. Raises ``ValueError``."""
    files_of_tests(parse_row(row))
    return row


class SWE(Env):
    """``root`` is the folder that the ``tree`` of rows is relative to, with the virtual environment ``venv`` of their
    tests; rows with an image need none. ``protocol``: ``tools`` (for models whose chat template knows tools),
    ``fenced`` (chat messages with one fenced block a turn) or ``text`` (the same without a chat template)."""

    parse_row = staticmethod(checked_row)

    def __init__(
        self,
        *,
        root: str = "",
        protocol: Literal["tools", "fenced", "text"] = "tools",
        turns: int = 50,
        command_timeout_s: float = 60.0,
        test_timeout_s: float = 300.0,
        memory_mb: int = 1024,
        disk_mb: int = 512,
        processes: int = 128,
        cpus: float = 1.0,
        output_bytes: int = 16_384,
        engine: str = "",
    ) -> None:
        if protocol not in ("tools", "fenced", "text"):
            raise ValueError(f"protocol must be tools, fenced or text, not {protocol!r}")
        self._root = Path(root)
        self._protocol = protocol
        self._turns = turns
        self.command_timeout_s = command_timeout_s
        self._test_timeout_s = test_timeout_s
        self._limits = Limits(
            memory_mb=memory_mb, disk_mb=disk_mb, processes=processes, cpus=cpus, output_bytes=output_bytes
        )
        self._engine = engine
        self.box: Sandbox | None = None
        self._commands = 0
        self._sandbox_s = 0.0

    async def reset(self, task: Task) -> Observation:
        self.instance = parse_row(task.data)
        started = asyncio.get_running_loop().time()
        self.box = await open_sandbox(self.source(), self._limits)
        self._base = await prepare(self.box, self.instance)
        self._count_time(started)
        return self.opening()

    def source(self) -> Source:
        """What a box of this task starts from."""
        if not self.instance.tree:
            return Source(image=self.instance.image, engine=self._engine)
        return Source(
            tree=str(self._root / self.instance.tree),
            read_only={str(self._root / "venv"): "/opt/venv"},
            variables={"PATH": "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def opening(self) -> Observation:
        """The first prompt. The row's problem is all of it that may be told."""
        prompt = PROMPT.format(workdir="/testbed", problem=self.instance.problem.strip())
        if self._protocol == "tools":
            return Observation(messages=[{"role": "user", "content": prompt}], tools=TOOLS)
        return self._say(f"{prompt}\n{FENCED_HELP}")

    async def step(self, action: Action) -> Step:
        assert self.box is not None
        started = asyncio.get_running_loop().time()
        replies: list[Message] = []
        submitted = False
        for call in self._calls(action, replies):
            if call.name == "submit" and not call.error:
                submitted = True
                break
            self._commands += 1
            try:
                text = await call_tool(self.box, call, self.command_timeout_s, prelude(self.instance))
            except ToolError as error:
                text = f"{error}\n"
            replies.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        self._count_time(started)
        if submitted or action.turn + 1 >= self._turns:
            return await self.finish()
        if self._protocol == "tools":
            return Step(observation=Observation(messages=replies))
        return Step(observation=self._say("".join(reply["content"] for reply in replies)))

    def _calls(self, action: Action, replies: list[Message]) -> Sequence[ToolCall]:
        """What the action asks for; a turn that asks for nothing is answered with how it is done."""
        if self._protocol == "tools":
            if not action.tool_calls:
                replies.append({"role": "user", "content": GO_ON})
            return action.tool_calls
        try:
            return [parse_fenced(action.text)]
        except ToolError as error:
            replies.append({"role": "user", "content": f"{error}"})
            return []

    def _say(self, text: str) -> Observation:
        if self._protocol == "text":
            return Observation(text=f"\n{text}\n")
        return Observation(messages=[{"role": "user", "content": text}])

    async def finish(self) -> Step:
        """Judge, and end the episode."""
        grade = await self.grade()
        metrics = {
            "resolved": float(grade.resolved),
            "fail_to_pass": grade.fail_to_pass,
            "pass_to_pass": grade.pass_to_pass,
            "commands": float(self._commands),
            "sandbox_s": self._sandbox_s,
        }
        return Step(reward=float(grade.resolved), done=True, metrics=metrics)

    async def grade(self) -> Grade:
        """Judge what has been done so far."""
        assert self.box is not None
        started = asyncio.get_running_loop().time()
        patch = await changes(self.box, self._base, self.instance)
        box = await open_sandbox(self.source(), self._limits)
        try:
            return await judge(box, self.instance, patch, self._test_timeout_s)
        finally:
            await box.close()
            self._count_time(started)

    async def run(self, command: str) -> Completed:
        """A command of an agent that is a program of its own (see ``bridge``)."""
        assert self.box is not None
        started = asyncio.get_running_loop().time()
        self._commands += 1
        try:
            return await self.box.run(prelude(self.instance) + command, self.command_timeout_s)
        finally:
            self._count_time(started)

    async def close(self) -> None:
        if self.box is not None:
            await self.box.close()

    def _count_time(self, started: float) -> None:
        self._sandbox_s += asyncio.get_running_loop().time() - started
