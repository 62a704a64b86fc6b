"""A SyncEnv's objects in real processes: places, deadlines, crashes, interruption, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

import asyncrl.env_workers.pool as pool_module
from asyncrl.build.env_watch import alarm
from asyncrl.env import Action, EnvDown, Step, SyncEnv, Task, ToolCall
from asyncrl.env_workers.nursery import NICENESS
from asyncrl.env_workers.pool import EnvProcesses, RemoteEnv
from asyncrl.ports import RemoteError
from asyncrl.processes import ChildError

from . import engines

HERE = Path(__file__).parent
TASK = Task(id="t", data={})
SOON_S = 20.0
"""Only a failing test takes so long."""


def pool(tmp_path: Path, kind: type[SyncEnv] = engines.Engine, **settings: Any) -> EnvProcesses:
    settings = {"workers": 1, "reset_timeout_s": 20.0, "step_timeout_s": 20.0, "kwargs": {}, **settings}
    return EnvProcesses(
        f"{HERE / 'engines.py'}:{kind.__name__}",
        settings.pop("kwargs"),
        cost=kind.cost,
        reusable=kind.reusable,
        log=tmp_path / "env.log",
        **settings,
    )


@asynccontextmanager
async def running(envs: EnvProcesses) -> AsyncIterator[None]:
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
        task = group.create_task(envs.run())
        yield
        task.cancel()


def act(text: str, **kwargs: Any) -> Action:
    return Action(text=text, token_ids=(), finish_reason="stop", **kwargs)


async def begun(envs: EnvProcesses) -> tuple[RemoteEnv, int]:
    """An environment in an episode, and its process."""
    env = await envs.acquire()
    return env, int((await said(env)).split()[0])


async def said(env: RemoteEnv, **data: Any) -> str:
    observation = await env.reset(Task(id="t", data=data))
    assert isinstance(observation, str)
    return observation


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what it waits for happens in other processes)
        await asyncio.sleep(0.01)


async def test_an_episode_is_played_in_another_process(tmp_path: Path) -> None:
    envs = pool(tmp_path)
    async with running(envs):
        env, pid = await begun(envs)
        assert pid != os.getpid()
        step = await env.step(act("go", turn=3))
        assert step == Step(observation="did go", reward=0.5, metrics={"turn": 3})
        ids = Action(text="ids", token_ids=array("i", [5, 6]), finish_reason="stop")
        assert (await env.step(ids)).observation == "[5, 6]"
        large = {"a": 2**100, "b": [-(2**64), {"c": "\u00e9"}]}
        tools = [ToolCall(id="0", name="f", arguments=large), ToolCall(id="1", name="g", error="no")]
        told = (await env.step(act("calls", tool_calls=tools))).observation
        assert told == str([("0", "f", large, ""), ("1", "g", {}, "no")])
    assert not alive(pid)


async def test_workers_give_way_to_the_controller(tmp_path: Path) -> None:
    envs = pool(tmp_path)
    async with running(envs):
        _, worker = await begun(envs)
        assert os.getpriority(os.PRIO_PROCESS, worker) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS


def test_uvloop_plays_one_too(tmp_path: Path) -> None:
    async def main() -> None:
        envs = pool(tmp_path)
        async with running(envs):
            env, _ = await begun(envs)
            assert (await env.step(act("go"))).observation == "did go"

    uvloop.run(main())


async def test_what_user_code_raises_comes_out_in_one_line_with_its_traceback(tmp_path: Path) -> None:
    envs = pool(tmp_path)
    async with running(envs):
        env, _ = await begun(envs)
        with pytest.raises(RemoteError, match=r"^ValueError: no such tool$") as error:
            await env.step(act("raise no such tool"))
        assert "engines.py" in error.value.details and "in step" in error.value.details
        for command, said in (("panic oh", "Panic: oh"), ("mute", "Mute"), ("half", "ValueError: half of a pair: [?]")):
            with pytest.raises(RemoteError, match=f"^{said}$"):
                await env.step(act(command))
        with pytest.raises(EnvDown, match=r"^no container$"):
            await env.step(act("down no container"))
        with pytest.raises(RemoteError, match=r"^TypeError: returned dict; it must return asyncrl.Step$"):
            await env.step(act("odd"))
        with pytest.raises(TypeError, match="object is no plain data"):
            await env.reset(Task(id="t", data={"x": object()}))
        assert (await env.step(act("on"))).observation == "did on"


async def test_what_workers_write_goes_into_the_log(tmp_path: Path) -> None:
    envs = pool(tmp_path)
    async with running(envs):
        env, _ = await begun(envs)
        await env.step(act("print here I am"))
    assert "here I am" in (tmp_path / "env.log").read_text()


async def test_a_close_that_fails_is_in_the_log_and_frees_its_place(tmp_path: Path) -> None:
    envs = pool(tmp_path, kwargs={"marks": str(tmp_path)})  # a folder: it cannot be written to
    async with running(envs):
        env, _ = await begun(envs)
        envs.release(env, whole=True)
        await begun(envs)
    assert "IsADirectoryError" in (tmp_path / "env.log").read_text()


async def test_a_module_that_starts_threads_is_imported_in_each_worker(tmp_path: Path) -> None:
    module = tmp_path / "threaded.py"
    module.write_text(
        "import os, threading\nimport asyncrl\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\nIMPORTED_BY = os.getpid()\n"
        "class Threaded(asyncrl.SyncEnv):\n"
        "    def reset(self, task):\n        return f'{os.getpid() == IMPORTED_BY}'\n"
        "    def step(self, action):\n        return asyncrl.Step(done=True)\n"
    )
    envs = EnvProcesses(
        f"{module}:Threaded",
        {},
        cost=engines.Cost(),
        reusable=False,
        workers=1,
        reset_timeout_s=SOON_S,
        step_timeout_s=SOON_S,
        log=tmp_path / "env.log",
    )
    async with running(envs):
        assert await said(await envs.acquire()) == "True"


# --- places -----------------------------------------------------------------------------------------------------------


async def test_objects_spread_over_the_processes_and_share_them(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Shared, workers=2)
    async with running(envs):
        seen = [(await begun(envs))[1] for _ in range(8)]
        assert sorted(seen.count(pid) for pid in set(seen)) == [4, 4]


async def test_who_finds_no_place_waits_for_one(tmp_path: Path) -> None:
    envs = pool(tmp_path, workers=2)
    async with running(envs):
        first = await envs.acquire()
        await envs.acquire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(envs.acquire(), 0.05)
        envs.release(first, whole=True)
        await envs.acquire()


async def test_memory_bounds_how_many_live_at_once(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Shared, workers=2, memory_mb=39)
    async with running(envs):
        for _ in range(3):
            await envs.acquire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(envs.acquire(), 0.05)


async def test_calls_into_one_process_take_turns_and_the_wait_is_nobodys_deadline(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Shared, step_timeout_s=0.5)
    async with running(envs):
        both = [(await begun(envs))[0] for _ in range(4)]
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for env in both:
                group.create_task(env.step(act("sleep 0.2")))
        assert time.monotonic() - started >= 0.8


async def test_processes_work_side_by_side(tmp_path: Path) -> None:
    envs = pool(tmp_path, workers=4)
    async with running(envs):
        four = [(await begun(envs))[0] for _ in range(4)]
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for env in four:
                group.create_task(env.step(act("sleep 0.5")))
        assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("kind", [engines.Shared, engines.Reused])
async def test_a_reusable_object_serves_episode_after_episode(tmp_path: Path, kind: type[SyncEnv]) -> None:
    marks = tmp_path / "marks"
    envs = pool(tmp_path, kind, kwargs={"marks": str(marks)})
    episodes = []
    async with running(envs):
        for whole in (True, True, False, True):
            env = await envs.acquire()
            episodes.append((await said(env)).split()[2])
            envs.release(env, whole=whole)
    assert episodes == (["1", "2", "3", "1"] if kind.reusable else ["1"] * 4)
    closed = ["closed after 3", "closed after 1"] if kind.reusable else ["closed after 1"] * 4
    assert marks.read_text().splitlines() == closed


# --- deadlines and deaths ---------------------------------------------------------------------------------------------


async def test_a_hang_costs_its_process_and_is_told_from_what_it_did_to_others(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Shared, step_timeout_s=0.3)
    async with running(envs):
        env, pid = await begun(envs)
        other, same = await begun(envs)
        assert pid == same
        with pytest.raises(RemoteError, match=r"^no answer within 0.3 s$"):
            await env.step(act("stubborn 60"))
        await until(lambda: not alive(pid))
        with pytest.raises(EnvDown, match=r"^its worker process was killed: another environment in it hung$"):
            await other.step(act("on"))
        for e in (env, other):
            envs.release(e, whole=False)
        _, new = await begun(envs)
        assert new != pid


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 3", r"^its worker process exited with 3$"),
        ("crash", r"^its worker process was killed by SIGSEGV$"),
    ],
)
async def test_a_death_is_the_machines_fault_and_says_how(tmp_path: Path, command: str, reason: str) -> None:
    envs = pool(tmp_path, engines.Shared)
    async with running(envs):
        env, pid = await begun(envs)
        other, _ = await begun(envs)
        with pytest.raises(EnvDown, match=reason):
            await env.step(act(command))
        with pytest.raises(EnvDown, match=reason):
            await other.step(act("on"))
        envs.release(env, whole=False)
        assert (await begun(envs))[1] != pid


async def test_a_worker_that_is_killed_between_calls_is_replaced_for_the_next_episode(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Reused)
    async with running(envs):
        idle, pid = await begun(envs)
        busy, _ = await begun(envs)
        envs.release(idle, whole=True)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid))
        with pytest.raises(EnvDown, match=r"was killed by SIGKILL; is there too little memory\?$"):
            await busy.step(act("on"))
        assert (await begun(envs))[1] != pid


async def test_what_a_killed_worker_leaves_is_removed(tmp_path: Path) -> None:
    envs = pool(tmp_path, step_timeout_s=0.3)
    async with running(envs):
        env, _ = await begun(envs)
        child, file = [str((await env.step(act(what))).observation) for what in ("child", "file")]
        assert alive(int(child)) and Path(file).exists()
        with pytest.raises(RemoteError):
            await env.step(act("stubborn 60"))
        await until(lambda: not alive(int(child)) and not Path(file).exists())


async def test_the_first_reset_may_take_the_start_up_time_longer(tmp_path: Path) -> None:
    envs = pool(tmp_path, reset_timeout_s=0.3)
    envs._cost = engines.Cost(startup_s=10.0)
    async with running(envs):
        env = await envs.acquire()
        await said(env, command="sleep 0.6")
        with pytest.raises(RemoteError, match=r"no answer within 0.3 s"):
            await said(env, command="sleep 0.6")


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [engines.Engine, engines.Shared])
async def test_a_cancelled_call_is_interrupted_and_its_object_closed(tmp_path: Path, kind: type[SyncEnv]) -> None:
    marks = tmp_path / "marks"
    envs = pool(tmp_path, kind, kwargs={"marks": str(marks)})
    async with running(envs):
        env, pid = await begun(envs)
        other = (await begun(envs))[0] if kind is engines.Shared else None
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(act("sleep 60")), 0.1)
        envs.release(env, whole=False)
        if other is not None:
            assert (await other.step(act("on"))).observation == "did on"
        assert (await begun(envs))[1] == pid
        assert time.monotonic() - started < 5
    assert marks.read_text().splitlines()[0] == "closed after 1"


async def test_a_cancelled_call_that_does_not_let_itself_be_interrupted_is_killed(tmp_path: Path) -> None:
    envs = pool(tmp_path)
    async with running(envs):
        env, pid = await begun(envs)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(act("stubborn 60")), 0.1)
        envs.release(env, whole=False)
        await until(lambda: not alive(pid))
        await begun(envs)


async def test_a_call_that_has_not_begun_is_dropped(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Shared)
    async with running(envs):
        one, two = [(await begun(envs))[0] for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(one.step(act("sleep 0.3")))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(two.step(act("raise never")), 0.05)
        assert first.result().reward == 0.5


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_the_end_closes_what_is_open_and_leaves_no_process(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    envs = pool(tmp_path, workers=3, kwargs={"marks": str(marks)})
    async with running(envs):
        three = [await begun(envs) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            sleeping = group.create_task(three[0][0].step(act("sleep 60")))
            await asyncio.sleep(0.1)
            sleeping.cancel()
    assert not any(alive(pid) for _, pid in three)
    assert marks.read_text().splitlines() == ["closed after 1"] * 3
    with pytest.raises(EnvDown, match="run is over"):
        await three[0][0].step(act("on"))


async def test_workers_survive_the_death_of_the_process_that_forks_them_as_new_ones(tmp_path: Path) -> None:
    envs = pool(tmp_path)
    async with running(envs):
        env, pid = await begun(envs)
        nursery = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(nursery, signal.SIGKILL)
        await until(lambda: not alive(pid))
        with pytest.raises(EnvDown):
            await env.step(act("on"))
        envs.release(env, whole=False)
        assert (await begun(envs))[1] != pid


async def test_a_nursery_that_ran_for_long_has_all_its_restarts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STEADY_S", 0.0)
    envs = pool(tmp_path)
    async with running(envs):
        for _ in range(pool_module.MAX_RESTARTS + 2):
            env, pid = await begun(envs)
            os.kill(int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
            await until(lambda pid=pid: not alive(pid))
            envs.release(env, whole=False)


async def test_a_worker_that_is_asked_of_a_nursery_just_dead_is_started_by_the_next(tmp_path: Path) -> None:
    envs = pool(tmp_path, workers=2)
    async with running(envs):
        _, pid = await begun(envs)
        nursery = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(nursery, signal.SIGKILL)
        time.sleep(0.2)  # noqa: ASYNC251 - so that nobody on the loop has heard of it
        with alarm(SOON_S):
            assert (await begun(envs))[1] != pid


async def test_a_class_that_cannot_be_imported_in_the_workers_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    envs = EnvProcesses(
        f"{HERE / 'gone.py'}:Engine",
        {},
        cost=engines.Engine.cost,
        reusable=False,
        workers=1,
        reset_timeout_s=1,
        step_timeout_s=1,
        log=tmp_path / "env.log",
    )
    with pytest.raises(ExceptionGroup) as error:
        await envs.run()
    assert isinstance(error.value.exceptions[0], ChildError)
    assert "no file" in str(error.value.exceptions[0])


async def test_nothing_stays_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    envs = pool(tmp_path)
    async with running(envs):
        env, pid = await begun(envs)
        assert list(temporary.iterdir())
        nursery = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(nursery, signal.SIGKILL)
        await until(lambda: not alive(pid))
        envs.release(env, whole=False)
        await begun(envs)
    assert not list(temporary.iterdir())


async def test_a_killed_controller_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from env_workers.test_pool import begun, pool, running\n"
        "async def main():\n"
        "    envs = pool(Path(sys.argv[1]))\n"
        "    async with running(envs):\n"
        "        print((await begun(envs))[1], flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    controller = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        str(tmp_path),
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])},
        stdout=asyncio.subprocess.PIPE,
    )
    assert controller.stdout is not None
    async with asyncio.timeout(SOON_S):
        pid = int(await controller.stdout.readline())
        assert list(temporary.iterdir())
        controller.kill()
        await controller.wait()
        await until(lambda: not alive(pid) and not list(temporary.iterdir()))
