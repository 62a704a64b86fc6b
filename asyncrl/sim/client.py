"""The client's side of a simulated server: what the adapter of real servers (``engine/sglang.py``) keeps per request.

``Stream`` is one request and what was sent of it, ``Deadlines`` gives up those that hear nothing, ``Calls`` are the
control calls in flight, a ``Load`` is what one of them asked for. ``sim/engine.py`` owns them, puts chunks and errors
in, and answers the calls.

    Stream.something()    waits for: the next chunk or error    woken by: put()
    Calls.wait()          waits for: an answer                  woken by: the engine, break_off(), its deadline
    Deadlines             one timer, at the earliest deadline
"""

from __future__ import annotations

import asyncio
import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable

from asyncrl.ports import Chunk, EngineError
from asyncrl.sim.server import EPS, Sequence, countdown

_LOGPROB = array("f", [-0.5])


class Reply(Sequence):
    """One of the replies of a stream; ``stream`` is None once nobody listens any more."""

    __slots__ = ("index", "sent", "stream")

    def __init__(self, stream: Stream, index: int, tokens: array[int], remaining: int, budget: int) -> None:
        super().__init__(tokens, remaining, budget)
        self.stream: Stream | None = stream
        self.index = index
        self.sent = 0
        """Tokens that were sent."""

    @property
    def wanted(self) -> bool:
        """Its last chunk was not sent yet, and somebody listens."""
        return self.stream is not None and self in self.stream.replies

    def chunk(self, new: int, reason: str | None, version: int) -> Chunk:
        """The next ``new`` tokens, sampled by ``version``. They count down: see sim/engine.py."""
        follow = self.remaining - self.sent
        self.sent += new
        return Chunk(
            index=self.index,
            output_ids=countdown(follow, new),
            logprobs=_LOGPROB * new,
            versions=array("i", [version]) * new,
            finish_reason=reason,
            cached_tokens=self.cached,
        )


class Stream:
    """One request, with ``n`` replies."""

    __slots__ = ("began", "heard", "n", "outbox", "replies", "rid", "waiter")

    def __init__(self, rid: str, now: float, n: int) -> None:
        self.rid = rid
        self.n = n
        self.began = now
        self.heard: float | None = None
        """When its last chunk was sent."""
        self.outbox: deque[Chunk | EngineError] = deque()
        self.replies: list[Reply] = []
        """Those whose last chunk was not sent yet; none once the connection broke."""
        self.waiter: asyncio.Future[None] | None = None

    def something(self) -> asyncio.Future[None]:
        """Done when the outbox is no longer empty."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    def put(self, item: Chunk | EngineError) -> None:
        self.outbox.append(item)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def leave(self) -> list[Reply]:
        """Nobody listens any more; the replies that had not ended."""
        replies, self.replies = self.replies, []
        return replies

    def fail(self, error: EngineError) -> list[Reply]:
        """The connection breaks; the replies that nobody listens to any more. Harmless once all have ended: then only
        what follows the last token is lost."""
        lost = self.leave()
        for reply in lost:
            reply.stream = None
        if lost:
            self.put(error)
        return lost


class Load:
    """A weight load that was asked for. The server does it even if nobody waits for it any more."""

    __slots__ = ("done", "ends", "version")

    def __init__(self, version: int, done: asyncio.Future[None]) -> None:
        self.version = version
        self.done = done
        self.ends: float | None = None
        """Server time; None until it begins."""


class Deadlines:
    """Gives up streams that were silent for ``idle_s``, or that have not ended after ``request_s``."""

    def __init__(self, idle_s: float, request_s: float, give_up: Callable[[Stream, str], None]) -> None:
        self._idle_s = idle_s
        self._request_s = request_s
        self._give_up = give_up
        self._heap: list[tuple[float, int, Stream]] = []
        """An entry may be too early, as its stream was heard since."""
        self._entries = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Stream) -> None:
        deadline = min(self._idle_until(stream), stream.began + self._request_s)
        if deadline == math.inf:
            return
        self._entries += 1
        heapq.heappush(self._heap, (deadline, self._entries, stream))
        if self._timer is None or deadline < self._timer.when():
            self._arm()

    def _idle_until(self, stream: Stream) -> float:
        return (stream.began if stream.heard is None else stream.heard) + self._idle_s

    def _arm(self) -> None:
        self.close()
        if self._heap:
            self._timer = asyncio.get_running_loop().call_at(self._heap[0][0], self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + EPS
        while self._heap and self._heap[0][0] <= now:
            stream = heapq.heappop(self._heap)[2]
            if not stream.replies:
                continue
            if stream.began + self._request_s <= now:
                self._give_up(stream, "request_timeout_s")
            elif self._idle_until(stream) <= now:
                self._give_up(stream, "idle_timeout_s")
            else:
                self.watch(stream)
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Calls:
    """The control calls in flight to the server ``name``. Each is a future, which the server answers."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._calls: dict[asyncio.Future[None], bool] = {}
        """True for those that a hang keeps waiting."""

    async def wait(self, path: str, answer: asyncio.Future[None], *, hung: bool = False) -> None:
        """Wait for ``answer``; ``hung`` calls are also answered by ``wake``. Raises ``EngineError``."""
        self._calls[answer] = hung
        try:
            async with asyncio.timeout(self._timeout_s):
                await answer
        except TimeoutError:
            raise EngineError(
                f"{self._name}: no answer to {path} within {self._timeout_s:g} s: hung, or overloaded"
            ) from None
        finally:
            del self._calls[answer]

    def wake(self) -> None:
        """The hang is over."""
        for call, hung in self._calls.items():
            if hung and not call.done():
                call.set_result(None)

    def break_off(self, error: EngineError) -> None:
        for call in self._calls:
            if not call.done():
                call.set_exception(error)
