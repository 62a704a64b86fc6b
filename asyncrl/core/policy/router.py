"""How a plan routes: one request after another, by any routing strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from asyncrl.core.policy.load import Admission, Load
from asyncrl.core.policy.routing import RequestView


class Router(Protocol):
    """A routing strategy at work in one plan."""

    @property
    def passes_over(self) -> bool:
        """Whether requests whose group has a V_traj may wait while those behind them do not."""

    def choose(self, request: RequestView) -> Load | None:
        """The server that gets the request; None: it waits, and those behind it, unless they may pass."""

    def placed(self, request: RequestView, load: Load) -> None:
        """The server has got the request, and its load has changed."""

    def pull(self, request: RequestView, chosen: Load | None) -> Load | None:
        """Of the servers ``offered`` the one that is better pulled for the request than the request given to
        ``chosen``, if there is any. It is one of the servers from now on."""


class MakeRouter(Protocol):
    """The routing strategy, set to work on servers. ``offered`` are servers of its fleet with the version that they
    would have if they pulled, for ``waiting`` requests."""

    def __call__(
        self, loads: Sequence[Load], admission: Admission, offered: Sequence[Load] = (), waiting: int = 1
    ) -> Router: ...


def route(router: Router, requests: Iterable[RequestView], admission: Admission) -> Iterator[tuple[RequestView, Load]]:
    """The loop of algorithm 3: each request in turn, until one must wait. Changes the servers' loads as it goes."""
    for request in requests:
        load = router.choose(request)
        if load is None:
            if router.passes_over and request.v_traj is not None:
                continue
            return
        place(router, request, load, admission)
        yield request, load


def place(router: Router, request: RequestView, load: Load, admission: Admission) -> None:
    """The request is the server's."""
    admission.routed(request, load.version)
    load.take(request)
    router.placed(request, load)


class EachByItself:
    """A routing function of core/policy/routing.py, for every request in turn. A server in which requests wait gets
    none: migration would cut what was given to it, at every plan anew."""

    passes_over = False

    def __init__(
        self,
        function: Callable[[RequestView, Sequence[Load]], Load | None],
        loads: Sequence[Load],
        admission: Admission,
        offered: Sequence[Load] = (),
        waiting: int = 1,
    ) -> None:
        self._function = function
        self._loads = [load for load in loads if load.up and not load.waiting]
        self._admission = admission
        self._offered = list(offered)

    def choose(self, request: RequestView) -> Load | None:
        may = {load.version: False for load in self._loads}
        for version in may:
            may[version] = self._admission.routable(request, version)
        return self._function(request, [load for load in self._loads if may[load.version]])

    def placed(self, request: RequestView, load: Load) -> None:
        pass

    def pull(self, request: RequestView, chosen: Load | None) -> Load | None:
        """Without a cost model: one that runs nothing loses nothing; others pull for what can go nowhere else."""
        if not self._offered or not self._admission.routable(request, self._offered[0].version):
            return None
        if chosen is None:
            load = self._function(request, self._offered)
        elif chosen.version < self._offered[0].version:
            return None
        else:
            load = self._function(request, [chosen, *(load for load in self._offered if not load.running)])
        if load is None or load is chosen:
            return None
        self._offered.remove(load)
        self._loads.append(load)
        return load
