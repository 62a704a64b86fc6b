"""How weights travel between two processes: one TCP connection for one version, asked for by the one that lacks it.
Where several have parts of it, one connection to each.

    taker → giver    length, FetchReq
    giver → taker    length, FetchReply, then the bytes of the file (or of the giver's parts of it) from the offset that
                     was asked for to its end, then length, FetchEnd: checksums, made while the bytes travel

The giver sends what it has and goes on as more comes in, so a chain of them is a pipeline. The taker names its own
offset: after a broken connection it goes on where it was, with whoever gives to it then. A slow taker holds back
nobody but those behind it, as the giver's buffer is the file, which it keeps anyway.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from asyncrl.access import VARIABLE
from asyncrl.core.manifest import Manifest
from asyncrl.wire import Door, FetchEnd, FetchReply, FetchReq

T = TypeVar("T")

LIMIT = 2**28
"""Largest message before the bytes; a manifest takes about a hundred bytes a tensor."""


STRANGER = f"it has not the run's token; set {VARIABLE} to that where it is started"


class LinkBroken(Exception):
    """The connection ended early, or brought what is not of this protocol."""


class LinkMissing(Exception):
    """This side, or the other, cannot move bytes as the recipe says. One line with the remedy."""


class Giver(Protocol):
    """The bytes of a version, as one connection brings them: the port for other networks than TCP (``nixl.py``)."""

    async def receive_into(self, start: int, view: memoryview) -> int:
        """At least one byte of the file from ``start`` on, which never goes back. Raises ``LinkBroken`` or
        ``OSError``."""
        ...

    def close(self) -> None: ...


class TcpGiver:
    """The bytes follow each other on the connection itself."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def receive_into(self, start: int, view: memoryview) -> int:
        return await receive_into(self._sock, view)

    def close(self) -> None:
        """Who made the connection closes it."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def length(head: bytes) -> int:
    """Raises ``LinkBroken``."""
    size = int.from_bytes(head, "little")
    if size > LIMIT:
        raise LinkBroken(f"a message of {size} bytes; is this the port of a relay?")
    return size


def decode(body: bytes, kind: type[T]) -> T:
    """Raises ``LinkBroken``."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise LinkBroken(f"not a {kind.__name__}: {error}") from None


class Source:
    """Who gives a version: one that has all of it, or several that have their parts. ``sockets`` are connected to
    them, and closed by who made them. ``manifest`` is what ``ask`` found, None where one of them has it not. Use as a
    context."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        self._givers: list[Giver] = []
        self._spans: deque[tuple[int, int, Giver]] = deque()
        self.manifest: Manifest | None = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        for giver in self._givers:
            giver.close()

    async def ask(self, request: FetchReq) -> None:
        """Raises ``LinkBroken``, ``LinkMissing`` or ``OSError``."""
        for sock in self._sockets:
            await asyncio.get_running_loop().sock_sendall(sock, frame(request))
        replies = [await receive(sock, FetchReply) for sock in self._sockets]
        for reply in replies:
            if reply.error:
                raise LinkMissing(reply.error)
        self.manifest = _common([reply.manifest for reply in replies])
        for sock, reply in zip(self._sockets, replies, strict=True):
            self._givers.append(TcpGiver(sock) if reply.door is None else await _reader(sock, reply.door))
        spans = [
            (start, end, number)
            for number, reply in enumerate(replies)
            for start, end in (((0, sys.maxsize),) if reply.spans is None else reply.spans)
        ]
        self._spans = deque((start, end, self._givers[number]) for start, end, number in sorted(spans))

    async def receive_into(self, start: int, view: memoryview) -> int:
        """As a ``Giver``."""
        while self._spans and self._spans[0][1] <= start:
            self._spans.popleft()
        if not self._spans or self._spans[0][0] > start:
            raise LinkBroken(f"nobody gives byte {start}")
        _, end, giver = self._spans[0]
        return await giver.receive_into(start, view[: end - start])

    async def checksums(self) -> dict[str, int]:
        """Of the tensors, once all bytes were received. Raises ``LinkBroken`` or ``OSError``."""
        total: Counter[str] = Counter()
        for sock in self._sockets:
            total.update((await receive(sock, FetchEnd)).checksums)
        return {name: value % 2**64 for name, value in total.items()}


async def _reader(sock: socket.socket, door: Door) -> Giver:
    from asyncrl.weights.nixl import Reader  # imports this module

    return await asyncio.to_thread(Reader, sock, door)


def _common(manifests: Sequence[Manifest | None]) -> Manifest | None:
    """Raises ``LinkBroken``."""
    if None in manifests:
        return None
    if any(manifest != manifests[0] for manifest in manifests):
        raise LinkBroken("its sources have different weights")
    return manifests[0]


async def receive(sock: socket.socket, kind: type[T]) -> T:
    """Raises ``LinkBroken`` or ``OSError``."""
    return decode(await exactly(sock, length(await exactly(sock, 4))), kind)


async def exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    got = 0
    while got < size:
        got += await receive_into(sock, memoryview(data)[got:])
    return bytes(data)


async def receive_into(sock: socket.socket, view: memoryview) -> int:
    """At least one byte. Raises ``LinkBroken`` or ``OSError``."""
    count = await asyncio.get_running_loop().sock_recv_into(sock, view)
    if not count:
        raise LinkBroken("the other side closed the connection")
    return count


async def connect(address: str) -> socket.socket:
    """To ``host:port``. Raises ``OSError``."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock
