"""What the coordinator says to the fleet (StaleFlow §5.1, table 1). A request is named by its id, a server by its name.

A list of commands is carried out concurrently. Two dependencies are kept (§5.2): a request that is routed anew waits
until its interrupt has brought it back, and one that is routed to a server that pulls waits until that has its weights.
"""

from __future__ import annotations

from asyncrl.core.types import Record


class Pull(Record, frozen=True, kw_only=True):
    """Cut all that the server runs and give it the newest weights; what was cut waits for a server again. (Algorithm 1
    has an Interrupt of all its requests before; here a Pull implies it.)"""

    instance: str


class Route(Record, frozen=True, kw_only=True):
    """Give these waiting requests to the server."""

    instance: str
    requests: tuple[int, ...]


class Interrupt(Record, frozen=True, kw_only=True):
    """Cut these requests on the server; they keep their tokens and wait for a server again."""

    instance: str
    requests: tuple[int, ...]


class Abort(Record, frozen=True, kw_only=True):
    """Refuse these waiting requests: no server has the version any more that began them, and no other may go on."""

    requests: tuple[int, ...]


Command = Pull | Route | Interrupt | Abort
