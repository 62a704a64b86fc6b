"""CPU of one operation of the staleness buffers at the size of a large run.

    python bench/staleness_control.py --json bench/results/staleness_control.json

The buffers are kept full: groups start on whatever version has room, as servers that update one by one leave it, end in
random order, now and then one is aborted, and each batch that is ready is trained. Everything that a run asks of the
control for each group is called, and timed apart. The shares of the calls do not matter: no call costs the number of
groups, but ``consume``, which pays for those it returns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.core.staleness.buffers import StalenessBuffers


class Timed:
    """CPU time and number of the calls of each operation."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __call__(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        begun = time.process_time_ns()
        result = call(*args)
        self.spent[name] = self.spent.get(name, 0) + time.process_time_ns() - begun
        self.calls[name] = self.calls.get(name, 0) + 1
        return result

    def microseconds(self, name: str) -> float:
        return self.spent[name] / self.calls[name] / 1000


def measure(batch: int, bound: int, steps: int, seed: int) -> dict[str, float]:
    """Mean microseconds a call; ``consume`` for each group of the batch, and ``not ready`` where it finds none."""
    rng, timed = random.Random(seed), Timed()
    buffers = StalenessBuffers(batch=batch, bound=bound)
    unfinished: list[int] = []
    next_id = step = 0
    while step < steps:
        for version in range(max(0, step - bound), step + 1):
            while timed("room", buffers.room, version):
                timed("reserve", buffers.reserve, next_id, version)
                unfinished.append(next_id)
                next_id += 1
        i = rng.randrange(len(unfinished))
        unfinished[i], unfinished[-1] = unfinished[-1], unfinished[i]
        if rng.random() < 0.05:
            timed("release", buffers.release, unfinished.pop())
        else:
            timed("occupy", buffers.occupy, unfinished.pop())
        ready = len(buffers.certain(batch)) == batch
        if timed("consume" if ready else "not ready", buffers.consume):
            step += 1
    result = {name: timed.microseconds(name) for name in ("room", "reserve", "occupy", "release", "not ready")}
    return {**result, "consume, a group": timed.microseconds("consume") / batch}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of one operation of the staleness buffers.")
    parser.add_argument("--bound", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {str(batch): measure(batch, args.bound, max(1, 8192 // batch), seed=0) for batch in args.batches}
    for batch, row in results.items():
        print(f"batch {batch:>5}, η = {args.bound}: " + ", ".join(f"{name} {us:.1f} µs" for name, us in row.items()))
    if args.json:
        args.json.write_text(json.dumps({"bound": args.bound, "microseconds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
