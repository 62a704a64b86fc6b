"""Plays one task of a ``verifiers`` environment, or lists its tasks as rows. Run by the Python that has ``verifiers``,
so nothing of asyncrl is imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any


async def play(env: Any, index: int) -> dict[str, Any]:
    """Reward and metrics of one episode. ``error`` is what it failed of; a full context is an end and no failure."""
    import verifiers.v1 as vf

    [task] = env.taskset.include(idx=[index])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    failed = [e for e in errors if "context_length_exceeded" not in e.message]
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    numbers: dict[str, list[float]] = defaultdict(list)
    for trace in traces:
        for name, value in trace.metrics.items():
            if value is not None:
                numbers[name].append(value)
        for name, reward in trace.rewards.items():
            if reward is not None:
                numbers[name].append(reward.score)
    return {
        "reward": fmean(trace.reward for trace in traces) if traces else 0.0,
        "metrics": {name: fmean(values) for name, values in numbers.items()},
        "error": f"{failed[0].type}: {failed[0].message}" if failed else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Play a task of a verifiers environment, or list its tasks.")
    parser.add_argument("what", choices=["rows", "play"])
    parser.add_argument("config", type=json.loads, metavar="JSON", help="the environment, as verifiers' env")
    parser.add_argument("--index", type=int, default=0, help="of the task")
    parser.add_argument("--result", type=Path, help="file for what came out")
    parser.add_argument("--limit", type=int, default=None, help="rows at most")
    args = parser.parse_args()
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "verifiers":
            raise
        sys.exit(3)
    env = load_environment(resolve_env_config(args.config))
    if args.what == "rows":
        for task in env.taskset if args.limit is None else env.taskset.take(args.limit):
            print(json.dumps({"index": task.data.idx}))
    else:
        args.result.write_text(json.dumps(asyncio.run(play(env, args.index))))


if __name__ == "__main__":
    main()
