"""What the machine does to a client: names not found, no files left, a clock that jumps; and a server of others."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncrl.engine.sglang import SGLangEngine
from asyncrl.ports import EngineError

from .scripted import Server, collect, finished, hangs, line, make_engine, reply, sends

NAME = "no-such-host.invalid"


@pytest.fixture
async def named(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], SGLangEngine]:
    """An engine whose host's name is found only after so many failures."""
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo
    port = int(server.url.rpartition(":")[2])
    left = 0

    async def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if host != NAME:
            return await real(host, *args, **kwargs)
        if left:
            left -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)

    def make(failures: int, **settings: Any) -> SGLangEngine:
        nonlocal left
        left = failures
        return make_engine(f"http://{NAME}:{port}", **settings)

    return make


async def test_a_name_that_is_found_late_costs_only_time(named: Callable[..., SGLangEngine]) -> None:
    engine = named(3)
    try:
        assert (await engine.connect()).name == "s0"
        assert sum(len(chunk.output_ids) for chunk in await collect(engine)) == 8
    finally:
        await engine.close()


async def test_a_name_that_is_not_found_is_one_line_with_the_key(named: Callable[..., SGLangEngine]) -> None:
    engine = named(10_000, connect_timeout_s=0.3)
    try:
        for attempt in (engine.connect(), collect(engine)):
            with pytest.raises(EngineError, match=rf"{NAME}.*no machine of that name .*engine\.urls") as error:
                await attempt
            assert "\n" not in str(error.value)
        assert not await engine.health()
    finally:
        await engine.close()


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in taken:
                os.close(file)


async def test_a_machine_out_of_files_is_told_from_a_dead_server_and_goes_on(server: Server, make: Any) -> None:
    engine = make(retries=1)
    with no_more_files(), pytest.raises(EngineError) as error:
        await collect(engine)
    assert "ulimit -n" in str(error.value) and "engine.max_running_requests" in str(error.value)
    assert "is the server running" not in str(error.value)
    assert sum(len(chunk.output_ids) for chunk in await collect(engine)) == 8


async def test_no_wait_is_measured_by_the_time_of_day(
    server: Server, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It jumps by a year at every look, back and forth."""
    real, looks = time.time, 0

    def jumping() -> float:
        nonlocal looks
        looks += 1
        return real() + (-1) ** looks * 3e7

    monkeypatch.setattr(time, "time", jumping)
    engine = make(idle_timeout_s=0.3)
    for _ in range(3):
        assert sum(len(chunk.output_ids) for chunk in await collect(engine)) == 8
    assert len({exchange.peer for exchange in server.exchanges}) == 1, "the connection was kept"
    server.answers = [hangs(), finished(8)]
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"engine\.idle_timeout_s"):
        await collect(engine)
    assert 0.3 <= time.monotonic() - began < 60


async def test_a_server_of_others_is_trusted_only_with_weights_from_here(server: Server, make: Any) -> None:
    """Whatever it says that it holds may be another run's, or another model's."""
    engine = make(version=None)
    server.control["/model_info"] = {"model_path": "m", "model_type": "qwen3", "weight_version": "0"}
    assert (await engine.connect()).version == -1
    server.answers = [sends(line(reply([1], 1, {"type": "length", "length": 1}, version="0")))]
    assert [list(chunk.versions) for chunk in await collect(engine)] == [[-1]]
    await engine.load_from_disk("/w/v0", 0)
    assert (await engine.connect()).version == 0
    assert [list(chunk.versions) for chunk in await collect(engine)] == [[0]]
