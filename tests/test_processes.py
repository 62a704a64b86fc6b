"""Child processes: logs, how they end, and that none is ever left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from asyncrl.processes import Child, ChildError, free_port, last_line

DEADLINE_S = 20.0


def alive(pid: int) -> bool:
    """Runs, and is no zombie that waits for whoever inherited it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in other processes)
            await asyncio.sleep(0.005)


async def start(tmp_path: Path, script: str, name: str = "server 0", **env: str) -> Child:
    argv = ["/bin/sh", "-c", textwrap.dedent(script)]
    return await Child.start(name, argv, log=tmp_path / "child.log", env=env)


async def logged(child: Child, words: str) -> str:
    """The line of the log that starts with ``words``, once it is there."""

    def found() -> str:
        lines = child.log.read_text().splitlines(keepends=True)
        return next((line for line in lines if line.startswith(words) and line.endswith("\n")), "")

    await until(lambda: bool(found()))
    return found().removeprefix(words).strip()


async def test_output_goes_to_the_log_and_the_environment_is_extended(tmp_path: Path) -> None:
    (tmp_path / "child.log").write_text("of an earlier start\n")
    child = await start(tmp_path, 'echo "$SECRET $HOME"; echo error >&2; read line || echo no input', SECRET="42")
    assert child.exit_code is None
    assert await child.wait() == 0
    assert child.log.read_text() == f"of an earlier start\n42 {os.environ['HOME']}\nerror\nno input\n"


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("echo one; echo 'OSError: no weights' >&2; echo; exit 3", "exited with 3: OSError: no weights"),
        ("kill -9 $$", "was killed by signal 9: it wrote nothing"),
        ("exit 0", "exited with 0: it wrote nothing"),
    ],
)
async def test_death_is_one_line_with_the_cause_and_the_log(tmp_path: Path, script: str, how: str) -> None:
    child = await start(tmp_path, script)
    await child.wait()
    assert child.death() == f"server 0 {how} (log: {child.log})"


async def test_a_running_child_says_so(tmp_path: Path) -> None:
    child = await start(tmp_path, "sleep 60")
    assert child.death() == f"server 0 is running: it wrote nothing (log: {child.log})"
    await child.stop()


async def test_stop_is_sigterm_first(tmp_path: Path) -> None:
    child = await start(tmp_path, "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.02; done")
    await logged(child, "up")
    await child.stop()
    assert child.exit_code == 5
    assert last_line(child.log) == "bye"
    await child.stop()  # harmless


async def test_stop_is_sigkill_after_the_grace(tmp_path: Path) -> None:
    child = await start(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.02; done")
    await logged(child, "up")
    started = time.monotonic()
    await child.stop(grace_s=0.2)
    assert child.exit_code == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize("own", ["", "trap '' TERM;"])
async def test_stop_ends_the_whole_process_group(tmp_path: Path, own: str) -> None:
    """Also a grandchild that ignores SIGTERM and outlives the child that does not."""
    child = await start(tmp_path, f'sh -c "{own} echo grandchild \\$\\$; while :; do sleep 0.02; done" & wait')
    grandchild = int(await logged(child, "grandchild "))
    await child.stop(grace_s=5)
    assert child.exit_code == -signal.SIGTERM
    await until(lambda: not alive(grandchild))


async def test_a_child_that_dies_leaves_no_grandchild(tmp_path: Path) -> None:
    child = await start(tmp_path, "sleep 60 & echo grandchild $!; exit 1")
    grandchild = int(await logged(child, "grandchild "))
    assert await child.wait() == 1
    await until(lambda: not alive(grandchild))


async def test_a_cancelled_stop_kills_at_once(tmp_path: Path) -> None:
    child = await start(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.02; done")
    await logged(child, "up")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await child.stop(grace_s=60)
    async with asyncio.timeout(DEADLINE_S):
        assert await child.wait() == -signal.SIGKILL


PARENT = """
import asyncio, os, pathlib, sys
from asyncrl.processes import Child
async def main():
    log = pathlib.Path(sys.argv[1])
    child = await Child.start("server 0", ["sleep", "60"], log=log, env={})
    print(child.pid, flush=True)
    await asyncio.sleep(60)

"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("run", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"], ids=["asyncio", "uvloop"])
async def test_a_child_dies_when_its_parent_is_killed(tmp_path: Path, run: str) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT + run, str(tmp_path / "log"), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert alive(child)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(child))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_missing_program_is_one_line(tmp_path: Path, run: Callable[..., object]) -> None:
    async def main() -> None:
        with pytest.raises(ChildError) as error:
            await Child.start("server 1", ["/no/such/python", "-m", "x"], log=tmp_path / "log", env={})
        assert str(error.value) == "server 1: cannot start /no/such/python (No such file or directory)"

    run(main())


async def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "missing" / "log"
    with pytest.raises(ChildError) as error:
        await Child.start("server 1", ["true"], log=log, env={})
    assert str(error.value) == f"server 1: cannot write its log {log} (No such file or directory)"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "it wrote nothing"),
        (b"\n  \n", "it wrote nothing"),
        (b"a\nb\n\n", "b"),
        (b"a\nb", "b"),
        (b"Traceback:\n  File x\nValueError: no\n", "ValueError: no"),
        (b"\xff\xfe broken\n", "\ufffd\ufffd broken"),
        (b"x" * 1000, "x" * 300),
        (b"old\n" * 100_000 + b"new\n", "new"),
    ],
)
def test_last_line_is_the_last_that_says_something(tmp_path: Path, content: bytes, line: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    assert last_line(log) == line


def test_last_line_of_no_log(tmp_path: Path) -> None:
    assert last_line(tmp_path / "log") == "no log"


def test_a_free_port_can_be_listened_on() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", free_port())
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_port_that_was_given_out_is_not_given_out_again_before_anyone_listens_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = free_port()
    draws = [given, given, *range(given + 1, given + 50)]
    monkeypatch.setattr("asyncrl.processes.random.randrange", lambda *_: draws.pop(0))
    assert free_port() > given
