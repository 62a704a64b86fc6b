"""Environments for real: how many one controller drives, what faults cost, what environment-level asynchrony and
redundant environments (ROLL Flash §5.2) bring on ALFWorld's own engine. Wall time.

    python bench/envs.py [--quick] [--only scale,chaos,lock-step,redundant] [--json FILE]

The runtime is the real one from the lease to the batch, over HTTP to a scripted server (scripted_server.py) that
answers each turn with the same tokens after the same time; the trainer takes a moment and computes nothing. ALFWorld's
games are made by the shipped generator and played by chance in worker processes. Latencies, turns and faults are
functions of the task and the episode's number, so that the two runs of a comparison are given the same work. The
paper's latencies are in seconds, here a twentieth of them; their simulated counterparts, at the paper's size, are
figures/fig9.py to fig11.py.

Event-loop lag: how much later than asked a sleep of 10 ms ends, all the while.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from env_runs import Games, Kind, recipe_of, run
from injected import NO_FAULTS, Cheap, Faults, Injected

from asyncrl.build.fit import machine
from asyncrl.config import Recipe
from asyncrl.core.distributions import Constant, Distribution, Normal
from asyncrl.core.types import Task
from asyncrl.ports import EnvSource
from asyncrl.runtime.env_source import LocalEnvs

sys.path.append(str(Path(__file__).parent / "figures"))
from agentic import Rounds

LAG_BUDGET_S = 0.02
CHAOS = Faults(hang=0.05, crash=0.05, slow=0.10)
CHAOS_BUDGET = 0.05
SCALE = 1 / 20
"""Of the paper's seconds."""
GAMES = 24


def cheap_tasks() -> list[Task]:
    return [Task(id=f"task {i}", data={}) for i in range(1000)]


# --- what is measured; each gives the rows of the results


def scale(games: Games | None, quick: bool) -> Iterator[dict[str, Any]]:
    """Many environments at once. The ideal: each spends its time in latencies and replies alone."""
    turns, reply_s = 10, 0.1
    latency = Normal(mean=0.5, std=0.2) if quick else Normal(mean=2.0, std=1.0)

    def measure(name: str, *kinds: tuple[int, Callable[[Recipe], EnvSource], list[Task]]) -> dict[str, Any]:
        count = sum(envs for envs, _, _ in kinds)
        groups = max(1, count // 80)
        rounds = math.ceil(count / (groups * 8))  # steps in which every environment ends one episode
        # Twice as many groups may be in progress as there are environments for: most groups wait for their last member
        # while the others' environments play the next, and none is to be without work but at the end.
        recipe = recipe_of(groups=groups, group_size=8, steps=4 * rounds, alpha=19.0, num_envs=count, max_turns=turns)
        outcome = run(
            name,
            recipe,
            *(
                Kind(
                    envs=lambda inner=inner: Injected(  # type: ignore[misc]
                        inner(recipe), latency=latency, turns=Constant(value=turns), max_turns=turns
                    ),
                    tasks=tasks,
                    weight=envs,
                )
                for envs, inner, tasks in kinds
            ),
            reply_s=reply_s,
            warm=rounds,
            cool=rounds + 1,
        )
        return {"envs": count, "ideal": count / (latency.expected + reply_s), **msgspec.to_builtins(outcome)}

    cheap = 200 if quick else 2000
    cheap_envs = (cheap, lambda recipe: LocalEnvs(Cheap), cheap_tasks())
    yield measure(f"{cheap} async environments", cheap_envs)
    if games is not None:
        count = 10 if quick else 200
        alfworld = (count, lambda recipe: games.envs(recipe, per_process=64, count=count), games.tasks)
        yield measure(f"{count} ALFWorld environments", alfworld)
        yield measure(f"{cheap} async and {count} ALFWorld environments", cheap_envs, alfworld)


def chaos(games: Games | None, quick: bool) -> Iterator[dict[str, Any]]:
    """The same run without and with faults, its server always busy: more environments than it can serve, and half as
    many members of a group, and groups, again as are trained."""
    turns = 4 if quick else 10

    def measure(
        name: str, groups: int, running: int, inner: Callable[[Recipe], EnvSource], tasks: list[Task], wait_s: float
    ) -> dict[str, Any]:
        recipe = recipe_of(
            groups=groups,
            group_size=4,
            steps=6 if quick else 10,
            alpha=2.0,
            more_groups=groups // 2,
            more_members=2,
            max_turns=turns,
            step_timeout_s=wait_s,
            running=running,
        )
        pair = []
        for label, faults in (("without faults", NO_FAULTS), ("with faults", CHAOS)):
            source = lambda faults=faults: Injected(  # noqa: E731
                inner(recipe),
                latency=Normal(mean=0.2, std=0.1),
                turns=Constant(value=turns),
                max_turns=turns,
                faults=faults,
            )
            pair.append(run(f"{name}, {label}", recipe, Kind(envs=source, tasks=tasks), warm=2 if quick else 3))
        loss = 1 - pair[1].trained_per_s / pair[0].trained_per_s
        failed = pair[1].played.failed_share
        return {
            "name": name,
            "loss": loss,
            "failed_share": failed,
            "allowed": failed + CHAOS_BUDGET,
            "runs": msgspec.to_builtins(pair),
        }

    yield measure("async environments", 4 if quick else 16, 16, lambda recipe: LocalEnvs(Cheap), cheap_tasks(), 6.0)
    if games is not None:
        envs = lambda recipe: games.envs(recipe, per_process=1)  # noqa: E731
        yield measure("ALFWorld, a process each", 2 if quick else 6, 8, envs, games.tasks, 3.0)


def lock_step(games: Games | None, quick: bool) -> Iterator[dict[str, Any]]:
    """Environment-level asynchrony off (all environments of a batch step together) and on: figure 9."""
    if games is None:
        return
    groups, size, turns = (1, 4, 4) if quick else (4, 8, 20)
    recipe = recipe_of(groups=groups, group_size=size, steps=2 if quick else 3, max_turns=turns)
    for std in (10,) if quick else (1, 10):
        latency = Normal(mean=10 * SCALE, std=std * SCALE)
        pair = []
        for label, together in (("lock-step", True), ("asynchronous", False)):
            source = lambda together=together, latency=latency: Injected(  # noqa: E731
                games.envs(recipe, per_process=16),
                latency=latency,
                turns=Constant(value=turns),
                max_turns=turns,
                rounds=Rounds(recipe.batch_trajectories) if together else None,
            )
            pair.append(run(f"latency (10, {std})/20 s, {label}", recipe, Kind(envs=source, tasks=games.tasks), warm=1))
        yield {"latency": [10, std], "speedup": pair[0].step_s / pair[1].step_s, "runs": msgspec.to_builtins(pair)}


def redundant(games: Games | None, quick: bool) -> Iterator[dict[str, Any]]:
    """Redundant environments off and on, with synchronous and asynchronous training, without and with failures."""
    if games is None:
        return
    groups, size, steps = (1, 4, 2) if quick else (4, 8, 5)
    turns: Distribution = Normal(mean=4, std=1) if quick else Normal(mean=10, std=3)
    failing = Faults(hang=0.01, crash=0.01, slow=0.02, slow_factor=3.0)
    for alpha in (0.0,) if quick else (0.0, 1.0):
        for label, faults in (("none", NO_FAULTS), ("failures", failing)):
            pair = []
            for more in (0, 1):
                recipe = recipe_of(
                    groups=groups,
                    group_size=size,
                    steps=steps,
                    alpha=alpha,
                    more_groups=more,
                    more_members=more,
                    num_envs=(groups + more) * (size + more),
                    max_turns=20,
                    step_timeout_s=60 * SCALE,
                )
                source = lambda recipe=recipe, faults=faults: Injected(  # noqa: E731
                    games.envs(recipe, per_process=1),
                    latency=Normal(mean=10 * SCALE, std=5 * SCALE),
                    turns=turns,
                    max_turns=20,
                    faults=faults,
                )
                name = f"α = {alpha:g}, {label}, {groups + more} × {size + more}"
                pair.append(run(name, recipe, Kind(envs=source, tasks=games.tasks), warm=1))
            gain = pair[0].step_s / pair[1].step_s - 1
            yield {"alpha": alpha, "faults": label, "gain": gain, "runs": msgspec.to_builtins(pair)}


PARTS: dict[str, Callable[[Games | None, bool], Iterator[dict[str, Any]]]] = {
    "scale": scale,
    "chaos": chaos,
    "lock-step": lock_step,
    "redundant": redundant,
}


# --- what is told


def _tell(results: dict[str, list[dict[str, Any]]]) -> None:
    for row in results.get("scale", []):
        lag, envs = row["lag_ms"], row["envs"]
        print(
            f"{row['name']}: {row['turns_per_s']:,.0f} turns/s of {row['ideal']:,.0f} "
            f"({row['turns_per_s'] / row['ideal']:.1%}); {1e3 * row['controller_mb'] / envs:.0f} KB each in the "
            f"controller, {row['workers_mb'] / envs:.1f} MB each in {row['workers']} workers; "
            f"lag p50 {lag['p50']:.1f}, p99 {lag['p99']:.1f}, max {lag['max']:.0f} ms: "
            f"{_verdict(lag['p99'] <= 1e3 * LAG_BUDGET_S)}"
        )
    for row in results.get("chaos", []):
        faulty = row["runs"][1]
        print(
            f"{row['name']}: loss {row['loss']:.1%} of at most {row['allowed']:.1%} (failed work "
            f"{row['failed_share']:.1%} + 5 %): {_verdict(row['loss'] <= row['allowed'])}; "
            f"{faulty['played']['faulty']} of {faulty['played']['episodes']} episodes failed, ledger balanced"
        )
    for row in results.get("lock-step", []):
        seconds = [r["step_s"] for r in row["runs"]]
        print(f"latency {row['latency']}: {seconds[0]:.1f} → {seconds[1]:.1f} s, × {row['speedup']:.2f}")
    for row in results.get("redundant", []):
        seconds = [r["step_s"] for r in row["runs"]]
        print(f"α {row['alpha']:g}, {row['faults']}: {seconds[0]:.2f} → {seconds[1]:.2f} s, {row['gain']:+.1%}")


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few environments: does it run?")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write the figures here; parts that were not run are kept")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        games = None
        if importlib.util.find_spec("alfworld") and importlib.util.find_spec("fast_downward"):
            games = Games(Path(folder), 6 if args.quick else GAMES)
        else:
            print("without ALFWorld, which is not installed: pip install 'asyncrl[alfworld]'")
        for name in parts:
            print(f"{name} (load {os.getloadavg()[0]:.1f})", flush=True)
            results[name] = []
            for row in PARTS[name](games, args.quick):
                results[name].append(row)
                if args.json:
                    text = json.dumps(results | {"machine": machine()}, indent=1, ensure_ascii=False)
                    args.json.write_text(text + "\n")
    _tell(results)


if __name__ == "__main__":
    main()
