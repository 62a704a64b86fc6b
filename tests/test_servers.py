"""Local inference servers as processes: their commands, restarts, and how they end. The programs are stand-ins."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl import servers as servers_module
from asyncrl.config import Recipe, load_table
from asyncrl.processes import ChildError
from asyncrl.serve.__main__ import _parser as serve_parser
from asyncrl.servers import LocalServers

DEADLINE_S = 20.0
HELLO = 'echo "args $*"\necho "env $OMP_NUM_THREADS $CUDA_VISIBLE_DEVICES"\n'


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in other processes)
            await asyncio.sleep(0.005)


class Fleet:
    """``LocalServers`` in a folder of their own, with what they noted."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.logs = folder
        self.notes: list[str] = []
        self.servers = LocalServers(recipe, logs=folder, note=self.notes.append)

    def log(self, index: int) -> str:
        file = self.logs / f"server-{index}.log"
        return file.read_text() if file.exists() else ""

    def said(self, index: int, word: str) -> list[str]:
        """What follows ``word`` in the lines of a log, one entry a start."""
        return [line.removeprefix(word).strip() for line in self.log(index).splitlines() if line.startswith(word)]


@asynccontextmanager
async def fleet(folder: Path, script: str, **engine: Any) -> AsyncIterator[Fleet]:
    """Servers that run ``script`` in a shell, stopped at the end."""
    (folder / "start.sh").write_text(script)
    settings = {"kind": "sglang", "python": "/bin/sh", "script": str(folder / "start.sh"), **engine}
    got = Fleet(folder, load_table({"model": {"path": "/models/m"}, "seed": 3, "engine": settings}))
    try:
        yield got
    finally:
        await got.servers.stop()


async def test_each_server_has_its_own_port_log_seed_and_gpus(tmp_path: Path) -> None:
    async with fleet(
        tmp_path, HELLO + "exec sleep 60", count=3, threads=2, gpus=["0,1", "2"], args=["--tp", "2"], device="cuda"
    ) as f:
        urls = f.servers.urls
        assert len(set(urls)) == 3
        await f.servers.start()
        await until(lambda: all(f.said(i, "env") for i in range(3)))
        for index, url in enumerate(urls):
            [args] = f.said(index, "args")
            assert f"--model-path /models/m --host 127.0.0.1 --port {url.rpartition(':')[2]} " in args
            assert f"--random-seed {3000 + index} " in args
            assert "--dtype float32" in args and "--device cuda" in args and args.endswith("--tp 2")
            assert "hicache" not in args
        assert [f.said(i, "env") for i in range(3)] == [["2 0,1"], ["2 2"], ["2 0,1"]]
        await f.servers.stop()
        assert all(child.exit_code is not None for child in f.servers._children.values())


async def test_sglang_keeps_kv_in_host_memory_by_its_hierarchical_cache(tmp_path: Path) -> None:
    async with fleet(tmp_path, HELLO + "exec sleep 60", max_total_tokens=4000, host_kv_tokens=2000) as f:
        await f.servers.start()
        await until(lambda: bool(f.said(0, "env")))
        assert "--enable-hierarchical-cache --hicache-ratio 1.5" in f.said(0, "args")[0]


async def test_the_embedded_engine_is_started_with_arguments_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{HELLO}exec sleep 60")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    engine = {"kind": "embedded", "max_running_requests": 7, "max_total_tokens": 5000, "device": "cpu"}
    engine |= {"kv_reuse": True, "host_kv_tokens": 900}
    async with fleet(tmp_path, "", **engine) as f:
        await f.servers.start()
        await until(lambda: bool(f.said(0, "env")))
        module, name, *rest = shlex.split(f.said(0, "args")[0])
        assert (module, name) == ("-m", "asyncrl.serve")
        args = serve_parser().parse_args(rest)
        assert (str(args.model), args.device, args.dtype, args.seed) == ("/models/m", "cpu", "float32", 3000)
        assert (args.max_running_requests, args.max_total_tokens) == (7, 5000)
        assert (args.kv_reuse, args.host_kv_tokens) == (True, 900)
        assert f.servers.urls == [f"http://127.0.0.1:{args.port}"]


async def test_running_servers_are_used_and_none_is_started(tmp_path: Path) -> None:
    async with fleet(tmp_path, "echo started", urls=["http://10.0.0.1:30000"], count=2) as f:
        assert f.servers.urls == ["http://10.0.0.1:30000"]
        await f.servers.start()
        async with asyncio.timeout(DEADLINE_S):
            assert await f.servers.until_death(asyncio.sleep(0.05, "ready")) == "ready"
    assert not list(tmp_path.glob("*.log"))


async def test_what_starts_meanwhile_is_waited_for(tmp_path: Path) -> None:
    async with fleet(tmp_path, "exec sleep 60", count=2) as f:
        await f.servers.start()
        assert await f.servers.until_death(asyncio.sleep(0.05, "ready")) == "ready"
        assert all(child.exit_code is None for child in f.servers._children.values())


async def test_a_server_that_dies_while_starting_is_told_at_once_with_its_last_words(tmp_path: Path) -> None:
    async with fleet(tmp_path, "echo 'ValueError: no such model'; exit 1") as f:
        await f.servers.start()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ExceptionGroup) as error:
                await f.servers.until_death(asyncio.sleep(600))
        [death] = error.value.exceptions
        assert isinstance(death, ChildError)
        assert str(death) == (f"server 0 exited with 1: ValueError: no such model (log: {tmp_path / 'server-0.log'})")


async def test_a_server_that_dies_is_started_again_on_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = HELLO + "[ -e again ] && exec sleep 60\ntouch again\nexit 9"
    async with fleet(tmp_path, script, restart_backoff_s=0.01) as f:
        monkeypatch.chdir(tmp_path)
        await f.servers.start()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(f.servers.watch())
            await until(lambda: len(f.said(0, "args")) == 2)
            watch.cancel()
        first, second = f.said(0, "args")
        assert first == second
        assert len(f.notes) == 1
        assert "server 0 exited with 9" in f.notes[0] and f.notes[0].endswith("; starting it again")


@pytest.mark.parametrize("restarts", [0, 2])
async def test_a_server_that_always_dies_is_given_up(tmp_path: Path, restarts: int) -> None:
    async with fleet(tmp_path, "echo args; exit 9", restarts=restarts, restart_backoff_s=0.01) as f:
        await f.servers.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(f.servers.watch())
            await until(lambda: len(f.notes) == restarts + 1)
            watching.cancel()
        assert len(f.said(0, "args")) == restarts + 1
        assert len(f.notes) == restarts + 1
        assert f.notes[-1].endswith("it died 3 times and is given up" if restarts else "server-0.log)")


async def test_a_server_that_ran_for_long_has_all_its_restarts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "STEADY_S", 0.0)
    async with fleet(tmp_path, "echo args; exit 9", restarts=1, restart_backoff_s=0.01) as f:
        await f.servers.start()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(f.servers.watch())
            await until(lambda: len(f.said(0, "args")) == 5)
            watch.cancel()


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_restart_that_fails_counts_as_a_death_and_harms_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    made, mkdtemp = iter(range(1 + failures)), tempfile.mkdtemp

    def full(**how: str) -> str:
        if next(made, None) is None:
            return mkdtemp(**how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with fleet(tmp_path, HELLO + "exec sleep 60", count=2, restarts=3, restart_backoff_s=0.01) as f:
        await f.servers.start()
        await until(lambda: all(f.said(i, "env") for i in range(2)))
        monkeypatch.setattr("asyncrl.servers.tempfile.mkdtemp", full)
        with pytest.raises(ChildError, match="No space left on device"):
            await f.servers.add("")
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(f.servers.watch())
            f.servers.kill("server 0")
            if failures == 1:
                await until(lambda: len(f.said(0, "env")) == 2)
            else:
                await until(lambda: len(f.notes) == 5)
            watching.cancel()
        failed = "server 0: cannot be started again ([Errno 28] No space left on device)"
        assert f.notes[0].endswith("; starting it again") and f.notes[1 : failures + 1] == [failed] * failures
        assert len(f.notes) == 2 or f.notes[4].endswith("; it died 4 times and is given up")
        assert f.servers.began("server 1") is not None


async def test_a_missing_interpreter_is_one_line(tmp_path: Path) -> None:
    async with fleet(tmp_path, "", python="/no/such/python") as f:
        with pytest.raises(ChildError, match=r"^server 0: cannot start /no/such/python \(No such file or directory\)$"):
            await f.servers.start()


async def test_a_server_that_is_killed_by_name_is_started_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, HELLO + "exec sleep 60", count=2, restart_backoff_s=0.0) as f:
        await f.servers.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(f.servers.watch())
            await until(lambda: all(f.said(i, "env") for i in range(2)))
            f.servers.kill("server 1")
            f.servers.kill("server 7")  # which is none of ours
            await until(lambda: len(f.said(1, "env")) == 2)
            watching.cancel()
        assert len(f.said(0, "env")) == 1
        assert "server 1 was killed by signal 9" in f.notes[0]


async def test_what_sglang_leaves_among_temporary_files_goes_with_each_server(tmp_path: Path) -> None:
    script = 'touch "$TMPDIR/socket"\necho "folder $TMPDIR $TORCHINDUCTOR_CACHE_DIR"\nexec sleep 60'
    async with fleet(tmp_path, script, count=2, restart_backoff_s=0.01) as f:
        await f.servers.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(f.servers.watch())
            await until(lambda: bool(f.said(0, "folder") and f.said(1, "folder")))
            [killed, compiled], [stopped, _] = (f.said(i, "folder")[0].split() for i in range(2))
            assert Path(killed, "socket").exists() and not Path(compiled).is_relative_to(killed)
            f.servers.kill("server 0")
            await until(lambda: not Path(killed).exists() and len(f.said(0, "folder")) == 2)
            watching.cancel()
    assert not Path(stopped).exists()
    assert not Path(f.said(0, "folder")[1].split()[0]).exists()


async def test_servers_are_added_and_retired_while_others_run(tmp_path: Path) -> None:
    async with fleet(tmp_path, HELLO + "exec sleep 60", count=2, restart_backoff_s=0.0) as f:
        await f.servers.start()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(f.servers.watch())
            await until(lambda: all(f.said(i, "env") for i in range(2)))
            assert await f.servers.add("http://10.0.0.1:30000") == 2
            assert await f.servers.add("") == 3
            await until(lambda: bool(f.said(3, "env")))
            assert f.servers.urls[2] == "http://10.0.0.1:30000" and len(set(f.servers.urls)) == 4
            assert f.servers.began("server 2") is None
            before = f.servers.began("server 3")
            assert before is not None
            f.servers.kill("server 3")
            await until(lambda: len(f.said(3, "env")) == 2)
            assert (f.servers.began("server 3") or 0.0) > before
            f.servers.retire("server 0")
            await until(lambda: f.servers.began("server 0") is None)
            await asyncio.sleep(0.05)
            assert len(f.said(0, "env")) == 1 and f.servers.began("server 0") is None
            watching.cancel()
        assert len(f.notes) == 1, "the one that was retired is not mourned"


async def test_a_run_that_starts_no_servers_is_given_urls_only(tmp_path: Path) -> None:
    async with fleet(tmp_path, "exec sleep 60", urls=["http://10.0.0.1:30000"]) as f:
        with pytest.raises(ChildError, match="this run starts no servers; give the URL of one that runs"):
            await f.servers.add("")
        assert await f.servers.add("http://10.0.0.2:30000") == 1
