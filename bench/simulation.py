"""What a simulated hour costs: 64 servers × 256 trajectories at once, all the time, through the whole runtime.

    python bench/simulation.py [--mean 11000] [--servers 64] [--hours 1] [--json FILE]

The servers are StaleFlow's table 4, responses are lognormal (tailness 50) with this mean, and queue-drop keeps every
slot busy. CPU seconds of one core; the budget is 60 an hour.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.build.simulate import play
from asyncrl.config import Recipe, load_table
from asyncrl.observe.tally import Tally

CONCURRENCY = 256
PERIOD_S = 600.0
"""Of a train step: so many simulated seconds."""


def recipe_of(servers: int, mean: float, hours: float) -> Recipe:
    longest = int(8 * mean)
    slots = servers * CONCURRENCY
    return load_table(
        {
            "preset": "queue-drop",
            "rollout": {
                "batch_groups": slots // 64,
                "group_size": 16,
                "num_envs": slots,
                "max_new_tokens": longest,
                "max_tokens": longest + 100,
            },
            "engine": {
                "count": servers,
                "max_running_requests": CONCURRENCY,
                "max_total_tokens": CONCURRENCY * int(4 * mean),
                "stream_interval": 0,
                "idle_timeout_s": 1e5,
                "request_timeout_s": 1e5,
            },
            "env": {"episode_timeout_s": 1e5},
            "sim": {
                "lengths": {"kind": "lognormal", "mean": mean, "tailness": 50.0, "cap": float(longest)},
                "trainer": {"fixed_s": PERIOD_S, "tokens_per_s": 1e12},
                "weights": {"transport": "collective"},
            },
            "run": {"steps": max(1, round(hours * 3600 / PERIOD_S)), "trace_requests": False},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mean", type=float, default=11_000.0, help="tokens of a response, on average")
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    recipe = recipe_of(args.servers, args.mean, args.hours)
    tallies: list[Tally] = []

    def observe(clock: Callable[[], float]) -> Tally:
        tallies.append(Tally(recipe, clock))
        return tallies[0]

    began = time.process_time()
    books, error = play(recipe, observe)
    cpu = time.process_time() - began
    if error is not None:
        raise error
    [tally] = tallies
    summary = tally.summary(exit="finished", started="", command=(), ledger=books.counts())
    trajectories = sum(tally.states.values())
    row: dict[str, Any] = {
        "servers": args.servers,
        "concurrency": CONCURRENCY,
        "mean_tokens": args.mean,
        "simulated_s": summary.seconds,
        "trajectories": trajectories,
        "tokens": summary.tokens,
        "server_bubbles": summary.bubble_share,
        "cpu_s": cpu,
        "cpu_s_an_hour": cpu / summary.seconds * 3600,
        "cpu_us_a_trajectory": cpu / trajectories * 1e6,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }
    for key, value in row.items():
        print(f"{key:22}{value:,.4g}" if isinstance(value, float) else f"{key:22}{value}")
    if args.json:
        args.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
