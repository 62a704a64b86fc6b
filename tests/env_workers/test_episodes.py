"""Whole groups of episodes in real worker processes that hang, crash and are surplus: the books balance."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from asyncrl.core.policy.routing import least_loaded
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.types import Task
from asyncrl.env_workers.pool import EnvProcesses
from asyncrl.runtime.conversation import ChatTemplate
from asyncrl.runtime.env_manager import EnvManager, EpisodeLimits, EpisodePlayer, EpisodePlayers
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.task_source import TaskSource
from asyncrl.runtime.user_code import FailureWindow
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.tokenizer import SimTokenizer
from asyncrl.sim.trace import TraceRecorder

from . import engines
from .test_pool import SOON_S, pool, running


async def batches(envs: EnvProcesses, tasks: list[Task], *, steps: int, slots: int, **settings: Any) -> SampleBuffer:
    """Train ``steps`` batches of two groups of two; the buffer, closed and balanced."""
    proxy = LLMProxy(route=least_loaded, observer=TraceRecorder(), context_length=1000)
    engine = SimEngine("server 0", rng=random.Random(0), lengths=lambda rng, ids: 2)
    proxy.add(engine, await engine.connect())
    observer = TraceRecorder()
    buffer = SampleBuffer(
        control=InflightCap(batch=2, alpha=steps),  # the version stays 0
        tasks=TaskSource(tasks, seed=0, shuffle=False),
        group_size=2,
        observer=observer,
        retries=3,
        backoff_s=0.01,
        **settings,
    )
    player = EpisodePlayer(
        envs=envs,
        scorer=None,
        proxy=proxy,
        template=ChatTemplate(SimTokenizer()),
        limits=EpisodeLimits(max_turns=2, max_new_tokens=5, max_tokens=100, reset_timeout_s=None, step_timeout_s=None),
    )
    async with asyncio.TaskGroup() as group:
        managers = [
            EnvManager(
                name=f"env {i}",
                buffer=buffer,
                player=EpisodePlayers({"": player}),
                failures={"": FailureWindow(size=100, max_rate=1.0)},
                observer=observer,
                episode_timeout_s=SOON_S,
                temperature=1.0,
                top_p=1.0,
            )
            for i in range(slots)
        ]
        playing = [group.create_task(manager.run()) for manager in managers]
        for step in range(steps):
            await buffer.get_batch(step)
        buffer.close("run ended")
        for task in playing:
            task.cancel()
    buffer.ledger.check_balanced()
    return buffer


async def test_hangs_and_crashes_cost_their_own_episodes_and_are_told_apart(tmp_path: Path) -> None:
    envs = pool(tmp_path, engines.Chaotic, workers=2, step_timeout_s=0.3, kwargs={"marks": str(tmp_path)})
    tasks = [Task(id=f"t{i}", data={"fault": ("", "stubborn 60", "exit 7", "raise x")[i % 4]}) for i in range(12)]
    async with running(envs):
        buffer = await batches(envs, tasks, steps=6, slots=4)
    counts, reasons = buffer.ledger.counts(), buffer.ledger.reasons()["failed"]
    assert counts["consumed"] == 6 * 4
    assert reasons["step: no answer within 0.3 s"] == 3
    assert reasons["step: ValueError: x"] == 3
    assert reasons["infra: step: its worker process exited with 7"] >= 3
    snapshot = buffer.snapshot()
    assert snapshot.failed_task == 6
    assert snapshot.failed_infra == sum(n for reason, n in reasons.items() if reason.startswith("infra: "))


async def test_a_surplus_step_does_not_keep_its_worker(tmp_path: Path) -> None:
    """Redundant members: a slow one is interrupted when its group is complete, and its worker goes on at once."""
    envs = pool(tmp_path, engines.Alone, workers=6, kwargs={"marks": str(tmp_path)})
    tasks = [Task(id=f"t{i}", data={"fault": "sleep 60"}) for i in range(8)]
    began = time.monotonic()
    async with running(envs):
        buffer = await batches(envs, tasks, steps=4, slots=6, group_size_redundancy=1)
    assert time.monotonic() - began < 10
    assert buffer.ledger.counts()["surplus"] == 4 * 2
    assert buffer.snapshot().failed_task == buffer.snapshot().failed_infra == 0
