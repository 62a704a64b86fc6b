"""What the run store costs: CPU seconds a trajectory, on the loop (``put``) and beside it (the writing thread).

    python bench/store.py [--json FILE]
    python bench/store.py --backlog 100000 [--tokens 2000] [--json FILE]
    python bench/store.py --run recipes/runsum --set run.steps=30 [--json FILE]

Groups of 8 go through their life as in a run (opened, started, turns, scored, ready, consumed, given, trained), a
checkpoint every 20 steps, written to a real file with fsync. The wall clock is of no interest: writes are waited for by
nobody but the train step. ``--backlog``: so many finished trajectories wait for their batch, and may have 64 MiB; what
this process has in memory while they come, after another process has gone on from the store, and what is on the disk;
then they are trained. ``--run``: the store's share of a real run's CPU seconds and of its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from asyncrl.build.fit import machine
from asyncrl.cli import main as asyncrl_main
from asyncrl.core import journal
from asyncrl.core.types import Task, Trajectory, Turn, flatten
from asyncrl.observe.database import STORE
from asyncrl.observe.run_dir import LineFile
from asyncrl.observe.store import SEGMENTS, Store
from asyncrl.observe.summary import read_summary
from asyncrl.workers import ThreadBlocking

GROUP = 8
BATCH = 16
CASES = {
    "single turn, 1,000 tokens": (1, 1000),
    "single turn, 16,000 tokens": (1, 16_000),
    "30 turns of 300 tokens": (30, 300),
}


def no_task(source: str, name: str) -> Task:
    raise KeyError(name)  # nothing is read here


def any_task(source: str, name: str) -> Task:
    return Task(id=name, data={})


def turn_of(tokens: int) -> Turn:
    prompt, output = tokens // 4, tokens - tokens // 4
    return Turn(
        prompt_ids=array("i", range(prompt)),
        output_ids=array("i", range(output)),
        logprobs=array("f", [-0.5]) * output,
        versions=array("i", [3]) * output,
        finish_reason="stop",
    )


def trajectory(number: int, group: int, index: int, turns: list[Turn]) -> Trajectory:
    tokens, mask, logprobs, versions = flatten(turns)
    return Trajectory(
        id=number,
        group_id=group,
        index=index,
        task_id=f"train/{group}",
        v_traj=0,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        turns=len(turns),
        reward=1.0,
        finish_reason="stop",
    )


async def measure(turns: int, tokens: int, steps: int) -> dict[str, Any]:
    blocking = ThreadBlocking(workers=1)
    turn = turn_of(tokens)
    whole = [turn] * turns
    on_loop = 0.0

    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Store(Path(folder), blocking=blocking, find_task=no_task)) as store,
    ):

        def put(entry: journal.Entry) -> None:
            nonlocal on_loop
            began = time.thread_time()
            store.put(entry)
            on_loop += time.thread_time() - began

        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(store.run())
            began, loop_began = time.process_time(), time.thread_time()
            most = 0
            for step in range(steps):
                groups = range(step * BATCH, (step + 1) * BATCH)
                for group in groups:
                    numbers = tuple(range(group * GROUP, (group + 1) * GROUP))
                    put(
                        journal.GroupOpened(
                            group=group, task=Task(id=f"train/{group}", data={}), tasks_done=group, trajectories=numbers
                        )
                    )
                    put(journal.GroupStarted(group=group, v_traj=step, deadline=step + 1))
                    for index, number in enumerate(numbers):
                        for k in range(turns):
                            put(journal.TurnPiece(trajectory=number, number=k, turn=turn))
                        if turns > 1:
                            await asyncio.sleep(0.001)  # turns take longer than a write
                        put(journal.Scored(trajectory=trajectory(number, group, index, whole)))
                    put(journal.GroupReady(group=group))
                put(journal.BatchTaken(step=step, groups=tuple(groups)))
                put(journal.Given(step=step, groups=tuple(groups), advantages=[0.5] * (BATCH * GROUP)))
                await store.committed()
                put(journal.Trained(step=step, checksum=step))
                if step % 20 == 19:
                    put(journal.Checkpointed(version=step))
                sizes = [path.stat().st_size for path in (Path(folder) / SEGMENTS).iterdir()]
                most = max(most, sum(sizes))
            await store.committed()
            whole_cpu, loop_cpu = time.process_time() - began, time.thread_time() - loop_began
            service.cancel()
        database = sum(path.stat().st_size for path in Path(folder).glob(f"{STORE}*"))
    trajectories = steps * BATCH * GROUP
    return {
        "trajectories": trajectories,
        "tokens": trajectories * turns * tokens,
        "loop_us": 1e6 * on_loop / trajectories,
        "writer_us": 1e6 * (whole_cpu - loop_cpu) / trajectories,
        "us_per_turn": 1e6 * (on_loop + whole_cpu - loop_cpu) / trajectories / turns,
        "segments_mb_most": most / 1e6,
        "database_bytes_per_trajectory": database / trajectories,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


Phase = Callable[[Path, int, int], Coroutine[Any, Any, dict[str, Any]]]


def store_of(folder: Path) -> Store:
    return Store(folder, blocking=ThreadBlocking(workers=1), find_task=any_task, memory_bytes=64 << 20)


def on_disk_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


async def fill_up(folder: Path, count: int, tokens: int) -> dict[str, Any]:
    turn, waiting, resident = turn_of(tokens), [], {}
    with closing(store_of(folder)) as store:
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(store.run())
            for number in range(count):
                task = Task(id=f"train/{number}", data={})
                store.put(journal.GroupOpened(group=number, task=task, tasks_done=number, trajectories=(number,)))
                store.put(journal.GroupStarted(group=number, v_traj=0, deadline=None))
                waiting.append(trajectory(number, number, 0, [turn]))
                store.put(journal.Scored(trajectory=waiting[-1]))
                store.put(journal.GroupReady(group=number))
                if number % 16 == 15:
                    await store.committed()
                if number + 1 in (count // 2, count):
                    resident[number + 1] = round(resident_mb(), 1)
            service.cancel()
    (half, middle), (whole, last) = resident.items()
    return {
        "resident_mb": resident,
        "resident_bytes_per_trajectory": round(2**20 * (last - middle) / (whole - half)),
        "disk_mb": round(on_disk_mb(folder), 1),
        "cpu_s": round(time.process_time(), 1),
    }


async def go_on(folder: Path, count: int, tokens: int) -> dict[str, Any]:
    """Another process finds them all, and they are trained; a checkpoint every 20 steps."""
    before = resident_mb()
    with closing(store_of(folder)) as store:
        groups = store.load(0).groups
        found = time.process_time()
        resident = most = resident_mb()
        waiting = [slot.trajectory for group in groups for slot in group.slots if slot.trajectory is not None]
        assert len(waiting) == count
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(store.run())
            for step, first in enumerate(range(0, count, BATCH * GROUP)):
                batch = waiting[first : first + BATCH * GROUP]
                store.put(journal.BatchTaken(step=step, groups=tuple(t.group_id for t in batch)))
                await store.fill(batch)
                assert all(len(t.tokens) == tokens for t in batch)
                store.put(journal.Trained(step=step, checksum=step))
                if step % 20 == 19 or first + len(batch) == count:
                    store.put(journal.Checkpointed(version=step + 1))
                await store.committed()
                most = max(most, resident_mb())
                for t in batch:  # as nobody holds them any more
                    for column in (t.tokens, t.loss_mask, t.logprobs, t.versions):
                        del column[:]
            service.cancel()
    return {
        "resumed_mb": round(resident - before, 1),
        "resumed_cpu_s": round(found, 1),
        "training_mb_most": round(most - before, 1),
        "disk_mb_after": round(on_disk_mb(folder), 1),
    }


def backlog(count: int, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        came, trained = (in_a_process(phase, folder, count, tokens) for phase in (fill_up, go_on))
    return {"trajectories": count, "tokens_each": tokens, "mb": round(count * tokens * 13 / 1e6), **came, **trained}


def in_a_process(phase: Phase, *args: Any) -> dict[str, Any]:
    """Of its own, so that its memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_phase, phase, *args).result()


def run_phase(phase: Phase, *args: Any) -> dict[str, Any]:
    return asyncio.run(phase(*args))


def share_of_a_run(recipe: str, overrides: list[str]) -> dict[str, float]:
    """Of a real run: CPU seconds of the store's writes (without the files beside the database, which are written first)
    and of what it does on the loop, of the controller with them, and of its children; how long steps waited for the
    store, all in all; how long segments were synced, which depends on what else the disk does; and the run's time."""
    spent: Counter[str] = Counter()
    write, put, committed, sync = Store.write, Store.put, Store.committed, LineFile.sync

    @contextmanager
    def clocked(name: str, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        began = clock()
        try:
            yield
        finally:
            spent[name] += clock() - began

    def measured_write(store: Store, put: int | None = None) -> None:
        flush = store.before

        def flush_by_itself() -> None:
            with clocked("files_cpu_s"):
                flush()

        store.before = flush_by_itself
        try:
            with clocked("writes_cpu_s"):
                write(store, put)
        finally:
            store.before = flush

    def measured_put(store: Store, entry: journal.Entry) -> None:
        with clocked("put_cpu_s"):
            put(store, entry)

    def measured_sync(file: LineFile) -> None:
        with clocked("segments_sync_s", time.monotonic):
            sync(file)

    async def measured_committed(store: Store) -> None:
        spent["waits"] += 1
        with clocked("waited_s", time.monotonic):
            await committed(store)

    Store.write, Store.put, Store.committed = measured_write, measured_put, measured_committed  # type: ignore[method-assign]
    LineFile.sync = measured_sync  # type: ignore[method-assign]
    options = [part for override in overrides for part in ("--set", override)]
    with tempfile.TemporaryDirectory() as folder:
        if code := asyncrl_main(["train", recipe, "--run-dir", f"{folder}/run", *options]):
            raise SystemExit(code)
        summary = read_summary(Path(folder) / "run")
    assert summary is not None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    controller, children = time.process_time(), usage.ru_utime + usage.ru_stime
    store = spent["writes_cpu_s"] - spent["files_cpu_s"] + spent["put_cpu_s"]
    return {
        **spent,
        "store_cpu_s": store,
        "controller_cpu_s": controller,
        "children_cpu_s": children,
        "run_s": summary.seconds,
        "store_share_of_controller": store / controller,
        "store_share_of_all_cpu": store / (controller + children),
        "store_cpu_share_of_time": store / summary.seconds,
        "waited_share_of_time": spent["waited_s"] / summary.seconds,
        "load": os.getloadavg()[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="put it there, beside what else was measured")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backlog", type=int, metavar="N")
    parser.add_argument("--tokens", type=int, default=2000, help="of each trajectory of --backlog")
    parser.add_argument("--run", metavar="RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --run")
    args = parser.parse_args()
    if args.run:
        results = {"run": share_of_a_run(args.run, args.set)}
    elif args.backlog:
        results = {f"backlog of {args.tokens:,} tokens": backlog(args.backlog, args.tokens)}
    else:
        results = {name: asyncio.run(measure(*case, args.steps)) for name, case in CASES.items()}
    for name, result in results.items():
        print(f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in result.items()))
    if args.json:
        others = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps({**others, "machine": machine(), **results}, indent=1) + "\n")


def _shown(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
