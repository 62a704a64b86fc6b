"""HTTP to one inference server: deadlines, retries, and errors of one line that name the server.

Owns two connection pools. Generation keeps connections alive, because opening one costs more than a short request.
Control calls (health, pause, weights) each take a fresh connection: the server drops an idle one after 5 s, and a call
that must not be repeated has to know that it never met a dropped one.

Waits for the server only, each time with a deadline.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
from yarl import URL

from asyncrl.access import VARIABLE, header
from asyncrl.ports import EngineError, EngineRejected
from asyncrl.shield import to_the_end

T = TypeVar("T")

TCP_CONNECT_S = 10.0
"""A host that does not answer a connection attempt for this long is unreachable."""

KEEP_ALIVE_S = 4.0
"""Idle connections are dropped here before the server does it (5 s), which would fail the next request on one."""

BACKOFF_S = 0.05
BACKOFF_MAX_S = 2.0

BUSY = frozenset({429, 502, 503, 504})
"""Statuses that pass by themselves: the server (or a proxy before it) is starting, stopping or overloaded."""

_encode = msgspec.json.Encoder().encode


class Http:
    """One server's connections. ``retries`` bounds what is repeated, ``rng`` draws the jitter between attempts,
    ``token`` is what the server asks for (``access.py``)."""

    def __init__(self, url: str, name: str, *, retries: int, rng: random.Random, token: str = "") -> None:
        self._base = URL(url)
        self._headers = {"Content-Type": "application/json", **header(token)}
        self._where = f"engine {name} ({url})"
        self._retries = retries
        self._rng = rng
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    def session(self, *, fresh: bool) -> aiohttp.ClientSession:
        """The pool that keeps connections alive, or the one that opens a connection for each request."""
        if self._pooled is None or self._fresh is None:
            self._pooled = self._open(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))
            self._fresh = self._open(aiohttp.TCPConnector(limit=0, force_close=True))
        return self._fresh if fresh else self._pooled

    def _open(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding"],
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=TCP_CONNECT_S),
        )

    def url(self, path: str) -> URL:
        return self._base.joinpath(path)

    async def call(
        self,
        method: Literal["GET", "POST", "PUT", "DELETE"],
        path: str,
        reply: type[T] = NoneType,  # type: ignore[assignment]
        *,
        timeout_s: float,
        body: msgspec.Struct | None = None,
        query: Mapping[str, float] | None = None,
        repeatable: bool = True,
    ) -> T:
        """One request and its whole JSON reply (``NoneType``: any, not read). ``timeout_s`` covers all attempts.

        ``repeatable`` says that doing it twice does no harm; else only a refused connection is tried again.
        """
        data = b"{}" if body is None else _encode(body)
        url = self.url(path).with_query(query)
        attempt = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        async with self.session(fresh=True).request(
                            method, url, data=data if method in ("POST", "PUT") else None
                        ) as response:
                            raw = await response.read()
                        if response.status < 400:
                            return self.decode(path, raw, reply)
                        error = self.refused(path, response.status, raw)
                        again = repeatable and response.status in BUSY
                    except (aiohttp.ClientError, OSError) as broken:
                        error = self.broken(path, broken)
                        again = repeatable or isinstance(broken, aiohttp.ClientConnectorError)
                    if not again or attempt >= self._retries:
                        raise error
                    await self.backoff(attempt)
                    attempt += 1
        except TimeoutError:
            raise self.error(f"no answer to {path} within {timeout_s:g} s: hung, or overloaded") from None

    async def backoff(self, attempt: int) -> None:
        """Wait before attempt ``attempt`` + 1: twice as long each time, and never in step with other clients."""
        delay = min(BACKOFF_MAX_S, BACKOFF_S * 2**attempt)
        await asyncio.sleep(delay * self._rng.uniform(0.5, 1.5))

    def decode(self, path: str, raw: bytes, reply: type[T]) -> T:
        if reply is NoneType:
            return None  # type: ignore[return-value]
        try:
            return msgspec.json.decode(raw, type=reply)
        except msgspec.DecodeError as error:
            raise self.garbage(path, raw, error) from None

    # --- errors, one line each

    def error(self, what: str) -> EngineError:
        return EngineError(f"{self._where}: {what}")

    def rejected(self, what: str) -> EngineRejected:
        return EngineRejected(f"{self._where}: {what}")

    def broken(self, path: str, error: Exception) -> EngineError:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return self.error(
                f"no connection: this machine lets asyncrl open no more files ({os.strerror(error.errno)}); raise the "
                "limit (ulimit -n), or lower engine.max_running_requests"
            )
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            why = error.os_error.strerror or error.os_error
            return self.error(f"no machine of that name ({why}); check the name in engine.urls, and this machine's DNS")
        if isinstance(error, aiohttp.ClientConnectorError):
            return self.error(f"cannot connect ({error.os_error.strerror or error.os_error}); is the server running?")
        return self.error(f"connection broke during {path} ({type(error).__name__}: {error})")

    def garbage(self, path: str, raw: bytes, why: object) -> EngineError:
        start = raw[:60].decode("utf-8", "replace")
        return self.error(f"{path} brought what SGLang would not send ({why}): {start!r}; is the URL right?")

    def refused(self, path: str, status: int, raw: bytes) -> EngineError:
        """4xx means that the request is at fault, 5xx (and 429) the server."""
        message = _message(raw)
        if status == 401 and VARIABLE not in message:  # the embedded server says it itself
            message += f"; set {VARIABLE} to the key that it was started with (--api-key)"
        return self._refusal(status, f"{path} answered {status}: {message}")

    def refused_in_stream(self, status: int, message: str) -> EngineError:
        """The same, said in a stream after status 200."""
        return self._refusal(status, f"/generate was refused: {message}")

    def _refusal(self, status: int, what: str) -> EngineError:
        return self.rejected(what) if 400 <= status < 500 and status not in BUSY else self.error(what)

    async def close(self) -> None:
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()


async def shielded(work: Coroutine[Any, Any, object], timeout_s: float) -> None:
    """Bring ``work`` to its end or its deadline, even if the caller is being cancelled. An EngineError of it is
    dropped: this is for cleaning up on a server, which may be gone."""
    with suppress(EngineError, TimeoutError):
        await to_the_end(work, timeout_s)


def _message(raw: bytes) -> str:
    """What an error reply says: SGLang has four shapes for it, and a proxy may send a page."""
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        found = raw.decode("utf-8", "replace")
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if key in found), str(found))
    return " ".join(str(found).split())[:300] or "(no message)"
