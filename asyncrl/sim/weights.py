"""The simulated way of weights to the servers: seconds by the formulas of core/transfer.py, then each server's load.

Keeps the versions that the real transport would still have, and refuses others as it does: the shared folder holds the
newest two, the trainer stages one for the collective, relays keep ``weights.keep_versions``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from asyncrl.config import WeightsModel
from asyncrl.core.transfer import Transport, seconds_to_arrive, seconds_to_deliver, seconds_to_prepare
from asyncrl.ports import Engine, EngineError, TrainerError
from asyncrl.sim.trainer import SimTrainer


class SimTransport:
    """Moves ``trainer``'s weights to a fleet of ``servers``."""

    def __init__(
        self, model: WeightsModel, transport: Transport, *, servers: int, trainer: SimTrainer, keep: int = 2
    ) -> None:
        self._model = model
        self._transport = transport
        self._servers = servers
        self._trainer = trainer
        most = {"disk": 2, "collective": 1, "relay": keep}[transport]
        self._kept: deque[int] = deque([trainer.version], maxlen=most)
        self._arrives_at = 0.0
        """When the newest version has come, or will have, down the whole chain of relays: they pass it on from when the
        trainer has staged it, whoever asks for it."""

    def forget(self) -> None:
        """Nothing: channels are not simulated."""

    async def prepare(self, version: int) -> None:
        if self._transport == "collective":  # staging overwrites what was staged
            self._kept.clear()
        elif version in self._kept:
            return
        await self._trainer.while_alive(seconds_to_prepare(self._model, self._transport))
        self._kept.append(version)
        seconds = seconds_to_arrive(self._model, self._transport, self._servers)
        self._arrives_at = asyncio.get_running_loop().time() + seconds

    async def arrive(self, engines: Sequence[Engine], version: int) -> None:
        if (seconds := self._arrives_at - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(seconds)

    async def deliver(self, engines: Sequence[Engine], version: int) -> None:
        if version not in self._kept:
            kept = ", ".join(map(str, self._kept)) or "none"
            raise TrainerError(f"version {version} cannot be delivered by {self._transport}: it has {kept}")
        seconds = seconds_to_deliver(self._model, self._transport, len(engines))
        if self._transport == "collective":  # the trainer sends; from a disk or a relay the servers take it themselves
            await self._trainer.while_alive(seconds)
        else:
            await asyncio.sleep(seconds)
        failures: list[EngineError] = []

        async def load(engine: Engine) -> None:
            try:
                await engine.load_from_disk(f"version {version}", version)
            except EngineError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(load(engine))
        if failures:
            raise failures[0]

    async def close(self) -> None:
        await asyncio.sleep(0)
