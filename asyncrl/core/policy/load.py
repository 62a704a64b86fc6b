"""The state that one plan works on: the snapshot's servers as the commands decided so far will have changed them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot

NOT_YET = float("inf")
"""Place of requests without V_traj in the order of levels."""


class Load:
    """One server. What routing functions read (``InstanceView``) is among its fields.

    ``up`` says that this plan may command it: it is up, does not pull, and its books show all that it was told before.
    ``promised`` is the version that it has, or will have when these commands have taken effect; -1 if it is down.
    """

    def __init__(self, index: int, instance: InstanceSnapshot, *, up: bool, promised: int) -> None:
        self.index = index
        self.name = instance.name
        self.version = instance.version
        self.running = instance.running
        self.tokens = instance.tokens
        self.kv_tokens = instance.kv_tokens
        self.waiting = instance.waiting
        self.generated = instance.generated
        self.slowness = instance.slowness
        self.max_running = instance.max_running
        self.max_tokens = instance.max_tokens
        self.requests: dict[int, RequestView] = instance.requests
        """As the snapshot has them."""
        self.pinned = instance.pinned
        self.draining = instance.draining
        """It goes on with what it has begun, where that may go on nowhere else."""
        self.up = up
        self.promised = promised
        self.cold = False
        """It pulls first, so it holds no prefixes."""
        self.acting = self.acting_tokens = 0
        """Trajectories of its batch that are with their environments, and the tokens that they will come back with, as
        a repack sees them (core/policy/own_batch.py)."""
        self.kv_peak = -1
        """The most that its batch ``held`` at earlier looks for a repack; -1 at the first."""
        self.groups = 0
        """Unfinished groups of its own batch, where servers have one (core/policy/own_batch.py)."""
        self.needed = False
        """Only its version may go on with something, and no other server has it or stays with it."""
        self.leaving = False
        """It gives up its version once it is empty (core/policy/streaming.py)."""

    @property
    def sequences(self) -> int:
        """Trajectories that it has, those that are with their environments among them."""
        return self.running + self.acting

    @property
    def held(self) -> int:
        """Tokens of these, but for those that wait inside the server."""
        return self.kv_tokens + self.acting_tokens

    def take(self, request: RequestView) -> None:
        self.running += request.slots
        self.tokens += request.tokens
        self.kv_tokens += request.tokens

    def lose(self, request: RequestView) -> None:
        """It is cut; one that waits inside the server, if any does."""
        self.running -= request.slots
        self.tokens -= request.tokens
        if self.waiting:
            self.waiting = max(0, self.waiting - request.slots)
        else:
            self.kv_tokens = max(0, self.kv_tokens - request.tokens)

    def clear(self) -> None:
        """All that it has is cut."""
        self.running = self.tokens = self.kv_tokens = self.waiting = 0

    def pull(self, version: int) -> None:
        self.clear()
        self.version = self.promised = version
        self.cold = True

    def copy(self) -> Load:
        other = Load.__new__(Load)
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"<Load {self.name} v{self.version} {self.running} running, {self.kv_tokens} tokens>"


class Move(NamedTuple):
    """Requests that run on one server go to another of the same version."""

    source: Load
    destination: Load
    requests: list[RequestView]

    def carry_out(self) -> None:
        """In the loads."""
        for request in self.requests:
            self.source.lose(request)
            self.destination.take(request)


class Admission:
    """V_traj of groups that had none, within one plan (StaleFlow algorithm 2).

    ``room(version)`` says how many groups more may start on a version, of which each reservation, on whatever version,
    takes at most one. So a group is admitted if there is room for one more than this plan has admitted: never too many,
    and what this refuses though there is place comes with the next plan.
    """

    def __init__(self, room: Callable[[int], int]) -> None:
        self._room = room
        self._rooms: dict[int, int] = {}
        self._assigned: dict[int, int] = {}

    def v_traj(self, request: RequestView) -> int | None:
        return self._assigned.get(request.group) if request.v_traj is None else request.v_traj

    def open(self, version: int) -> bool:
        """May one group more start on ``version``?"""
        room = self._rooms.get(version)
        if room is None:
            room = self._rooms[version] = self._room(version)
        return room > len(self._assigned)

    def routed(self, request: RequestView, version: int) -> None:
        """The first request of a group proposes its server's version."""
        if request.v_traj is None:
            self._assigned.setdefault(request.group, version)

    def routable(self, request: RequestView, version: int) -> bool:
        """Algorithm 2: may ``version`` serve the request?"""
        v_traj = self.v_traj(request)
        return version >= request.after and (self.open(version) if v_traj is None else version >= v_traj)

    def copy(self) -> Admission:
        other = Admission(self._room)
        other._rooms, other._assigned = self._rooms, dict(self._assigned)
        return other


class Queue:
    """The multi-level queue (StaleFlow §5.3): levels by the oldest version that may serve them, those without V_traj
    last. A plan sees the first ``most`` of it."""

    def __init__(self, levels: Mapping[int | None, Iterable[RequestView]], most: int | None = None) -> None:
        self._levels = dict(levels)
        self._most = most
        self._returned: dict[int | None, list[RequestView]] = {}

    def add(self, requests: Iterable[RequestView]) -> None:
        """Requests that this plan cut."""
        for request in requests:
            key = None if request.v_traj is None else request.oldest
            self._returned.setdefault(key, []).append(request)

    @property
    def keys(self) -> list[int | None]:
        """Oldest versions that may serve the levels, in order."""
        return sorted(self._levels.keys() | self._returned.keys(), key=lambda v: NOT_YET if v is None else v)

    def __iter__(self) -> Iterator[RequestView]:
        """In order. Costs nothing for what is not asked for."""
        return islice(self._all(), self._most)

    def _all(self) -> Iterator[RequestView]:
        for key in self.keys:
            level: Iterable[RequestView] = self._levels.get(key, ())
            returned = self._returned.get(key)
            if returned:
                level = heapq.merge(level, sorted(returned, key=_arrival), key=_arrival)
            yield from level


def _arrival(request: RequestView) -> int:
    return request.sequence
