"""The process of a simulated server: its life, its faults, and when it does what (sim/server.py says what).

``sim/engine.py`` is the client's way to it. A process has a clock of its own, which stands still while it hangs.

    a weight load   waits for: running requests to end, load_s   woken by: _settle(), a fault, its deadline
    _settle()       the server's next event                      woken by: one timer; each change, once a moment
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from asyncrl.ports import EngineError, EngineRejected
from asyncrl.sim.client import Calls, Load, Reply, Stream
from asyncrl.sim.kv import Arrivals, KvLink
from asyncrl.sim.server import EPS, Server

NOTICE_S = 2.5
"""How long a real server takes to find out that a client is gone (2 to 3 s, measured)."""


class SimProcess:
    """``new_server`` makes what a new process begins with. ``load_s`` is the time of a weight load, ``start_s`` of a
    start. With a ``kv_link`` it gives KV to other servers, and takes it from them."""

    def __init__(
        self,
        name: str,
        new_server: Callable[[], Server[Reply]],
        *,
        load_s: float,
        start_s: float,
        control_timeout_s: float,
        kv_link: KvLink | None,
    ) -> None:
        self.name = name
        self.ranks = 1
        self.version = 0
        self._new_server = new_server
        self._load_s = load_s
        self._start_s = start_s
        self._server = new_server()
        self._arrivals = Arrivals(kv_link)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Stream] = {}
        self._calls = Calls(name, control_timeout_s)
        self._loads: deque[Load] = deque()
        self._paused = False
        self._answering = asyncio.Event()
        """Set while the server is up, can be reached, and does not hang."""
        self._answering.set()
        self._timer: asyncio.TimerHandle | None = None
        """The server's next event."""
        self._settling = False
        self._starting: asyncio.TimerHandle | None = None
        self._dead = False
        self._partitioned = False
        self._hung_at: float | None = None
        self._lost = 0.0
        """Seconds that the server stood still: its own clock is that much behind."""
        self._slow = 1.0
        self._drop_replies = 0
        self._duplicate_replies = 0
        self._corrupt_loads = 0

    # --- faults, each with its end

    def kill(self) -> None:
        """The process dies, until ``restart``: connections break, new ones are refused, and what was not streamed yet
        is lost."""
        self._dead = True
        self._break("did the server die?")
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        self._loads.clear()
        self._arrivals.clear()
        self._server = self._new_server()
        self._server.slow(self._slow)
        self._paused = False
        self._hung_at, self._lost = None, 0.0
        self._changed()

    def restart(self) -> None:
        """A new process in place of the old one. It refuses connections for ``start_s``, and has the first weights."""
        if not self._dead:
            self.kill()
        if self._start_s:
            self._starting = asyncio.get_running_loop().call_later(self._start_s, self._started)
        else:
            self._started()

    def hang(self, on: bool) -> None:
        """Nothing is answered and nothing goes on, while connections stay open: callers run into their deadlines. In
        the end the server goes on where it was, and answers those that still wait."""
        if self._dead or on == (self._hung_at is not None):
            return
        loop = asyncio.get_running_loop()
        if on:
            self._book()
            self._hung_at = loop.time()
        else:
            assert self._hung_at is not None
            self._lost += loop.time() - self._hung_at
            self._hung_at = None
            self._calls.wake()
        self._changed()

    def slow(self, factor: float) -> None:
        """From the next step on, steps take ``factor`` times as long; 1 ends it. It is the machine that is slow, so a
        restart changes nothing."""
        self._book()
        self._slow = factor
        self._server.slow(factor)
        self._touch()

    def partition(self, on: bool) -> None:
        """The network between client and server is cut: connections break and new ones are refused. The server goes
        on; it notices after ``NOTICE_S`` that its clients are gone and aborts their requests."""
        if on == self._partitioned:
            return
        self._partitioned = on
        if on:
            self._book()
            lost = self._break("is the network down?")
            asyncio.get_running_loop().call_later(NOTICE_S, self._remove, lost)
        self._changed()

    def drop_reply(self) -> None:
        """The next reply that would end is lost: the request's stream breaks before its last chunk, and the server
        aborts what else it has of the request."""
        self._drop_replies += 1

    def duplicate_reply(self) -> None:
        """The next reply that ends, ends twice. The port promises one last chunk a reply, and the adapter of real
        servers keeps that: it takes the second one for a contradiction, drops the connection and raises
        ``EngineError``. So the stream gives the last chunk and then breaks; for the ``LLMProxy`` the server failed, the
        ended reply stays ended, and other replies of the request (``n`` > 1) go on elsewhere with their tokens."""
        self._duplicate_replies += 1

    def corrupt_weights(self) -> None:
        """The next weights that arrive are not those that were sent: the server refuses them and keeps the old."""
        self._corrupt_loads += 1

    def _break(self, why: str) -> list[Reply]:
        """Every connection breaks. The replies whose client is lost."""
        error = EngineError(f"{self.name}: connection broke; {why}")
        self._calls.break_off(error)
        return [reply for stream in self._streams.values() for reply in stream.fail(error)]

    def _changed(self) -> None:
        """It can be reached again, or no longer."""
        if self._dead or self._partitioned or self._hung_at is not None:
            self._answering.clear()
        else:
            self._answering.set()
        self._touch()

    def _started(self) -> None:
        self._starting = None
        self._dead = False
        self.version = 0
        self._changed()

    # --- the server's side

    def _clock(self) -> float:
        """The server's time: it stands still while the server hangs."""
        assert self._loop is not None
        return (self._loop.time() if self._hung_at is None else self._hung_at) - self._lost

    def _book(self) -> None:
        """Book the steps up to now and send what is due."""
        if self._loop is None or self._dead or self._hung_at is not None:
            return
        due = self._server.advance(self._clock())
        if due:
            for reply, reason in due:
                self._send(reply, reason)
            self._touch()

    def _touch(self) -> None:
        """Something changed: settle once, after all that happens at this moment."""
        if not self._settling and self._loop is not None:
            self._settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Let the server plan from here, and come back at its next event."""
        assert self._loop is not None
        self._settling = False
        if self._dead or self._hung_at is not None:
            self._arm(math.inf)
            return
        now = self._clock()
        while True:
            self._book()
            if self._settling:  # those who were sent something come first: they may have the next request
                self._arm(math.inf)
                return
            while self._loads and self._load_weights(now):
                pass
            while (came := self._arrivals.arrived(self.version, now)) is not None:
                reply, tokens = came
                self._server.hold(tokens)
                if reply.wanted:
                    self._server.add(reply)
            until = self._server.plan(now, admit=not self._paused and not self._loads)
            if self._loads and self._loads[0].ends is not None:
                until = self._loads[0].ends
            until = min(math.inf if until is None else until, self._arrivals.next)
            if until > now + EPS:
                break
        self._arm(until)

    def _arm(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if until < math.inf:
            assert self._loop is not None
            self._timer = self._loop.call_at(until + self._lost, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._settle()

    def _load_weights(self, now: float) -> bool:
        """The first load begins once nothing runs (who waits, waits on), and ends ``load_s`` later. True if it did."""
        load = self._loads[0]
        if load.ends is None and not self._server.admitted:
            load.ends = now + self._load_s
        if load.ends is None or now < load.ends - EPS:
            return False
        self._loads.popleft()
        error: EngineError | None = None
        if self._corrupt_loads:
            self._corrupt_loads -= 1
            error = EngineRejected(
                f"{self.name}: version {load.version} was refused: not the checksums of its manifest"
            )
        else:
            self._arrivals.forget(self.version, self._server.flush(), now)
            self.version = load.version
        if load.done.done():  # nobody waits for it any more
            return True
        if error:
            load.done.set_exception(error)
        else:
            load.done.set_result(None)
        return True

    def _send(self, reply: Reply, reason: str | None) -> None:
        """Send the tokens made since the last chunk; with a ``reason`` it is the reply's last one."""
        stream = reply.stream
        if stream is None:
            return
        if reason is not None and self._drop_replies:
            self._drop_replies -= 1
            error = EngineError(f"{self.name}: ended /generate before the last token; did the server die?")
            self._remove(stream.fail(error))
            return
        assert self._loop is not None
        stream.heard = self._loop.time()
        stream.put(reply.chunk(reply.made - reply.sent, reason, self.version))
        if reason is None:
            return
        stream.replies.remove(reply)
        if self._duplicate_replies:
            self._duplicate_replies -= 1
            error = EngineError(f"{self.name}: /generate contradicts itself: unexpected reply index {reply.index}")
            self._remove(stream.fail(error))
            if stream.outbox[-1] is not error:  # all had ended: the client reads on nevertheless
                stream.put(error)

    # --- KV of other servers

    @property
    def answers(self) -> bool:
        return self._answering.is_set()

    def held(self, version: int, tokens: bytes, limit: int) -> int:
        """How many of the first ``limit`` tokens it has KV of, computed by ``version``."""
        self._book()
        if version == self.version:
            return self._server.held(tokens, limit)
        return self._arrivals.past(version, tokens, limit, self._clock())

    def given(self, version: int, tokens: bytes) -> None:
        """Another server takes what it has of these, computed by ``version``."""
        if version == self.version:
            self._server.given(tokens)

    def _arrive(self, reply: Reply, kv_from: str) -> None:
        """It is the server's now, or when its KV has come."""
        if not kv_from or not self._arrivals.ask(kv_from, self, reply, self._clock()):
            self._server.add(reply)

    def _abort(self, replies: Sequence[Reply]) -> None:
        """Interrupt replies. ``_book`` comes first, as some may just have ended."""
        for reply in list(replies):
            self._server.remove(reply)
            self._send(reply, "abort")
        self._touch()

    def _remove(self, replies: Sequence[Reply]) -> None:
        """Nobody wants these any more. Harmless for those that the server no longer has."""
        if replies:
            self._book()
            for reply in replies:
                self._server.remove(reply)
            self._touch()
