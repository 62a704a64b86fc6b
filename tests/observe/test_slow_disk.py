"""A disk that takes its time: who has to be sure waits for it, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.core import journal
from asyncrl.core.types import Task
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_dir import METRICS, LineFile
from asyncrl.observe.store import Store
from asyncrl.workers import ThreadBlocking

from .synthetic import Clock, make_recipe, make_step, make_trajectory

PATIENCE_S = 60.0


async def test_a_store_on_a_slow_disk_holds_back_only_who_waits_for_it(tmp_path: Path) -> None:
    gate = threading.Event()
    blocking = ThreadBlocking(workers=1)
    with closing(Store(tmp_path, blocking=blocking, find_task=lambda source, name: Task(id=name, data={}))) as store:
        store.before = lambda: gate.wait(PATIENCE_S) or None
        async with asyncio.TaskGroup() as group:
            service = group.create_task(store.run())
            for number in range(500):
                store.put(
                    journal.GroupOpened(
                        group=number, task=Task(id="t", data={}), tasks_done=number + 1, trajectories=(number,)
                    )
                )
                if number == 0:
                    sure = group.create_task(store.committed())
                await asyncio.sleep(0.0002)  # the loop turns all the while
            assert not sure.done()
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                await sure
                await store.committed()
            service.cancel()
    await blocking.close()


async def test_a_recorder_on_a_slow_disk_takes_what_comes_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), LineFile.write

    def slow(self: LineFile, data: bytes) -> None:
        gate.wait(PATIENCE_S)
        write(self, data)

    monkeypatch.setattr(LineFile, "write", slow)
    clock, blocking = Clock(), ThreadBlocking(workers=1)
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.step(make_step(0, [make_trajectory(0)], clock.now + 1))
    async with asyncio.TaskGroup() as group:
        flushing = group.create_task(blocking.run(recorder.flush))
        for step in range(1, 200):
            clock.now += 1
            recorder.step(make_step(step, [make_trajectory(step)], clock.now + 1))
            await asyncio.sleep(0.0002)
        assert not flushing.done()
        gate.set()
    recorder.close()
    await blocking.close()
    assert (tmp_path / METRICS).read_bytes().count(b"\n") == 200
