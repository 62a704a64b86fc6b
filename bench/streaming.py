"""What streaming groups to the trainer is worth, in simulation: the same recipe with it and without.

    python bench/streaming.py [--steps 10] [--json FILE]

16 servers (Qwen3-8B on an H800, an estimate) and 8 GPUs that train; 32 groups of 8 a step, lengths of Qwen3-8B-Think.
Times are simulated seconds a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from asyncrl.build.simulate import play
from asyncrl.config import Recipe, load_table
from asyncrl.observe.tally import Tally
from asyncrl.ports import StepMetrics

COLUMNS = ("seconds", "wait_s", "train_s", "streamed_s", "update_s")


class Kept(Tally):
    """With each step's metrics."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.steps.append(metrics)


def recipe_of(bound: float, stream: bool, steps: int) -> Recipe:
    return load_table(
        {
            "rollout": {
                "batch_groups": 32,
                "group_size": 8,
                "num_envs": 512,
                "max_new_tokens": 30000,
                "max_tokens": 32000,
            },
            "engine": {
                "count": 16,
                "max_running_requests": 64,
                "max_total_tokens": 1_000_000,
                "stream_interval": 0,
                "request_timeout_s": 1e5,
                "idle_timeout_s": 1e5,
            },
            "env": {"episode_timeout_s": 1e5},
            "trainer": {"ranks": 4, "micro_batch_tokens": 32768, "stream": stream},
            "staleness": {"bound": bound},
            "run": {"steps": steps, "trace_requests": False},
            "sim": {
                "lengths": {"kind": "named", "name": "qwen3-8b-think"},
                "prompt_tokens": {"kind": "constant", "value": 200},
                "instance": {"profile": "qwen3-8b@h800"},
                "trainer": {"gpus": 8, "tokens_per_s": 3000},
            },
        }
    )


def measure(bound: float, stream: bool, steps: int) -> dict[str, float]:
    recipe = recipe_of(bound, stream, steps)
    tallies: list[Kept] = []

    def observe(clock: Callable[[], float]) -> Kept:
        tallies.append(Kept(recipe, clock))
        return tallies[0]

    _, error = play(recipe, observe)
    if error is not None:
        raise error
    [tally] = tallies
    summary = tally.summary(exit="finished", started="", command=(), ledger={})
    times = {name: fmean(getattr(step, name) for step in tally.steps) for name in COLUMNS}
    return {
        "bound": bound,
        "stream": stream,
        **times,
        "server_bubbles": summary.bubble_share or 0.0,
        "trainer_idle": summary.trainer_idle_share or 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(bound, stream, args.steps) for bound in (0, 1) for stream in (False, True)]
    for row in rows:
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
