"""A simulated inference server behind the Engine port: its streams, its life and its faults, on virtual time.

What a server does with its requests is ``sim/server.py``'s; this is the way to it. As far as the runtime can see it
behaves like the adapter of real servers (``engine/sglang.py``), which it stands for: the same deadlines, and the same
errors for the same misfortune.

Generated ids count down to the end of their response: id ``GENERATED + r`` says that r tokens follow, and
``GENERATED`` itself is the end of turn. So a response that is cut off and sent again with its tokens goes on to the
length that was drawn for it, on any server, without hidden state.

    generate()      waits for: its next chunk                    woken by: _settle(), a fault, its deadline
    a weight load   waits for: running requests to end, load_s   woken by: _settle(), a fault, its deadline
    other calls     wait only while the server hangs             woken by: hang(False), a fault, their deadline
    _settle()       the server's next event                      woken by: one timer; each change, once a moment
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, EngineError, EngineInfo, EngineLoad, EngineRejected, GenerateRequest
from asyncrl.shield import to_the_end
from asyncrl.sim.client import Calls, Deadlines, Load, Reply, Stream
from asyncrl.sim.server import EPS, Server
from asyncrl.sim.server import GENERATED as GENERATED

Lengths = Callable[[random.Random, Sequence[int]], int]
"""Draws the length of a response; the second argument is the request's input ids."""

# As the adapter of real servers has them (engine/sglang.py).
HEALTH_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 5.0

NOTICE_S = 2.5
"""How long a real server takes to find out that a client is gone (2 to 3 s, measured)."""


class SimEngine:
    """``lengths`` draws the length of each response. ``load_s`` is the time of a weight load, ``start_s`` of a start.
    ``chunked_prefill`` and ``prefix_cache`` are explained in ``sim/server.py``, the deadlines in
    ``config.EngineConfig``; with ``stream_interval`` 0 a request may be silent until ``request_timeout_s``."""

    def __init__(
        self,
        name: str,
        *,
        rng: random.Random,
        lengths: Lengths,
        cost: CostModel | None = None,
        max_running: int = 256,
        max_tokens: int = 1_000_000,
        context_length: int = 40_960,
        stream_interval: int = 0,
        chunked_prefill: int = 0,
        prefix_cache: bool = True,
        load_s: float = 0.5,
        start_s: float = 0.0,
        connect_timeout_s: float = 300.0,
        request_timeout_s: float = math.inf,
        idle_timeout_s: float = 120.0,
        control_timeout_s: float = 120.0,
    ) -> None:
        self.name = name
        self.version = 0
        self._rng = rng
        self._lengths = lengths
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._context_length = context_length
        self._load_s = load_s
        self._start_s = start_s
        self._connect_timeout_s = connect_timeout_s
        self._new_server: Callable[[], Server[Reply]] = lambda: Server(
            cost=cost or CostModel(),
            max_running=max_running,
            max_tokens=max_tokens,
            stream_interval=stream_interval,
            chunked_prefill=chunked_prefill,
            prefix_cache=prefix_cache,
        )
        self._server = self._new_server()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Stream] = {}
        self._calls = Calls(name, control_timeout_s)
        self._deadlines = Deadlines(
            idle_timeout_s if stream_interval else request_timeout_s, request_timeout_s, self._give_up
        )
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

    def __repr__(self) -> str:
        return f"<SimEngine {self.name} v{self.version} {self._server}>"

    @property
    def server(self) -> Server[Reply]:
        """What goes on inside, for whoever watches: sequences, KV, steps, busy seconds, preemptions … up to now. Counts
        begin with the process."""
        if self._loop is not None and not self._loop.is_closed():
            self._book()
        return self._server

    # --- Engine port

    async def connect(self) -> EngineInfo:
        if not self._answering.is_set():
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    await self._answering.wait()
            except TimeoutError:
                raise EngineError(
                    f"{self.name}: not ready within engine.connect_timeout_s ({self._connect_timeout_s:g} s)"
                ) from None
        return EngineInfo(
            name=self.name,
            version=self.version,
            max_running_requests=self._max_running,
            max_total_tokens=self._max_tokens,
            context_length=self._context_length,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        stream = self._open(request)
        abandoned = False
        try:
            while stream.replies or stream.outbox:
                if not stream.outbox:
                    await stream.something()
                    continue
                item = stream.outbox.popleft()
                if isinstance(item, EngineError):
                    raise item
                yield item
        except (asyncio.CancelledError, GeneratorExit):
            abandoned = True
            raise
        finally:
            del self._streams[request.rid]
            self._remove(stream.replies)
            if abandoned and self._hung_at is not None:  # it has to be told, and does not answer
                with suppress(EngineError, TimeoutError):
                    await to_the_end(self._reach("/abort_request"), ABORT_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        stream = self._streams.get(rid)
        if stream is None:
            return
        if stream.n > 1 or (self._paused and stream.heard is None):
            self._cut(stream)  # as the adapter does it: on this side, without asking the server
            return
        await self._reach("/abort_request")
        self._book()
        self._abort(stream.replies)

    async def pause(self) -> None:
        await self._reach("/pause_generation")
        self._book()
        self._paused = True
        self._abort([*self._server.admitted, *self._server.waiting])

    async def resume(self) -> None:
        await self._reach("/continue_generation")
        self._paused = False
        self._touch()

    async def load_from_disk(self, path: str, version: int) -> None:
        self._check_reachable()
        load = Load(version, asyncio.get_running_loop().create_future())
        self._loads.append(load)
        self._touch()
        await self._calls.wait("/update_weights_from_disk", load.done)

    async def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        await self._reach("/init_weights_update_group")

    async def load_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int,
        checksums: Sequence[int] = (),
    ) -> None:
        await self.load_from_disk(group, version)

    async def health(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._reach("/health")
        except (EngineError, TimeoutError):
            return False
        return True

    async def load(self) -> EngineLoad:
        await self._reach("/v1/loads")
        server = self.server
        return EngineLoad(running=server.running, waiting=len(server.waiting), used_tokens=server.used_tokens)

    async def close(self) -> None:
        self._deadlines.close()
        for timer in (self._timer, self._starting):
            if timer is not None:
                timer.cancel()

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

    # --- the client's side

    def _open(self, request: GenerateRequest) -> Stream:
        rid, ids = request.rid, request.input_ids
        if rid in self._streams:
            raise EngineRejected(f"{self.name}: request id {rid!r} is already running; ids must be unique")
        self._check_reachable()
        total = len(ids) + request.max_new_tokens
        limit = min(self._context_length, self._max_tokens)
        if not ids or total > limit:
            raise EngineRejected(f"{self.name}: {len(ids)} prompt tokens, {total} in all exceed its context of {limit}")
        tokens = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        stream = Stream(rid, asyncio.get_running_loop().time(), request.n)
        last = tokens[-1]
        for index in range(request.n):
            if request.ignore_eos:
                remaining = request.max_new_tokens + 1
            else:
                remaining = last - GENERATED if last > GENERATED else max(1, self._lengths(self._rng, ids))
            reply = Reply(stream, index, tokens, remaining, request.max_new_tokens)
            stream.replies.append(reply)
            self._server.add(reply)
        self._streams[rid] = stream
        self._deadlines.watch(stream)
        self._touch()
        return stream

    def _give_up(self, stream: Stream, key: str) -> None:
        """``key`` names the deadline that has passed."""
        self._remove(stream.fail(EngineError(f"{self.name}: /generate brought nothing more within engine.{key}")))

    def _cut(self, stream: Stream) -> None:
        """The client gives a request up: its replies end with what was sent."""
        self._book()
        replies, stream.replies = stream.replies, []
        self._remove(replies)
        for reply in replies:
            stream.put(reply.chunk(0, "abort", self.version))

    def _check_reachable(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._dead or self._partitioned:
            raise EngineError(f"{self.name}: connection refused; is the server running?")

    async def _reach(self, path: str) -> None:
        """A control call arrives at the server, now or when it no longer hangs."""
        self._check_reachable()
        while self._hung_at is not None:
            call = asyncio.get_running_loop().create_future()
            await self._calls.wait(path, call, hung=True)
            self._check_reachable()

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
            self._arm(None)
            return
        now = self._clock()
        while True:
            self._book()
            if self._settling:  # those who were sent something come first: they may have the next request
                self._arm(None)
                return
            while self._loads and self._load_weights(now):
                pass
            until = self._server.plan(now, admit=not self._paused and not self._loads)
            if self._loads and self._loads[0].ends is not None:
                until = self._loads[0].ends
            if until is None or until > now + EPS:
                break
        self._arm(until)

    def _arm(self, until: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if until is not None:
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
            self._server.flush()
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
