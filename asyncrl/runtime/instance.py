"""The book entry of one inference server, as LLMProxy keeps it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot
from asyncrl.ports import Engine, EngineError, EngineInfo
from asyncrl.runtime.trajectory_server import Request


class Instance:
    """The book entry of one server; what routing reads (``InstanceView``)."""

    __slots__ = (
        "asked",
        "attention_at",
        "context_length",
        "cutting",
        "down_since",
        "draining",
        "empty",
        "engine",
        "generated",
        "held",
        "interrupted",
        "kv_url",
        "max_running",
        "max_tokens",
        "name",
        "pinned",
        "prefilled",
        "pulling",
        "queued",
        "requests",
        "rids",
        "routed",
        "running",
        "slowness",
        "streams",
        "tokens",
        "up",
        "version",
        "why",
    )

    def __init__(self, engine: Engine, info: EngineInfo, *, up: bool = True) -> None:
        self.engine = engine
        self.name = engine.name
        self.version = info.version if up else -1
        self.context_length = info.context_length
        self.meet(info)
        self.running = 0
        self.tokens = 0
        self.empty = asyncio.Event()
        """Nothing runs there."""
        self.empty.set()
        self.generated = self.prefilled = 0
        """Tokens since the run began; prefilled ones without the prefixes that it held or was given."""
        self.slowness = 1.0
        """Times as long as the cost model says that its steps take (runtime/meter.py)."""
        self.queued = 0
        """Of ``running``, those that waited inside the server when it was last asked."""
        self.attention_at = math.inf
        """The coordinator wants to know when ``tokens`` exceed this."""
        self.up = up
        self.why = "" if up else "it joins"
        """Why it is not up, in words."""
        self.draining = False
        """It begins nothing; once nothing is left on it, it is not ``up`` either, and rests."""
        self.pinned = False
        """An evaluation uses it: its weights stay."""
        self.pulling = False
        """It is being given weights, on its own: it gets no requests."""
        self.down_since = 0.0
        self.held: deque[Request] = deque()
        """Requests that wait for this very server: it was chosen though it has no room yet."""
        self.requests: dict[int, RequestView] = {}
        """What a coordinator sent here and runs, by id."""
        self.rids: dict[int, str] = {}
        """Their ids at the server."""
        self.streams: dict[int, asyncio.Timeout] = {}
        """Of each request here, evaluations' too, what cuts it off."""
        self.asked: tuple[str, float] | None = None
        """What it is to do before it serves again, and since when: to pause, to load a version, to resume."""
        self.cutting: set[int] = set()
        """Those that an ``Interrupt`` is to bring back."""
        self.routed = 0
        """Requests that were given to it, and those whose ``Route`` came too late."""
        self.interrupted = 0
        """The same of ``Interrupt``."""

    def meet(self, info: EngineInfo) -> None:
        """What answers now, perhaps another process than before, has these limits. Raises ``EngineError`` where it
        takes shorter requests than the server did that was there first."""
        if info.context_length < self.context_length:
            raise EngineError(
                f"{self.name}: takes at most {info.context_length} tokens now, and took {self.context_length}; start "
                "it as it was"
            )
        self.kv_url = info.kv_url
        self.max_running = info.max_running_requests
        self.max_tokens = info.max_total_tokens

    def take(self, slots: int, tokens: int) -> None:
        self.running += slots
        self.tokens += tokens
        self.empty.clear()

    def release(self, slots: int, tokens: int) -> None:
        self.running -= slots
        self.tokens -= tokens
        if not self.running:
            self.empty.set()

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """It is asked for this inside."""
        self.asked = what, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.asked = None

    def cut(self, now: float) -> None:
        """Every request here comes back, as from a server that has failed."""
        for scope in self.streams.values():
            if not scope.expired():
                scope.reschedule(now)

    def check(self, versions: Sequence[int], oldest: int) -> None:
        """Raises ``EngineError`` for tokens of weights that it was not given since ``oldest``: it was restarted unseen,
        with its first ones, or somebody else gives it some."""
        if versions and not oldest <= versions[0] <= versions[-1] <= self.version:
            raise EngineError(
                f"{self.name}: samples from version {versions[0]}, not {oldest}; did it restart, or does another run "
                "give it weights?"
            )

    def snapshot(self) -> InstanceSnapshot:
        return InstanceSnapshot(
            name=self.name,
            version=self.version,
            up=self.up,
            running=self.running,
            tokens=self.tokens,
            max_running=self.max_running,
            max_tokens=self.max_tokens,
            kv_tokens=min(self.tokens, self.max_tokens),
            waiting=self.queued,
            requests=self.requests,
            routed=self.routed,
            interrupted=self.interrupted,
            generated=self.generated,
            slowness=self.slowness,
            pulling=self.pulling,
            pinned=self.pinned,
            draining=self.draining,
        )

    def __repr__(self) -> str:
        pulls = " pulls" if self.pulling else ""
        held = f" {len(self.held)} held" if self.held else ""
        return (
            f"<Instance {self.name} v{self.version} {'up' if self.up else 'down'}{pulls} {self.running} running{held}>"
        )


def kv_source(view: RequestView, instance: Instance, fleet: Sequence[Instance]) -> str:
    """Where ``instance`` gets the KV of the request's prefix without computing it (DORA §4.4): from the server that
    holds it, or held it until it took newer weights, if it is of the version that ``instance`` has. Empty: nowhere."""
    if not instance.kv_url or view.home in (None, instance.name) or view.after != instance.version:
        return ""
    return next((other.kv_url for other in fleet if other.name == view.home and other.up), "")


def to_prefill(view: RequestView, instance: Instance, fleet: Sequence[Instance]) -> int:
    """Tokens of the request that ``instance`` has to compute before it goes on."""
    held = view.home == instance.name or kv_source(view, instance, fleet)
    return view.tokens - (view.prefix if held else 0)
