"""Maths with a Python tool: the model may run programs in a sandbox before it gives its answer.

    [env]
    target = "asyncrl.envs.tool_math:ToolMath"
    max_turns = 8
    [env.kwargs]
    protocol = "tools"
    turns = 8

Rows are those of ``asyncrl.envs.maths``. A turn that calls the tool is answered with what the program printed; a turn
that does not, or the last one, is the answer, and math-verify judges it: the reward is 1 if it is right, else 0.
Programs share files within an episode and nothing else. Metrics: ``solved``, ``tool_calls``, ``tool_errors`` (programs
that failed or ran too long, and calls that could not be read), ``tool_s``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from asyncrl.env import Action, Env, Message, Observation, Step, Task, Tool, ToolCall
from asyncrl.envs.dialogue import fenced_blocks
from asyncrl.envs.maths import parse_row, score
from asyncrl.envs.sandbox import Limits, Sandbox, Source, open_sandbox, told

MAX_CALLS = 4
"""In one turn; further ones are refused."""
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program and see what it prints. Each call is a new interpreter; there is no "
            "network.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
FENCED_HELP = """\
You may run Python: write a block

```python
print(6 * 7)
```

and end your turn. You are then told what it printed. A turn without such a block is your answer.
"""


class ToolMath(Env):
    """``protocol``: ``tools`` (for models whose chat template knows tools), ``fenced`` (chat messages, a program is a
    block of ``python``) or ``text`` (the same without a chat template or a word of explanation: the problem, and what
    programs print). ``venv``: a virtual environment whose packages programs may use; else the standard library."""

    parse_row = staticmethod(parse_row)
    example_actions = (  # the call of a tool, as a block, and an answer
        '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>',
        "```python\nprint(6 * 7)\n```",
        "\\boxed{42}",
    )

    def __init__(
        self,
        *,
        protocol: Literal["tools", "fenced", "text"] = "tools",
        turns: int = 8,
        venv: str = "",
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        disk_mb: int = 64,
        processes: int = 32,
        cpus: float = 1.0,
        output_bytes: int = 4096,
    ) -> None:
        if protocol not in ("tools", "fenced", "text"):
            raise ValueError(f"protocol must be tools, fenced or text, not {protocol!r}")
        self._protocol = protocol
        self._turns = turns
        self._timeout_s = timeout_s
        self._limits = Limits(
            memory_mb=memory_mb, disk_mb=disk_mb, processes=processes, cpus=cpus, output_bytes=output_bytes
        )
        self._source = Source(
            read_only={venv: "/opt/venv"} if venv else {},
            variables={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            workdir="/work",
        )
        self._python = ["/opt/venv/bin/python", "-I"] if venv else [str(Path(sys.executable).resolve()), "-I", "-S"]
        self._box: Sandbox | None = None
        self._answer = ""
        self._tool_calls = self._tool_errors = 0
        self._tool_s = 0.0

    async def reset(self, task: Task) -> Observation:
        self._answer = task.data["answer"]
        if self._protocol == "text":
            return Observation(text=task.data["problem"])
        prompt = task.data["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if self._protocol == "tools":
            return Observation(messages=messages, tools=TOOLS)
        last = messages[-1]
        return Observation(messages=[*messages[:-1], {**last, "content": f"{last['content']}\n\n{FENCED_HELP}"}])

    async def step(self, action: Action) -> Step:
        calls = self._calls(action)
        if not calls or action.turn + 1 >= self._turns:
            solved = await score(action.text, self._answer)
            metrics = {
                "solved": solved,
                "tool_calls": float(self._tool_calls),
                "tool_errors": float(self._tool_errors),
                "tool_s": self._tool_s,
            }
            return Step(reward=solved, done=True, metrics=metrics)
        loop = asyncio.get_running_loop()
        began = loop.time()
        printed = [await self._call(call) for call in calls[:MAX_CALLS]]
        printed += [f"[not run: at most {MAX_CALLS} calls in a turn]\n"] * len(calls[MAX_CALLS:])
        self._tool_s += loop.time() - began
        return Step(observation=self._told(calls, printed))

    def _calls(self, action: Action) -> Sequence[ToolCall]:
        if self._protocol == "tools":
            return action.tool_calls
        return [
            ToolCall(id=str(number), name="python", arguments={"code": code})
            for number, code in enumerate(_programs(action.text))
        ]

    async def _call(self, call: ToolCall) -> str:
        """What the model is told of one call."""
        self._tool_calls += 1
        code = call.arguments.get("code")
        if call.error or call.name != "python" or not isinstance(code, str):
            self._tool_errors += 1
            why = call.error or (f"no tool {call.name!r}" if call.name != "python" else "code must be text")
            return f"[not run: {why}; call python with code]\n"
        if self._box is None:
            self._box = await open_sandbox(self._source, self._limits)
        program = code.encode(errors="replace")
        done = await self._box.run_program([*self._python, "-"], self._timeout_s, stdin=program)
        self._tool_errors += done.returncode != 0
        return told(done, self._timeout_s)

    def _told(self, calls: Sequence[ToolCall], printed: Sequence[str]) -> Observation:
        if self._protocol == "tools":
            replies: list[Message] = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
                for call, text in zip(calls, printed, strict=True)
            ]
            return Observation(messages=replies)
        blocks = "".join(f"```output\n{text}```\n" for text in printed)
        if self._protocol == "text":
            return Observation(text=f"\n{blocks}")
        return Observation(messages=[{"role": "user", "content": blocks}])

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()


def _programs(text: str) -> list[str]:
    """What stands in the closed blocks of python, behind any thoughts."""
    return [code for info, code in fenced_blocks(text.rpartition("</think>")[2]) if info == "python"]
