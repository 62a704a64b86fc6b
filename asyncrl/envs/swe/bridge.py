"""The way into a box for programs outside of it: an agent program's commands come over a Unix socket.

A connection is one command: the line ``{"command": "ls"}`` is answered by the line ``{"output": "a.py\\n",
"returncode": 0, "timed_out": false}``, or by ``{"error": "..."}`` if it could not be read. Who may enter the socket's
folder may connect. A client that goes away does not end its command; the command's deadline does, or the episode's end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from asyncrl.envs.sandbox import Completed

MAX_LINE = 2**20


class _Request(msgspec.Struct):
    command: str


@asynccontextmanager
async def serve_commands(run: Callable[[str], Awaitable[Completed]], path: Path) -> AsyncIterator[None]:
    """Listen at ``path`` while inside; what still runs at the end is killed. What ``run`` raises ends the inside."""
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = group.create_task(_answer(run, reader, writer))
        connections.add(connection)
        connection.add_done_callback(connections.discard)

    try:
        async with asyncio.TaskGroup() as group:
            server = await asyncio.start_unix_server(connected, path, limit=MAX_LINE)
            try:
                yield
            finally:
                server.close()
            for connection in connections:
                connection.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the others ended because of it


async def _answer(
    run: Callable[[str], Awaitable[Completed]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        try:
            request = msgspec.json.decode(await reader.readline(), type=_Request)
        except (ValueError, msgspec.DecodeError) as error:  # a line too long is a ValueError
            answer: dict[str, str | int] = {
                "error": f'write {{"command": TEXT}} in one line of at most {MAX_LINE} bytes: {error}'
            }
        else:
            done = await run(request.command)
            answer = {"output": done.output, "returncode": done.returncode, "timed_out": done.timed_out}
        writer.write(msgspec.json.encode(answer) + b"\n")
        with contextlib.suppress(ConnectionError):  # it has gone away
            await writer.drain()
    finally:
        writer.close()
