"""LLMProxy: the fleet of inference servers, and every generation request in flight (ROLL Flash §4.2).

Owns the instances' books and the queue of requests that wait for one. A request is its own unit of work (queue
scheduling): ``_assign``, one synchronous function called whenever a request or room appears, hands waiting requests to
servers, oldest V_traj first; the caller's own coroutine then does the HTTP exchange. A request that a weight update or
a dying server cut off goes back to the queue with its tokens and continues elsewhere; its caller never notices.

    generate()    waits for: a server with room, then its tokens     woken by: _assign(), the engine's stream
    suspend()     waits for: servers to pause (drain: to run empty)  woken by: the engine, the last request's end
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec.structs import replace

from asyncrl.core.policy.routing import RequestView, has_room, least_loaded
from asyncrl.core.snapshot import FleetSnapshot
from asyncrl.ports import Engine, EngineError, EngineInfo, EngineRejected, GenerateRequest, Observer
from asyncrl.runtime.generation import Completion, Prompt, Reply
from asyncrl.runtime.instance import Instance, kv_source, to_prefill
from asyncrl.runtime.trajectory_server import Request, TrajectoryServer
from asyncrl.shield import together

MAX_FRUITLESS = 20
"""Attempts without a token after which a request is given up: a server that aborts everything must not spin forever.
What this process cut itself, for an update or a migration, does not count."""

NONE_PINNED = "no server holds the evaluation's version any more"

Route = Callable[[RequestView, "list[Instance]"], "Instance | None"]


class LLMProxy:
    """``route`` is a routing function of core/policy/routing.py, which gives every request its server; None: a
    coordinator does (runtime/coordination.py), and hears of all that happens by ``on_change``."""

    def __init__(
        self,
        *,
        route: Route | None,
        observer: Observer,
        context_length: int,
        stop_token_ids: Sequence[int] = (),
        rid_prefix: str = "",
    ) -> None:
        self._route = route
        self._observer = observer
        self._context_length = context_length
        self._stop_token_ids = tuple(stop_token_ids)
        self._rid_prefix = rid_prefix
        self._instances: list[Instance] = []
        self._taking: list[Instance] = []
        """Those that do not drain."""
        self.waiting = TrajectoryServer()
        self._evaluating = TrajectoryServer()
        """Pinned requests, which do not stand in the others' way."""
        self._sequence = self._arrivals = self._ended = 0
        self._suspended = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.trouble = asyncio.Event()  # a server has failed
        self.available = asyncio.Event()
        """Set while at least one server is up and may be given weights."""
        self.last_error = ""
        self.generated = 0
        """Tokens received since the start."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when requests, room or servers have come or gone."""
        self.on_free: Callable[[Instance], None] = lambda instance: None
        """Called when a server may have nothing left: a request has ended there, a pull, an evaluation."""

    # --- the fleet

    def add(self, engine: Engine, info: EngineInfo, *, up: bool = True) -> Instance:
        """A connected server joins; one that is not ``up`` is used once ``mark_up`` says so."""
        instance = Instance(engine, info, up=up)
        self._instances.append(instance)
        self.changed(instance)
        return instance

    def remove(self, instance: Instance) -> None:
        """A server that has nothing is forgotten."""
        self._instances.remove(instance)
        self.changed(instance)
        self._observer.instant(instance.name, "left", asyncio.get_running_loop().time(), {})

    def changed(self, instance: Instance) -> None:
        """The server was added or removed, came up or went down, or is to begin nothing any more (``draining``)."""
        self._taking = [i for i in self._instances if not i.draining]
        self._refresh()
        self._report(instance)
        self._assign()

    def give_back(self, instance: Instance) -> None:
        """What waits for this server waits for any."""
        self.waiting.forget(instance)
        while instance.held:
            request = instance.held.pop()
            if not request.given.done():
                self._queue(request.view).put(request, front=True)

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
        if instance.draining:  # it was not to be waited for
            return
        instance.up, instance.why = True, ""
        self.changed(instance)

    def mark_down(self, instance: Instance, error: Exception) -> None:
        """The server failed: no more requests until it is back. Those it runs come back by themselves."""
        self.last_error = instance.why = str(error)
        self.give_back(instance)
        self.unpin(instance)
        if instance.up:
            instance.up = False
            instance.down_since = asyncio.get_running_loop().time()
            self._observer.instant(instance.name, "down", instance.down_since, {"error": str(error)})
        self.changed(instance)
        self.on_free(instance)
        self.trouble.set()

    def snapshot(self, newest: int = 0, pace: float = math.inf) -> FleetSnapshot:
        return FleetSnapshot(
            instances=tuple(i.snapshot() for i in self._instances),
            waiting=len(self.waiting)
            + len(self._evaluating)
            + sum(not request.given.done() for i in self._instances for request in i.held),
            suspended=self._suspended,
            newest=newest,
            waiting_requests=self.waiting.levels,
            mean_new_tokens=self.generated / self._ended if self._ended and self.generated else math.inf,
            pace=pace,
        )

    def __repr__(self) -> str:
        s = self.snapshot()
        return f"<LLMProxy {s.running} running, {s.waiting} waiting{', suspended' if s.suspended else ''}>"

    # --- requests

    async def generate(
        self, prompt: Prompt, n: int = 1, on_server: Callable[[str], None] = lambda server: None
    ) -> list[Completion]:
        """Continue ``prompt`` to ``n`` independent ends. ``on_server`` hears which server takes it, "" when one leaves.

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
        replies = [Reply(prompt.begun, prompt.keep) if n == 1 else Reply() for _ in range(n)]
        arrival = self._arrivals
        self._arrivals += 1
        number = self._new_number()
        try:
            while unfinished := [r for r in replies if r.finish_reason is None]:
                if len(unfinished) > 1 and any(r.output_ids for r in unfinished):
                    break  # replies of one request that was cut at different lengths go on one by one
                await self._attempt(prompt, unfinished, number, arrival, on_server)
        finally:
            self._is_over(number)
        if unfinished:
            await together(self._finish_one(prompt, reply, arrival) for reply in unfinished)
        self._ended += n
        return [reply.completed(began) for reply in replies]

    async def _finish_one(self, prompt: Prompt, reply: Reply, arrival: int) -> None:
        number = self._new_number()
        try:
            while reply.finish_reason is None:
                await self._attempt(prompt, [reply], number, arrival, lambda server: None)
        finally:
            self._is_over(number)

    async def _attempt(
        self, prompt: Prompt, replies: list[Reply], number: int, arrival: int, on_server: Callable[[str], None]
    ) -> None:
        """One exchange with one server. Afterwards each reply has ended, or was interrupted and kept its tokens."""
        first = replies[0]
        ids = prompt.ids + first.output_ids if first.output_ids else prompt.ids
        remaining = prompt.max_new_tokens - len(first.output_ids)
        if remaining <= 0:  # less, where it went on from a run with a higher limit
            first.finish_reason = "length"
            return
        if first.fruitless >= MAX_FRUITLESS:
            raise EngineRejected(f"{first.server} cut a request {first.fruitless} times without a token; see its log")
        view = RequestView(
            id=number,
            group=prompt.start.group_id,
            v_traj=prompt.start.v_traj,
            after=first.versions[-1] if first.versions else prompt.after,
            tokens=len(ids),
            slots=len(replies),
            home=first.server or prompt.home,
            prefix=len(ids) if first.server else prompt.prefix,
            sequence=arrival,
            pinned=prompt.pinned,
        )
        loop = asyncio.get_running_loop()
        asked = loop.time()
        instance = await self._acquire(waiting := Request(view, prompt.start, loop.create_future()))
        view = waiting.view  # its group may have begun since
        version = instance.version
        rid = f"{self._rid_prefix}{self._new_number():012x}"
        instance.rids[number] = rid
        started = loop.time()
        request = GenerateRequest(
            rid=rid,
            input_ids=ids,
            max_new_tokens=remaining,
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            stop_token_ids=self._stop_token_ids,
            n=len(replies),
            kv_from=kv_source(view, instance, self._instances),
        )
        received = 0
        on_server(instance.name)
        try:
            async with asyncio.timeout(None) as instance.streams[number]:
                async for chunk in instance.engine.generate(request):
                    reply = replies[chunk.index]
                    if reply.finish_reason is not None:
                        continue  # a reply is answered once, whatever the server repeats
                    instance.check(chunk.versions, version)
                    reply.add(chunk)
                    received += len(chunk.output_ids)
                    instance.tokens += len(chunk.output_ids)
                    instance.generated += len(chunk.output_ids)
                    if number in instance.requests:
                        instance.requests[number] = replace(view, tokens=view.tokens + received, after=version)
                    if instance.tokens > instance.attention_at:
                        self.on_change()
        except EngineRejected:
            raise
        except EngineError as error:
            self.mark_down(instance, error)
        except TimeoutError:
            self.mark_down(instance, EngineError(instance.why or f"{instance.name}: cut off, as it held up the run"))
        finally:
            self.generated += received
            ended = loop.time()
            ours = self._suspended or instance.pulling or instance.draining or number in instance.cutting
            for reply in replies:
                reply.waited_s += started - asked
                reply.ended = ended
                reply.server = instance.name
                reply.fruitless = 0 if received else reply.fruitless + (not ours)
            self._release(instance, view, len(ids) + received)
            on_server("")
            self._observer.span(
                instance.name,
                "generate",
                started,
                ended,
                {"version": instance.version, "prompt": len(ids), "tokens": received},
            )

    def _is_over(self, number: int) -> None:
        """A request that has ended is not routed anywhere any more."""
        if (target := self.waiting.redeem(number)) is not None:
            target.routed += 1
            self.on_change()

    def _new_number(self) -> int:
        self._sequence += 1
        return self._sequence

    async def _acquire(self, request: Request) -> Instance:
        """Wait for a server with room; the room is taken when this returns."""
        view, given = request.view, request.given
        if view.pinned and not self.has_pinned:
            raise EngineRejected(NONE_PINNED)
        target = self.waiting.redeem(view.id)
        if target is not None and (target.pulling or target.version >= view.oldest):
            self.hand(request, target)
        else:
            if target is not None:  # too old by now: its command is done with
                target.routed += 1
            self._queue(view).put(request)
            self._assign()
        try:
            return await given
        except asyncio.CancelledError:
            if not given.done() or given.cancelled():
                given.cancel()
                self._queue(view).remove(request)
            elif given.exception() is None:  # the room was given in the same tick
                self._release(given.result(), view, view.tokens)
            raise

    def _assign(self) -> None:
        """Give waiting requests to servers with room, oldest V_traj first; a request that fits nowhere holds its place
        in front, so that long ones do not starve. Where routing names a server without room, only those of the same
        server wait behind it."""
        if self._route is not None:
            self._assign_from(self.waiting, self._route, self._taking)
        else:
            self.on_change()
        if self._evaluating:
            route = self._route or least_loaded
            self._assign_from(self._evaluating, route, [i for i in self._instances if i.pinned])

    def _assign_from(self, queue: TrajectoryServer, route: Route, instances: list[Instance]) -> None:
        while not self._suspended and (request := queue.first()) is not None:
            if not request.given.done():
                instance = route(request.view, instances)
                if instance is None:
                    return
                self.hand(request, instance)
            queue.remove(request)

    def hand(self, request: Request, instance: Instance) -> None:
        """The request, which waits nowhere any more, is the server's, now or when it has room."""
        if instance.held or instance.pulling or not has_room(request.view, instance):
            instance.held.append(request)
        else:
            self._give(instance, request)

    def refuse(self, numbers: Sequence[int], why: str) -> None:
        """These waiting requests, if they still wait, will not be served."""
        for number in numbers:
            if (request := self.waiting.get(number)) is not None:
                self.waiting.remove(request)
                if not request.given.done():
                    request.given.set_exception(EngineRejected(why))

    def _queue(self, view: RequestView) -> TrajectoryServer:
        return self._evaluating if view.pinned else self.waiting

    def _assign_held(self, instance: Instance) -> None:
        """Room may have appeared on this server, for those that wait for it."""
        while instance.held and not self._suspended and not instance.pulling:
            request = instance.held[0]
            if request.given.done():
                instance.routed += 1
            elif has_room(request.view, instance):
                self._give(instance, request)
            else:
                return
            instance.held.popleft()

    def _give(self, instance: Instance, request: Request) -> None:
        view = request.view
        if self._route is None and not view.pinned:
            instance.requests[view.id] = replace(view, after=instance.version)  # where it is cut, it has its tokens
            instance.routed += 1
        instance.prefilled += to_prefill(view, instance, self._instances)
        instance.take(view.slots, view.tokens)
        if not instance.pinned:
            self._idle.clear()
        self._report(instance)
        request.given.set_result(instance)

    def _release(self, instance: Instance, view: RequestView, tokens: int) -> None:
        instance.rids.pop(view.id, None)
        instance.streams.pop(view.id, None)
        if instance.requests.pop(view.id, None) is not None and view.id in instance.cutting:
            instance.cutting.remove(view.id)
            instance.interrupted += 1
        instance.release(view.slots, tokens)
        self._report(instance)
        if not instance.running:
            self._refresh()
        self._assign_held(instance)
        self.on_free(instance)
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
                with instance.asking("to pause"):
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
                with instance.asking("to resume"):
                    await instance.engine.resume()
            except EngineError as error:
                self.mark_down(instance, error)

        async with asyncio.TaskGroup() as group:
            for instance in self._instances:
                if instance.up:
                    group.create_task(resume(instance))
        self._suspended = False
        for instance in list(self._instances):
            self._assign_held(instance)
            self.on_free(instance)
        self._assign()

    def resumed(self, instance: Instance) -> None:
        """The server, which was given weights on its own, serves again."""
        instance.pulling = False
        self._report(instance)
        self._assign_held(instance)
        self.on_free(instance)
        self._assign()

    # --- servers that an evaluation sets aside

    def pin(self, version: int, share: float) -> list[Instance]:
        """Let ``share`` of the servers, at least one, keep ``version`` until they are unpinned. They go on with what it
        may serve, and take pinned requests. Empty if none holds it."""
        holders = [i for i in self._taking if i.up and i.version == version]
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
        self.on_free(instance)
        if not self.has_pinned:
            for request in list(self._evaluating):
                self._evaluating.remove(request)
                if not request.given.done():
                    request.given.set_exception(EngineRejected(NONE_PINNED))

    @property
    def has_pinned(self) -> bool:
        return any(i.pinned for i in self._instances)

    def _refresh(self) -> None:
        """What others wait for: a server that may be given weights; none of those with a request."""
        free = [i for i in self._instances if not i.pinned]
        (self.available.set if any(i.up for i in free) else self.available.clear)()
        (self._idle.clear if any(i.running for i in free) else self._idle.set)()

    async def interrupt(self, numbers: Sequence[int], instance: Instance) -> None:
        """These requests come back from the server with their tokens, if it runs them."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.TaskGroup() as calls:
                for number in numbers:
                    calls.create_task(instance.engine.abort(instance.rids.get(number, "")))
        except* EngineError as errors:
            self.mark_down(instance, errors.exceptions[0])
        self._observer.span(instance.name, "migrate", began, loop.time(), {"requests": len(numbers)})

    def _report(self, instance: Instance) -> None:
        now = asyncio.get_running_loop().time()
        self._observer.server(instance.name, now, instance.running, instance.version, instance.up)
