"""Plays every task of a folder that ``setup.py`` made: a scripted agent that knows the solution, and a random one.

    python recipes/swe/prove.py recipes/swe/build

The first must score 1.0 on every task, the other 0.0; the exit code says whether.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from asyncrl.core.types import Task
from asyncrl.env import Action, ToolCall
from asyncrl.envs.swe import SWE, Instance, parse_row
from asyncrl.loading import load_tasks

RANDOM_COMMANDS = 5


def calls_of(patch: str) -> list[ToolCall]:
    """A patch of one hunk a file as the edits that an agent would call."""
    calls: list[ToolCall] = []
    for file in patch.split("diff --git ")[1:]:
        head, *hunks = file.split("\n@@ ")
        path = head.rpartition("+++ b/")[2].strip()
        for hunk in hunks:
            lines = hunk.split("\n")[1:]
            old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
            new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
            arguments = {"command": "str_replace", "path": path, "old_str": old, "new_str": new}
            calls.append(ToolCall(id=str(len(calls)), name="edit", arguments=arguments))
    return calls


def gold(instance: Instance) -> list[ToolCall]:
    return calls_of(instance.gold)


def at_random(instance: Instance, rng: random.Random) -> list[ToolCall]:
    """Looks around, and swaps a word of the broken file for another."""
    path = instance.gold.partition("+++ b/")[2].partition("\n")[0]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("bash", {"command": "ls"}),
        ("bash", {"command": f"python -m pytest -q {instance.fail_to_pass[0].partition('::')[0]} | tail -3"}),
        ("bash", {"command": f"sed -i '{rng.randrange(1, 60)}s/a/b/' {path}"}),
        ("edit", {"command": "view", "path": path, "line": rng.randrange(1, 100)}),
        ("edit", {"command": "str_replace", "path": path, "old_str": "e", "new_str": "f"}),
    ]
    return [ToolCall(id=str(i), name=name, arguments=a) for i, (name, a) in enumerate(rng.sample(calls, 3))]


async def play(root: Path, task: Task, calls: list[ToolCall]) -> dict[str, float]:
    """Metrics of one episode that makes ``calls`` and submits."""
    env = SWE(root=str(root))
    try:
        await env.reset(task)
        calls = [*calls, ToolCall(id="end", name="submit")]
        for turn, call in enumerate(calls):
            action = Action(text="", token_ids=(), finish_reason="stop", turn=turn, tool_calls=[call])
            step = await env.step(action)
        return {**step.metrics, "reward": step.reward}
    finally:
        await env.close()


async def prove(root: Path, tasks: list[Task], at_once: int, seed: int) -> bool:
    right: list[bool] = []
    room = asyncio.Semaphore(at_once)

    async def one(number: int, task: Task) -> None:
        instance = parse_row(task.data)
        async with room:
            solved = await play(root, task, gold(instance))
            lost = await play(root, task, at_random(instance, random.Random(f"{seed}/{number}")))
        right.append(solved["reward"] == 1.0 and lost["reward"] == 0.0)
        gained = f"gold {solved['reward']:.0f} in {solved['sandbox_s']:.1f} s; random {lost['reward']:.0f}"
        print(f"{'ok ' if right[-1] else 'BAD'} {instance.id}: {gained}", flush=True)

    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tasks):
            group.create_task(one(number, task))
    print(f"{sum(right)} of {len(right)} tasks: gold 1.0 and random 0.0")
    return all(right)


def main() -> int:
    parser = argparse.ArgumentParser(description="Gold and random agents on every task.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tasks = [task for name in ("train", "heldout") for task in load_tasks(str(args.root / f"{name}.jsonl"), name)]
    return 0 if asyncio.run(prove(args.root, tasks, args.at_once, args.seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
