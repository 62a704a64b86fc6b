"""Rank 0's HTTP server, on a thread of its own, so that /health answers while a step runs.

Owns the listening socket and that thread. Requests that need the model become ``jobs`` for the main thread; those that
only move what is staged run on a second thread, and those that wait for a checkpoint on a third. Each kind is done one
at a time, in order of arrival. A handler waits for its answer, which the working thread hands to the loop.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from aiohttp import web

from asyncrl.access import guard
from asyncrl.wire import FeedReq, OpenGroupReq, PublishReq, SaveReq, TrainerInfo, TrainReply, TrainReq

MAX_BODY = 2**34
"""Largest request in bytes: a batch of a thousand million tokens."""

SHUTDOWN_S = 2.0
"""How long an answer on its way may hold up the end."""


class Refused(Exception):
    """A request that was not carried out, and changed nothing. One line with the reason."""


class Commands(Protocol):
    """What the endpoints of the same names do. Each returns metrics, or raises ``Refused``."""

    def info(self) -> TrainerInfo: ...
    def feed(self, request: FeedReq) -> dict[str, float]: ...
    def train_step(self, request: TrainReq) -> dict[str, float]: ...
    def publish(self, request: PublishReq) -> dict[str, float]: ...
    def hold(self, request: PublishReq) -> dict[str, float]: ...
    def broadcast(self, request: PublishReq) -> dict[str, float]: ...
    def open_group(self, request: OpenGroupReq) -> dict[str, float]: ...
    def join_group(self, _: None) -> dict[str, float]: ...
    def save(self, request: SaveReq) -> dict[str, float]: ...
    def saved(self) -> None: ...


Job = Callable[[], None]


class Server:
    """Serves from construction on, until ``close``, who has the ``token``."""

    def __init__(self, listener: socket.socket, commands: Commands, token: str = "") -> None:
        self._commands = commands
        self._token = token
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="sender")
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="waiter")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="http", daemon=True)
        self._thread.start()

    def jobs(self) -> Iterator[Job]:
        """What the main thread has to call, as it arrives; ends with /shutdown. A job raises nothing but what should
        end the process."""
        while (job := self._jobs.get()) is not None:
            yield job

    def close(self) -> None:
        """Let answers go out, and free the port."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard(self._token)])
        app.router.add_get("/health", self._health)
        app.router.add_post("/feed", self._feed)
        app.router.add_post("/train_step", self._train_step)
        app.router.add_post("/publish", self._publish)
        app.router.add_post("/open_group", self._open_group)
        app.router.add_post("/join_group", self._join_group)
        app.router.add_post("/save", self._save)
        app.router.add_post("/saved", self._saved)
        app.router.add_post("/shutdown", self._shutdown)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        await self._stopping.wait()
        await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return _response(self._commands.info())

    async def _feed(self, request: web.Request) -> web.Response:
        return await self._on_main(self._commands.feed, await _body(request, FeedReq))

    async def _train_step(self, request: web.Request) -> web.Response:
        return await self._on_main(self._commands.train_step, await _body(request, TrainReq))

    async def _publish(self, request: web.Request) -> web.Response:
        body = await _body(request, PublishReq)
        if body.transport == "hold":
            return await self._on_sender(self._commands.hold, body)
        if body.transport == "collective":
            return await self._on_sender(self._commands.broadcast, body)
        return await self._on_main(self._commands.publish, body)

    async def _open_group(self, request: web.Request) -> web.Response:
        return await self._on_sender(self._commands.open_group, await _body(request, OpenGroupReq))

    async def _join_group(self, _: web.Request) -> web.Response:
        return await self._on_sender(self._commands.join_group, None)

    async def _save(self, request: web.Request) -> web.Response:
        return await self._on_main(self._commands.save, await _body(request, SaveReq))

    async def _saved(self, _: web.Request) -> web.Response:
        def wait(_: None) -> dict[str, float]:
            self._commands.saved()
            return {}

        return _response(await self._loop.run_in_executor(self._waiter, self._answer, wait, None))

    async def _shutdown(self, _: web.Request) -> web.Response:
        self._jobs.put(None)
        return _response(TrainReply(version=self._commands.info().version, metrics={}))

    async def _on_main(self, command: Callable[[Any], dict[str, float]], body: msgspec.Struct) -> web.Response:
        reply: asyncio.Future[TrainReply] = self._loop.create_future()

        def settle(answer: TrainReply) -> None:
            if not reply.done():  # the client may have gone meanwhile
                reply.set_result(answer)

        def job() -> None:
            self._loop.call_soon_threadsafe(settle, self._answer(command, body))

        self._jobs.put(job)
        return _response(await reply)

    async def _on_sender(self, command: Callable[[Any], dict[str, float]], body: msgspec.Struct | None) -> web.Response:
        return _response(await self._loop.run_in_executor(self._sender, self._answer, command, body))

    def _answer(self, command: Callable[[Any], dict[str, float]], body: msgspec.Struct | None) -> TrainReply:
        metrics: dict[str, float] = {}
        error: str | None = None
        try:
            metrics = command(body)
        except Refused as refusal:
            error = str(refusal)
        info = self._commands.info()
        return TrainReply(
            version=info.version,
            metrics=metrics,
            checksum=info.checksum,
            checksums=info.checksums,
            outlets=info.outlets,
            error=error,
        )


async def _body(request: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise web.HTTPBadRequest(text=f"{request.path}: not a {kind.__name__}: {error}") from error


def _response(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type="application/msgpack")
