"""Evaluator: held-out tasks, played by one version of the policy.

    whole()   before and after training, on all servers
    run()     while training goes on, whenever it is asked, on servers that keep the version meanwhile; it holds at most
              ``share`` of the fleet's capacity     waits for: ask()     woken by: the train loop

A failed episode counts as 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from asyncrl.core.evaluation import Score, accuracy, details
from asyncrl.core.journal import Noted
from asyncrl.core.types import Task
from asyncrl.ports import NoStore, Observer, RunStore
from asyncrl.runtime.env_manager import Episode, EpisodePlayers
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.parameter_server import ParameterServer
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.trajectory_server import Start
from asyncrl.runtime.user_code import EpisodeFailed, FailureWindow


class MixedVersions(Exception):
    """An evaluation's episode has tokens of another version: a bug of the runtime."""


class Evaluator:
    """Plays each of ``tasks`` ``samples`` times, at most ``concurrency`` at once."""

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        samples: int,
        temperature: float,
        concurrency: int,
        share: float,
        players: EpisodePlayers,
        failures: Mapping[str, FailureWindow],
        proxy: LLMProxy,
        parameters: ParameterServer,
        observer: Observer,
        episode_timeout_s: float,
        store: RunStore | None = None,
        newest: int = -1,
    ) -> None:
        self._store = store or NoStore()
        self.newest = newest
        """The version that was evaluated last; -1: none."""
        self._tasks = tasks
        self._samples = samples
        self._temperature = temperature
        self._concurrency = concurrency
        self._share = share
        self._players = players
        self._failures = failures
        self._proxy = proxy
        self._parameters = parameters
        self._observer = observer
        self._episode_timeout_s = episode_timeout_s
        self.stages: list[Stage] = []
        """Of the episodes that are being played."""
        self._asked = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while no evaluation that was asked for is under way."""
        self.idle.set()

    async def whole(self) -> None:
        """With nothing else under way, if it was not done before."""
        await self._parameters.catch_up()
        if self._tasks and self.newest < self._parameters.version:
            await self._play(self._parameters.version, pinned=False, concurrency=self._concurrency)

    def ask(self) -> None:
        """Evaluate the version that the servers hold, beside training; left out while the one before is under way."""
        if self._tasks and self.idle.is_set():
            self.idle.clear()
            self._asked.set()
        else:
            now = asyncio.get_running_loop().time()
            self._observer.instant("controller", "evaluation skipped", now, {"version": self._parameters.version})

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._beside()
            self.idle.set()

    async def _beside(self) -> None:
        """Given up, and said so in the trace, if the servers that keep the version fail."""
        async with self._parameters.pinned(self._share) as version:
            room = sum(i.max_running for i in self._proxy.instances)
            if version is None or not await self._play(
                version, pinned=True, concurrency=min(self._concurrency, max(1, int(self._share * room)))
            ):
                now = asyncio.get_running_loop().time()
                self._observer.instant("controller", "evaluation given up", now, {"version": version})

    async def _play(self, version: int, *, pinned: bool, concurrency: int) -> bool:
        """False if the servers of a pinned one were lost."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        scores = [Score(task=task, samples=[0.0] * self._samples) for task in self._tasks]
        pending = iter([(score, i) for score in scores for i in range(self._samples)])
        lost = False

        async def play(stage: Stage) -> None:
            nonlocal lost
            for score, i in pending:
                stage.who = f"evaluation of version {version}, task {score.task.id}"
                failures = self._failures[score.task.source]
                try:
                    async with self._bounded(stage):
                        [episode] = await self._players.play(
                            score.task, start=Start(version), temperature=self._temperature, pinned=pinned, stage=stage
                        )
                except EpisodeFailed as failure:
                    if pinned and not self._proxy.has_pinned:
                        lost = True
                        return
                    failures.failed(failure)
                else:
                    failures.succeeded()
                    _check(episode, version)
                    score.samples[i] = episode.metrics.get("accuracy", episode.reward)

        self.stages = [Stage() for _ in range(min(concurrency, len(scores) * self._samples))]
        async with asyncio.TaskGroup() as group:
            for stage in self.stages:
                group.create_task(play(stage))
        self.stages = []
        if not lost:
            self._observer.span("controller", "evaluate", started, loop.time(), {"version": version})
            self.newest = version
            self._store.put(Noted(key="evaluated", value=version))
            self._observer.eval(version, accuracy(scores), len(scores) * self._samples, details(scores))
        return not lost

    @asynccontextmanager
    async def _bounded(self, stage: Stage) -> AsyncIterator[None]:
        """Within the deadline that episodes have in training, too."""
        try:
            async with asyncio.timeout(self._episode_timeout_s) as scope:
                stage.scope, stage.cut_why = scope, ""
                yield
        except TimeoutError:
            why = stage.cut_why or f"no end within {self._episode_timeout_s:g} s"
            raise EpisodeFailed("episode", why, infra=bool(stage.cut_why)) from None
        finally:
            stage.scope, stage.what = None, ""


def _check(episode: Episode, version: int) -> None:
    for turn in episode.turns:
        if any(v != version for v in turn.versions):
            raise MixedVersions(
                f"an evaluation of version {version} has tokens of versions {sorted(set(turn.versions))}"
            )
