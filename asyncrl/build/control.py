"""``asyncrl servers``, both ends: a run listens on loopback for changes of its fleet, and anybody who may read its
``control.json`` gives them: where it listens, and a key of its own, which opens nothing else.

A change is begun and answered at once, when it is known to whatever process the run goes on in; how far it is stands in
the list, which the command asks for until it is done. So a command that is interrupted changes nothing: the server goes
on draining, or joining. What the run's end finds still waiting, for a server that does not answer yet, is given up
before anything that it uses is closed, and answered so.

Owns the listening socket, the key and the file, which goes with the run.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from asyncrl.access import guard, header
from asyncrl.build.members import Members
from asyncrl.core.types import Record
from asyncrl.observe.run_dir import CONTROL, RECIPE, RunDirError, write_atomic
from asyncrl.ports import Engine, EngineError
from asyncrl.processes import ChildError
from asyncrl.runtime.fleet import Fleet, FleetError
from asyncrl.runtime.instance import Instance
from asyncrl.servers import LocalServers

PATH = "/servers"
Verb = Literal["add", "drain", "remove"]
ASK_S = 0.5
"""Between two looks at how far a change is."""
JOIN_S = 30.0
"""For a server that is said to run to describe itself."""
ANSWER_S = 10.0


class Door(Record, frozen=True, kw_only=True):
    """``control.json``."""

    host: str
    url: str
    key: str


class Asked(Record, frozen=True, kw_only=True):
    """``server`` is a URL or a name; empty, with ``add``, for one to be started here. ``token`` is what it asks for, if
    that is not the run's."""

    verb: Verb
    server: str = ""
    token: str = ""


class Row(Record, frozen=True, kw_only=True):
    """One server of the list."""

    name: str
    url: str
    state: Literal["serves", "drains", "rests", "down"]
    version: int
    running: int
    generated: int
    why: str = ""


class Control:
    """Of the run in ``run_dir``, whose servers ask for ``token``. ``connect`` makes the engine of a server by its
    number and its own token, if it has one; it may raise ``FleetError``."""

    def __init__(
        self,
        run_dir: Path,
        *,
        fleet: Fleet,
        servers: LocalServers,
        members: Members,
        connect: Callable[[int, str], Engine],
        token: str,
    ) -> None:
        self._file = run_dir / CONTROL
        self._token = token
        self._fleet = fleet
        self._servers = servers
        self._members = members
        self._connect = connect
        self._drained: dict[int, int | str] = {}
        """Servers that may be readmitted, and as what."""
        self._runner: web.AppRunner | None = None
        self._joining = asyncio.Lock()
        """One URL after another: twice the same is one server."""
        self._changes: set[asyncio.Timeout] = set()
        """That are under way."""
        self._none = asyncio.Event()
        """Set while there are none."""
        self._none.set()

    async def start(self) -> None:
        """Raises ``RunDirError``."""
        key = secrets.token_hex()
        app = web.Application(middlewares=[guard(key)])
        app.router.add_get(PATH, self._list)
        app.router.add_post(PATH, self._change)
        app.on_shutdown.append(self._give_up)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        door = Door(host=socket.gethostname(), url=url, key=key)
        write_atomic(self._file, msgspec.json.encode(door), mode=0o600)

    async def close(self) -> None:
        self._file.unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _give_up(self, app: web.Application) -> None:
        """aiohttp would leave alone what nobody waits for any longer."""
        for scope in self._changes:
            scope.reschedule(0.0)
        await self._none.wait()

    async def _list(self, request: web.Request) -> web.Response:
        rows = [self._row(instance) for instance in self._fleet.instances]
        return web.Response(body=msgspec.json.encode(rows), content_type="application/json")

    def _row(self, instance: Instance) -> Row:
        state: Literal["serves", "drains", "rests", "down"] = "drains" if instance.draining else "serves"
        if not instance.up:
            state = "rests" if instance.draining else "down"
        return Row(
            name=instance.name,
            url=_shown(self._servers.urls[_number(instance.name)]),
            state=state,
            version=instance.version,
            running=instance.running,
            generated=instance.generated,
            why="" if instance.up else instance.why,
        )

    async def _change(self, request: web.Request) -> web.Response:
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._changes.add(scope)
                self._none.clear()
                asked = msgspec.json.decode(await request.read(), type=Asked)
                if asked.verb == "add":
                    async with self._joining if asked.server else nullcontext():
                        name = await self._add(asked)
                else:
                    name = self._drain(asked)
                await self._members.committed()
        except TimeoutError:
            return web.json_response({"error": "the run ends"}, status=409)
        except (msgspec.DecodeError, FleetError, EngineError, ChildError) as error:
            return web.json_response({"error": str(error)}, status=409)
        finally:
            self._changes.discard(scope)
            if not self._changes:
                self._none.set()
        return web.json_response({"name": name})

    async def _add(self, asked: Asked) -> str:
        url = asked.server.rstrip("/")
        known = (self._find(url) or await self._same(url)) if url else None
        if known is not None:
            self._fleet.readmit(known)
            if (member := self._drained.pop(_number(known), None)) is not None:
                self._members.readmitted(_number(known), member)
            return known
        number = await self._servers.add(url)
        name = f"server {number}"
        own = asked.token if asked.token != self._token else ""
        try:
            async with asyncio.timeout(JOIN_S if url else None):
                await self._fleet.add(self._connect(number, own))
        except TimeoutError:
            raise FleetError(
                f"{url}: no inference server answers there within {JOIN_S:g} s; start it first, or correct the URL"
            ) from None
        except (FleetError, EngineError):
            self._servers.retire(name)
            raise
        if not own:  # written nowhere: a run that goes on would ask that server without it
            self._members.added(number, url)
        return name

    async def _same(self, url: str) -> str | None:
        """The server that this URL names in other words. Raises ``FleetError``."""
        _check(url)
        try:
            asked = await _places(url)
        except OSError as error:
            raise FleetError(f"{url}: no machine of that name ({error.strerror or error})") from None
        for instance in list(self._fleet.instances):
            with suppress(OSError):
                if asked & await _places(self._servers.urls[_number(instance.name)]):
                    return instance.name
        return None

    def _drain(self, asked: Asked) -> str:
        name = self._find(asked.server.rstrip("/"))
        if name is None:
            known = ", ".join(f"{i.name} ({self._row(i).url})" for i in self._fleet.instances)
            raise FleetError(f"{asked.server}: no such server; there are {known}")
        self._fleet.drain(name, forget=asked.verb == "remove")
        if (member := self._members.left(_number(name))) is not None:
            self._drained[_number(name)] = member
        return name

    def _find(self, server: str) -> str | None:
        """By name, number or URL."""
        for instance in self._fleet.instances:
            number = _number(instance.name)
            if server in (instance.name, str(number), self._servers.urls[number].rstrip("/")):
                return instance.name
        return None


def _number(name: str) -> int:
    return int(name.removeprefix("server "))


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
        good = good and parts.path == "" and not (parts.query or parts.username or parts.password)
    except ValueError:
        good = False
    if not good:
        raise FleetError(f"{_shown(url)}: write http://HOST:PORT")


async def _places(url: str) -> set[tuple[object, ...]]:
    """Addresses and port that a URL stands for. Raises ``OSError``."""
    parts = urlsplit(url)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    return {address[:2] for *_, address in found}


def _shown(url: str) -> str:
    """Without a password."""
    return url.rpartition("@")[2] if "@" in url else url


# --- the command


def ask(
    run_dir: Path, verb: Literal["list"] | Verb, server: str, out: Callable[[str], object], *, token: str = ""
) -> int:
    """Carry out one command on the run in ``run_dir``, and say how it goes until it is done. ``token`` is that of a
    server that is added. The exit code. Raises ``RunDirError``."""
    door = _door(run_dir)
    if verb == "list":
        for each in _rows(door):
            out(_line(each))
        return 0
    answer = _call(door, Asked(verb=verb, server=server, token=token))
    if "error" in answer:
        out(f"asyncrl: {answer['error']}")
        return 1
    name, said = answer["name"], ""
    while True:
        row = next((row for row in _rows(door) if row.name == name), None)
        if row is None:
            out(f"{name} has left")
            return int(verb != "remove")
        if (line := _line(row, running=verb != "add")) != said:
            out(said := line)
        if row.state == {"add": "serves", "drain": "rests"}.get(verb):
            return 0
        time.sleep(ASK_S)


def _line(row: Row, *, running: bool = True) -> str:
    state = row.state + (f" ({row.why})" if row.why else "")
    version = f", version {row.version}" if row.version >= 0 else ""
    more = f", {row.running} requests" if running else ""
    return f"{row.name}  {row.url}  {state}{version}{more}"


def _door(run_dir: Path) -> Door:
    if not (run_dir / RECIPE).exists():
        raise RunDirError(f"{run_dir}: no run is there (no {RECIPE}); name the folder of --run-dir")
    try:
        door = msgspec.json.decode((run_dir / CONTROL).read_bytes(), type=Door)
    except FileNotFoundError:
        raise _gone(run_dir) from None
    except PermissionError:
        raise RunDirError(f"{run_dir / CONTROL}: only the user who started the run may change it") from None
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{run_dir / CONTROL}: cannot be read ({error})") from None
    if door.host != socket.gethostname():
        raise RunDirError(f"{run_dir}: the run is on {door.host}, and listens there only; give the command there")
    return door


def _gone(run_dir: Path) -> RunDirError:
    return RunDirError(f"{run_dir}: no run goes on there now, or it is still starting; see asyncrl status {run_dir}")


def _rows(door: Door) -> list[Row]:
    return msgspec.convert(_call(door, None), list[Row])


def _call(door: Door, asked: Asked | None) -> Any:
    data = None if asked is None else msgspec.json.encode(asked)
    request = urllib.request.Request(door.url + PATH, data=data, headers=dict(header(door.key)))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        # A server that joins is connected to first, which may take its start-up time.
        with opener.open(request, timeout=ANSWER_S if asked is None else None) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as refusal:
        if refusal.code == 409:
            return json.load(refusal)
        raise RunDirError(f"{door.url}: answers {refusal.code}; is another program there?") from None
    except (OSError, ValueError) as error:
        raise RunDirError(f"{door.url}: the run does not answer ({error}); see asyncrl status") from None
