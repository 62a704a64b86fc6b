"""LLMProxy: the fleet of inference servers, and every generation request in flight (ROLL Flash §4.2).

Owns the instances' books and the queue of requests that wait for one. A request is its own unit of work (queue
scheduling): ``_assign``, one synchronous function called whenever a request or room appears, hands waiting requests to
servers, oldest V_traj first; the caller's own coroutine then does the HTTP exchange. A request that a weight update or
a dying server cut off goes back to the queue with its tokens and continues elsewhere; its caller never notices.

    generate()    waits for: a server with room, then its tokens     woken by: _assign(), the engine's stream
    suspend()     waits for: servers to pause (drain: to run empty)  woken by: the engine, the last request's end
    watch()       waits for: a server that failed                    woken by: mark_down(); probes it until it is back
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from asyncrl.core.policy.routing import RequestView, has_room
from asyncrl.core.snapshot import FleetSnapshot
from asyncrl.core.types import Record
from asyncrl.ports import Engine, EngineError, EngineInfo, EngineRejected, GenerateRequest, Observer
from asyncrl.runtime.instance import Instance, Waiting

MAX_FRUITLESS = 20
"""Attempts without a token after which a request is given up: a server that aborts everything must not spin forever."""

NONE_PINNED = "no server holds the evaluation's version any more"

Route = Callable[[RequestView, "list[Instance]"], "Instance | None"]


class FleetDown(Exception):
    """No inference server is left: the run cannot go on."""


class Prompt(Record, frozen=True, kw_only=True):
    """What to continue. ``v_traj`` is the oldest version that may generate for it; ``home`` holds its prefix; one that
    is ``pinned`` belongs to an evaluation, and only the servers that are set aside for that take it."""

    ids: array[int]
    v_traj: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    home: str | None = None
    pinned: bool = False


class Completion(Record, frozen=True, kw_only=True):
    """One generation, whole, whatever interruptions it had. ``output_ids``, ``logprobs``, ``versions`` are parallel.
    ``waited_s`` of its ``seconds`` it waited for a server."""

    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: str
    server: str
    interruptions: int
    waited_s: float
    seconds: float


class _Reply:
    """One reply in the making; keeps its tokens over interruptions."""

    __slots__ = (
        "ended",
        "finish_reason",
        "fruitless",
        "interruptions",
        "logprobs",
        "output_ids",
        "server",
        "versions",
        "waited_s",
    )

    def __init__(self) -> None:
        self.output_ids = array("i")
        self.logprobs = array("f")
        self.versions = array("i")
        self.finish_reason: str | None = None
        self.server = ""
        self.interruptions = 0
        self.fruitless = 0
        """Attempts in a row that brought no token."""
        self.waited_s = 0.0
        self.ended = 0.0


class LLMProxy:
    """``route`` is a routing function of core/policy/routing.py; ``probe_s`` the time between two probes of a server
    that failed, ``patience_s`` how long the run waits when none is up."""

    def __init__(
        self,
        *,
        route: Route,
        observer: Observer,
        context_length: int,
        stop_token_ids: Sequence[int] = (),
        rid_prefix: str = "",
        probe_s: float = 2.0,
        patience_s: float = 60.0,
    ) -> None:
        self._route = route
        self._observer = observer
        self._context_length = context_length
        self._stop_token_ids = tuple(stop_token_ids)
        self._rid_prefix = rid_prefix
        self._probe_s = probe_s
        self._patience_s = patience_s
        self._instances: list[Instance] = []
        self._waiting: list[Waiting] = []
        """Heap by (V_traj, arrival). Cancelled futures are skipped."""
        self._evaluating: list[Waiting] = []
        """The same of pinned requests, which do not stand in the others' way."""
        self._sequence = 0
        self._arrivals = 0
        self._suspended = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._trouble = asyncio.Event()
        self.available = asyncio.Event()
        """Set while at least one server is up and may be given weights."""
        self._last_error = ""
        self.generated = 0
        """Tokens received since the start."""
        self.on_return: Callable[[Instance], Awaitable[None]] | None = None
        """Awaited when a failed server answers again: brings its weights up to date, then calls ``mark_up``."""

    # --- the fleet

    def add(self, engine: Engine, info: EngineInfo) -> None:
        """A connected server joins."""
        instance = Instance(engine, info)
        self._instances.append(instance)
        self._refresh()
        self._report(instance)
        self._assign()

    @property
    def instances(self) -> Sequence[Instance]:
        return self._instances

    def set_version(self, instance: Instance, version: int) -> None:
        """The server now holds ``version``; a version never goes backwards."""
        if version < instance.version:
            raise ValueError(f"{instance.name} would go back from version {instance.version} to {version}")
        instance.version = version
        self._report(instance)

    def mark_up(self, instance: Instance) -> None:
        """A server that failed holds verified weights again."""
        instance.up = True
        self._refresh()
        self._report(instance)
        self._assign()

    def mark_down(self, instance: Instance, error: Exception) -> None:
        """The server failed: no more requests until it is back. Those it runs come back by themselves."""
        self._last_error = str(error)
        while instance.held:
            waiting = instance.held.popleft()
            heapq.heappush(self._queue(waiting[2]), waiting)
        self.unpin(instance)
        if instance.up:
            instance.up = False
            self._refresh()
            instance.down_since = asyncio.get_running_loop().time()
            self._report(instance)
            self._observer.instant(instance.name, "down", instance.down_since, {"error": str(error)})
        self._trouble.set()
        self._assign()

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(
            instances=tuple(i.snapshot() for i in self._instances),
            waiting=sum(
                1
                for queue in (self._waiting, self._evaluating, *(i.held for i in self._instances))
                for *_, future in queue
                if not future.done()
            ),
            suspended=self._suspended,
        )

    def __repr__(self) -> str:
        s = self.snapshot()
        return f"<LLMProxy {s.running} running, {s.waiting} waiting{', suspended' if s.suspended else ''}>"

    # --- requests

    async def generate(
        self, prompt: Prompt, n: int = 1, on_running: Callable[[bool], None] = lambda running: None
    ) -> list[Completion]:
        """Continue ``prompt`` to ``n`` independent ends. ``on_running`` hears when a server takes or leaves it.

        Raises ``EngineRejected`` if a server refuses the request for good. Cancelling it aborts it on the server.
        """
        room = self._context_length - len(prompt.ids)
        if room < 1:
            raise EngineRejected(
                f"the prompt has {len(prompt.ids)} tokens, the servers' context is only "
                f"{self._context_length}; lower rollout.max_tokens"
            )
        if room < prompt.max_new_tokens:
            raise EngineRejected(
                f"{len(prompt.ids)} prompt tokens + {prompt.max_new_tokens} new ones exceed the "
                f"servers' context of {self._context_length}; lower rollout.max_tokens"
            )
        began = asyncio.get_running_loop().time()
        replies = [_Reply() for _ in range(n)]
        arrival = self._arrivals
        self._arrivals += 1
        while unfinished := [r for r in replies if r.finish_reason is None]:
            if len(unfinished) == 1 or not any(r.output_ids for r in unfinished):
                await self._attempt(prompt, unfinished, arrival, on_running)
            else:  # replies of one request that was cut at different lengths go on one by one
                async with asyncio.TaskGroup() as group:
                    for reply in unfinished:
                        group.create_task(self._finish_one(prompt, reply, arrival))
        return [
            Completion(
                output_ids=r.output_ids,
                logprobs=r.logprobs,
                versions=r.versions,
                finish_reason=r.finish_reason or "",
                server=r.server,
                interruptions=r.interruptions,
                waited_s=r.waited_s,
                seconds=r.ended - began,
            )
            for r in replies
        ]

    async def _finish_one(self, prompt: Prompt, reply: _Reply, arrival: int) -> None:
        while reply.finish_reason is None:
            await self._attempt(prompt, [reply], arrival, lambda running: None)

    async def _attempt(
        self, prompt: Prompt, replies: list[_Reply], arrival: int, on_running: Callable[[bool], None]
    ) -> None:
        """One exchange with one server. Afterwards each reply has ended, or was interrupted and kept its tokens."""
        first = replies[0]
        ids = prompt.ids + first.output_ids if first.output_ids else prompt.ids
        remaining = prompt.max_new_tokens - len(first.output_ids)
        if remaining == 0:
            first.finish_reason = "length"
            return
        if first.fruitless >= MAX_FRUITLESS:
            raise EngineRejected(f"{first.server} cut a request {first.fruitless} times without a token; see its log")
        view = RequestView(
            v_traj=prompt.v_traj,
            tokens=len(ids),
            slots=len(replies),
            home=first.server or prompt.home,
            sequence=arrival,
            pinned=prompt.pinned,
        )
        asked = asyncio.get_running_loop().time()
        instance = await self._acquire(view)
        started = asyncio.get_running_loop().time()
        self._sequence += 1
        request = GenerateRequest(
            rid=f"{self._rid_prefix}{self._sequence:012x}",
            input_ids=ids,
            max_new_tokens=remaining,
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            stop_token_ids=self._stop_token_ids,
            n=len(replies),
        )
        received = 0
        on_running(True)
        try:
            async for chunk in instance.engine.generate(request):
                reply = replies[chunk.index]
                if reply.finish_reason is not None:
                    continue  # a reply is answered once, whatever the server repeats
                oldest = reply.versions[-1] if reply.versions else prompt.v_traj
                if chunk.versions and chunk.versions[0] < oldest:  # restarted behind our back, with its first weights
                    raise EngineError(f"{instance.name}: samples from version {chunk.versions[0]}, not {oldest}")
                reply.output_ids += chunk.output_ids
                reply.logprobs += chunk.logprobs
                reply.versions += chunk.versions
                received += len(chunk.output_ids)
                instance.tokens += len(chunk.output_ids)
                if chunk.finish_reason == "abort":
                    reply.interruptions += 1
                elif chunk.finish_reason is not None:
                    reply.finish_reason = chunk.finish_reason
        except EngineRejected:
            raise
        except EngineError as error:
            self.mark_down(instance, error)
        finally:
            self.generated += received
            ended = asyncio.get_running_loop().time()
            for reply in replies:
                reply.waited_s += started - asked
                reply.ended = ended
                reply.server = instance.name
                reply.fruitless = 0 if received else reply.fruitless + 1
            self._release(instance, view, len(ids) + received)
            on_running(False)
            self._observer.span(
                instance.name,
                "generate",
                started,
                ended,
                {"version": instance.version, "prompt": len(ids), "tokens": received},
            )

    async def _acquire(self, view: RequestView) -> Instance:
        """Wait for a server with room; the room is taken when this returns."""
        if view.pinned and not self.has_pinned:
            raise EngineRejected(NONE_PINNED)
        future: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._queue(view), (view.oldest, self._sequence, view, future))
        self._assign()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # the room was given in the same tick
                self._release(future.result(), view, view.tokens)
            else:
                future.cancel()
            raise

    def _assign(self) -> None:
        """Give waiting requests to servers with room, oldest V_traj first; a request that fits nowhere holds its place
        in front, so that long ones do not starve. Where routing names a server without room, only those of the same
        server wait behind it."""
        self._assign_from(self._waiting, self._instances)
        if self._evaluating:
            self._assign_from(self._evaluating, [i for i in self._instances if i.pinned])

    def _assign_from(self, queue: list[Waiting], instances: list[Instance]) -> None:
        while queue and not self._suspended:
            waiting = queue[0]
            _, _, view, future = waiting
            if not future.done():
                instance = self._route(view, instances)
                if instance is None:
                    return
                if instance.held or not has_room(view, instance):
                    instance.held.append(waiting)
                else:
                    self._give(instance, view, future)
            heapq.heappop(queue)

    def _queue(self, view: RequestView) -> list[Waiting]:
        return self._evaluating if view.pinned else self._waiting

    def _assign_held(self, instance: Instance) -> None:
        """Room may have appeared on this server, for those that wait for it."""
        while instance.held and not self._suspended:
            _, _, view, future = instance.held[0]
            if not future.done():
                if not has_room(view, instance):
                    return
                self._give(instance, view, future)
            instance.held.popleft()

    def _give(self, instance: Instance, view: RequestView, future: asyncio.Future[Instance]) -> None:
        instance.running += view.slots
        instance.tokens += view.tokens
        if not instance.pinned:
            self._idle.clear()
        self._report(instance)
        future.set_result(instance)

    def _release(self, instance: Instance, view: RequestView, tokens: int) -> None:
        instance.running -= view.slots
        instance.tokens -= tokens
        self._report(instance)
        self._refresh()
        self._assign_held(instance)
        self._assign()

    # --- suspend → model_update → resume (ROLL Flash §4.2)

    async def suspend(self, running: Literal["interrupt", "drain"]) -> list[Instance]:
        """Hold all requests. ``interrupt`` cuts what runs, which keeps its tokens; ``drain`` lets it end first.

        Returns the servers that are now paused and can take weights; one that fails to pause is marked down.
        """
        self._suspended = True
        if running == "drain":
            await self._idle.wait()
        paused: list[Instance] = []

        async def pause(instance: Instance) -> None:
            try:
                await instance.engine.pause()
            except EngineError as error:
                self.mark_down(instance, error)
            else:
                paused.append(instance)

        async with asyncio.TaskGroup() as group:
            for instance in self._instances:
                if instance.up and not instance.pinned:
                    group.create_task(pause(instance))
        return sorted(paused, key=lambda i: i.name)

    async def resume(self) -> None:
        """Go on after ``suspend``."""

        async def resume(instance: Instance) -> None:
            try:
                await instance.engine.resume()
            except EngineError as error:
                self.mark_down(instance, error)

        async with asyncio.TaskGroup() as group:
            for instance in self._instances:
                if instance.up:
                    group.create_task(resume(instance))
        self._suspended = False
        for instance in self._instances:
            self._assign_held(instance)
        self._assign()

    # --- servers that an evaluation sets aside

    def pin(self, version: int, share: float) -> list[Instance]:
        """Let ``share`` of the servers, at least one, keep ``version`` until they are unpinned. They go on with what it
        may serve, and take pinned requests. Empty if none holds it."""
        holders = [i for i in self._instances if i.up and i.version == version]
        chosen = holders[: max(1, int(share * len(self._instances)))]
        for instance in chosen:
            instance.pinned = True
        self._refresh()
        return chosen

    def unpin(self, instance: Instance) -> None:
        """The server takes weights again. With the last one, pinned requests that wait are refused."""
        if not instance.pinned:
            return
        instance.pinned = False
        self._refresh()
        if not self.has_pinned:
            for _, _, _, future in self._evaluating:
                if not future.done():
                    future.set_exception(EngineRejected(NONE_PINNED))
            self._evaluating.clear()

    @property
    def has_pinned(self) -> bool:
        return any(i.pinned for i in self._instances)

    def _refresh(self) -> None:
        """What others wait for: a server that may be given weights; none of those with a request."""
        free = [i for i in self._instances if not i.pinned]
        (self.available.set if any(i.up for i in free) else self.available.clear)()
        (self._idle.clear if any(i.running for i in free) else self._idle.set)()

    # --- failed servers

    async def watch(self) -> None:
        """Probe servers that failed until they answer; raises ``FleetDown`` when none is up for ``patience_s``."""
        loop = asyncio.get_running_loop()
        while True:
            await self._trouble.wait()
            await asyncio.sleep(self._probe_s)
            down = [i for i in self._instances if not i.up]
            if not down:
                self._trouble.clear()
                continue
            for instance in down:
                if await instance.engine.health() and self.on_return is not None:
                    await self.on_return(instance)
            if all(not i.up and loop.time() - i.down_since > self._patience_s for i in self._instances):
                raise FleetDown(f"no inference server is left; the last error was: {self._last_error}")

    def _report(self, instance: Instance) -> None:
        self._observer.server(
            instance.name, asyncio.get_running_loop().time(), instance.running, instance.version, instance.up
        )
