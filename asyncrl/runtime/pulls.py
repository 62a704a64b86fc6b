"""The ParameterServer from which each server takes new weights by itself, when it is told to (StaleFlow §5.1).

    prepare()   Push: alone with the transport; waits for pulls under way, and pulls that come later wait for it.
    pull()      one server: its requests go back to the TrajectoryServer with their tokens, it loads the newest version,
                and goes on. Any number of pulls at once.
    deliver()   nothing: the servers take a version at their own pace.
    catch_up()  pulls for all that are behind; where all must hold one version.
    pinned()    some servers take the newest version, if they do not hold it, and keep it for an evaluation.

So servers hold several versions at once, and the trainer may be any number of versions ahead that the staleness control
allows. A server never goes back: each pull takes the newest version there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from asyncrl.ports import EngineError, EngineRejected, Observer, TrainerDied, WeightTransport
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.parameter_server import ParameterServer
from asyncrl.runtime.restarts import RestartingTrainer


class ReadersWriter:
    """Shared by readers, or a writer's alone. In order of arrival: a writer that waits holds up later readers."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._readers = 0
        self._unread = asyncio.Event()
        self._unread.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._turn:
            self._readers += 1
            self._unread.clear()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._unread.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._turn:
            await self._unread.wait()
            yield


class PulledParameterServer(ParameterServer):
    """``version`` is the newest that servers can pull. Where ``cuts`` is false, servers pull only when nothing runs on
    them, and an evaluation takes servers that have the newest version, or waits for one."""

    def __init__(
        self,
        *,
        proxy: LLMProxy,
        transport: WeightTransport,
        trainer: RestartingTrainer,
        observer: Observer,
        version: int = 0,
        cuts: bool = True,
    ) -> None:
        super().__init__(
            proxy=proxy, transport=transport, trainer=trainer, running="interrupt", observer=observer, version=version
        )
        self._cuts = cuts
        self._access = ReadersWriter()
        self._pull_ended = asyncio.Event()
        """Set at the end of each pull."""

    async def prepare(self, version: int) -> None:
        async with self._access.alone():
            await super().prepare(version)
            self._version = version
        self._proxy.on_change()

    async def deliver(self, version: int) -> None:
        """Servers pull it when they are told to."""

    async def align(self) -> None:
        version, instances = self._version, self._proxy.instances
        if version or any(instance.version != version for instance in instances):
            for instance in instances:
                instance.version = min(instance.version, version - 1)
            self._aligning = version == 0
            await self.prepare(version)
            await self.catch_up()
            self._aligning = False

    async def catch_up(self) -> None:
        """Every server that is up holds the newest version when this returns, but those that an evaluation keeps."""
        while behind := [
            i for i in self._proxy.instances if i.up and not i.draining and not i.pinned and i.version < self._version
        ]:
            free = [i for i in behind if not i.pulling]
            if not free:
                self._pull_ended.clear()
                await self._pull_ended.wait()
            async with asyncio.TaskGroup() as pulls:
                for instance in free:
                    instance.pulling = True
                    pulls.create_task(self.pull(instance))

    async def pull(self, instance: Instance) -> None:
        """Give the newest version to a server that is marked as ``pulling``, until this returns. One that fails is
        marked down."""
        try:
            await self._trainer.attempt(_nothing)  # while there is none, what it has staged is lost
            async with self._access.shared():
                await self._take(instance)
        finally:
            self._end_pull(instance)

    async def _take(self, instance: Instance) -> None:
        loop = asyncio.get_running_loop()
        began, version = loop.time(), self._version
        cut = instance.running
        try:
            await self._transport.arrive([instance.engine], version)
            with instance.asking("to pause"):
                await instance.engine.pause()
            await self._load([instance], version)
            if not instance.up:  # somebody else found that it failed: it is restored like any other
                return
            self._proxy.set_version(instance, version)
            with instance.asking("to resume"):
                await instance.engine.resume()
        except (EngineError, TrainerDied) as error:
            if self._aligning and isinstance(error, EngineRejected):
                raise
            self._proxy.mark_down(instance, EngineError(f"{instance.name}: did not pull version {version}: {error}"))
        else:
            self._observer.span(instance.name, "update", began, loop.time(), {"version": version, "interrupted": cut})

    def _end_pull(self, instance: Instance) -> None:
        self._pull_ended.set()
        self._proxy.resumed(instance)

    @asynccontextmanager
    async def pinned(self, share: float) -> AsyncIterator[int | None]:
        instances = await self._free(share)
        version = self._version
        for instance in instances:
            instance.pinned = True
        try:
            if self._cuts:
                version = await self._take_all(instances)
            yield version if any(i.pinned for i in instances) else None
        finally:
            for instance in instances:
                self._proxy.unpin(instance)
            self._proxy.on_change()

    async def _take_all(self, instances: Sequence[Instance]) -> int:
        """They all hold the version that is returned, but those that failed."""
        for instance in instances:
            instance.pulling = True
        try:
            async with self._access.shared(), asyncio.TaskGroup() as pulls:
                version = self._version
                for instance in instances:
                    if instance.version < version:
                        pulls.create_task(self._take(instance))
        finally:
            for instance in instances:
                self._end_pull(instance)
        return version

    async def _free(self, share: float) -> list[Instance]:
        """``share`` of the servers, those first that have the newest weights; none if none is up."""
        while True:
            up = [i for i in self._proxy.instances if i.up and not i.draining]
            free = [i for i in up if not i.pulling and (self._cuts or i.version == self._version)]
            if free or not up:
                free.sort(key=lambda i: -i.version)
                return free[: max(1, int(share * len(self._proxy.instances)))]
            self._pull_ended.clear()
            await self._pull_ended.wait()

    async def restage(self, version: int) -> None:
        await super().restage(version)
        self._proxy.on_change()

    async def restore(self, instance: Instance) -> None:
        """A failed server answers again: it is used only once it is verified. One that lost its weights pulls."""
        if instance.up or instance.pulling:
            return
        instance.pulling = True
        try:
            async with self._access.shared():
                info = await instance.engine.connect()
                instance.meet(info)
                await instance.engine.pause()
                version = instance.version
                if version < 0 and info.version == self._version:
                    version = info.version  # it joins, with the newest weights
                if version < 0 or info.version != version or instance.name in self._unsure:
                    version = self._version
                    if not self._trainer.up or version != self._prepared:
                        return  # it is probed again
                    self._transport.forget()
                    await self._load([instance], version)
                await instance.engine.resume()
                instance.version = version
        except (EngineError, TrainerDied) as error:
            instance.why = str(error)  # it is probed again
        else:
            self._proxy.mark_up(instance)
        finally:
            self._end_pull(instance)


async def _nothing() -> None:
    """What a trainer that is up does at once."""
