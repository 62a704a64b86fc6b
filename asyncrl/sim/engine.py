"""A simulated inference server behind the Engine port, on virtual time.

What a server does with its requests is ``sim/server.py``'s, its life and its faults are ``sim/process.py``'s; this is
the way to it. As far as the runtime can see it behaves like the adapter of real servers (``engine/sglang.py``), which
it stands for: the same deadlines, and the same errors for the same misfortune.

Generated ids count down to the end of their response: id ``GENERATED + r`` says that r tokens follow, and
``GENERATED`` itself is the end of turn. So a response that is cut off and sent again with its tokens goes on to the
length that was drawn for it, on any server, without hidden state.

    generate()      waits for: its next chunk                    woken by: the process, a fault, its deadline
    other calls     wait only while the server hangs             woken by: hang(False), a fault, their deadline
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, EngineError, EngineInfo, EngineLoad, EngineRejected, GenerateRequest
from asyncrl.shield import to_the_end
from asyncrl.sim.client import Deadlines, Load, Reply, Stream
from asyncrl.sim.kv import KvLink
from asyncrl.sim.process import SimProcess
from asyncrl.sim.server import GENERATED as GENERATED
from asyncrl.sim.server import Server

Lengths = Callable[[random.Random, Sequence[int]], int]
"""Draws the length of a response; the second argument is the request's input ids."""

# As the adapter of real servers has them (engine/sglang.py).
HEALTH_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 5.0


class SimEngine(SimProcess):
    """``lengths`` draws the length of each response. ``load_s`` is the time of a weight load, ``start_s`` of a start.
    ``chunked_prefill`` and ``prefix_cache`` are explained in ``sim/server.py``, the deadlines in
    ``config.EngineConfig``; with ``stream_interval`` 0 a request may be silent until ``request_timeout_s``. With a
    ``kv_link`` it gives KV to other servers, and takes it from them."""

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
        kv_link: KvLink | None = None,
    ) -> None:
        super().__init__(
            name,
            lambda: Server(
                cost=cost or CostModel(),
                max_running=max_running,
                max_tokens=max_tokens,
                stream_interval=stream_interval,
                chunked_prefill=chunked_prefill,
                prefix_cache=prefix_cache,
            ),
            load_s=load_s,
            start_s=start_s,
            control_timeout_s=control_timeout_s,
            kv_link=kv_link,
        )
        self._rng = rng
        self._lengths = lengths
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._context_length = context_length
        self._connect_timeout_s = connect_timeout_s
        self._kv_url = name if kv_link else ""
        self._deadlines = Deadlines(
            idle_timeout_s if stream_interval else request_timeout_s, request_timeout_s, self._give_up
        )

    def __repr__(self) -> str:
        return f"<SimEngine {self.name} v{self.version} {self._server}>"

    @property
    def server(self) -> Server[Reply]:
        """What goes on inside, for whoever watches: sequences, KV, steps, busy seconds, preemptions … up to now. Counts
        begin with the process."""
        if self._loop is not None and not self._loop.is_closed():
            self._book()
        return self._server

    @property
    def dead(self) -> bool:
        return self._dead

    # --- Engine port

    async def connect(self, within_s: float | None = None) -> EngineInfo:
        if not self._answering.is_set():
            timeout_s = within_s or self._connect_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    await self._answering.wait()
            except TimeoutError:
                limit = f"{timeout_s:g} s" if within_s else f"engine.connect_timeout_s ({timeout_s:g} s)"
                raise EngineError(f"{self.name}: not ready within {limit}") from None
        return EngineInfo(
            name=self.name,
            version=self.version,
            max_running_requests=self._max_running,
            max_total_tokens=self._max_tokens,
            context_length=self._context_length,
            kv_url=self._kv_url,
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
            self._remove(stream.leave())
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
        self._abort([*self._server.admitted, *self._server.waiting, *self._arrivals.replies])

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
        waiting = len(server.waiting) + len(self._arrivals.replies)
        return EngineLoad(running=server.running, waiting=waiting, used_tokens=server.used_tokens)

    async def close(self) -> None:
        self._deadlines.close()
        for timer in (self._timer, self._starting):
            if timer is not None:
                timer.cancel()

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
            self._arrive(reply, request.kv_from)
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
        replies = stream.leave()
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
