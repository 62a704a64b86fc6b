"""WeightTransport over relays: the controller's end, which decides on the chain and knows who holds what.

    prepare   each rank of the trainer copies its share into memory that it offers; then the trainer goes on
    arrive    the master takes all of it from there, each relay from the one before (``relay.py``); nobody else waits
    deliver   a server loads it from its own host's shared memory

``watch`` runs beside: it has a connection to each relay, over which orders go and states come. A relay whose connection
ends, or that is silent for ``silence_s``, is cut out, and the one after it is told to go on with another source; it is
asked again until it answers. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import aiohttp
import msgspec
from yarl import URL

from asyncrl.access import DEMAND, header
from asyncrl.core.relay_chain import RelayChain
from asyncrl.ports import Engine, EngineError, Observer
from asyncrl.wire import RelayOrders, RelayState

T = TypeVar("T")

SILENCE_S = 0.8
"""Four heartbeats."""

CONNECT_S = 5.0
RETRY_S = 0.1
CLOSE_S = 2.0

GONE_S = 10.0
"""How long a server waits for a relay that was lost, which its launcher may start again."""


class Publisher(Protocol):
    """What this transport needs of the trainer's client."""

    @property
    def outlets(self) -> Sequence[str]:
        """Where its ranks offer what was published last."""
        ...

    async def publish(self, version: int, transport: str, path: str = "") -> Mapping[str, float]: ...

    async def unless_ended(self, work: Awaitable[T]) -> T: ...


class RelayTransport:
    """``relays`` are their URLs, ``hosts`` says which one each server (by its name) loads from. ``run`` tells this
    run's versions from those of others, ``link`` says how bytes travel. ``note`` prints a line for the user."""

    def __init__(
        self,
        trainer: Publisher,
        relays: Sequence[str],
        hosts: Mapping[str, str],
        *,
        keep: int,
        run: str,
        timeout_s: float,
        observer: Observer,
        note: Callable[[str], None],
        silence_s: float = SILENCE_S,
        token: str = "",
        link: str = "tcp",
    ) -> None:
        self._trainer = trainer
        self._relays = list(relays)
        self._hosts = dict(hosts)
        self._run = run
        self._link = link
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._observer = observer
        self._note = note
        self._headers = header(token)
        self.chain = RelayChain(keep)
        self.states: dict[str, RelayState] = {}
        """Of the relays that are in the chain."""
        self._lost: dict[str, float] = {}
        """When a relay was last there, or first expected."""
        self._gone: dict[str, str] = {}
        """Why a relay is not there, as far as that is known."""
        self.news = asyncio.Event()
        """Set, and replaced, whenever a state or the orders changed."""

    # --- beside the run

    async def watch(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(headers=self._headers) as session, asyncio.TaskGroup() as tasks:
            for relay in self._relays:
                tasks.create_task(self._keep(session, relay))

    async def _keep(self, session: aiohttp.ClientSession, relay: str) -> None:
        now = asyncio.get_running_loop().time
        self._lost[relay] = now()
        told = False
        while True:
            why, refused = "it closed the connection", False
            try:
                async with asyncio.timeout(CONNECT_S):
                    connection = await session.ws_connect(URL(relay) / "control", max_msg_size=2**24)
                async with connection:
                    await self._converse(relay, connection)
            except TimeoutError:
                why = f"silent for {self._silence_s:g} s"
            except aiohttp.WSServerHandshakeError as error:
                refused = True
                why = f"it answered {error.status}: " + (DEMAND if error.status == 401 else "is it a relay?")
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                why = str(error) or type(error).__name__
            self._gone[relay] = why
            if self.states.pop(relay, None) is not None:
                self.chain.lose(relay)
                self._lost[relay] = now()
                self._tell()
                self._note(f"relay {relay} is gone ({why}); the others go on without it")
                told = True
            elif not told and (refused or now() - self._lost[relay] > GONE_S):
                self._note(f"relay {relay} does not come ({why}); the others go on without it")
                told = True
            await asyncio.sleep(RETRY_S)

    async def _converse(self, relay: str, connection: aiohttp.ClientWebSocketResponse) -> None:
        """Until the connection ends. Raises ``TimeoutError`` when the relay is silent."""
        try:
            async with asyncio.TaskGroup() as tasks:
                ordering: asyncio.Task[None] | None = None
                while True:
                    async with asyncio.timeout(self._silence_s):
                        message = await connection.receive()
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    self._heard(relay, msgspec.json.decode(message.data, type=RelayState))
                    # Not before: one that is not in the chain yet would be told to drop all that it holds.
                    ordering = ordering or tasks.create_task(self._order(relay, connection))
                if ordering is not None:
                    ordering.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _order(self, relay: str, connection: aiohttp.ClientWebSocketResponse) -> None:
        given = None
        while True:
            news, orders = self.news, self.chain.orders().get(relay)
            message = RelayOrders(run=self._run)
            if orders is not None:
                message = RelayOrders(run=self._run, sources=orders.sources, versions=orders.versions, link=self._link)
            if message != given:
                await connection.send_bytes(msgspec.json.encode(message))
                given = message
            await news.wait()

    def _heard(self, relay: str, state: RelayState) -> None:
        if state.run != self._run:
            return  # it has not yet read its first orders
        before = self.states.get(relay)
        self.states[relay] = state
        if before is None:
            host = URL(relay).host or ""
            self.chain.join(relay, f"{host}:{state.data_port}")
        if state.unable is not None and state.unable == self.chain.newest and self.chain.is_able(relay):
            self.chain.unable(relay)
            self._note(f"relay {relay}: {state.error}")
        if state != before:
            self._tell()

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def place(self, engine: str, relay: str) -> None:
        """A server that joins, by its name, loads from this relay."""
        self._hosts[engine] = relay

    # --- WeightTransport

    def forget(self) -> None:
        """Nothing: ``watch`` keeps the relays together, and a trainer says anew where it is."""

    async def prepare(self, version: int) -> None:
        newest = self.chain.newest
        if newest is not None and newest != version:  # the trainer's memory is free when one relay has it all
            await self._within(lambda: self._held_by_one(newest) or self._all_unable())
        if newest == version and self._held_by_one(version):
            return  # a trainer that was started again need not gather it anew
        metrics = await self._trainer.publish(version, "relay")
        now = asyncio.get_running_loop().time()
        self._observer.counter("weights/stall_s", now, metrics["seconds"])
        self.chain.announce(version, tuple(self._trainer.outlets))
        self._tell()

    async def arrive(self, engines: Sequence[Engine], version: int) -> None:
        """Until it is on the hosts of these servers, or can come to them no more. Raises ``TrainerError``."""
        started = asyncio.get_running_loop().time()
        relays = {self._hosts[engine.name] for engine in engines if engine.name in self._hosts}
        # Until one relay has all of it, only the trainer does.
        await self._trainer.unless_ended(self._within(lambda: self._held_by_one(version) or self._all_unable()))
        async with asyncio.TaskGroup() as waits:
            for relay in relays:
                waits.create_task(self._settled(relay, version))
        now = asyncio.get_running_loop().time()
        self._observer.span("controller", "broadcast", started, now, {"version": version})

    async def deliver(self, engines: Sequence[Engine], version: int) -> None:
        """All servers load at once. One that fails does not cut the others off in the middle of a load."""
        failures: list[EngineError] = []

        async def load(engine: Engine) -> None:
            try:
                await self._load(engine, version)
            except EngineError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as loads:
            for engine in engines:
                loads.create_task(load(engine))
        if failures:
            raise failures[0]

    async def _load(self, engine: Engine, version: int) -> None:
        relay = self._hosts.get(engine.name)
        if relay is None:
            raise EngineError(f"{engine.name}: no relay on its host; add one to weights.relay_urls")
        self.chain.hold(version)
        try:
            await self._settled(relay, version)
            if not self._has(relay, version):
                raise EngineError(f"{engine.name}: cannot load version {version}: {self._why(relay)}")
            await engine.load_from_disk(f"{self.states[relay].folder}/v{version}", version)
        finally:
            self.chain.release(version)
            self._tell()

    async def close(self) -> None:
        """Have relays that are not of this run's own making drop what they hold for it."""
        timeout = aiohttp.ClientTimeout(total=CLOSE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for relay in self._relays:
                tasks.create_task(_free(session, relay, self._run))

    # --- who holds what

    def _all_unable(self) -> bool:
        """There are relays, but none can take the newest version."""
        return bool(self.states) and not any(self.chain.is_able(relay) for relay in self.states)

    def _has(self, relay: str, version: int) -> bool:
        return relay in self.states and version in self.states[relay].versions

    def _held_by_one(self, version: int) -> bool:
        return any(self._has(relay, version) for relay in self.states)

    def _lacks(self, relay: str, version: int) -> bool:
        """It is there, and can still get it."""
        return relay in self.states and not self._has(relay, version) and self.states[relay].unable != version

    async def _settled(self, relay: str, version: int) -> None:
        """Wait until it has the version, or will not get it: it has no room, is gone for ``GONE_S``, or takes too
        long."""
        now = asyncio.get_running_loop().time
        while relay not in self.states or self._lacks(relay, version):
            if relay in self.states:
                if not await self._within(lambda: not self._lacks(relay, version)):
                    return
            elif not await self._within(lambda: relay in self.states, self._lost.get(relay, 0.0) + GONE_S - now()):
                return

    def _why(self, relay: str) -> str:
        state = self.states.get(relay)
        if state is None:
            return f"relay {relay} is gone ({self._gone[relay]})" if relay in self._gone else f"relay {relay} is gone"
        return f"relay {relay}: {state.error or f'it did not come in {self._timeout_s:g} s'}"

    async def _within(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``condition`` holds, for ``timeout_s`` (``self._timeout_s`` if not given); whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                while not condition():
                    await self.news.wait()
        return condition()


async def _free(session: aiohttp.ClientSession, relay: str, run: str) -> None:
    with suppress(aiohttp.ClientError, OSError):  # TimeoutError is one
        async with session.delete(URL(relay) / "runs" / run):
            pass
