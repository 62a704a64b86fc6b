"""WeightTransport over a shared folder: the trainer writes ``v<version>``, the servers load it. Imports no torch.

Works wherever trainer and servers see one file system (``/dev/shm`` on one machine, a network share on many). Writing
happens while the servers generate; a server that comes back later finds the current version in its place.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from asyncrl.ports import Engine, EngineError


class Publisher(Protocol):
    """What this transport needs of the trainer's client."""

    async def publish(self, version: int, transport: str, path: str = "") -> object: ...


class DiskTransport:
    """``folder`` belongs to this transport: the trainer removes older versions from it, ``close`` all of them."""

    def __init__(self, trainer: Publisher, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder.absolute()
        self._written: int | None = None
        """The version that was written last: a trainer that was started again need not write it anew, perhaps under the
        hands of a server that loads it."""

    def forget(self) -> None:
        """Nothing: the folder is the channel."""

    async def prepare(self, version: int) -> None:
        if version != self._written:
            await self._trainer.publish(version, "disk", str(self._path(version)))
            self._written = version

    async def arrive(self, engines: Sequence[Engine], version: int) -> None:
        """Once written it lies where all servers load it from."""

    async def deliver(self, engines: Sequence[Engine], version: int) -> None:
        """All servers load at once. One that fails does not cut the others off in the middle of a load."""
        failures: list[EngineError] = []

        async def load(engine: Engine) -> None:
            try:
                await engine.load_from_disk(str(self._path(version)), version)
            except EngineError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as loads:
            for engine in engines:
                loads.create_task(load(engine))
        if failures:
            raise failures[0]

    async def close(self) -> None:
        for path in self._folder.glob("v*"):
            if path.name[1:].isdecimal():
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # not there, or somebody else uses it too
            self._folder.rmdir()

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version}"
