"""WeightTransport over a process group: rank 0 of the trainer broadcasts, the servers receive. Imports no torch.

``prepare`` makes a copy in the trainer's memory, so that a version can be delivered at any time: also to a server that
comes back while the next step runs, and, as the trainer holds it until it was sent, while the next version is prepared.
A group cannot lose or gain a member, so it is formed anew for each other set of
servers, and after any failure. Deliveries go one after another: the trainer sends to one group at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from itertools import accumulate
from typing import Any, Protocol

from asyncrl.ports import Engine, EngineError, TrainerDied, TrainerError
from asyncrl.wire import TrainerInfo


class Publisher(Protocol):
    """What this transport needs of the trainer's client. ``alive`` is False once the job has ended."""

    @property
    def info(self) -> TrainerInfo: ...

    @property
    def alive(self) -> bool: ...

    async def publish(self, version: int, transport: str, path: str = "") -> object: ...

    async def hold(self, version: int) -> bool: ...

    async def open_group(self, address: str, world_size: int, group: str, backend: str) -> int: ...

    async def join_group(self) -> None: ...


class CollectiveTransport:
    """``address`` is where servers reach the trainer's rank 0. ``backend`` is ``nccl`` (trainer and servers on GPUs of
    their own), ``gloo``, or ``auto``: the trainer's own. Every tensor-parallel rank of a server is a member of the
    group: it receives whole tensors, and keeps its part of them."""

    def __init__(self, trainer: Publisher, *, address: str, backend: str) -> None:
        self._trainer = trainer
        self._address = address
        self._backend = backend
        self._formed = 0
        self._members: set[str] = set()
        """Names of the servers in the group, empty when there is no usable group."""
        self._sending = asyncio.Lock()
        self._staged: tuple[int, Sequence[int]] = (-1, ())
        """The version that was prepared last, and its checksums."""

    def forget(self) -> None:
        self._members = set()

    async def _form(self, engines: Sequence[Engine]) -> None:
        self._formed += 1
        backend = self._trainer.info.backend if self._backend == "auto" else self._backend
        *starts, size = accumulate((engine.ranks for engine in engines), initial=1)
        address, group = self._address, self._group
        # Servers are asked only when the trainer is there: in vain they would wait for long.
        port = await self._trainer.open_group(address, size, group, backend)
        await self._together(
            self._trainer.join_group(),
            [
                e.join_group(address, port, start, size, group, backend)
                for e, start in zip(engines, starts, strict=True)
            ],
        )

    async def prepare(self, version: int) -> None:
        await self._trainer.publish(version, "stage")
        self._staged = version, self._trainer.info.checksums

    async def arrive(self, engines: Sequence[Engine], version: int) -> None:
        """It goes straight from the trainer's memory into the servers'."""

    async def deliver(self, engines: Sequence[Engine], version: int) -> None:
        async with self._sending:
            checksums = await self._hold(version)
            names = {engine.name for engine in engines}
            formed, self._members = self._members == names, set()  # until it has gone well
            if not formed:
                await self._form(engines)
            info = self._trainer.info
            await self._together(
                self._trainer.publish(version, "collective"),
                [
                    e.load_from_group(info.names, info.dtypes, info.shapes, self._group, version, checksums)
                    for e in engines
                ],
            )
            self._members = names

    async def _hold(self, version: int) -> Sequence[int]:
        """Its checksums. Raises ``EngineError`` where it is not staged any more, before servers wait for it."""
        staged, checksums = self._staged
        if version != staged or not await self._trainer.hold(version):
            raise EngineError(f"version {version} cannot be broadcast: another has taken its place")
        return checksums

    async def close(self) -> None:
        """The group ends with its processes."""

    @property
    def _group(self) -> str:
        """Servers may outlive this run and keep old groups, so a name is never used twice."""
        return f"asyncrl-{os.getpid()}-{self._formed}"

    async def _together(
        self, trainer: Coroutine[Any, Any, object], servers: Sequence[Coroutine[Any, Any, None]]
    ) -> None:
        """One collective. All parts run to their end, as each has its deadline, and then the cause is told from the
        consequences: a dead trainer before a failing server before a trainer that merely saw the group break."""
        errors: list[EngineError | TrainerError] = []

        async def part(work: Coroutine[Any, Any, object]) -> None:
            try:
                await work
            except (EngineError, TrainerError) as error:
                errors.append(error)

        async with asyncio.TaskGroup() as parts:
            for work in (trainer, *servers):
                parts.create_task(part(work))
        if not errors:
            return
        first = EngineError if self._trainer.alive else TrainerError
        for kind in (TrainerDied, first):
            for error in errors:
                if isinstance(error, kind):
                    raise error
        raise errors[0]
