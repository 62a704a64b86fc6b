"""A box as a container, by the command line of docker or podman: what data sets with an image per task need.

The container's first process only waits and reaps. Each command is an ``exec`` in it that ends by killing whatever else
the container runs, so nothing is left behind; commands of one box therefore must not run side by side, and wait for
each other here.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Sequence
from typing import Self

from asyncrl.env import EnvDown
from asyncrl.envs.sandbox.base import Limits, Sandbox, Source, communicate
from asyncrl.shield import to_the_end

ENGINES = ("docker", "podman")
START_TIMEOUT_S = 1800.0
"""The first use of an image pulls it: some gigabytes."""
CLOSE_TIMEOUT_S = 60.0
GRACE_S = 15.0
"""What an exec may take beyond its command's own deadline."""
KILLED = 137
"""What ``timeout -s KILL`` answers when it had to."""
WAIT_AND_REAP = "while :; do sleep 86400 & wait $!; done"
# kill -1 spares the calling shell and the first process. Those who outlive the command hold its output open.
RUN = 'timeout -s KILL "$@"; code=$?; kill -KILL -1 2>/dev/null; exit $code'


class Container(Sandbox):
    """See the module. Made with ``open``."""

    def __init__(self, engine: str, name: str, source: Source, limits: Limits) -> None:
        self.limits = limits
        self._engine = engine
        self._name = name
        self._source = source
        self._one = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(cls, source: Source, limits: Limits) -> Self:
        engine = source.engine or next((name for name in ENGINES if shutil.which(name)), "")
        if not engine:
            raise EnvDown(f"sandbox: image {source.image} needs docker or podman, and neither is installed")
        box = cls(engine, f"asyncrl-{uuid.uuid4().hex[:12]}", source, limits)
        argv = ["run", "--detach", "--rm", "--name", box._name, "--label", "asyncrl", "--network", "none"]
        argv += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
        argv += ["--pids-limit", str(limits.processes), "--cpus", f"{limits.cpus:g}"]
        argv += ["--ulimit", f"fsize={limits.disk_mb * 2**20}", "--ulimit", "core=0"]
        argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--workdir", source.workdir]
        for outer, inner in source.read_only.items():
            argv += ["--volume", f"{outer}:{inner}:ro"]
        for key, value in source.variables.items():
            argv += ["--env", f"{key}={value}"]
        argv += ["--entrypoint", "sh", source.image, "-c", WAIT_AND_REAP]
        started = False
        try:
            output, code = await box._cli(argv, START_TIMEOUT_S)
            if code != 0:
                raise EnvDown(f"sandbox: {engine} cannot start {source.image}: {_last(output)}")
            started = True
        finally:
            if not started:
                await box.close()  # it may have been made all the same
        return box

    async def execute(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", output_bytes: int | None = None
    ) -> tuple[bytes, int | None]:
        if self._closed:
            raise EnvDown("sandbox: the box is closed")
        inside = ["exec", "--interactive", "--workdir", self._source.workdir, self._name]
        inside += ["bash", "-c", RUN, "run", f"{timeout_s:g}", *argv]
        loop = asyncio.get_running_loop()
        async with self._one:
            started = loop.time()
            output, code = await self._cli(inside, timeout_s + GRACE_S, stdin, output_bytes)
            if code is None:
                raise EnvDown(f"sandbox: {self._engine} exec did not end {GRACE_S:g} s after its deadline")
            if code == KILLED and loop.time() - started >= timeout_s:
                return output, None
            if code in (125, 126, 127) and _last(output).lower().startswith(("error", "oci runtime")):
                raise EnvDown(f"sandbox: {self._engine} exec failed: {_last(output)}")
            return output, code

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(EnvDown, TimeoutError):
            await to_the_end(self._cli(["rm", "--force", "--volumes", self._name], CLOSE_TIMEOUT_S), CLOSE_TIMEOUT_S)

    async def _cli(
        self, argv: Sequence[str], timeout_s: float, stdin: bytes = b"", output_bytes: int | None = None
    ) -> tuple[bytes, int | None]:
        return await communicate(
            [self._engine, *argv],
            stdin=stdin,
            timeout_s=timeout_s,
            output_bytes=output_bytes or self.limits.output_bytes,
        )


def _last(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
