"""What bench/envs.py measures with: one real run over a scripted server, its event-loop lag, memory and accounts."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles

import msgspec
import uvloop
from injected import Injected, Played, sum_of
from scripted_server import TOKENS, scripted_server

from asyncrl.build.assemble import Played as Source
from asyncrl.build.assemble import World, assemble
from asyncrl.config import Recipe, load_table
from asyncrl.core.types import Task
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.env import Cost
from asyncrl.env_workers.pool import EnvProcesses
from asyncrl.garbage import rare_collections
from asyncrl.observe.tally import Tally
from asyncrl.ports import EnvSource, StepMetrics
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.sim.tokenizer import SimTokenizer
from asyncrl.sim.trainer import SimTrainer
from asyncrl.sim.weights import SimTransport
from asyncrl.workers import ThreadBlocking

LAG_S = 0.01


class Lag(msgspec.Struct, kw_only=True):
    """Milliseconds."""

    p50: float
    p99: float
    max: float


class Outcome(msgspec.Struct, kw_only=True):
    """One run. Memory in MB (``controller_mb`` is what the run added), rates of the time after the warm-up.
    ``useful`` is the share of the generated tokens that was trained."""

    name: str
    seconds: float
    step_s: float
    turns_per_s: float
    trained_per_s: float
    useful: float
    lag_ms: Lag
    controller_mb: float
    workers: int
    workers_mb: float
    played: Played
    ledger: dict[str, int]
    reasons: dict[str, dict[str, int]]
    load: float
    """Of the machine over the last minute, at the end."""


class Kind(msgspec.Struct, kw_only=True):
    """Environments of one kind, ``weight`` of the run's tasks, and what they play."""

    envs: Callable[[], Injected]
    tasks: Sequence[Task]
    weight: float = 1.0


# --- one run


class Lines(Tally):
    """Keeps of each step its end, the tokens generated until then, those it trained, and the seconds it waited."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.lines: list[tuple[float, int, int, float]] = []

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        trained = sum(t.generated for t in metrics.batch.trajectories)
        self.lines.append((metrics.at, metrics.tokens, trained, metrics.wait_s))


class Meter:
    """Event-loop lag all the while, and the most memory that was seen."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.controller_mb = self.workers_mb = 0.0
        self.workers = 0

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time() + LAG_S
            await asyncio.sleep(LAG_S)
            self.lags.append(max(0.0, loop.time() - asked))

    async def weigh(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            controller, workers = await asyncio.to_thread(_memory_mb)
            if sum(workers) >= self.workers_mb:
                self.workers, self.workers_mb = len(workers), sum(workers)
            self.controller_mb = max(self.controller_mb, controller)

    def lag(self) -> Lag:
        cuts = quantiles(self.lags, n=100)
        return Lag(p50=1e3 * cuts[49], p99=1e3 * cuts[98], max=1e3 * max(self.lags))


def _memory_mb() -> tuple[float, list[float]]:
    """PSS of this process, and of each worker below a nursery."""
    below = [w for child in _children(os.getpid()) if "nursery" in _command(child) for w in _children(child)]
    return _pss_mb(os.getpid()), [_pss_mb(pid) for pid in below]


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _pss_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def recipe_of(
    *,
    groups: int,
    group_size: int,
    steps: int,
    alpha: float = 0.0,
    more_groups: int = 0,
    more_members: int = 0,
    num_envs: int = 0,
    max_turns: int = 50,
    step_timeout_s: float = 60.0,
    running: int = 100_000,
) -> Recipe:
    """``running``: of the server, at once."""
    size = group_size + more_members
    live = math.floor((1 + alpha) * groups) + more_groups
    return load_table(
        {
            "name": "envs",
            "preset": "roll-flash",
            "env": {
                "target": "injected",
                "max_turns": max_turns,
                "reset_timeout_s": 120.0,
                "step_timeout_s": step_timeout_s,
                "retries": 5,
                "backoff_s": 0.1,
                "max_failure_rate": 1.0,
                "max_infra_failure_rate": 1.0,
            },
            "rollout": {
                "batch_groups": groups,
                "group_size": group_size,
                "max_additional_running_prompts": more_groups,
                "group_size_redundancy": more_members,
                "num_envs": num_envs or live * size,
                "max_new_tokens": 64,
                "max_tokens": 1 << 15,
            },
            "staleness": {"bound": alpha},
            "update": {"running": "drain"},
            "engine": {
                "max_running_requests": running,
                "max_total_tokens": 1 << 22,
                "stream_interval": 0,
            },
            "run": {"steps": steps, "trace_requests": False},
            "sim": {"trainer": {"fixed_s": 0.05, "tokens_per_s": 1e9}, "weights": {"gigabytes": 0.001}},
        }
    )


async def _run(name: str, recipe: Recipe, kinds: Sequence[Kind], url: str, warm: int, cool: int) -> Outcome:
    loop = asyncio.get_running_loop()
    before_mb, _ = _memory_mb()
    meter, observer = Meter(), Lines(recipe, loop.time)
    engine = SGLangEngine(url, "server", recipe.engine, rng=random.Random(0))
    job = SimTrainer(recipe.sim.trainer)
    trainer = RestartingTrainer(job, restarts=0, replay_steps=0, backoff_s=1.0, observer=observer, note=print)
    blocking = ThreadBlocking()
    envs = [kind.envs() for kind in kinds]
    sources = {
        (label := f"kind {number}"): Source(
            weight=kind.weight,
            train=[msgspec.structs.replace(task, source=label) for task in kind.tasks],
            heldout=[],
            envs=injected,
            config=recipe.env,
        )
        for number, (kind, injected) in enumerate(zip(kinds, envs, strict=True))
    }

    async def no_checkpoint(version: int) -> None: ...

    world = World(
        engines=[engine],
        trainer=trainer,
        transport=SimTransport(recipe.sim.weights, "disk", servers=1, trainer=job),
        tokenizer=SimTokenizer(),
        blocking=blocking,
        observer=observer,
        sources=sources,
        checkpoint=no_checkpoint,
        services=[meter.listen, meter.weigh],
    )
    began = loop.time()
    try:
        run = await assemble(recipe, world)
        with rare_collections():
            await run.controller.run()
    finally:
        await engine.close()
        await blocking.close()
    run.buffer.ledger.check_balanced()
    ended = loop.time()
    start = observer.lines[warm - 1][:2] if warm else (began, 0)
    lines = observer.lines[warm : len(observer.lines) - cool]
    seconds, tokens = lines[-1][0] - start[0], lines[-1][1] - start[1]
    return Outcome(
        name=name,
        seconds=ended - began,
        step_s=seconds / len(lines),
        turns_per_s=tokens / TOKENS / seconds,
        trained_per_s=len(lines) * recipe.batch_trajectories / seconds,
        useful=sum(line[2] for line in lines) / tokens,
        lag_ms=meter.lag(),
        controller_mb=meter.controller_mb - before_mb,
        workers=meter.workers,
        workers_mb=meter.workers_mb,
        played=sum_of([injected.played for injected in envs]),
        ledger=run.buffer.ledger.counts(),
        reasons=run.buffer.ledger.reasons(),
        load=os.getloadavg()[0],
    )


def run(
    name: str,
    recipe: Recipe,
    *kinds: Kind,
    reply_s: float = 0.1,
    warm: int = 0,
    cool: int = 0,
) -> Outcome:
    """The whole recipe; the first ``warm`` and the last ``cool`` steps do not count in its rates.
    Raises what ended it early, and ``LedgerError`` for books that do not balance."""
    print(f"  {name} … ", end="", flush=True)

    async def main() -> Outcome:
        return await _run(name, recipe, kinds, url, warm, cool)

    with scripted_server(reply_s, recipe.engine.max_running_requests) as url:
        outcome = uvloop.run(main())
    print(
        f"{outcome.seconds:.0f} s, {outcome.turns_per_s:,.0f} turns/s, {outcome.step_s:.2f} s a step, "
        f"lag p99 {outcome.lag_ms.p99:.1f} ms, load {outcome.load:.1f}",
        flush=True,
    )
    return outcome


# --- ALFWorld


class Games:
    """ALFWorld's, generated into ``folder``."""

    def __init__(self, folder: Path, count: int) -> None:
        from asyncrl.envs.alfworld import rows
        from asyncrl.envs.alfworld_engine import AlfredEngine
        from asyncrl.envs.alfworld_games import generate

        self._folder = folder
        engine = AlfredEngine(folder / "cache")
        generate(engine, folder, "train", range(count), seed=0, max_receptacles=20)
        self.tasks = [Task(id=row["game"], data=row) for row in rows(folder, "train")]

    def envs(self, recipe: Recipe, *, per_process: int, count: int = 0) -> EnvSource:
        """For ``count`` environments; 0: for all of the recipe's."""
        count = count or recipe.rollout.num_envs
        return EnvProcesses(
            "injected_alfworld:RandomALFWorld",
            {"data": str(self._folder), "cache": str(self._folder / "cache")},
            cost=Cost(per_process=per_process, startup_s=60.0),
            reusable=True,
            workers=max(len(os.sched_getaffinity(0)), math.ceil(count / per_process)),
            reset_timeout_s=recipe.env.reset_timeout_s,
            step_timeout_s=recipe.env.step_timeout_s,
            log=self._folder / "env.log",
        )
