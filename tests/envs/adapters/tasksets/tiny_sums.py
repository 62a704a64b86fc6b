"""A v1 environment of ``verifiers``: sums, and a harness that asks the model until it says ``done``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["TinyHarness", "TinySums"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == 5:
            raise ZeroDivisionError("a scorer that breaks")
        return float(str(self.data.answer) in trace.assistant_messages[0].content)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TinySums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(4):
            yield SumTask(SumData(prompt=f"{a} + 2 =", answer=a + 2), self.config.task)


class TinyHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = reply.choices[0].message.content or ""
                if "done" in said:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more?"}]
