"""The Trainer port over HTTP: starts the torchrun job (or finds one), and turns its every failure into one line.

Every wait ends with the answer, its deadline, or the end of the job, whichever is first: a request and the process are
waited for together. While a command is at work, rank 0 is asked again and again whether it is there, as its connection
may have gone without a word. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from asyncrl.access import header
from asyncrl.config import Recipe
from asyncrl.core.advantage import Advantage, TurnRewards, split_rewards
from asyncrl.core.types import Batch, Trajectory
from asyncrl.ports import CheckpointFailed, StepResult, TrainerDied, TrainerError
from asyncrl.processes import free_port
from asyncrl.shield import unless
from asyncrl.train.description import PREFIX, version_of
from asyncrl.train.job import TorchrunJob
from asyncrl.wire import FeedReq, OpenGroupReq, PublishReq, SaveReq, TrainerInfo, TrainReply, TrainReq, TrainSequence

T = TypeVar("T")

RETRY_S = 0.1
"""Pause between attempts to reach a job that does not listen yet (in its first second or two)."""

HEALTH_EVERY_S = 10.0
"""Pause between two questions whether rank 0 is there."""

DOING_S = 2.0
"""How long a job may take to say what it does."""

SHUTDOWN_S = 10.0
"""How long a job may take to end by itself when it is asked to."""

EXIT_GRACE_S = 10.0
"""How long a job whose connection broke may take to end, so that its exit tells why."""


class _NotStaged(TrainerError):
    """Another version has taken its place."""


class HttpTrainer:
    """``ports.Trainer`` over a torchrun job on this machine, or over the one at ``url``, which is never stopped.

    ``run_dir`` receives the recipe as the ranks read it, ``log`` everything that they print. The job starts from the
    checkpoint ``resume``, and one that is started in its place from the newest that was completed since; a job at
    ``url`` must have been started from ``resume``.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: str,
        *,
        run_dir: Path,
        log: Path,
        url: str = "",
        resume: Path | None = None,
        token: str = "",
    ) -> None:
        self._recipe = recipe
        self._model = model
        self._run_dir = run_dir
        self._log = log
        self._resume = resume
        self._token = token
        self._given_url = url.rstrip("/")
        self._url = self._given_url
        self._job: TorchrunJob | None = None
        self._session: aiohttp.ClientSession | None = None
        self._info: TrainerInfo | None = None
        self._fed_step = -1
        self._fed: list[int] = []
        """Ids of the trajectories that the job was fed for ``_fed_step``, in that order."""
        self._fed_sequences = 0
        self._lost = False
        """The job runs perhaps, but does not answer."""
        self._saving = Path()
        """The checkpoint that was begun last."""

    @property
    def info(self) -> TrainerInfo:
        """What the job said of itself when it was connected."""
        if self._info is None:
            raise TrainerError("trainer: not connected; call connect() first")
        return self._info

    @property
    def alive(self) -> bool:
        """False once the job that was started here has ended."""
        return self._job is None or self._job.running

    async def connect(self) -> int:
        if self._session is None:
            # Each call sets its own deadline, and opens its own connection: a kept one may have been dropped by the
            # server between two steps, and a step must not be sent twice.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=header(self._token),
            )
        if not self._given_url and (self._job is None or self._lost or not self._job.running):
            if self._job is not None:
                await self._job.stop()
            self._lost, self._fed_step, self._fed = False, -1, []
            port = free_port()
            self._url = f"http://127.0.0.1:{port}"
            self._job = await TorchrunJob.start(
                self._recipe, self._model, port, self._run_dir, self._log, self._resume, self._token
            )
        timeout_s = self._recipe.trainer.connect_timeout_s
        self._info = await self._bounded(self._first_answer(), timeout_s, "not ready", "trainer.connect_timeout_s")
        if self._given_url and self._resume and self._info.version < (version_of(self._resume) or 0):
            raise TrainerError(
                f"trainer.url: the job at {self._url} is at version {self._info.version}; start it with "
                f"--resume {self._resume}"
            )
        return self._info.version

    async def feed(self, part: Batch, advantages: Sequence[Advantage]) -> bool:
        if part.step != self._fed_step:
            self._fed_step, self._fed, self._fed_sequences = part.step, [], 0
        sequences = [s for t, a in zip(part.trajectories, advantages, strict=True) for s in train_sequences(t, a)]
        request = FeedReq(step=part.step, start=self._fed_sequences, sequences=sequences)
        reply = await self._command("feed", request)
        self._fed += [trajectory.id for trajectory in part.trajectories]
        self._fed_sequences += len(sequences)
        return reply.metrics["micro_batches"] > 0

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        fed, self._fed_step = self._fed if batch.step == self._fed_step else [], -1
        if self._recipe.algorithm.mini_batches > 1 and any(t.segment_ends for t in batch.trajectories):
            fed = []  # segments have moved the border of the first mini-batch; send the batch whole
        reply = await self._command("train_step", train_request(batch, advantages, fed))
        repeats = self.info.backend == "gloo"  # on GPUs backward passes add up in any order
        return StepResult(version=reply.version, metrics=reply.metrics, checksum=reply.checksum, repeats=repeats)

    async def watch(self) -> None:
        forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await (forever if self._job is None else self._job.unless_ended(forever))

    async def publish(self, version: int, transport: str, path: str = "") -> dict[str, float]:
        """One part of moving weights, see ``wire.PublishReq``; the answer's metrics. Raises ``TrainerError``."""
        reply = await self._command("publish", PublishReq(version=version, transport=transport, path=path))
        self._info = msgspec.structs.replace(self.info, checksums=reply.checksums, outlets=reply.outlets)
        return reply.metrics

    async def hold(self, version: int) -> bool:
        """Have what is staged as ``version`` kept until it was broadcast; False if it is not staged any more. Raises
        ``TrainerError``."""
        try:
            await self._command("publish", PublishReq(version=version, transport="hold"), _NotStaged)
        except _NotStaged:
            return False
        return True

    @property
    def outlets(self) -> list[str]:
        return self.info.outlets

    async def unless_ended(self, work: Awaitable[T]) -> T:
        """``work``'s result; ``TrainerDied`` as soon as the job that was started here ends."""
        return await (work if self._job is None else self._job.unless_ended(work))

    async def open_group(self, address: str, world_size: int, group: str, backend: str) -> int:
        """The port at ``address`` where rank 0 now listens for the servers of an update group. Raises
        ``TrainerError``."""
        request = OpenGroupReq(address=address, world_size=world_size, group_name=group, backend=backend)
        return int((await self._command("open_group", request)).metrics["port"])

    async def join_group(self) -> None:
        """Become rank 0 of the group; returns when the servers have joined it too. Raises ``TrainerError``."""
        await self._command("join_group", None)

    async def save(self, folder: str) -> int:
        target = os.path.abspath(folder)
        version = (await self._command("save", SaveReq(folder=target), CheckpointFailed)).version
        self._saving = Path(target) / f"{PREFIX}{version}"
        return version

    async def saved(self) -> None:
        await self._command("saved", None, CheckpointFailed)
        self._resume = self._saving

    async def doing(self) -> str:
        if self._session is None or self._info is None:
            return ""
        try:
            async with asyncio.timeout(DOING_S):
                return (await self._request("GET", "health", b"", TrainerInfo)).doing
        except (TimeoutError, TrainerError, aiohttp.ClientError, msgspec.MsgspecError):
            return ""

    def give_up(self) -> None:
        self._lost = True

    async def close(self) -> None:
        try:
            if self._job is not None and self._job.running:
                if self._info is not None:
                    with suppress(TimeoutError, TrainerError, aiohttp.ClientError):
                        async with asyncio.timeout(SHUTDOWN_S):
                            await self._request("POST", "shutdown", b"", TrainReply)
                            await self._job.wait()
                await self._job.stop()
        finally:
            if self._session is not None:
                await self._session.close()

    # --- requests

    async def _command(
        self, path: str, request: msgspec.Struct | None, refusal: type[TrainerError] = TrainerError
    ) -> TrainReply:
        timeout_s = self._recipe.trainer.step_timeout_s
        answer = unless(self._silent(path), self._ask(path, msgspec.msgpack.encode(request)))
        reply = await self._bounded(answer, timeout_s, f"no answer to /{path}", "trainer.step_timeout_s")
        if reply.error is not None:
            raise refusal(f"trainer: {reply.error}")
        return reply

    async def _bounded(self, work: Coroutine[None, None, T], timeout_s: float, what: str, key: str) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.unless_ended(work)
        except TimeoutError:
            raise self._gone(f"trainer: {what} within {timeout_s:g} s; see {self._log}, or raise {key}") from None

    def _gone(self, line: str) -> TrainerError:
        self._lost = True
        return TrainerError(line) if self._given_url else TrainerDied(line)

    async def _silent(self, path: str) -> None:
        """Raises ``TrainerError`` once rank 0 has said nothing for too long."""
        loop, limit_s = asyncio.get_running_loop(), self._recipe.trainer.health_timeout_s
        heard = loop.time()
        while True:
            await asyncio.sleep(min(HEALTH_EVERY_S, limit_s / 4))
            try:
                async with asyncio.timeout_at(heard + limit_s):
                    await self._request("GET", "health", b"", TrainerInfo)
                heard = loop.time()
            except (TrainerError, aiohttp.ClientError, msgspec.MsgspecError):
                continue  # whether the command's own connection is broken is for that to say
            except TimeoutError:
                raise self._gone(
                    f"trainer: {self._url} has not answered /health for {limit_s:g} s, with /{path} at work: it hangs, "
                    f"or its host is cut off; see {self._log}, or raise trainer.health_timeout_s"
                ) from None

    async def _first_answer(self) -> TrainerInfo:
        while True:
            try:
                return await self._request("GET", "health", b"", TrainerInfo)
            except aiohttp.ClientError:
                await asyncio.sleep(RETRY_S)

    async def _ask(self, path: str, body: bytes) -> TrainReply:
        try:
            return await self._request("POST", path, body, TrainReply)
        except aiohttp.ClientError as error:
            if self._job is not None:
                await asyncio.sleep(EXIT_GRACE_S)  # ended by the job's exit, which tells more
            raise self._gone(f"trainer: {self._url} broke off /{path}: {error or type(error).__name__}") from None

    async def _request(self, method: str, path: str, body: bytes, reply: type[T]) -> T:
        if self._session is None:
            raise TrainerError("trainer: not connected; call connect() first")
        async with self._session.request(method, f"{self._url}/{path}", data=body) as response:
            data = await response.read()
        if response.status != 200:
            raise TrainerError(f"trainer: /{path} answered {response.status}: {data.decode(errors='replace')}")
        return msgspec.msgpack.decode(data, type=reply)


def train_request(batch: Batch, advantages: Sequence[Advantage], fed: Sequence[int] = ()) -> TrainReq:
    """The batch as it travels, without the trajectories whose ids are ``fed``."""
    sent = set(fed)
    sequences: list[TrainSequence] = []
    places: dict[int, range] = {}
    place = 0
    for trajectory, advantage in zip(batch.trajectories, advantages, strict=True):
        segments = len(trajectory.segment_ends) or 1
        places[trajectory.id] = range(place, place + segments)
        place += segments
        if trajectory.id not in sent:
            sequences += train_sequences(trajectory, advantage)
    return TrainReq(step=batch.step, sequences=sequences, fed=[p for number in fed for p in places[number]])


def train_sequences(trajectory: Trajectory, advantage: Advantage) -> list[TrainSequence]:
    """One for each segment: columns as the bytes of their arrays. What is not to be trained has an empty mask."""
    cuts = (0, *(trajectory.segment_ends or (len(trajectory.tokens),)))
    rewards = [TurnRewards(ends=(), rewards=())] * (len(cuts) - 1)
    if isinstance(advantage, TurnRewards):
        rewards = [advantage]
        if trajectory.segment_ends:
            rewards = split_rewards(advantage, trajectory.loss_mask.tobytes(), trajectory.segment_ends)
    return [
        TrainSequence(
            tokens=trajectory.tokens[start:end].tobytes(),
            loss_mask=trajectory.loss_mask[start:end].tobytes() if advantage is not None else bytes(end - start),
            logprobs=trajectory.logprobs[start:end].tobytes(),
            versions=trajectory.versions[start:end].tobytes(),
            advantage=advantage if isinstance(advantage, float) else 0.0,
            advantages=advantage[start:end].tobytes() if isinstance(advantage, array) else b"",
            turn_ends=turns.ends,
            turn_rewards=turns.rewards,
            continues=start > 0,
        )
        for (start, end), turns in zip(pairwise(cuts), rewards, strict=True)
    ]
