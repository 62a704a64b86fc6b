"""Relay processes and the controller's end over them, with a trainer that is an outlet and weights that are random."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from safetensors.numpy import load_file

from asyncrl.core.manifest import Manifest, TensorInfo
from asyncrl.ports import Engine, EngineError, Observer
from asyncrl.processes import free_port
from asyncrl.weights.outlet import Outlet
from asyncrl.weights.relay_transport import RelayTransport
from asyncrl.wire import RelayState

T = TypeVar("T")
Tensors = Mapping[str, np.ndarray[Any, Any]]


def tensors(version: int, megabytes: float) -> Tensors:
    """Five tensors, ``megabytes`` together, that differ from those of any other version."""
    rng = np.random.default_rng(version)
    count = int(megabytes * 2**20 / 4 / 5)
    return {f"t{i}": rng.integers(0, 2**31, count, dtype=np.int32) for i in range(5)}


class PlayedTrainer:
    """What ``RelayTransport`` asks of the trainer's client. ``weights`` are those of a version."""

    def __init__(self, weights: Callable[[int], Tensors]) -> None:
        self.weights = weights
        self.outlet = Outlet("127.0.0.1")
        self.published: list[int] = []

    @property
    def outlets(self) -> list[str]:
        return [f"127.0.0.1:{self.outlet.port}"]

    async def publish(self, version: int, transport: str, path: str = "") -> Mapping[str, float]:
        data = self.weights(version)
        infos = tuple(TensorInfo(name=name, shape=t.shape, dtype=str(t.dtype)) for name, t in data.items())
        manifest = Manifest(version=version, tensors=infos)
        layout, memory = self.outlet.begin(manifest)
        for place in layout.places:
            memory[place.start : place.end] = data[place.tensor.name].tobytes()
        self.outlet.offer(manifest)
        self.published.append(version)
        return {"seconds": 0.0}

    async def unless_ended(self, work: Awaitable[T]) -> T:
        return await work


class PlayedServer:
    """Reads what it is told to load, as an engine would, and compares it with what was published."""

    def __init__(self, name: str, megabytes: float) -> None:
        self.name = name
        self.megabytes = megabytes
        self.version: int | None = None

    async def load_from_disk(self, path: str, version: int) -> None:
        try:
            found = load_file(f"{path}/model.safetensors")
        except OSError as error:
            raise EngineError(f"{self.name}: {error}") from None
        expected = tensors(version, self.megabytes)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected), "something corrupt was loaded"
        self.version = version


class Seen:
    """The part of an ``Observer`` that the transport talks to."""

    def __init__(self) -> None:
        self.counters: list[str] = []
        self.spans: list[str] = []

    def counter(self, name: str, at: float, value: float) -> None:
        self.counters.append(name)

    def span(self, track: str, name: str, start: float, end: float, args: object = None) -> None:
        self.spans.append(name)


class World:
    """``relays`` processes with their folders in ``memory``, and one server on each. ``silence_s`` is long, as a
    crowded machine may keep a process waiting for seconds: that one was killed is told by its connection."""

    def __init__(
        self,
        memory: Path,
        relays: int,
        *,
        megabytes: float,
        chunk_mb: int = 1,
        keep: int = 2,
        max_mb_s: int = 0,
        silence_s: float = 10.0,
        link: str = "tcp",
        weights: Callable[[int], Tensors] | None = None,
    ) -> None:
        self.memory = memory
        self.chunk_mb = chunk_mb
        self.max_mb_s = max_mb_s
        self.ports = [free_port() for _ in range(relays)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.trainer = PlayedTrainer(weights or (lambda version: tensors(version, megabytes)))
        self.servers = [PlayedServer(f"s{i}", megabytes) for i in range(relays)]
        self.hosts = {server.name: url for server, url in zip(self.servers, self.urls, strict=True)}
        self.notes: list[str] = []
        self.seen = Seen()
        self.transport = RelayTransport(
            self.trainer,
            self.urls,
            self.hosts,
            keep=keep,
            run="test",
            timeout_s=60.0,
            observer=cast(Observer, self.seen),
            note=self.notes.append,
            silence_s=silence_s,
            link=link,
        )

    def engines(self, *indices: int) -> Sequence[Engine]:
        chosen = [self.servers[i] for i in indices] if indices else self.servers
        return cast(list[Engine], chosen)

    def state(self, index: int) -> RelayState:
        return self.transport.states[self.urls[index]]

    def folder(self, index: int) -> Path:
        return self.memory / f"asyncrl-relay-{self.ports[index]}"

    async def start(self, index: int) -> None:
        self.processes[index] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.weights.relay_main", "--port", str(self.ports[index])),
            *("--memory", str(self.memory), "--chunk-mb", str(self.chunk_mb), "--max-mb-s", str(self.max_mb_s)),
            *("--log-level", "error"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[index].send_signal(number)
        if number is signal.SIGKILL:
            await self.processes[index].wait()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.transport.news.wait()

    async def up(self, *indices: int) -> None:
        await self.until(lambda: all(self.urls[i] in self.transport.states for i in indices or range(len(self.urls))))

    async def without(self, index: int) -> None:
        """Until the controller has noticed that it is gone."""
        await self.until(lambda: self.urls[index] not in self.transport.states)

    async def broadcast(self, version: int, *indices: int) -> None:
        """The whole way of a version to these servers (all, if none are named)."""
        await self.transport.prepare(version)
        await self.transport.arrive(self.engines(*indices), version)
        await self.transport.deliver(self.engines(*indices), version)


@asynccontextmanager
async def world(memory: Path, relays: int, **settings: Any) -> AsyncIterator[World]:
    """Running and connected; nothing is left of it afterwards."""
    made = World(memory, relays, **settings)
    try:
        for index in range(relays):
            await made.start(index)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(made.transport.watch())
            await made.up()
            yield made
            watching.cancel()
    finally:
        made.trainer.outlet.close()
        for process in made.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                await process.wait()
