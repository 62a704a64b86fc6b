"""TrajectoryServer: the requests that wait for a server, as a multi-level queue (StaleFlow §5.1, §5.3).

A level is the oldest version that may generate for its requests; within a level the first to come is the first to go.
Initial requests, whose group has no V_traj yet, are the last level. A partial one, which an update, a migration or a
dying server cut off, waits here with its tokens.

Owns no decision: LLMProxy, or the coordinator through it, says who goes where.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from asyncrl.core.policy.routing import RequestView

if TYPE_CHECKING:
    from asyncrl.runtime.instance import Instance


class Start:
    """V_traj of a group: the oldest version that may generate for any of its trajectories (StaleFlow §4.1).

    Known at admission, or None until the first request of the group is routed, for a control that ``assigns_late``.
    That request proposes the version of its server; all others go to servers that are not older. So it is the minimum
    over the group's members (§4.3) from the first token on.
    """

    __slots__ = ("group_id", "v_traj")

    def __init__(self, v_traj: int | None = None, group_id: int = -1) -> None:
        self.v_traj = v_traj
        self.group_id = group_id

    def __repr__(self) -> str:
        return f"<Start of group {self.group_id}: {self.v_traj}>"


class Request:
    """One request that waits. ``given`` is done with its server when it has one."""

    __slots__ = ("given", "level", "start", "view")

    def __init__(self, view: RequestView, start: Start, given: asyncio.Future[Instance]) -> None:
        self.view = view
        self.start = start
        self.given = given
        self.level = 0


INITIAL = 1 << 62
"""The level of requests without a V_traj: behind all others."""


class TrajectoryServer:
    """Operations are O(1), but for finding the first level among the few that there are."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._levels: dict[int, OrderedDict[int, RequestView]] = {}
        self._initial: dict[int, dict[int, None]] = {}
        """Group without a V_traj → its requests."""
        self._promised: dict[int, Instance] = {}
        """Requests on their way back here, and where they go from here."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, number: int) -> Request | None:
        return self._requests.get(number)

    @property
    def levels(self) -> Mapping[int | None, Collection[RequestView]]:
        """By the oldest version that may serve them, None for initial ones. In any order, none empty; not copied."""
        return {None if v == INITIAL else v: level.values() for v, level in self._levels.items()}

    def put(self, request: Request, *, front: bool = False) -> None:
        """Behind the others of its level, or before them."""
        view = request.view
        number = view.id
        self._requests[number] = request
        if view.v_traj is None:
            request.level = INITIAL
            self._initial.setdefault(view.group, {})[number] = None
        else:
            request.level = view.oldest
        level = self._levels.get(request.level)
        if level is None:
            level = self._levels[request.level] = OrderedDict()
        level[number] = view
        if front:
            level.move_to_end(number, last=False)

    def first(self) -> Request | None:
        levels = self._levels
        if not levels:
            return None
        level = levels[min(levels)] if len(levels) > 1 else next(iter(levels.values()))
        return self._requests[next(iter(level))]

    def remove(self, request: Request) -> None:
        """Harmless for one that has gone."""
        view = request.view
        number = view.id
        if self._requests.pop(number, None) is None:
            return
        level = self._levels[request.level]
        del level[number]
        if not level:
            del self._levels[request.level]
        if view.v_traj is None:
            group = self._initial[view.group]
            del group[number]
            if not group:
                del self._initial[view.group]

    def promise(self, number: int, instance: Instance) -> None:
        """A request that is being interrupted goes to this server when it is back."""
        self._promised[number] = instance

    def forget(self, instance: Instance) -> None:
        """The server failed: what was promised to it is not."""
        self._promised = {number: to for number, to in self._promised.items() if to is not instance}

    def redeem(self, number: int) -> Instance | None:
        """The request is back, or has ended."""
        return self._promised.pop(number, None)

    def assigned(self, start: Start) -> None:
        """The group has its V_traj now: its requests go to that level."""
        for number in list(self._initial.get(start.group_id, ())):
            request = self._requests[number]
            self.remove(request)
            request.view = msgspec.structs.replace(request.view, v_traj=start.v_traj)
            self.put(request)
