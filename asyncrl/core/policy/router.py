"""How a plan routes: one request after another, by any routing strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from asyncrl.core.policy.load import Admission, Load
from asyncrl.core.policy.routing import RequestView


class Router(Protocol):
    """A routing strategy at work in one plan."""

    def choose(self, request: RequestView) -> Load | None:
        """The server that gets the request; None: it and those behind it wait."""

    def placed(self, load: Load) -> None:
        """The server's load has changed."""

    def shadow(self, loads: Iterable[Load]) -> None:
        """Servers that are not there, but could be (``selective``)."""

    def winners(self, request: RequestView, chosen: Load | None) -> list[Load]:
        """Of the shadows those that would each, alone, have been chosen in place of ``chosen``; they are shadows no
        more."""


def route(router: Router, requests: Iterable[RequestView], admission: Admission) -> Iterator[tuple[RequestView, Load]]:
    """The loop of algorithm 3: each request in turn, until one must wait. Changes the servers' loads as it goes."""
    for request in requests:
        load = router.choose(request)
        if load is None:
            return
        place(router, request, load, admission)
        yield request, load


def place(router: Router, request: RequestView, load: Load, admission: Admission) -> None:
    """The request is the server's."""
    admission.routed(request, load.version)
    load.take(request)
    router.placed(load)


class EachByItself:
    """A routing function of core/policy/routing.py, for every request in turn."""

    def __init__(
        self,
        function: Callable[[RequestView, Sequence[Load]], Load | None],
        loads: Sequence[Load],
        admission: Admission,
    ) -> None:
        self._function = function
        self._loads = [load for load in loads if load.up]
        self._admission = admission
        self._shadows: list[Load] = []

    def choose(self, request: RequestView) -> Load | None:
        may = {load.version: False for load in self._loads}
        for version in may:
            may[version] = self._admission.routable(request, version)
        return self._function(request, [load for load in self._loads if may[load.version]])

    def placed(self, load: Load) -> None:
        pass

    def shadow(self, loads: Iterable[Load]) -> None:
        self._shadows = list(loads)

    def winners(self, request: RequestView, chosen: Load | None) -> list[Load]:
        if not self._shadows or not self._admission.routable(request, self._shadows[0].version):
            return []
        others = [] if chosen is None else [chosen]
        found = [s for s in self._shadows if self._function(request, [*others, s]) is s]
        self._shadows = [s for s in self._shadows if s not in found]
        return found
