"""Who may talk to what listens: one secret for a run, the token.

Everything listens on loopback by default. A run draws a token and hands it to what it starts, by environment, never on
a command line; what is started elsewhere, and listens where other machines reach it, needs one in ``ASYNCRL_TOKEN``,
the same for all of a run. It travels as ``Authorization: Bearer TOKEN`` (which SGLang's ``--api-key`` compares too), or
within the request where the protocol is not HTTP.
"""

from __future__ import annotations

import hmac
import os
import secrets
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware

VARIABLE = "ASYNCRL_TOKEN"
SHORTEST = 16
"""Characters; a shorter token could be guessed."""
DEMAND = f"set {VARIABLE} to one secret for all of the run (python -c 'import secrets; print(secrets.token_hex())')"


class AccessError(Exception):
    """A token is missing, or none that can be used. One line with the remedy."""


def given_token() -> str:
    """What the environment says, or nothing. Raises ``AccessError``."""
    token = os.environ.get(VARIABLE, "")
    if token and (len(token) < SHORTEST or not all("!" <= character <= "~" for character in token)):
        raise AccessError(f"{VARIABLE}: must be {SHORTEST} or more visible ASCII characters; {DEMAND}")
    return token


def run_token() -> str:
    """That of a run: what was given, or else a new one. Raises ``AccessError``."""
    return given_token() or secrets.token_hex()


def demand(key: str, host: str, token: str) -> None:
    """Raises ``AccessError``, naming ``key``, where others than this machine reach ``host`` and there is no token."""
    if not token and not is_loopback(host):
        raise AccessError(f"{key} {host}: other machines reach it there; {DEMAND}, or listen on 127.0.0.1")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name of this machine, or the empty name of all its addresses
        return False


def gloo_interface(address: str) -> Mapping[str, str]:
    """What tells a process to have gloo on loopback too, where the other members of its groups reach it there: by
    itself it takes the address of the machine's name, and asks nobody for a token."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" and is_loopback(address) else {}


def header(token: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def matches(given: str, token: str) -> bool:
    """Without a token, everything does."""
    return not token or hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def guard(token: str) -> Middleware:
    """The middleware that refuses requests without the token."""
    from aiohttp import web  # not for those that only read a recipe

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not matches(request.headers.get("Authorization", "").removeprefix("Bearer "), token):
            raise web.HTTPUnauthorized(text=f"not this run's token: set {VARIABLE} to the one that it was started with")
        return await handler(request)

    return check
