"""A real run whose processes are killed again and again: was anything lost, trained twice or too stale?

    python bench/soak.py [RECIPE] [--minutes 60] [--every 20] [--kill server,trainer,env] [--set KEY=VALUE]
                         [--seed 0] [--json FILE]

Every ``--every`` seconds, give or take half of it, one process of a kind drawn by ``--seed`` gets SIGKILL: an inference
server, a rank of the trainer, a relay or a worker of the environments, where the recipe has any, or the controller. For
that the same command is given again, and the next kill waits for a step. When the time is over the run is interrupted
as by Ctrl-C. The controller itself raises when its ledger does not balance or a trained group was too stale; here the
same is read once more from what it wrote. Memory is that of the controller that runs at the moment. Linux.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from processes import ALWAYS, COMMANDS, Run, kill

from asyncrl.build.fit import machine
from asyncrl.config import load
from asyncrl.observe.run_dir import METRICS, read_lines
from asyncrl.observe.summary import read_summary

CONTROLLER = "controller"
KINDS = (*COMMANDS, CONTROLLER)
ENDED_S = 120.0
FIRST_LAST = 10


def soak(recipe: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    run = Run(recipe, folder / "run", [*ALWAYS, *args.set])
    killed: Counter[str] = Counter()
    memory: list[float] = []
    try:
        run.wait_for_steps(2)
        print(f"step 2 at {time.strftime('%H:%M:%S')}; killing {', '.join(args.kill)}", flush=True)
        ends = time.monotonic() + 60 * args.minutes
        while time.monotonic() < ends and run.process.poll() is None:
            time.sleep(min(args.every * rng.uniform(0.5, 1.5), max(0.0, ends - time.monotonic())))
            kind = rng.choice(args.kill)
            found = [run.process.pid] if kind == CONTROLLER else run.of(kind)
            if found and time.monotonic() < ends:
                kill(rng.choice(found))
                killed[kind] += 1
            if kind == CONTROLLER:
                steps = run.steps()
                run.start_again(ENDED_S)
                run.wait_for_steps(steps + 1)  # whatever dies while a run starts ends it, for that may be the recipe
            if run.process.poll() is None:
                memory.append(run.controller_mb())
        run.interrupt(ENDED_S)
    finally:
        if run.process.poll() is None:
            run.kill()
    left = run.leftovers()
    text = run.output.read_text()
    print(text[-1500:])
    return _account(recipe, run, args, killed, memory, left)


def _account(
    recipe: Path, run: Run, args: argparse.Namespace, killed: Counter[str], memory: list[float], left: list[str]
) -> dict[str, Any]:
    summary = read_summary(run.run_dir)
    lines = list(read_lines(run.run_dir / METRICS))
    ledger = summary.ledger
    ends = {name: ledger[name] for name in ("consumed", "filtered", "surplus", "failed", "aborted")}
    limit = load(recipe, overrides=[*ALWAYS, *args.set]).staleness.limit
    batches = [line["version"] for line in lines]
    quarter = max(1, len(memory) // 4)
    return {
        "recipe": recipe.name,
        "settings": args.set,
        "machine": machine(),
        "minutes": args.minutes,
        "killed": dict(killed),
        "exit": summary.exit,
        "steps": len(lines),
        "reserved": ledger["reserved_ever"],
        "lost": ledger["reserved_ever"] - sum(ends.values()),
        "trained_twice": len(batches) - len(set(batches)),
        "staleness_max": max(line["staleness/max"] for line in lines),
        "staleness_limit": limit,
        "reward_first": fmean(line["reward/mean"] for line in lines[:FIRST_LAST]),
        "reward_last": fmean(line["reward/mean"] for line in lines[-FIRST_LAST:]),
        "controller_mb_first_quarter": median(memory[:quarter]),
        "controller_mb_last_quarter": median(memory[-quarter:]),
        "left_over": left,
        **ends,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/runsum"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills, on average")
    parser.add_argument("--kill", default="server", help=f"kinds, of {', '.join(KINDS)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="lay over the recipe")
    parser.add_argument("--seed", type=int, default=0, help="of whom is killed when")
    parser.add_argument("--json", type=Path, help="write the account here")
    args = parser.parse_args()
    args.kill = args.kill.split(",")
    if unknown := set(args.kill) - set(KINDS):
        parser.error(f"--kill: unknown {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as folder:
        account = soak(args.recipe, Path(folder), args)
    text = json.dumps(account, indent=1, ensure_ascii=False)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    limit = account["staleness_limit"]
    good = account["exit"] == "interrupted" and not account["lost"] and not account["trained_twice"]
    good = good and not account["left_over"] and (limit is None or account["staleness_max"] <= limit)
    print("all accounted for" if good else "NOT in order")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
