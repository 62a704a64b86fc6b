"""A request of a client that is on the server."""

from __future__ import annotations

import asyncio

import aiohttp

from asyncrl.engine.replies import ReplyReader


class GaveUp(Exception):
    """This side gave the request up (``Live.give_up``)."""


class Live:
    """One request that is on the server."""

    __slots__ = ("deadline", "given_up", "progress", "reader", "response", "rid", "wait")

    def __init__(self, reader: ReplyReader, deadline: float) -> None:
        self.reader = reader
        self.deadline = deadline
        self.rid = ""
        """Its id on the server."""
        self.response: aiohttp.ClientResponse | None = None
        self.given_up = False
        self.wait: asyncio.Timeout | None = None
        """The wait for the server, if there is one now."""
        self.progress = asyncio.Event()
        """Set at the first line, and at the end."""

    def give_up(self) -> None:
        self.given_up = True
        if self.wait is not None:
            self.wait.reschedule(asyncio.get_running_loop().time())

    def drop(self) -> None:
        """Close the connection, unless the reply was read to its end and the connection went back to its pool."""
        if self.response is not None:
            self.response.close()
            self.response = None
