"""``asyncrl servers`` on a run of stand-ins: who may, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from asyncrl.build import control as control_module
from asyncrl.build.control import Control, Door, _door, ask
from asyncrl.build.members import Members
from asyncrl.cli import main
from asyncrl.config import dumps, load_table
from asyncrl.core.policy.routing import least_loaded
from asyncrl.observe.run_dir import CONTROL, RECIPE
from asyncrl.ports import Engine, EngineError, EngineInfo, NoStore, RunStore
from asyncrl.runtime.fleet import Fleet
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.servers import LocalServers
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.trace import TraceRecorder

TOKEN, KEY = "the run's own token", "that of one server"
URLS = ["http://me:secret@10.0.0.1:30000", "http://10.0.0.2:30000"]


class Refusing(SimEngine):
    async def connect(self, within_s: float | None = None) -> EngineInfo:
        raise EngineError(f"{self.name}: serves a llama model, the recipe trains a qwen3")


class Silent(SimEngine):
    waiting = 0

    async def connect(self, within_s: float | None = None) -> EngineInfo:
        Silent.waiting += 1
        try:
            await asyncio.sleep(3600)
        finally:
            Silent.waiting -= 1
        raise AssertionError


class Notes(NoStore):
    def __init__(self) -> None:
        self.fleet = ""

    def put(self, entry: Any) -> None:
        self.fleet = entry.value


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "ASK_S", 0.02)
    monkeypatch.setattr(control_module, "JOIN_S", 0.5)


class Slow(NoStore):
    """Durable is what was put once somebody says so."""

    def __init__(self) -> None:
        self.asked, self.durable = asyncio.Event(), asyncio.Event()

    async def committed(self) -> None:
        self.asked.set()
        await self.durable.wait()


@asynccontextmanager
async def controlled(
    tmp_path: Path, *, tokens: list[str] | None = None, store: RunStore | None = None
) -> AsyncIterator[Callable[..., Any]]:
    """A fleet of two with its control; the value carries out a command on a thread, as another process would.
    ``tokens`` gets those that servers which join have of their own."""
    recipe = load_table({"engine": {"urls": URLS}})
    (tmp_path / RECIPE).write_bytes(dumps(recipe))
    proxy = LLMProxy(route=least_loaded, observer=TraceRecorder(), context_length=1000)

    async def restore(instance: Instance) -> None:
        instance.version = 3
        proxy.mark_up(instance)

    def connect(number: int, token: str) -> Engine:
        if tokens is not None:
            tokens.append(token)
        kind = {"666": Refusing, "999": Silent}.get(servers.urls[number].rpartition(":")[2], SimEngine)
        return kind(f"server {number}", rng=random.Random(0), lengths=lambda rng, ids: 9)

    fleet = Fleet(proxy=proxy, restore=restore, probe_s=0.05, context_length=1000)
    members = Members(recipe, {}, store or NoStore())
    servers = LocalServers(recipe, logs=tmp_path, note=lambda text: None)
    for number in range(2):
        engine = connect(number, "")
        proxy.add(engine, await engine.connect())
    control = Control(tmp_path, fleet=fleet, servers=servers, members=members, connect=connect, token=TOKEN)
    await control.start()

    async def command(verb: Any, server: str = "", token: str = "") -> tuple[int, list[str]]:
        lines: list[str] = []
        async with asyncio.timeout(20):
            return await asyncio.to_thread(ask, tmp_path, verb, server, lines.append, token=token), lines

    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.run())
        yield command
        running.cancel()
    await control.close()
    assert not (tmp_path / CONTROL).exists()


async def test_servers_are_listed_without_passwords(tmp_path: Path) -> None:
    async with controlled(tmp_path) as run:
        code, lines = await run("list")
        assert code == 0 and lines == [
            "server 0  10.0.0.1:30000  serves, version 0, 0 requests",
            "server 1  http://10.0.0.2:30000  serves, version 0, 0 requests",
        ]


async def test_one_joins_another_drains_comes_back_and_leaves(tmp_path: Path) -> None:
    async with controlled(tmp_path) as run:
        code, lines = await run("add", "http://10.0.0.3:30000/")
        assert code == 0
        assert lines[0].startswith("server 2  http://10.0.0.3:30000  down (it joins)")
        assert lines[-1] == "server 2  http://10.0.0.3:30000  serves, version 3"
        code, lines = await run("drain", "http://10.0.0.2:30000")
        assert code == 0 and "  rests (it rests), version 0, 0 requests" in lines[-1]
        assert (await run("add", "http://10.0.0.2:30000"))[1][-1].endswith("serves, version 3")
        assert await run("remove", "2") == (0, ["server 2 has left"])
        assert [line.split("  ")[0] for line in (await run("list"))[1]] == ["server 0", "server 1"]
        assert (await run("add", "http://10.0.0.3:30000"))[1][-1].startswith("server 3  "), "numbers are not used twice"


async def test_a_key_of_its_own_opens_a_server_and_is_written_nowhere(tmp_path: Path) -> None:
    tokens: list[str] = []
    async with controlled(tmp_path, tokens=tokens, store=(notes := Notes())) as run:
        tokens.clear()
        assert (await run("add", "http://10.0.0.3:30000", TOKEN))[0] == 0
        assert tokens == [""] and "10.0.0.3" in notes.fleet
        assert (await run("add", "http://10.0.0.4:30000", KEY))[0] == 0
        assert tokens == ["", KEY] and "10.0.0.4" not in notes.fleet
        assert (await run("drain", "http://10.0.0.4:30000"))[0] == 0
        assert (await run("add", "http://10.0.0.4:30000"))[1][-1].endswith("serves, version 3")
        assert "10.0.0.4" not in notes.fleet and tokens == ["", KEY], "it was there already"
        assert (await run("remove", "http://10.0.0.4:30000"))[0] == 0
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("verb", "server", "said"),
    [
        ("add", "10.0.0.3:30000", "10.0.0.3:30000: write http://HOST:PORT"),
        ("add", "http://me:secret@10.0.0.3:30000", "10.0.0.3:30000: write http://HOST:PORT"),
        ("add", "http://10.0.0.3:99999999", "http://10.0.0.3:99999999: write http://HOST:PORT"),
        ("add", "http://10.0.0.3:30000/v1", "http://10.0.0.3:30000/v1: write http://HOST:PORT"),
        ("add", "http://10.0.0.2:30000", "server 1 is in use already"),
        ("add", "http://10.2:30000", "server 1 is in use already"),
        ("add", "", "this run starts no servers; give the URL of one that runs"),
        ("add", "http://10.0.0.3:999", "http://10.0.0.3:999: no inference server answers there within 0.5 s; start"),
        ("add", "http://10.0.0.3:666", "server 2: serves a llama model, the recipe trains a qwen3"),
        ("drain", "http://10.0.0.9:1", "http://10.0.0.9:1: no such server; there are server 0 (10.0.0.1:30000), "),
    ],
)
async def test_what_cannot_be_done_is_one_line(tmp_path: Path, verb: str, server: str, said: str) -> None:
    async with controlled(tmp_path) as run:
        code, [line] = await run(verb, server)
        assert code == 1 and line.startswith(f"asyncrl: {said}")
        assert len((await run("list"))[1]) == 2


async def test_a_server_that_is_added_twice_at_once_is_one(tmp_path: Path) -> None:
    async with controlled(tmp_path) as run, asyncio.TaskGroup() as group:
        adding = [group.create_task(run("add", f"http://10.0.0.{host}:30000")) for host in ("3", "3")]
        codes = [(await each)[0] for each in adding]
        assert sorted(codes) == [0, 1]
        assert len((await run("list"))[1]) == 3


async def test_a_change_is_answered_when_it_is_kept(tmp_path: Path) -> None:
    """A run that is killed then goes on with it."""
    store = Slow()
    async with controlled(tmp_path, store=store) as run, asyncio.TaskGroup() as group:
        removing = group.create_task(run("remove", "1"))
        await store.asked.wait()
        await asyncio.sleep(0.1)
        assert not removing.done()
        store.durable.set()
        assert (await removing)[0] == 0


async def test_what_waits_when_the_run_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the command was interrupted, and nobody waits for the answer."""
    monkeypatch.setattr(control_module, "JOIN_S", 60.0)
    async with asyncio.TaskGroup() as group:
        async with controlled(tmp_path) as run:
            door = _door(tmp_path)
            with pytest.raises(TimeoutError):
                async with (
                    aiohttp.ClientSession(headers={"Authorization": f"Bearer {door.key}"}) as session,
                    asyncio.timeout(0.2),
                ):
                    await session.post(f"{door.url}/servers", data=b'{"verb": "add", "server": "http://10.0.0.3:999"}')
            adding = group.create_task(run("add", "http://10.0.0.4:999"))
            await asyncio.sleep(0.3)
            assert Silent.waiting == 1 and not adding.done(), "the other one is next"
        assert Silent.waiting == 0, "what they wait for is closed now"
        assert await adding == (1, ["asyncrl: the run ends"])
    assert not caplog.records


async def test_the_last_server_stays(tmp_path: Path) -> None:
    async with controlled(tmp_path) as run:
        assert (await run("remove", "server 0"))[0] == 0
        for verb in ("drain", "remove"):
            code, [line] = await run(verb, "server 1")
            assert code == 1 and line == "asyncrl: server 1 is the last server in use; add another one first"


async def test_only_who_may_read_the_file_may_change_anything(tmp_path: Path) -> None:
    async with controlled(tmp_path):
        assert (tmp_path / CONTROL).stat().st_mode & 0o777 == 0o600
        door = _door(tmp_path)
        for headers in ({}, {"Authorization": "Bearer " + "0" * 64}):
            async with aiohttp.ClientSession() as session, session.get(f"{door.url}/servers", headers=headers) as reply:
                assert reply.status == 401
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {door.key}"}) as session,
            session.post(f"{door.url}/servers", data=b'{"verb": "reboot"}') as reply,
        ):
            assert reply.status == 409 and "reboot" in (await reply.json())["error"]


def test_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line() -> str:
        assert main(["servers", "list", str(tmp_path)]) == 2
        [only] = capsys.readouterr().err.splitlines()
        return only

    assert "no run is there" in line()
    (tmp_path / RECIPE).write_bytes(b"{}")
    assert "no run goes on there now" in line()
    (tmp_path / CONTROL).write_bytes(b"{")
    assert "cannot be read" in line()
    (tmp_path / CONTROL).write_bytes(msgspec.json.encode(Door(host="node17", url="http://127.0.0.1:1", key="k")))
    assert "the run is on node17, and listens there only" in line()
    here = control_module.socket.gethostname()
    (tmp_path / CONTROL).write_bytes(msgspec.json.encode(Door(host=here, url="http://127.0.0.1:1", key="k")))
    assert "the run does not answer" in line()
