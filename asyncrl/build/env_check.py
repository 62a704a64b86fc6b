"""``asyncrl env check``: a user's environment, played without any model, and what is wrong with it.

Random and scripted actions are played against the real class: contract, deadlines, time that the event loop is held,
what is left behind, a cancellation in the middle of a step, two episodes side by side. A finding is one line with its
remedy. A ``SyncEnv`` is played in this process, where it can be watched, and once through its worker processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing.util
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.build.env_actions import ODD, Actor, said
from asyncrl.build.env_contract import Finding, wrong_observation, wrong_reward, wrong_step
from asyncrl.build.env_watch import Hang, Watched, alarm, left_behind
from asyncrl.config import EnvConfig, RecipeError
from asyncrl.core.types import Record
from asyncrl.env import Action, Env, Task
from asyncrl.env_workers.pool import EnvProcesses, RemoteEnv
from asyncrl.loading import Environment, load_environment, load_tasks
from asyncrl.runtime.env_source import BlockingEnv

HOLD_S = 0.1
"""What an ``async`` method may hold the event loop, once; twice as long is never an accident of the machine."""
WARM_UP = 2
"""Episodes before what is left behind is counted: caches fill in the first."""
MEMORY_MB = 1.0
"""Growth an episode that is called a leak."""
CANCEL_S = 0.05
"""How far a step in a worker process has come when it is cancelled; one that takes less just ends."""
OBEY_S = 5.0
"""How long a cancelled step, or what it leaves to close, may take."""


class Report(Record, frozen=True, kw_only=True):
    """``findings`` with how often they were seen; ``times`` of each method's calls, seconds; ``notes`` on what was not
    checked and why."""

    findings: dict[tuple[str, str, str], int]
    times: dict[str, list[float]]
    episodes: int
    turns: int
    ended: int
    notes: list[str]


class _Broken(Exception):
    """The episode cannot go on; the finding is noted."""


class _Inline:
    """The Blocking port without workers: one episode at a time is played, and it may block."""

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    async def close(self) -> None: ...


def check(
    target: str,
    *,
    kwargs: dict[str, Any],
    tasks: str,
    actions: Sequence[str],
    episodes: int,
    max_turns: int,
    timeout_s: float,
    seed: int,
) -> Report:
    """Play, and report. Raises ``RecipeError`` for what cannot be loaded."""
    if (file := target.partition(":")[0]).endswith(".py"):
        target = f"{Path(file).resolve()}:{target.partition(':')[2]}"
    environment = load_environment(EnvConfig(target=target, kwargs=kwargs))
    if environment.rollout is not None:
        raise RecipeError(f"{target}: a rollout function drives a model itself, and cannot be checked without one")
    rows = [Task(id="check/1", data={"prompt": "?"})]
    if tasks:
        rows = load_tasks(tasks, "--tasks", environment.required, parse_row=environment.parse_row)
    examples = actions or getattr(environment.kind, "example_actions", ())
    multiprocessing.util.get_temp_dir()  # made before, it is not in the folder here, which goes earlier
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="asyncrl-check-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            checker = _Check(
                environment, rows, Actor(examples, random.Random(seed)), max_turns, timeout_s, Path(folder), bool(tasks)
            )
            asyncio.run(checker.run(target, kwargs, episodes))
        finally:
            tempfile.tempdir = None
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
    return checker.report()


class _Check:
    def __init__(
        self,
        environment: Environment,
        tasks: Sequence[Task],
        actor: Actor,
        max_turns: int,
        timeout_s: float,
        scratch: Path,
        own_tasks: bool,
    ) -> None:
        self._environment = environment
        self._is_sync = environment.make is None
        self._tasks = tasks
        self._actor = actor
        self._max_turns = max_turns
        self._timeout_s = timeout_s
        self._scratch = scratch
        self._own_tasks = own_tasks
        self._findings: dict[tuple[str, str, str], int] = {}
        self._times: dict[str, list[float]] = {}
        self._holds: dict[str, list[float]] = {}
        self._notes: list[str] = []
        self._episodes = self._turns = self._ended = 0

    def report(self) -> Report:
        return Report(
            findings=self._findings,
            times=self._times,
            episodes=self._episodes,
            turns=self._turns,
            ended=self._ended,
            notes=self._notes,
        )

    async def run(self, target: str, kwargs: dict[str, Any], episodes: int) -> None:
        if self._environment.reward is not None:
            await self._rewards(episodes)
            return
        played = await self._random_episodes(episodes)
        await self._scripted()
        self._loop_held()
        if played:
            await self._side_by_side(played)
            if self._is_sync:
                await self._in_workers(target, kwargs, *played[0])
            else:
                await self._cancelled(*played[0])
        if played and not self._ended:
            self._note(
                "step",
                f"no episode was done within {self._max_turns} turns",
                "set done at the end of an episode; give actions that reach it by --actions, or more --max-turns",
            )

    # --- playing ------------------------------------------------------------------------------------------------------

    def _note(self, where: str, what: str, remedy: str) -> None:
        key = (where, what, remedy)
        self._findings[key] = self._findings.get(key, 0) + 1

    def _note_all(self, where: str, findings: Iterable[Finding]) -> None:
        """``_Broken`` if there is any: who gave a wrong answer cannot be played on."""
        found = list(findings)
        for what, remedy in found:
            self._note(where, what, remedy)
        if found:
            raise _Broken

    def _new(self) -> Env:
        try:
            if self._environment.make_sync is not None:
                return BlockingEnv(self._environment.make_sync(), _Inline())
            assert self._environment.make is not None
            return self._environment.make()
        except Exception as error:
            self._raised("__init__", error)
            raise _Broken from None

    def _raised(self, where: str, error: BaseException, said: str = "") -> None:
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        remedy = "answer nonsense with an observation that says what was wrong: an exception fails the episode"
        if where != "step":
            remedy = "mend it" if self._own_tasks else "mend it; or it needs rows of its own: give --tasks FILE"
        self._note(where, f"raised {type(error).__name__}{': ' if text else ''}{text:.120}{at}{said}", remedy)

    async def _call(self, where: str, call: Awaitable[Any], *, said: str = "") -> Any:
        """Its answer; ``_Broken`` where it raised or hung."""
        watched = Watched(call)
        began = time.perf_counter()
        try:
            with alarm(self._timeout_s + 0.5):
                async with asyncio.timeout(self._timeout_s) as scope:
                    return await watched
        except TimeoutError as error:
            if scope.expired():
                self._note(where, f"gave no answer within {self._timeout_s:g} s", "bound what it waits for")
            else:
                self._raised(where, error, said)
        except Hang:
            self._note(where, f"held its thread for {self._timeout_s:g} s", "bound what it waits for")
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._raised(where, error, said)
        except (Exception, SystemExit) as error:
            self._raised(where, error, said)
        finally:
            self._times.setdefault(where, []).append(time.perf_counter() - began)
            self._holds.setdefault(where, []).append(watched.held_s)
        raise _Broken

    async def _reset(self, env: Env, task: Task) -> Any:
        observation = await self._call("reset", env.reset(task))
        self._note_all("reset", wrong_observation(observation, first=True))
        return observation

    async def _step(self, env: Env, action: Action) -> Any:
        step = await self._call("step", env.step(action), said=f" for the action {action.text!r:.40}")
        self._turns += 1
        self._note_all("step", wrong_step(step))
        return step

    async def _close(self, env: Env) -> None:
        with contextlib.suppress(_Broken):
            await self._call("close", env.close())

    async def _random_episodes(self, episodes: int) -> list[tuple[Task, list[Action]]]:
        """Tasks and the actions that were played, of those that broke nothing. Counts what is left behind."""
        played: list[tuple[Task, list[Action]]] = []
        shared: Env | None = None
        before: dict[str, float] = {}
        for number in range(WARM_UP + episodes):
            if number == WARM_UP:
                before = left_behind(self._scratch)
            task, actions = self._tasks[number % len(self._tasks)], list[Action]()
            self._episodes += 1
            whole, env = False, shared
            try:
                env = shared or self._new()
                observation = await self._reset(env, task)
                tools = getattr(observation, "tools", ())
                for turn in range(self._max_turns):
                    actions.append(self._actor.drawn(task, observation, tools, turn))
                    step = await self._step(env, actions[-1])
                    observation = step.observation
                    if step.done:
                        self._ended += 1
                        break
                whole = True
                played.append((task, actions))
            except _Broken:
                pass
            shared = env if whole and self._environment.kind.reusable else None
            if env is not None and shared is None:
                await self._close(env)
        self._compare_left(before, left_behind(self._scratch), episodes)
        if shared is not None:
            await self._close(shared)
        return played

    async def _scripted(self) -> None:
        """The given actions in their order, to the end."""
        for task in self._tasks[:WARM_UP]:
            script = self._actor.script(task)
            if not script:
                return
            with contextlib.suppress(_Broken):
                await self._replay(task, [said(text, turn) for turn, text in enumerate(script)])

    async def _replay(self, task: Task, actions: Sequence[Action]) -> list[bytes]:
        """One episode of these actions; what it answered."""
        return (await self._interleaved([(task, actions)]))[0]

    async def _interleaved(self, episodes: Sequence[tuple[Task, Sequence[Action]]]) -> list[list[bytes]]:
        """Turn by turn, each in an object of its own; what each answered."""
        envs: list[Env] = []
        answers: list[list[bytes]] = [[] for _ in episodes]
        try:
            for (task, _), record in zip(episodes, answers, strict=True):
                envs.append(self._new())
                self._episodes += 1
                record.append(_bytes(await self._reset(envs[-1], task)))
            for turn in range(max(len(actions) for _, actions in episodes)):
                for env, (_, actions), record in zip(envs, episodes, answers, strict=True):
                    if turn < len(actions) and record[-1] != b"done":
                        step = await self._step(env, actions[turn])
                        record.append(_bytes([step.observation, float(step.reward)]))
                        if step.done:
                            self._ended += 1
                            record.append(b"done")
        finally:
            for env in envs:
                await self._close(env)
        return answers

    # --- what is looked for -------------------------------------------------------------------------------------------

    def _loop_held(self) -> None:
        if self._is_sync:
            return
        for where, holds in self._holds.items():
            if max(holds) > 2 * HOLD_S or sum(h > HOLD_S for h in holds) > 1:
                self._note(
                    where,
                    f"held the event loop for up to {max(holds) * 1e3:.0f} ms, and everything else with it",
                    "await instead of blocking, or derive from asyncrl.SyncEnv with plain methods",
                )

    async def _side_by_side(self, played: Sequence[tuple[Task, Sequence[Action]]]) -> None:
        """The same actions bring the same again (if that was declared), also with another episode between."""
        two = [played[0], played[-1]]
        try:
            alone = [await self._replay(*episode) for episode in two]
            again = [await self._replay(*episode) for episode in two]
            if alone != again:
                if self._environment.kind.deterministic:
                    self._note(
                        "step",
                        "the same task and actions brought something else the second time",
                        "seed what is drawn by the task, or do not declare deterministic",
                    )
                else:
                    self._notes.append("not deterministic, so two episodes side by side were not compared")
                return
            if self._is_sync and self._environment.kind.cost.per_process == 1:
                return
            if await self._interleaved(two) != alone:
                self._note(
                    "step",
                    "an episode went another way with a second one beside it",
                    "keep state in self, not in the class or the module"
                    + ("; or leave cost.per_process at 1" if self._is_sync else ""),
                )
        except _Broken:
            self._notes.append("episodes broke, so two side by side were not compared")

    async def _cancelled(self, task: Task, actions: Sequence[Action]) -> None:
        """A step that nobody waits for any more ends at once, and can be closed."""
        try:
            env = self._new()
            await self._reset(env, task)
        except _Broken:
            return
        wait_s = statistics.median(self._times["step"]) / 2
        began = time.perf_counter()
        was_cancelled = True
        try:
            with alarm(wait_s + self._timeout_s):
                async with asyncio.timeout(wait_s) as scope:
                    await env.step(actions[0])
            was_cancelled = scope.expired()
        except TimeoutError:
            pass
        except (Exception, Hang) as error:
            self._raised("step", error, " when it was cancelled")
        took_s = time.perf_counter() - began - wait_s
        if was_cancelled and took_s > OBEY_S:
            self._note("step", f"went on for {took_s:.0f} s after it was cancelled", "let CancelledError pass")
        await self._close(env)

    async def _in_workers(self, target: str, kwargs: dict[str, Any], task: Task, actions: Sequence[Action]) -> None:
        """One episode as in a run: in a worker process, over a socket."""
        kind = self._environment.kind
        workers = EnvProcesses(
            target,
            kwargs,
            cost=kind.cost,
            reusable=kind.reusable,
            workers=1,
            reset_timeout_s=self._timeout_s,
            step_timeout_s=self._timeout_s,
            log=self._scratch / "env.log",
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(workers.run())
            try:
                async with _acquired(workers) as env:
                    await env.reset(task)
                    for action in actions:
                        if (await env.step(action)).done:
                            break
                await self._cancelled_in_worker(workers, task, actions[0])
            except Exception as error:
                self._note(
                    "worker process", str(error).split("\n", 1)[0], "what crosses is plain data; see the log above"
                )
            running.cancel()

    async def _cancelled_in_worker(self, workers: EnvProcesses, task: Task, action: Action) -> None:
        """A step that nobody waits for any more does not cost its process."""
        async with _acquired(workers) as env:
            await env.reset(task)
            process = env.process
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await env.step(action)
        async with _acquired(workers) as env:
            await env.reset(task)  # its turn comes when the step has ended
            if env.process is not process:
                self._note(
                    "step",
                    "went on after it was cancelled, so that its worker process was killed",
                    "let BaseException pass while it waits",
                )

    async def _rewards(self, rounds: int) -> None:
        """A reward function: finite numbers for anything, twice the same."""
        function = self._environment.reward
        assert function is not None

        async def answer(task: Task, action: Action) -> Any:
            value: Any = function(task, action)
            return await value if inspect.isawaitable(value) else value

        for number in range(max(rounds, len(ODD))):
            task = self._tasks[number % len(self._tasks)]
            texts = [ODD[number % len(ODD)], *self._actor.script(task)]
            for text in texts:
                for finish_reason in ("stop", "length"):
                    action = said(text, 0, finish_reason=finish_reason)
                    self._turns += 1
                    with contextlib.suppress(_Broken):
                        shown = f" for {text!r:.40}"
                        values = [await self._call("reward", answer(task, action), said=shown) for _ in range(2)]
                        self._note_all("reward", wrong_reward(values[0]))
                        if values[0] != values[1] and values[0] == values[0]:
                            self._note(
                                "reward",
                                "the same response was given two rewards",
                                "judge by the task and the response alone",
                            )
        if inspect.iscoroutinefunction(function):
            self._loop_held()

    def _compare_left(self, before: dict[str, float], after: dict[str, float], episodes: int) -> None:
        for what, count in after.items():
            grown = (count - before[what]) / episodes
            if grown >= (MEMORY_MB if what == "MB of memory" else 1):
                remedy = "free in close() what reset and step took, also after a failure"
                self._note("close", f"leaves {grown:.3g} {what} behind an episode", remedy)


@contextlib.asynccontextmanager
async def _acquired(workers: EnvProcesses) -> AsyncIterator[RemoteEnv]:
    env = await workers.acquire()
    try:
        yield env
    finally:
        workers.release(env, whole=False)


def _bytes(answer: Any) -> bytes:
    return msgspec.msgpack.encode(answer, enc_hook=repr)


def show(report: Report, target: str) -> None:
    """Print it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    counts = f"{report.episodes} episodes, {report.turns} turns, {report.ended} done"
    console.print(f"{target}: {counts}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "calls", "p50", "p99", "longest"):
        table.add_column(column, justify="left" if not column else "right")
    for where, times in report.times.items():
        ordered = sorted(times)
        picked = (ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], ordered[-1])
        table.add_row(where, f"{len(ordered):,}", *(f"{t * 1e3:,.1f} ms" for t in picked))
    console.print(table)
    for note in report.notes:
        console.print(f"  note  {note}", markup=False)
    for (where, what, remedy), count in report.findings.items():
        times_seen = f" ({count} times)" if count > 1 else ""
        console.print(f"  wrong {where}: {what}{times_seen}; {remedy}", markup=False, soft_wrap=True)
    console.print("  all well" if not report.findings else f"{len(report.findings)} findings", markup=False)
