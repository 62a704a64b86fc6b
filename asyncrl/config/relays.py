"""Which relay each server loads its weights from: one on its own host."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit


def relays_of(servers: Sequence[str], relays: Sequence[str]) -> list[str | None]:
    """The relay of each server, by URL; servers of a host with several take turns. None where the host has none."""
    places: dict[str, list[str]] = {}
    for relay in relays:
        places.setdefault(_host(relay), []).append(relay)
    taken = dict.fromkeys(places, 0)
    found: list[str | None] = []
    for server in servers:
        host = _host(server)
        here = places.get(host)
        found.append(here[taken[host] % len(here)] if here else None)
        if here:
            taken[host] += 1
    return found


def _host(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return "127.0.0.1" if host in ("localhost", "::1") else host
