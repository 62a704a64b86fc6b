"""Leases: the episodes that wait for an EnvManager, and the EnvManagers that wait for one.

lease()    waits for: an episode    woken by: hand_out(), after whatever may have made one possible
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from asyncrl.runtime.lease import Lease


class Leases:
    """``begin`` opens another group, which offers its episodes; False if none may be opened. ``admit`` is called when
    there is more to hand out than before; it calls ``hand_out``."""

    def __init__(self, *, begin: Callable[[], bool], admit: Callable[[], None]) -> None:
        self._begin = begin
        self._admit = admit
        self._unclaimed: deque[Lease] = deque()
        self._lessees: deque[asyncio.Future[Lease]] = deque()
        self._idle = 0
        """Lessees that are kept waiting: slots out of use."""

    async def lease(self) -> Lease:
        """The next episode to run; waits until one is admitted."""
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._lessees.append(future)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was given in the same tick: to the next in line
                lease = future.result()
                if not lease.revoked:
                    self._unclaimed.appendleft(lease)
                    self._admit()
            else:
                future.cancel()
            raise

    def hand_out(self) -> None:
        """Give episodes to waiting lessees, and begin groups for them while that is allowed."""
        while len(self._lessees) > self._idle:
            future = self._lessees[0]
            if future.done():
                self._lessees.popleft()
                continue
            if not self._unclaimed and not self._begin():
                return
            lease = self._unclaimed.popleft()
            if lease.revoked:
                continue
            self._lessees.popleft()
            future.set_result(lease)

    def offer(self, lease: Lease, *, after_s: float = 0.0) -> None:
        """It waits for a lessee from now on, or from ``after_s`` on."""
        if after_s:
            loop = asyncio.get_running_loop()
            lease.due = loop.time() + after_s
            loop.call_at(lease.due, self._after_backoff, lease)
        else:
            self._unclaimed.append(lease)

    def _after_backoff(self, lease: Lease) -> None:
        if not lease.revoked:
            self._unclaimed.append(lease)
            self._admit()

    def keep_idle(self, slots: int) -> None:
        """This many lessees get nothing from now on."""
        self._idle = slots
        self._admit()

    @property
    def unclaimed(self) -> int:
        return sum(1 for lease in self._unclaimed if not lease.revoked)

    def clear(self) -> None:
        """Nothing is to be played any more."""
        self._unclaimed.clear()
