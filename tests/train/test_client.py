"""The trainer's client by itself: a job that another host runs, and that goes silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from asyncrl.config import Recipe, TrainerConfig
from asyncrl.core.types import Batch
from asyncrl.ports import TrainerDied, TrainerError
from asyncrl.train.client import HttpTrainer
from asyncrl.wire import TrainerInfo, TrainReply

HEALTH_S = 1.0
INFO = TrainerInfo(version=0, world_size=1, backend="gloo", parameters=1, names=[], dtypes=[], shapes=[])


class Job:
    """Rank 0 as seen from outside: ``/saved`` takes ``seconds``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.backend = "gloo"
        self.there = asyncio.Event()
        self.there.set()
        self.asked = 0

    async def health(self, _: web.Request) -> web.Response:
        self.asked += 1
        await self.there.wait()
        return web.Response(body=msgspec.msgpack.encode(msgspec.structs.replace(INFO, backend=self.backend)))

    async def saved(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.seconds)
        return await self.train_step(request)

    async def train_step(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.msgpack.encode(TrainReply(version=0, metrics={})))


@pytest.fixture
async def job() -> AsyncIterator[tuple[Job, str]]:
    job, app = Job(), web.Application()
    app.add_routes(
        [web.get("/health", job.health), web.post("/saved", job.saved), web.post("/train_step", job.train_step)]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield job, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def trainer(job: tuple[Job, str], tmp_path: Path) -> AsyncIterator[HttpTrainer]:
    _, url = job
    recipe = Recipe(trainer=TrainerConfig(url=url, health_timeout_s=HEALTH_S, connect_timeout_s=20, step_timeout_s=60))
    client = HttpTrainer(recipe, "", run_dir=tmp_path, log=tmp_path / "none.log", url=url)
    await client.connect()
    yield client
    await client.close()


async def test_a_command_that_takes_long_is_waited_for_while_the_job_is_there(
    job: tuple[Job, str], trainer: HttpTrainer
) -> None:
    there, _ = job
    there.seconds = 2.5 * HEALTH_S
    await trainer.saved()
    assert there.asked >= 4


async def test_a_job_that_says_nothing_any_more_is_given_up_long_before_its_step_would_be(
    job: tuple[Job, str], trainer: HttpTrainer
) -> None:
    there, _ = job
    there.seconds = 3600.0
    there.there.clear()
    with pytest.raises(TrainerError, match=r"has not answered /health for 1 s, with /saved at work") as raised:
        await trainer.saved()
    assert not isinstance(raised.value, TrainerDied), "a job at a URL is not ours to start again"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
async def test_only_a_job_on_cpus_is_said_to_repeat_itself(
    job: tuple[Job, str], trainer: HttpTrainer, backend: str
) -> None:
    job[0].backend = backend
    await trainer.connect()
    assert (await trainer.train_step(Batch(step=0, groups=()), ())).repeats == (backend == "gloo")
