"""Which relay each server loads its weights from: one on its own host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from asyncrl.config.base import RecipeError

LOCAL = ["http://127.0.0.1"]
"""Where those are that a run starts itself."""


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


def check_relays(relays: Sequence[str], servers: Sequence[str]) -> None:
    """``weights.relay_urls`` and ``engine.urls``, empty for those that the run starts itself. Raises
    ``RecipeError``."""
    for url in relays:
        if not re.fullmatch(r"https?://[^/]+:\d+/?", url):
            raise RecipeError(f"weights.relay_urls = {url}: write http://HOST:PORT")
    for server, relay in zip(servers or LOCAL, relays_of(servers or LOCAL, relays or LOCAL), strict=True):
        if relay is None:
            raise RecipeError(
                f"weights.relay_urls = {list(relays)}: no relay on the host of {server}; start one there "
                "(asyncrl relay --host HOST) and name it"
            )


def _host(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return "127.0.0.1" if host in ("localhost", "::1") else host
