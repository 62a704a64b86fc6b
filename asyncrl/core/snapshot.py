"""What policies see of the fleet: plain data, taken at one moment. The proxy's own books, so they are exact."""

from __future__ import annotations

from asyncrl.core.types import Record


class InstanceSnapshot(Record, frozen=True, kw_only=True):
    """One inference server."""

    name: str
    version: int
    up: bool
    running: int
    """Requests that it has, among them those that wait inside the server."""
    tokens: int
    """Tokens of these requests, prompt and generated: its use of the KV cache."""
    max_running: int
    max_tokens: int


class FleetSnapshot(Record, frozen=True, kw_only=True):
    """All servers and the requests that none has taken yet."""

    instances: tuple[InstanceSnapshot, ...]
    waiting: int
    suspended: bool

    @property
    def running(self) -> int:
        return sum(i.running for i in self.instances)
