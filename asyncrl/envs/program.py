"""An agent program in any language as an environment: a child process that talks to the gateway.

    async def rollout(task, agent):
        with tempfile.TemporaryDirectory() as folder:
            await run_program(agent, ["my-agent", "--task", task.data["issue"]], cwd=folder)
            return float(solved(folder))

The process gets the episode's endpoint and key in the variables that OpenAI's clients read. It is ended with the
episode, and all that it started with it, as long as that stays in its process group; what is not trusted belongs into a
sandbox.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.core.types import Record
from asyncrl.env import Agent, EnvDown, EpisodeOver
from asyncrl.processes import Child, ChildError
from asyncrl.shield import to_the_end

GRACE_S = 2.0
MAX_OUTPUT = 2**16
"""Bytes of output that are kept, the last ones."""
READ = 2**16
LAST_READS = 16
"""After the program's end, for what is in the pipe: who left its process group may hold it, and write on."""


class Finished(Record, frozen=True, kw_only=True):
    """How a program ended: its exit code (negative: the signal), and the end of what it wrote on both channels."""

    code: int
    output: str


async def run_program(
    agent: Agent, command: Sequence[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
) -> Finished:
    """Run ``command`` until it ends, with ``env`` on top of this process's environment.

    Raises ``EpisodeOver`` if it wants more of the model than the episode may have, and ``EnvDown`` if it cannot be
    started.
    """
    if not agent.base_url:
        raise EnvDown("no gateway here, so a program cannot reach the model")
    # The second name is that of older clients, which some libraries still read.
    endpoint = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), agent.base_url)
    endpoint["OPENAI_API_KEY"] = agent.api_key
    loop = asyncio.get_running_loop()
    kept = bytearray()
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    def take() -> bool:
        """What was written meanwhile; whether that was anything."""
        try:
            data = os.read(ours, READ)
        except BlockingIOError:
            return False
        if not data:
            loop.remove_reader(ours)
        kept.extend(data)
        del kept[:-MAX_OUTPUT]
        return bool(data)

    loop.add_reader(ours, take)
    try:
        try:
            log = Path(f"/dev/fd/{theirs}")
            child = await Child.start("program", command, log=log, env={**endpoint, **(env or {})}, cwd=cwd)
        except ChildError as error:
            raise EnvDown(str(error)) from None
        finally:
            os.close(theirs)

        async def end() -> None:
            await child.stop(GRACE_S)
            await child.wait()

        over = False

        async def end_when_over() -> None:
            nonlocal over
            await agent.over()
            over = True
            await child.stop(GRACE_S)

        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(end_when_over())
                code = await child.wait()
                watch.cancel()
        finally:
            await to_the_end(end(), GRACE_S + 1.0)
        for _ in range(LAST_READS):
            if not take():
                break
    finally:
        loop.remove_reader(ours)
        os.close(ours)
    if over:
        raise EpisodeOver("the program wanted more of the model than the episode may have")
    return Finished(code=code, output=kept.decode(errors="replace"))
