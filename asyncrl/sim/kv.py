"""KV on its way from one simulated server to another (DORA §4.4; the embedded engine's serve/kv_transfer.py).

A request that came with its KV's source is not the server's before its KV is there, however long that takes; one
transfer after another, as one link has to carry them. What the source holds is looked at when the request comes: of its
version now, or of the one before for ``PAST_S``. It counts as given if the source can still be reached at the end. What
was given is the first that the source forgets when it needs room.

No clock and no loop: the caller says what time it is. Times are the receiving server's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from asyncrl.core.types import Record
from asyncrl.sim.client import Reply
from asyncrl.sim.prefix_cache import PrefixCache
from asyncrl.sim.server import EPS

PAST_S = 10.0
"""As in serve/loop.py."""


class Peer(Protocol):
    """A server that takes KV, or gives it."""

    version: int

    @property
    def answers(self) -> bool:
        """It can be reached."""

    def held(self, version: int, tokens: bytes, limit: int) -> int:
        """How many of the first ``limit`` tokens it has KV of, computed by ``version``."""

    def given(self, version: int, tokens: bytes) -> None:
        """Another takes what it has of these."""


class KvLink(Record, frozen=True, kw_only=True):
    """``token_s``: seconds for the KV of a token. ``peers``: all servers, by name."""

    token_s: float
    peers: Mapping[str, Peer]


class Past(Record, frozen=True, kw_only=True):
    """What a server held before it took newer weights."""

    version: int
    cache: PrefixCache
    until: float


class Transfer(Record, frozen=True, kw_only=True):
    """The first ``tokens`` of a reply's input, by ``version``."""

    reply: Reply
    source: Peer
    version: int
    tokens: int
    ends: float


class Arrivals:
    """What is on its way to one server, in order, and what it held before it took newer weights. ``link`` None: nothing
    ever comes or goes."""

    def __init__(self, link: KvLink | None) -> None:
        self._link = link
        self._coming: deque[Transfer] = deque()
        self._past: Past | None = None
        self.taken = 0
        """Tokens whose KV came."""

    @property
    def replies(self) -> list[Reply]:
        """Those that wait for their KV."""
        return [transfer.reply for transfer in self._coming if transfer.reply.wanted]

    @property
    def next(self) -> float:
        """When the next KV is there."""
        return self._coming[0].ends if self._coming else math.inf

    def ask(self, name: str, to: Peer, reply: Reply, now: float) -> bool:
        """Begin to take what the server ``name`` has of the reply's input, if that is more than is here."""
        source = None if self._link is None else self._link.peers.get(name)
        if self._link is None or source is None or not source.answers:
            return False
        data, limit = reply.tokens.tobytes(), len(reply.tokens) - 1
        tokens = source.held(to.version, data, limit)
        if tokens <= to.held(to.version, data, limit):
            return False
        source.given(to.version, data)
        begins = max(now, self._coming[-1].ends) if self._coming else now
        ends = begins + self._link.token_s * tokens
        self._coming.append(Transfer(reply=reply, source=source, version=to.version, tokens=tokens, ends=ends))
        return True

    def arrived(self, version: int, now: float) -> tuple[Reply, bytes] | None:
        """The next one that is there, with the tokens whose KV came: none if the version here is another by now."""
        if self.next > now + EPS:
            return None
        transfer = self._coming.popleft()
        reply = transfer.reply
        if transfer.version != version or not transfer.source.answers:
            return reply, b""
        self.taken += transfer.tokens
        return reply, reply.tokens[: transfer.tokens].tobytes()

    def forget(self, version: int, cache: PrefixCache, now: float) -> None:
        """``version`` is replaced; for a while others may still take what was held of it."""
        if self._link is not None:
            self._past = Past(version=version, cache=cache, until=now + PAST_S)

    def past(self, version: int, tokens: bytes, limit: int, now: float) -> int:
        """As ``Peer.held``, of what was forgotten."""
        past = self._past
        return past.cache.find(tokens, limit).end if past and past.version == version and now < past.until else 0

    def clear(self) -> None:
        """The process has died."""
        self._coming.clear()
        self._past = None
