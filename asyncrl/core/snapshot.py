"""What policies see of the fleet: plain data, taken at one moment. The proxy's own books, so they are exact.

A snapshot costs O(servers), whatever the number of requests: those of a server and those that wait are not copied but
referred to, and read within the synchronous call that took the snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from asyncrl.core.policy.routing import RequestView
from asyncrl.core.types import Record


class InstanceSnapshot(Record, frozen=True, kw_only=True):
    """One inference server. The paper's five fields (StaleFlow figure 11) are ``kv_tokens``, ``requests`` without the
    ``waiting`` last of them, these, ``routed`` − ``interrupted``, and ``version``."""

    name: str
    version: int
    up: bool
    running: int
    """Requests that it has, among them those that wait inside the server."""
    tokens: int
    """Tokens of these requests, prompt and generated: its use of the KV cache once all of them run."""
    max_running: int
    max_tokens: int
    kv_tokens: int = 0
    """Tokens of those that decode: its use of the KV cache now."""
    waiting: int = 0
    """Of ``running``, those that wait inside the server and do not decode."""
    requests: dict[int, RequestView] = {}
    """Its requests by id, as they came; not copied."""
    routed: int = 0
    """Requests that ``Route`` commands have given to it since the run began, those it ended among them. One whose
    command came too late, as it was gone, counts: the command has no effect still to come."""
    interrupted: int = 0
    """The same of ``Interrupt`` commands."""
    generated: int = 0
    """Tokens since the run began."""
    slowness: float = 1.0
    """Times as long as the cost model says that its steps take."""
    pulling: bool = False
    """It is being given weights; ``version`` is still the old one."""
    pinned: bool = False
    """An evaluation uses it: its weights stay."""
    draining: bool = False
    """It is to leave: it begins nothing any more."""


class FleetSnapshot(Record, frozen=True, kw_only=True):
    """All servers and the requests that none has taken yet."""

    instances: tuple[InstanceSnapshot, ...]
    waiting: int
    suspended: bool
    newest: int = 0
    """Version that a server which pulls now will have."""
    waiting_requests: Mapping[int | None, Collection[RequestView]] = {}
    """The multi-level queue (StaleFlow §5.3): a level for each oldest version that may serve its requests, first come
    first within it, and one (None) of those whose group has no V_traj yet. Without those for which a ``Route`` is under
    way. Not copied; levels in any order, none of them empty."""
    mean_new_tokens: float = float("inf")
    """Tokens that a server generates for a request, on average: what its prefill is spread over."""
    pace: float = float("inf")
    """Seconds that a decode step may take where groups start (core/pace.py)."""

    @property
    def running(self) -> int:
        return sum(i.running for i in self.instances)
