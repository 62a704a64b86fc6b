"""What the run store costs: CPU seconds a trajectory, on the loop (``put``) and beside it (the writing thread).

    python bench/store.py [--backlog N] [--json FILE]
    python bench/store.py --run recipes/runsum --set run.steps=30

Groups of 8 go through their life as in a run (opened, started, turns, scored, ready, consumed, given, trained), a
checkpoint every 20 steps, written to a real file with fsync. The wall clock is of no interest: writes are waited for by
nobody but the train step. ``--backlog``: the memory that so many finished trajectories of 32,000 tokens take which wait
for their batch, when they may have 64 MiB of it. ``--run``: the store's share of a real run's CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

from asyncrl.cli import main as asyncrl_main
from asyncrl.core import journal
from asyncrl.core.types import Task, Trajectory, Turn, flatten
from asyncrl.observe.database import STORE
from asyncrl.observe.store import SEGMENTS, Store
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


async def backlog(count: int) -> dict[str, Any]:
    blocking = ThreadBlocking(workers=1)
    turn = turn_of(32_000)
    resident = {}
    waiting = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Store(Path(folder), blocking=blocking, find_task=no_task, memory_bytes=64 << 20)) as store,
    ):
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(store.run())
            for number in range(count):
                task = Task(id=f"train/{number}", data={})
                store.put(journal.GroupOpened(group=number, task=task, tasks_done=number, trajectories=(number,)))
                waiting.append(trajectory(number, number, 0, [turn]))
                store.put(journal.Scored(trajectory=waiting[-1]))
                store.put(journal.GroupReady(group=number))
                if number % 16 == 15:
                    await store.committed()
                if number + 1 in (count // 4, count // 2, count):
                    resident[number + 1] = resident_mb()
            service.cancel()
    return {"tokens": count * 32_000, "mb": count * 32_000 * 13 / 1e6, "resident_mb": resident}


def share_of_a_run(recipe: str, overrides: list[str]) -> dict[str, float]:
    """CPU seconds of a real run: of the store's writes, of the controller with them, and of its children."""
    seconds = 0.0
    write = Store.write

    def measured(store: Store) -> None:
        nonlocal seconds
        flush = store.before

        def not_counted() -> None:  # the files beside the database
            nonlocal seconds
            began = time.thread_time()
            flush()
            seconds -= time.thread_time() - began

        store.before, began = not_counted, time.thread_time()
        try:
            write(store)
        finally:
            store.before = flush
        seconds += time.thread_time() - began

    Store.write = measured  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        options = [part for override in overrides for part in ("--set", override)]
        if code := asyncrl_main(["train", recipe, "--run-dir", f"{folder}/run", *options]):
            raise SystemExit(code)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "store_s": seconds,
        "controller_s": time.process_time(),
        "children_s": children.ru_utime + children.ru_stime,
        "share_of_controller": seconds / time.process_time(),
        "share_of_run": seconds / (time.process_time() + children.ru_utime + children.ru_stime),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backlog", type=int, default=1000, metavar="N")
    parser.add_argument("--run", metavar="RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --run")
    args = parser.parse_args()
    if args.run:
        print(", ".join(f"{key} {value:.3f}" for key, value in share_of_a_run(args.run, args.set).items()))
        return
    results = {name: asyncio.run(measure(*case, args.steps)) for name, case in CASES.items()}
    waiting = asyncio.run(backlog(args.backlog))
    print(f"backlog of {args.backlog}: {waiting}")
    for name, result in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:,.1f}" for key, value in result.items()))
    if args.json:
        args.json.write_text(json.dumps({**results, "backlog": waiting}, indent=2) + "\n")


if __name__ == "__main__":
    main()
