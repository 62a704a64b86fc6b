"""The simulated world: the same runtime over simulated servers, trainer and environment, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from asyncrl.build.assemble import Run, World, assemble
from asyncrl.config import Recipe
from asyncrl.core.types import Task
from asyncrl.env import Env
from asyncrl.loading import load_own
from asyncrl.ports import Observer
from asyncrl.runtime.controller import Service
from asyncrl.sim.engine import Lengths, SimEngine
from asyncrl.sim.trace import TraceRecorder
from asyncrl.sim.world import SimBlocking, SimEnv, SimTokenizer, SimTrainer, SimTransport


class Simulation(msgspec.Struct, kw_only=True):
    """A run on virtual time and its parts, for faults and for looking at afterwards."""

    run: Run
    engines: list[SimEngine]
    trainer: SimTrainer
    trace: TraceRecorder


async def simulated(
    recipe: Recipe,
    *,
    lengths: Lengths | None = None,
    env: Callable[[random.Random], Env] | None = None,
    services: Sequence[Service] = (),
    context_length: int | None = None,
    observer: Observer | None = None,
) -> Simulation:
    """Wire a run of ``recipe``. To be awaited on a ``VirtualLoop`` (sim/loop.py).

    Everything random comes from the recipe's seed: one seed, one trace.
    """
    trace = TraceRecorder()
    rng = random.Random(f"{recipe.seed}/world")
    engines = [
        SimEngine(
            f"server {i}",
            rng=random.Random(rng.random()),
            lengths=lengths or (lambda r, ids: min(recipe.rollout.max_new_tokens, int(r.lognormvariate(4.0, 1.0)) + 1)),
            max_running=recipe.engine.max_running_requests,
            max_tokens=recipe.engine.max_total_tokens,
            context_length=context_length or recipe.engine.max_total_tokens,
            stream_interval=recipe.engine.stream_interval,
        )
        for i in range(recipe.engine.count)
    ]
    trainer = SimTrainer()
    env_rng = random.Random(rng.random())

    async def checkpoint(version: int) -> None:
        await trainer.save(f"version {version}")

    world = World(
        engines=engines,
        trainer=trainer,
        transport=SimTransport(),
        tokenizer=SimTokenizer(),
        blocking=SimBlocking(rng=random.Random(rng.random())),
        observer=observer or trace,
        train_tasks=[Task(id=f"task {i}", data={"prompt": f"task {i} "}) for i in range(1000)],
        heldout_tasks=[Task(id=f"heldout {i}", data={"prompt": f"heldout {i} "}) for i in range(16)],
        make_env=lambda: (env or (lambda r: SimEnv(rng=r, turns=recipe.env.max_turns)))(env_rng),
        reward=None,
        checkpoint=checkpoint,
        own_advantage=load_own(recipe.algorithm.advantage, "algorithm.advantage"),
        services=services,
    )
    return Simulation(run=await assemble(recipe, world), engines=engines, trainer=trainer, trace=trace)
