"""Untrusted commands in a box: a file tree of their own, no network, and limits on CPU, memory, processes, disk, output
and time. SWE tasks run an agent's shell in one, tool-using maths its Python.

    sandbox = await open_sandbox(Source(tree="trees/boltons"), Limits(memory_mb=512))
    done = await sandbox.run("python -m pytest -q", timeout_s=60)     # done.output, done.returncode, done.timed_out
    await sandbox.close()

Two backends: ``bubblewrap`` (Linux, no engine, no root needed) and ``container`` (docker or podman by command line).
What fails in the sandbox itself is ``EnvDown``; what fails in it is the command's own return code.
"""

from asyncrl.envs.sandbox.base import Completed, Limits, Sandbox, Source, told
from asyncrl.envs.sandbox.bubblewrap import Bubblewrap
from asyncrl.envs.sandbox.container import Container

__all__ = ["Completed", "Limits", "Sandbox", "Source", "open_sandbox", "told"]


async def open_sandbox(source: Source, limits: Limits | None = None) -> Sandbox:
    """A fresh box over ``source``: a container if it names an image, else bubblewrap. Raises ``EnvDown``."""
    backend = Container if source.image else Bubblewrap
    return await backend.open(source, limits or Limits())
