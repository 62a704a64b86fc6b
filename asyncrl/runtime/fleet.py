"""Fleet: servers that fail, hang, come back, join, drain and leave, at any time (Laminar §3.3).

Failing requests tell at once of a server that is dead. One that hangs is told by heartbeats, within ``hang_s``, also
where nobody waits for it; its requests go elsewhere then, and its process is killed if the launcher owns it, which
starts another. Whatever failed, and whatever joins, is given requests only when its weights are verified.

A server that drains begins nothing. What it runs goes elsewhere with its tokens where an update would cut it too, and
ends where it is otherwise; a trajectory of one version (Laminar §6) ends with all its turns. Then the server rests,
until it is readmitted or forgotten.

    _bring_back()    waits for: a server that is down, then its next probe    woken by: LLMProxy.mark_down; the clock
    _listen()        waits for: the next heartbeat                            woken by: the clock
    _move()          waits for: a server that drains, then its answer         woken by: drain(); the server
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from asyncrl.ports import Engine, EngineError, EngineInfo
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy

BEATS = 4
"""Heartbeats within ``hang_s``. Each has until the next one to be answered."""


class FleetDown(Exception):
    """No inference server is left: the run cannot go on."""


class FleetError(Exception):
    """The fleet cannot be changed so. One line with the remedy."""


class Launcher(Protocol):
    """Owns the processes of some of the servers."""

    def began(self, name: str) -> float | None:
        """When the process of that server was started, in loop time; None if it has none here that lives."""

    def kill(self, name: str) -> None:
        """It ends at once; another takes its place. Harmless where it has none here."""

    def retire(self, name: str) -> None:
        """It ends in order, for good. Harmless where it has none here."""


class Fleet:
    """``restore`` brings the weights of a server that answers again up to date, and then calls ``mark_up``. ``probe_s``
    is the time between two probes of one that failed, ``patience_s`` how long the run waits when none is up, ``hang_s``
    how long a server may be silent (0: any time), and ``start_s`` one whose process has just begun. ``cuts``: running
    requests may go on elsewhere. ``has_begun``: whether a server has more to go on with than the requests that it runs.
    ``context_length`` is what a server has to take. ``note`` prints a line."""

    def __init__(
        self,
        *,
        proxy: LLMProxy,
        restore: Callable[[Instance], Awaitable[None]],
        launcher: Launcher | None = None,
        probe_s: float = 2.0,
        patience_s: float = 60.0,
        hang_s: float = 0.0,
        start_s: float = 300.0,
        cuts: bool = True,
        has_begun: Callable[[str], bool] | None = None,
        context_length: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._proxy = proxy
        self._restore = restore
        self._launcher = launcher
        self._probe_s = probe_s
        self._patience_s = patience_s
        self._hang_s = hang_s
        self._start_s = start_s
        self._cuts = cuts
        self._has_begun = has_begun
        self._context_length = context_length
        self._note = note
        self._heard: dict[str, float] = {}
        """When each server was last heard of."""
        self._leaving: dict[str, bool] = {}
        """Servers that drain and do not rest yet, and whether they are then forgotten."""
        self._moving: list[Instance] = []
        self._to_move = asyncio.Event()
        proxy.on_free = self._settle

    async def run(self) -> None:
        """Until cancelled. Raises ``FleetDown`` when none is up for ``patience_s``."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._bring_back())
            group.create_task(self._move())
            if self._hang_s:
                group.create_task(self._listen())

    # --- servers that fail, hang and come back

    async def _bring_back(self) -> None:
        loop, proxy = asyncio.get_running_loop(), self._proxy
        while True:
            await proxy.trouble.wait()
            await asyncio.sleep(self._probe_s)
            down = [i for i in proxy.instances if not i.up and not i.draining]
            if not down:
                proxy.trouble.clear()
                continue
            async with asyncio.TaskGroup() as probes:
                for instance in down:
                    probes.create_task(self._probe(instance))
            use = [i for i in proxy.instances if not i.draining]
            if all(not i.up and loop.time() - i.down_since > self._patience_s for i in use):
                raise FleetDown(f"no inference server is left; the last error was: {proxy.last_error}")

    async def _probe(self, instance: Instance) -> None:
        seconds = asyncio.get_running_loop().time() - instance.down_since
        if not await instance.engine.health():
            if instance.version >= 0 and seconds > self._patience_s:
                instance.version = -1  # what it has begun is not waited for any longer
                self._proxy.on_change()
            return
        before = instance.why
        await self._restore(instance)
        if instance.up:
            self._note(f"{instance.name} serves, with version {instance.version}, after {seconds:.0f} s")
        elif instance.why != before:
            self._note(f"{instance.name} answers, but is not used: {instance.why}")

    async def _listen(self) -> None:
        """Servers that are silent for ``hang_s`` hang. An event loop that was held up itself has heard nobody."""
        loop, pause = asyncio.get_running_loop(), self._hang_s / BEATS
        due = loop.time()
        while True:
            async with asyncio.TaskGroup() as beats:
                for instance in self._proxy.instances:
                    beats.create_task(self._beat(instance, loop.time() + pause))
            now = loop.time()
            if now > due + 1.5 * pause:
                self._heard.clear()
            for instance in list(self._proxy.instances):
                self._judge(instance, now)
            due = max(due + pause, now)
            await asyncio.sleep(due - now)

    async def _beat(self, instance: Instance, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                healthy = await instance.engine.health()
        except TimeoutError:
            return
        if healthy:
            self._heard[instance.name] = asyncio.get_running_loop().time()

    def _judge(self, instance: Instance, now: float) -> None:
        name = instance.name
        silent_s = now - self._heard.setdefault(name, now)
        if silent_s < self._hang_s or (instance.draining and not instance.up):
            return
        if instance.up:
            why = f"{name}: silent for {silent_s:.0f} s (engine.hang_s): it hangs, or cannot be reached"
            self._proxy.mark_down(instance, EngineError(why))
            self._note(why)
        instance.cut(now)
        began = None if self._launcher is None else self._launcher.began(name)
        if self._launcher and began is not None and (self._heard[name] >= began or now - began > self._start_s):
            self._note(f"{name}: its process is killed, and another started")
            self._launcher.kill(name)

    # --- servers that join, drain and leave

    async def add(self, engine: Engine) -> Instance:
        """A server joins: it is in use when it has the newest weights. Raises ``EngineError`` where it cannot be
        reached or serves another model, and ``FleetError``."""
        info = await engine.connect()
        if info.context_length < self._context_length:
            raise FleetError(
                f"{engine.name}: takes at most {info.context_length} tokens, and rollout.max_tokens is "
                f"{self._context_length}; start it with a longer context"
            )
        self._note(f"{engine.name} joins")
        return self._admit(engine, info)

    def expect(self, engine: Engine, like: EngineInfo, why: str) -> None:
        """A server that this run had is not there: it joins when it is. ``like`` has the limits that it should have."""
        self._note(f"{why}; going on without {engine.name}, which joins when it can be used")
        self._admit(engine, like).why = why

    def _admit(self, engine: Engine, info: EngineInfo) -> Instance:
        instance = self._proxy.add(engine, info, up=False)
        self._wait_for(instance)
        return instance

    @property
    def instances(self) -> Sequence[Instance]:
        return self._proxy.instances

    def find(self, name: str) -> Instance:
        """Raises ``FleetError``."""
        for instance in self._proxy.instances:
            if instance.name == name:
                return instance
        raise FleetError(f"{name}: no such server; there are {', '.join(i.name for i in self._proxy.instances)}")

    def readmit(self, name: str) -> None:
        """A server that drains or rests is used again. Raises ``FleetError``."""
        instance = self.find(name)
        if not instance.draining:
            raise FleetError(f"{name} is in use already")
        instance.draining = False
        if self._leaving.pop(instance.name, None) is None:
            self._wait_for(instance)
        self._proxy.changed(instance)

    def drain(self, name: str, *, forget: bool = False) -> None:
        """The server gets nothing new, and then rests, or is forgotten. Raises ``FleetError``, also for the last one in
        use."""
        instance = self.find(name)
        if not any(i.up and not i.draining for i in self._proxy.instances if i is not instance):
            raise FleetError(f"{instance.name} is the last server in use; add another one first")
        if instance.draining and instance.name not in self._leaving:
            if forget:
                self._forget(instance)
            return
        self._leaving[instance.name] = forget or self._leaving.get(instance.name, False)
        if not instance.draining:
            instance.draining = True
            self._note(f"{instance.name} drains: {instance.running} requests run there")
            if self._cuts or self._has_begun is None:
                self._proxy.give_back(instance)
            if self._cuts:
                self._moving.append(instance)
                self._to_move.set()
            self._proxy.changed(instance)
            self._proxy.on_change()
        self._settle(instance)

    def _wait_for(self, instance: Instance) -> None:
        instance.why, instance.down_since = "it joins", asyncio.get_running_loop().time()
        self._proxy.trouble.set()

    async def _move(self) -> None:
        while True:
            await self._to_move.wait()
            self._to_move.clear()
            await asyncio.sleep(0)  # what was given to them last is on its way then
            moving, self._moving = self._moving, []
            async with asyncio.TaskGroup() as calls:
                for instance in moving:
                    calls.create_task(self._proxy.interrupt(list(instance.rids), instance))

    def _settle(self, instance: Instance) -> None:
        """Does it rest?"""
        if instance.name not in self._leaving or instance.running:
            return
        if not instance.up:
            instance.version = -1  # what it had begun is not waited for
        elif self._goes_on(instance):
            return
        instance.up, instance.why = False, "it rests"
        self._note(f"{instance.name} is drained, and rests")
        self._proxy.changed(instance)
        if self._leaving.pop(instance.name):
            self._forget(instance)

    def _goes_on(self, instance: Instance) -> bool:
        """It runs nothing, but will, or is not done with its weights."""
        if instance.held or instance.pulling or instance.pinned or self._proxy.snapshot().suspended:
            return True
        return self._has_begun is not None and self._has_begun(instance.name)

    def _forget(self, instance: Instance) -> None:
        self._heard.pop(instance.name, None)
        self._proxy.remove(instance)
        if self._launcher is not None:
            self._launcher.retire(instance.name)
        self._note(f"{instance.name} has left")
