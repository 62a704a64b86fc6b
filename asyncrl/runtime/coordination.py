"""Coordination: carries out what the coordinator decides about the fleet (StaleFlow §5.2).

One round is a snapshot, ``Coordinator.plan`` and the start of its commands, in one synchronous step: nothing can
change in between. A Route takes effect at once, in the proxy's books; Pull and Interrupt take as long as the servers
need, each beside the others, and the books show when they have been carried out.

    run()    waits for: something to decide     woken by: touch(); with a repack also the clock, which alone tells that
             a server has not been given anything for a while (Laminar §5.1: "a periodic check, e.g. 5 seconds")
    touch()  a request came, went or was cut; room, a version or a server appeared; the control admits more; a server's
             KV cache fills up. All that happens within one turn of the loop makes one round. A plan that stopped at
             its limit is gone on with in the next turn.

A server's own queue is the one thing that the proxy's books do not have: who waits there because the KV cache is full
(preemption). So a server is asked for it, and only while its books say that the cache is nearly full.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from operator import itemgetter

from asyncrl.core.commands import Abort, Interrupt, Pull, Route
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.pace import Pace
from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.types import Group
from asyncrl.ports import EngineError, Observer
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.meter import Meter
from asyncrl.runtime.pulls import PulledParameterServer
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.trajectory_server import Request

LOST = "the servers that had begun it have failed, and no other has their version"
NEARLY_FULL = 0.9
"""Share of the KV cache, by the proxy's books, from which on a server is asked who waits."""
ASK_AGAIN = 0.01
"""What must be generated since the last answer, as a share of the cache, before it is asked again."""


class Coordination:
    """``stream_interval``: tokens that a server generates between two chunks; 0: the cost model stays as it is.
    ``look_s``: seconds between two looks for a repack or a repartition; 0: none but at new versions."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        proxy: LLMProxy,
        parameters: PulledParameterServer,
        buffer: SampleBuffer,
        control: StalenessControl,
        observer: Observer,
        stream_interval: int,
        look_s: float = 0.0,
    ) -> None:
        self._coordinator = coordinator
        self._proxy = proxy
        self._parameters = parameters
        self._buffer = buffer
        self._control = control
        self._observer = observer
        # What servers generate is seen in chunks; without streaming too late to tell how fast.
        self._meter = Meter(coordinator.cost, steps=4 * max(16, stream_interval)) if stream_interval else None
        self._pace = Pace()
        self._look_s = look_s
        self._something = asyncio.Event()
        proxy.on_change = buffer.on_change = self.touch
        buffer.on_batch = self._taken
        buffer.on_rest = coordinator.rests

    def has_begun(self, name: str) -> bool:
        """Whether trajectories are under way that are to go on with this server only."""
        return self._coordinator.has_begun(name)

    def touch(self) -> None:
        self._something.set()

    def _taken(self, groups: Sequence[Group]) -> None:
        """A batch is complete. If its oldest groups could not have come later, it shows how much time there is."""
        oldest, control = min(group.v_traj for group in groups), self._control
        if control.snapshot().step - 1 - oldest == control.limit:
            longest = max((t.generated for group in groups for t in group.trajectories), default=0)
            self._pace.taken(oldest, longest, asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as under_way:
            if self._look_s:
                under_way.create_task(self._look())
            while True:
                await self._something.wait()
                self._something.clear()
                self._round(under_way)
                if self._coordinator.unfinished:
                    self.touch()
                    await asyncio.sleep(0)  # what else is ready goes first

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self._coordinator.look = True
            self.touch()

    def _round(self, under_way: asyncio.TaskGroup) -> None:
        instances = {i.name: i for i in self._proxy.instances}
        for instance in instances.values():
            if self._wants_load(instance):
                under_way.create_task(self._ask(instance))
        newest = self._parameters.version
        self._pace.available(newest, asyncio.get_running_loop().time())
        snapshot = self._proxy.snapshot(newest, self._pace.seconds)
        routes: list[tuple[int, Instance, Route]] = []
        for command in self._coordinator.plan(snapshot, self._buffer.room):
            if isinstance(command, Abort):
                self._proxy.refuse(command.requests, LOST)
                continue
            instance = instances[command.instance]
            match command:
                case Pull():
                    instance.pulling = True
                    under_way.create_task(self._parameters.pull(instance))
                case Interrupt(requests=numbers):
                    running = [number for number in numbers if number in instance.requests]
                    instance.interrupted += len(numbers) - len(running)
                    instance.cutting.update(running)
                    under_way.create_task(self._proxy.interrupt(running, instance))
                case Route():
                    routes.append((newest if instance.pulling else instance.version, instance, command))
        # The oldest version first: that is what the plan gave a group whose members go to several.
        for version, instance, command in sorted(routes, key=itemgetter(0)):
            self._route(command.requests, instance, version)
        self._measure()
        for instance in instances.values():
            self._proxy.on_free(instance)

    def _measure(self) -> None:
        """Let the cost model follow the servers. Last in a round, so that what was just routed counts from now on."""
        if (meter := self._meter) is None:
            return
        now = asyncio.get_running_loop().time()
        if [i for i in self._proxy.instances if meter.look(i, now)]:
            self._coordinator.cost = meter.cost
            self._observer.counter("coordinator/cost_error", now, meter.error)

    def _route(self, numbers: Sequence[int], instance: Instance, version: int) -> None:
        """Give waiting requests to a server that holds ``version``, or will when it has pulled. One that is still being
        interrupted goes when it is back."""
        waiting, fleet = self._proxy.waiting, self._proxy.instances
        for number in numbers:
            request = waiting.get(number)
            if request is None and any(number in i.cutting or (i.pulling and number in i.requests) for i in fleet):
                waiting.promise(number, instance)
            elif request is None or request.given.done() or not self._starts(request, version):
                instance.routed += 1  # it has gone, or may not start there: the command is done with
            else:
                waiting.remove(request)
                self._proxy.hand(request, instance)

    def _starts(self, request: Request, version: int) -> bool:
        """The version may serve the request, whose group has a V_traj or is given one now."""
        start = request.start
        if start.group_id >= 0 and not self._buffer.plays(start.group_id):
            self._coordinator.rests(start.group_id)
            return False
        if request.view.oldest > version:
            return False
        if start.v_traj is None:
            if not self._buffer.assign(start.group_id, version):
                return False
            self._proxy.waiting.assigned(start)
        return True

    def _wants_load(self, instance: Instance) -> bool:
        """Also sets from when on it will want it next."""
        full = NEARLY_FULL * instance.max_tokens
        if not instance.up or instance.pulling:
            instance.queued = 0
        if instance.tokens <= full and not instance.queued:
            instance.attention_at = full
            return False
        if instance.attention_at == math.inf or full < instance.tokens <= instance.attention_at:
            return False
        instance.attention_at = math.inf  # until it has answered
        return True

    async def _ask(self, instance: Instance) -> None:
        try:
            load = await instance.engine.load()
        except EngineError:  # whoever it fails for next says so
            load = None
        instance.attention_at = instance.tokens + ASK_AGAIN * instance.max_tokens
        if load is not None and load.waiting != instance.queued:
            instance.queued = load.waiting
            self.touch()
