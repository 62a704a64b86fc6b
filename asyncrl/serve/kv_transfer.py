"""KV from one server to another of the same weights, so that a request that moves is not prefilled again (DORA §4.4).

A request that comes with ``kv_from`` waits, without a slot, until the rows of its prefix have come from there; then it
is queued, and begins with them as with rows that were kept here. Equal tokens have equal rows, so what is asked for is
named by its tokens, and it does not matter who computed it or for which request. The two ends compare the version, the
weights and the layout first, blocks carry checksums, and nothing is unpickled.

Whatever goes wrong, the request is prefilled: other weights, nothing kept, no answer, a broken connection, bytes that
are not those that were sent, weights that change meanwhile. ``counts`` says how often.

    give()      waits for: one of ``GIVING`` places, the engine, the reader   woken by: these; its deadline
    taking()    waits for: the engine, the other server                       woken by: these; its deadlines
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from math import prod

import aiohttp
import msgspec
import torch
from aiohttp import web

from asyncrl.access import header
from asyncrl.checksum import checksum_of_part
from asyncrl.serve.loop import Engine, KvMismatch
from asyncrl.serve.scheduler import Sequence
from asyncrl.wire import KvKey, KvReq

log = logging.getLogger("asyncrl.serve")

BLOCK_BYTES = 1 << 20
"""What is copied at once, on the loop that serves requests, and has a checksum of its own."""
SUM_BYTES = 8
GIVING = 4
"""Prefixes that are sent at once; each keeps its rows in memory."""
CONNECT_S = 2.0
IDLE_S = 5.0
TOTAL_S = 30.0
"""Deadlines of a connection, of bytes that come, and of a whole transfer."""


class BadKv(Exception):
    """What came is not what was asked for."""


class KvTransfer:
    """Both ends, for one server. ``max_tokens`` may be on their way here at once; ``token`` is the run's, shown to the
    other servers."""

    def __init__(self, engine: Engine, *, max_tokens: int, token: str) -> None:
        self.counts = dict.fromkeys(
            ("given", "given_tokens", "taken", "taken_tokens", "absent", "refused", "late", "failed"), 0
        )
        """Transfers and tokens since the start. Not taken: ``absent`` there, or no longer than what was here;
        ``refused`` for its weights; too ``late``; ``failed`` otherwise."""
        self._engine = engine
        self._max_tokens = max_tokens
        self._coming = 0
        """Tokens on their way here."""
        self._headers = header(token)
        self._places = asyncio.Semaphore(GIVING)
        self._session: aiohttp.ClientSession | None = None

    async def close(self, app: web.Application) -> None:
        if self._session is not None:
            await self._session.close()

    # --- giving

    async def give(self, request: web.Request) -> web.StreamResponse:
        """POST /kv_cache (``wire.KvReq``)."""
        body = msgspec.json.decode(await request.read(), type=KvReq)
        try:
            async with asyncio.timeout(TOTAL_S), self._places:
                try:
                    rows = await self._engine.kv_rows(body)
                except KvMismatch as error:
                    return web.Response(status=409, text=str(error))
                if rows is None:
                    return web.Response(status=204)
                return await self._send(request, body.key, rows)
        except (TimeoutError, ConnectionResetError) as error:
            if request.transport is not None:
                request.transport.abort()
            log.info("KV for another server was not sent: %s", error or "no place, or no reader, in time")
            return web.Response(status=503)

    async def _send(self, request: web.Request, key: KvKey, rows: torch.Tensor) -> web.StreamResponse:
        count, block = rows.shape[3], max(1, BLOCK_BYTES // _bytes_of(key, 1))
        response = web.StreamResponse(headers={"KV-Tokens": str(count), "KV-Block": str(block)})
        response.content_type = "application/octet-stream"
        response.content_length = _length(key, count, block)
        await response.prepare(request)
        for start, end in _blocks(count, block):
            data = _bytes(rows[:, :, :, start:end].cpu().contiguous())
            await response.write(bytes(data) + checksum_of_part(data, 0).to_bytes(SUM_BYTES, "little"))
        await response.write_eof()
        self.counts["given"] += 1
        self.counts["given_tokens"] += count
        return response

    # --- taking

    @asynccontextmanager
    async def taking(self, url: str, sequences: list[Sequence]) -> AsyncIterator[None]:
        """Queue new sequences of one prompt as soon as its KV has come from ``url``, or will not. Leaving the block
        gives it up."""
        self._engine.add(sequences, arriving=True)
        async with asyncio.TaskGroup() as beside:
            task = beside.create_task(self._take(url, sequences))
            try:
                yield
            finally:
                task.cancel()

    async def _take(self, url: str, sequences: list[Sequence]) -> None:
        request = rows = None
        try:
            async with asyncio.timeout(TOTAL_S):
                request = await self._engine.kv_wanted(sequences[0].prompt)
                rows = await self._fetch(url, request)
        except (aiohttp.ClientError, OSError, EOFError, ValueError, BadKv) as error:  # TimeoutError is an OSError
            self.counts["failed"] += 1
            log.info("no KV from %s, so it is computed: %s", url, error or type(error).__name__)
        came = await self._engine.arrived(sequences, request, rows)
        if came and rows is not None:
            self.counts["taken"] += 1
            self.counts["taken_tokens"] += rows.shape[3]
        elif rows is not None:
            self.counts["late"] += 1

    async def _fetch(self, url: str, request: KvReq) -> torch.Tensor | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                read_bufsize=BLOCK_BYTES,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S),
            )
        data = msgspec.json.encode(request)
        async with self._session.post(f"{url.rstrip('/')}/kv_cache", data=data, allow_redirects=False) as response:
            if response.status == 204:
                self.counts["absent"] += 1
                return None
            if response.status == 409:
                self.counts["refused"] += 1
                log.info("no KV from %s, so it is computed: %s", url, await response.text())
                return None
            if response.status != 200:
                raise BadKv(f"it answered {response.status}")
            count, block = (int(response.headers.get(name, 0)) for name in ("KV-Tokens", "KV-Block"))
            if not request.beyond < count < len(request.input_ids):
                raise BadKv(f"{count} tokens, of a prompt of {len(request.input_ids)}")
            if block < 1 or (block > 1 and _bytes_of(request.key, block) > BLOCK_BYTES):
                raise BadKv(f"blocks of {block} tokens")
            if response.content_length != _length(request.key, count, block):
                raise BadKv(f"{response.content_length} bytes for {count} tokens")
            if self._coming + count > self._max_tokens:
                raise BadKv(f"{self._coming} tokens are on their way already, no room for {count} more")
            self._coming += count
            try:
                return await _receive(response.content, request.key, count, block)
            finally:
                self._coming -= count


async def _receive(content: aiohttp.StreamReader, key: KvKey, count: int, block: int) -> torch.Tensor:
    layers, kv_heads, head_dim = key.shape
    rows = torch.empty((layers, 2, kv_heads, count, head_dim), dtype=getattr(torch, key.dtype))
    for start, end in _blocks(count, block):
        part = torch.empty((layers, 2, kv_heads, end - start, head_dim), dtype=rows.dtype)
        data = _bytes(part)
        data[:] = await content.readexactly(len(data))
        if checksum_of_part(data, 0) != int.from_bytes(await content.readexactly(SUM_BYTES), "little"):
            raise BadKv(f"tokens {start} to {end} are corrupt")
        rows[:, :, :, start:end] = part
    return rows


def _blocks(count: int, block: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, block):
        yield start, min(count, start + block)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _bytes_of(key: KvKey, tokens: int) -> int:
    """KV of so many tokens."""
    dtype: torch.dtype = getattr(torch, key.dtype)
    return 2 * prod(key.shape) * tokens * dtype.itemsize


def _length(key: KvKey, count: int, block: int) -> int:
    """Bytes of an answer."""
    return _bytes_of(key, count) + SUM_BYTES * -(-count // block)
