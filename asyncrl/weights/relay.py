"""A relay: takes each version of the weights from the one before it in the chain into its host's shared memory, and
gives it on to the next while it still arrives (Laminar §4.2). One process on every host with inference servers.

    /control   the controller's connection: orders in, state out; its end tells either side that the other has gone
    taking     one task: what the orders name and is not there, newest first, but what is begun is brought to its end
    giving     a task for each one that takes from here

It decides nothing about others: whom to take from and what to keep the controller says (``core/relay_chain.py``). One
that loses its source goes on from the byte it has, with the same or the next source that it is given.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from contextlib import ExitStack, suppress
from typing import BinaryIO

import msgspec
from aiohttp import WSMsgType, web

from asyncrl.access import guard, matches
from asyncrl.weights import nixl
from asyncrl.weights.link import STRANGER, LinkBroken, LinkMissing, Source, connect, frame, receive
from asyncrl.weights.store import Corrupt, Incoming, NoRoom, Store
from asyncrl.wire import FetchEnd, FetchReply, FetchReq, RelayOrders, RelayState

log = logging.getLogger("asyncrl.relay")

SO_MAX_PACING_RATE = 47
"""Linux's; Python has no name for it."""

PIECE_BYTES = 2**21
"""Received before it is written and summed up, while it is still in a processor's cache."""

HEARTBEAT_S = 0.2
CONNECT_S = 2.0

RETRY_S = 0.02
"""Pause after a connection broke: its end is mostly known sooner than the new orders."""

MAX_RETRY_S = 1.0
"""While nothing comes, each pause is twice as long as the one before, up to this."""

ABSENT_S = 0.5
"""Pause before an older version is asked for again, of a source that does not have it."""


class Relay:
    """``data`` is the listening socket where others take weights; ``chunk_bytes`` is how much has to be there before it
    is given on, at ``pace`` bytes a second at most (0: any). ``token`` is asked of all, and shown to others."""

    def __init__(self, store: Store, data: socket.socket, chunk_bytes: int, pace: int = 0, token: str = "") -> None:
        self._store = store
        self._data = data
        self._chunk_bytes = chunk_bytes
        self._pace = pace
        self._token = token
        self._orders = RelayOrders(run="")
        self._incoming: Incoming | None = None
        self._incoming_run = ""
        self._absent: set[int] = set()
        """Versions that the source does not have."""
        self._unable: tuple[int, str] | None = None
        """The version that cannot come, as there is no room for it for instance, and the line that says so."""
        self._received = 0
        self._refused = 0
        self._fetching: asyncio.Timeout | None = None
        self._news = asyncio.Event()
        """Set, and replaced, whenever something changed that anyone may wait for."""
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def app(self) -> web.Application:
        app = web.Application(middlewares=[guard(self._token)])
        app.router.add_get("/control", self._control)
        app.router.add_get("/state", self._show)
        app.router.add_delete("/runs/{run}", self._free)
        return app

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take())
            tasks.create_task(self._accept(tasks))

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        """One that takes from here; the next is another task's, so that no end of this can leave a connection open."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self._data)
        with sock:
            tasks.create_task(self._accept(tasks))
            await self._give(sock)

    def state(self) -> RelayState:
        unable, error = self._unable or (None, "")
        return RelayState(
            run=self._orders.run,
            data_port=self._data.getsockname()[1],
            folder=str(self._store.folder),
            versions=self._store.versions,
            received=self._received,
            refused=self._refused,
            unable=unable,
            error=error,
        )

    def obey(self, orders: RelayOrders) -> None:
        before, self._orders = self._orders, orders
        self._store.drop_all_but(orders.versions if orders.run == before.run else ())
        if orders.run != before.run or orders.versions != before.versions:
            self._unable = None
            self._absent.clear()
        if self._fetching is not None:
            going_on = self._wanted() if orders.sources == before.sources else None
            if going_on is None or self._incoming is None or going_on != self._incoming.manifest.version:
                self._fetching.reschedule(asyncio.get_running_loop().time())
                self._fetching = None
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # --- the controller

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.state()), content_type="application/json")

    async def _free(self, request: web.Request) -> web.Response:
        if request.match_info["run"] == self._orders.run:
            self.obey(RelayOrders(run=""))
        return await self._show(request)

    async def _control(self, request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        try:
            await connection.prepare(request)
            async with asyncio.TaskGroup() as tasks:
                reporting = tasks.create_task(self._report(connection))
                async for message in connection:
                    if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                        self.obey(msgspec.json.decode(message.data, type=RelayOrders))
                reporting.cancel()
        except* (msgspec.MsgspecError, ConnectionError) as errors:
            log.warning("the controller's connection broke: %s", errors.exceptions[0])
        return connection

    async def _report(self, connection: web.WebSocketResponse) -> None:
        while not connection.closed:
            news = self._news
            await connection.send_bytes(msgspec.json.encode(self.state()))
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await news.wait()
            except TimeoutError:
                continue

    # --- taking

    def _wanted(self) -> int | None:
        """The version to take now: the one that is begun, or else the newest that is not there."""
        missing = [
            version
            for version in self._orders.versions
            if self._store.get(version) is None
            and version not in self._absent
            and (self._unable is None or version != self._unable[0])
        ]
        begun = self._incoming
        if begun is not None and begun.received and self._incoming_run == self._orders.run:
            missing.sort(key=lambda version: version != begun.manifest.version)
        return missing[0] if missing else None

    async def _take(self) -> None:
        pause_s, failed = RETRY_S, (self._orders, -1)
        while True:
            news, orders, version = self._news, self._orders, self._wanted()
            begun = self._incoming
            if begun is not None and (begun.manifest.version != version or self._incoming_run != orders.run):
                self._drop_incoming()
            if version is None or not orders.sources:
                try:
                    async with asyncio.timeout(ABSENT_S if self._absent else None):
                        await news.wait()
                except TimeoutError:
                    self._absent.clear()
                continue
            try:
                try:
                    async with asyncio.timeout(None) as self._fetching:
                        await self._fetch(orders, version)
                finally:
                    self._fetching = None
            except (NoRoom, LinkMissing) as error:
                log.warning("%s", error)
                self._unable = (version, str(error))
                self._drop_incoming()
                self._tell()
            except Corrupt as error:
                self._refused += 1
                log.warning("%s; it is taken again", error)
                await asyncio.sleep(RETRY_S)
            except (LinkBroken, OSError) as error:  # TimeoutError is one: other orders came
                log.info("version %d from %s: %s", version, ", ".join(orders.sources), error or type(error).__name__)
                before, failed = failed, (orders, self._received)
                pause_s = min(MAX_RETRY_S, 2 * pause_s) if failed == before else RETRY_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        while self._orders is orders:
                            await self._news.wait()

    async def _fetch(self, orders: RelayOrders, version: int) -> None:
        """The rest of a version. Raises ``LinkBroken``, ``LinkMissing``, ``OSError``, ``Corrupt`` or ``NoRoom``."""
        if orders.link == "nixl":
            nixl.stay_local(self._data.getsockname()[0])
        with ExitStack() as opened:
            async with asyncio.timeout(CONNECT_S):
                sockets = [opened.enter_context(await connect(address)) for address in orders.sources]
            source = opened.enter_context(Source(sockets))
            offset = 0 if self._incoming is None else self._incoming.received
            request = FetchReq(run=orders.run, version=version, offset=offset, token=self._token, link=orders.link)
            await source.ask(request)
            manifest = source.manifest
            if manifest is None:
                self._absent.add(version)
                return
            if self._incoming is None:
                self._incoming, self._incoming_run = self._store.begin(manifest), orders.run
                self._tell()
            elif manifest != self._incoming.manifest:
                self._drop_incoming()
                raise LinkBroken("it has other weights of the same version; taken from the beginning")
            await self._receive(source, self._incoming)
            checksums = await source.checksums()
        self._store.complete(self._incoming, checksums)
        self._incoming = None
        self._tell()

    async def _receive(self, source: Source, incoming: Incoming) -> None:
        while (start := incoming.received) < incoming.size:
            chunk_end = (start // self._chunk_bytes + 1) * self._chunk_bytes
            piece = self._buffer[: min(incoming.size, chunk_end, start + PIECE_BYTES) - start]
            got = 0
            try:
                while got < len(piece):
                    got += await source.receive_into(start + got, piece[got:])
            finally:  # what came before a connection broke need not come again
                self._received += got
                incoming.write(piece[:got])
            if incoming.received == chunk_end:
                self._tell()

    def _drop_incoming(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            self._store.discard(incoming)
            self._tell()

    # --- giving

    async def _give(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._pace:
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, self._pace)
            request = await receive(sock, FetchReq)
            if not matches(request.token, self._token):
                await loop.sock_sendall(sock, frame(FetchReply(error=STRANGER)))
                raise LinkBroken(STRANGER)
            version = await self._found(request, sock)
            if version is None:
                await loop.sock_sendall(sock, frame(FetchReply()))
                return
            with version.open() as file:  # at once, before it can be dropped and its memory get another
                if request.link == "nixl":
                    await self._give_by_nixl(sock, request.offset, version, file)
                    return
                await loop.sock_sendall(sock, frame(FetchReply(manifest=version.manifest)))
                offset = request.offset
                while (end := await self._more(version, offset)) > offset:
                    offset += await loop.sock_sendfile(sock, file, offset, end - offset)
                await self._end(sock, version)
        except (LinkBroken, OSError) as error:
            log.info("one that took from here has gone: %s", error)

    async def _give_by_nixl(self, sock: socket.socket, offset: int, version: Incoming, file: BinaryIO) -> None:
        loop = asyncio.get_running_loop()
        nixl.stay_local(self._data.getsockname()[0])
        memory = mmap.mmap(file.fileno(), version.size)
        try:
            shown = await asyncio.to_thread(nixl.Shown, memory, [(0, version.size)])
        except LinkMissing as error:
            await loop.sock_sendall(sock, frame(FetchReply(error=str(error))))
            return
        try:
            await loop.sock_sendall(sock, frame(FetchReply(manifest=version.manifest, door=shown.door)))
            while (end := await self._more(version, offset)) > offset:
                await loop.sock_sendall(sock, end.to_bytes(8, "little"))
                offset = end
            await self._end(sock, version)
        finally:
            shown.close()

    async def _more(self, version: Incoming, start: int) -> int:
        """Up to where it may be given on from ``start``, as soon as that is more; ``start`` when there will be no more:
        it has ended, or was dropped."""
        while (end := self._given(version)) <= start < version.size and self._has(version):
            await self._news.wait()
        return max(start, end)

    async def _end(self, sock: socket.socket, version: Incoming) -> None:
        """Send its checksums, as soon as they are here; nothing if they will not be. Wait until the other side reads no
        more, as the kernel sends from the file's own memory."""
        loop = asyncio.get_running_loop()
        while version is self._incoming:
            await self._news.wait()
        if version.checksums:
            await loop.sock_sendall(sock, frame(FetchEnd(checksums=version.checksums)))
        sock.shutdown(socket.SHUT_WR)
        await loop.sock_recv(sock, 1)

    async def _found(self, request: FetchReq, sock: socket.socket) -> Incoming | None:
        """The version, as soon as the first of it is here; None if it will not come, or not before newer ones. Orders
        may have reached the one that asks before they come here. Raises ``LinkBroken``."""
        while True:
            orders, incoming = self._orders, self._incoming
            if request.run == orders.run:
                if (complete := self._store.get(request.version)) is not None:
                    return complete
                if incoming is not None and incoming.manifest.version == request.version:
                    return incoming
                if request.version < max(orders.versions, default=request.version):
                    return None
            await self._news.wait()
            with suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    raise LinkBroken("it waits no longer")

    def _given(self, version: Incoming) -> int:
        """How much of it may be given on: whole chunks."""
        if version.received == version.size:
            return version.size
        return version.received // self._chunk_bytes * self._chunk_bytes

    def _has(self, version: Incoming) -> bool:
        return version is self._incoming or self._store.get(version.manifest.version) is version
