"""ParameterServer: which version the trainer and each server hold, and the way of new weights to the servers.

    prepare()   what needs the trainer (gather, write): its next step begins after it.
    deliver()   suspend → model_update → resume (ROLL Flash §4.2), so the servers stand still only while they load; the
                trainer's next step may run meanwhile (StaleFlow figure 21).
    restore()   brings a server that came back after a failure, or joins, to the current version; used by Fleet.
    pinned()    lets some servers keep the current version while others go on, for an evaluation of it.

A transport has the newest version, and older ones only perhaps. So while an update is on its way, a server that needs
weights waits for the end of it; unless no other is up, then it is the first to have the new ones.

Both hold one lock, so a version is never delivered while another is on its way. A server that fails while it loads is
marked down and the rest go on. When the trainer dies, the servers go on with what they have until it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Literal

from asyncrl.ports import EngineError, EngineRejected, Observer, TrainerDied, WeightTransport
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.runtime.stage import Stage


class ParameterServer:
    """``running`` is what an update does to requests in flight: cut them, or let them end first."""

    def __init__(
        self,
        *,
        proxy: LLMProxy,
        transport: WeightTransport,
        trainer: RestartingTrainer,
        running: Literal["interrupt", "drain"],
        observer: Observer,
        version: int = 0,
    ) -> None:
        self._proxy = proxy
        self._transport = transport
        self._trainer = trainer
        self._running = running
        self._observer = observer
        self._version = version
        self._announced, self._prepared = version, -1
        """Newest version that the transport was given, and that it can deliver."""
        self._lock = asyncio.Lock()
        self._aligning = False
        self.stage = Stage()
        """Of the delivery that is under way."""
        self._unsure: set[str] = set()
        """Names of the servers that began to load weights and did not end it: they may hold some of two versions."""

    @property
    def version(self) -> int:
        """The version that all servers in use hold, but those that an evaluation keeps at an older one."""
        return self._version

    @property
    def newest(self) -> int:
        """The newest version that was trained, as far as is known here: on its way to the servers, or there."""
        return self._announced

    async def prepare(self, version: int) -> None:
        """Make ``version`` ready, in place of the one before, which must have been delivered."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._announced = version
        await self._trainer.attempt(lambda: self._transport.prepare(version), f"the weights of version {version}")
        self._prepared = version
        self._observer.span("controller", "prepare weights", started, loop.time(), {"version": version})

    async def deliver(self, version: int) -> None:
        """Every server that is up holds ``version`` when this returns. With none up it waits for one to come back
        (``Fleet`` ends the run when that takes too long)."""
        while version > self._version:
            self.stage.enter("a server that is up")
            await self._proxy.available.wait()
            await self._trainer.attempt(lambda: self._update(version))
        self.stage.what = ""

    async def _update(self, version: int) -> None:
        """suspend → model_update → resume. Also when the trainer dies meanwhile, which is raised."""
        loop = asyncio.get_running_loop()
        self.stage.enter(f"version {version} to arrive at the servers")
        await self._transport.arrive([i.engine for i in self._proxy.instances if i.up], version)
        self.stage.enter("another delivery to end")
        async with self._lock:
            self.stage.enter("the servers to pause" if self._running == "interrupt" else "running requests to end")
            paused = await self._proxy.suspend(self._running)
            self.stage.enter(f"the servers to load version {version}")
            suspended = loop.time()
            try:
                updated = await self._deliver(paused, version)
            except TrainerDied:
                for instance in paused:
                    if instance.name in self._unsure:
                        died = EngineError(f"{instance.name}: the trainer died while it sent version {version}")
                        self._proxy.mark_down(instance, died)
                await self._proxy.resume()
                raise
            for instance in updated:
                self._proxy.set_version(instance, version)
                self._observer.span(instance.name, "update", suspended, loop.time(), {"version": version})
                self._version = version
            await self._proxy.resume()
            self._observer.span("controller", "suspended", suspended, loop.time(), {"version": version})

    async def align(self) -> None:
        """Before anything is generated: servers that hold, or may hold, other weights than the trainer, because it was
        resumed or they served another run, are given its own. One that refuses them serves another model: at version 0
        this raises ``EngineRejected``, and later the run goes on without it."""
        version, instances = self._version, self._proxy.instances
        if version or any(instance.version != version for instance in instances):
            for instance in instances:
                instance.version = min(instance.version, version)
            self._version = -1
            self._aligning = version == 0
            await self.prepare(version)
            await self.deliver(version)
            self._aligning = False

    @asynccontextmanager
    async def pinned(self, share: float) -> AsyncIterator[int | None]:
        """The version that ``share`` of the servers, at least one, keep inside; afterwards they catch up with the
        others. Where all are needed, an update waits for the end. None if no server is up."""
        async with self._lock:
            version = self._version
            instances = self._proxy.pin(version, share)
        try:
            yield version if instances else None
            await self._catch_up(instances)
        finally:
            for instance in instances:
                self._proxy.unpin(instance)

    async def _catch_up(self, instances: Sequence[Instance]) -> None:
        """Bring pinned servers to the version of the others, unless the next update is about to."""
        async with self._lock:
            for instance in instances:
                if not instance.pinned or instance.version == self._version or self._announced > self._version:
                    continue
                instance.pulling = True
                try:
                    if self._running == "drain":
                        await instance.empty.wait()
                    await instance.engine.pause()
                    await self._load([instance], self._version)
                    self._proxy.set_version(instance, self._version)
                    await instance.engine.resume()
                except (EngineError, TrainerDied) as error:
                    self._proxy.mark_down(instance, EngineError(f"{instance.name}: did not catch up: {error}"))
                finally:
                    self._proxy.resumed(instance)

    async def catch_up(self) -> None:
        """Every server that is up holds the newest version when this returns: here always so between updates."""

    async def restage(self, version: int) -> None:
        """A trainer that was started again has reached ``version``: make good what the servers still need of the one
        before."""
        self._transport.forget()
        if version == self._prepared:
            await self._transport.prepare(version)

    async def restore(self, instance: Instance) -> None:
        """A failed server answers again. If it restarted it has old weights: it is used only once it is verified."""
        async with self._lock:
            if instance.up:
                return
            try:
                info = await instance.engine.connect()
                instance.meet(info)
                await instance.engine.pause()
                if info.version != self._version or instance.name in self._unsure:
                    version = self._prepared  # of the first one, which nobody had to be given, there is none
                    staged = self._trainer.up and version == self._announced
                    if not staged or (version > self._version and any(i.up for i in self._proxy.instances)):
                        return  # it is probed again
                    self._transport.forget()
                    await self._load([instance], version)
                    self._version = version
                await instance.engine.resume()
            except (EngineError, TrainerDied) as error:
                instance.why = str(error)  # it is probed again
                return
            instance.version = self._version  # not set_version: a restarted server did go back
            self._proxy.mark_up(instance)

    async def _deliver(self, instances: list[Instance], version: int) -> list[Instance]:
        """Load ``version`` into these servers; those that succeeded. One that fails is marked down, and the transport
        is set up anew without it (a collective cannot go on with a dead member)."""
        while instances:
            try:
                await self._load(instances, version)
                return instances
            except EngineError as failure:
                if self._aligning and isinstance(failure, EngineRejected):
                    raise
                error = failure
                for instance in instances:
                    if not await instance.engine.health():
                        self._proxy.mark_down(instance, error)
            alive = [i for i in instances if i.up]
            if len(alive) == len(instances):  # none is dead, so trying again would only loop
                for instance in alive:
                    why = EngineError(f"{instance.name}: did not load version {version} ({error})")
                    self._proxy.mark_down(instance, why)
                return []
            instances = alive
        return []

    async def _load(self, instances: list[Instance], version: int) -> None:
        names = {instance.name for instance in instances}
        self._unsure |= names
        with ExitStack() as asked:
            for instance in instances:
                asked.enter_context(instance.asking(f"to load version {version}"))
            await self._transport.deliver([instance.engine for instance in instances], version)
        self._unsure -= names
