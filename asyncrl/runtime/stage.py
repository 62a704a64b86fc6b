"""Stage: what one coroutine waits for now, since when, and how long that may take.

Whoever waits enters its stages; a few attribute writes a turn, and nobody is woken. They are read only for the status
of a run (runtime/status.py) and by the watchdog (runtime/stall.py), which may ``cut`` what holds everything up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SERVER, PLACE = "a server", "a place for its environment"
"""Waits that others may pass."""


class Stage:
    """``who`` is in it, as a sentence begins. ``on_running`` hears when a server takes the episode's request and when
    it leaves it."""

    __slots__ = ("cut_why", "key", "limit_s", "on_running", "scope", "server", "since", "turns", "what", "who")

    def __init__(self, who: str = "", on_running: Callable[[bool], None] = lambda running: None) -> None:
        self.who = who
        self.on_running = on_running
        self.what = ""
        """Empty: nothing is waited for."""
        self.since = 0.0
        """Loop time."""
        self.limit_s: float | None = None
        self.key = ""
        """The recipe's name of that limit."""
        self.server = ""
        """The server that generates for it; empty in other stages."""
        self.turns = 0
        """Steps of the environment that have ended."""
        self.scope: asyncio.Timeout | None = None
        """Of an owner whose wait may be cut: a missed deadline like any other, but for ``cut_why``."""
        self.cut_why = ""

    def enter(self, what: str, limit_s: float | None = None, key: str = "") -> None:
        self.what, self.limit_s, self.key, self.server = what, limit_s, key, ""
        self.since = asyncio.get_running_loop().time()

    def at(self, server: str) -> None:
        """A server took the request; empty: it waits for one again, or has its answer."""
        self.enter(f"tokens from {server}" if server else SERVER)
        self.server = server
        self.on_running(bool(server))

    def cut(self, why: str) -> None:
        """End the wait now, where its owner allows that."""
        if self.scope is not None and not self.scope.expired():
            self.cut_why = why
            self.scope.reschedule(asyncio.get_running_loop().time())
