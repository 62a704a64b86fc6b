"""The simulated world: the same runtime over simulated servers, trainer and environments, on virtual time.

Everything is built from the recipe and its ``[sim]``, and everything random comes from its seed: one seed, one trace.
What the run does is checked all the way (sim/invariants.py).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from asyncrl.build.assemble import Played, Run, World, assemble
from asyncrl.build.profile import cost_of, kv_token_s
from asyncrl.build.samples import read_samples
from asyncrl.config import Recipe
from asyncrl.core.journal import NOTHING, Saved
from asyncrl.core.transfer import Transport
from asyncrl.env import Env
from asyncrl.loading import load_own
from asyncrl.ports import CheckpointLost, EngineError, NoStore, Observer, RunStore
from asyncrl.runtime.controller import Service
from asyncrl.runtime.env_source import LocalEnvs
from asyncrl.runtime.fleet import FleetError
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.sim.blocking import SimBlocking
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.env import SimEnvs
from asyncrl.sim.faults import Faults, schedule
from asyncrl.sim.invariants import Books, Checked
from asyncrl.sim.kv import KvLink
from asyncrl.sim.tasks import SimTasks, TaskLengths
from asyncrl.sim.tokenizer import SimTokenizer
from asyncrl.sim.trace import TraceRecorder
from asyncrl.sim.trainer import SimTrainer
from asyncrl.sim.weights import SimTransport


class Simulation(msgspec.Struct, kw_only=True):
    """A run on virtual time and its parts, for faults and for looking at afterwards. ``trace`` is empty where another
    observer was given."""

    run: Run
    engines: list[SimEngine]
    trainer: SimTrainer
    envs: SimEnvs
    checked: Checked
    trace: TraceRecorder

    async def play(self) -> None:
        """The whole run. However it ends, the laws of its end are checked; ``InvariantViolation`` if one is broken."""
        try:
            await self.run.controller.run()
        finally:
            self.checked.check_end()


class SimLauncher:
    """Owns all servers. What it starts in place of another is there after ``sim.instance.start_s``."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._engines = engines

    def began(self, name: str) -> float | None:
        """Process starts are not booked: one that runs has answered."""
        return None if self._of(name).dead else -math.inf

    def kill(self, name: str) -> None:
        self._of(name).restart()

    def retire(self, name: str) -> None:
        self._of(name).kill()

    def _of(self, name: str) -> SimEngine:
        return next(engine for engine in self._engines if engine.name == name)


async def simulated(
    recipe: Recipe,
    *,
    observer: Observer | None = None,
    services: Sequence[Service] = (),
    context_length: int | None = None,
    wrap_env: Callable[[Env], Env] = lambda env: env,
    store: RunStore | None = None,
    saved: Saved = NOTHING,
    checkpoint: tuple[int, int] = (0, 0),
) -> Simulation:
    """Wire a run of ``recipe``. To be awaited on a ``VirtualLoop`` (sim/loop.py).

    ``observer`` hears what a real run's would; without one a trace is kept, and every batch. ``services`` run beside.
    ``context_length`` is the model's, if shorter than a server's KV cache. ``wrap_env`` goes around every simulated
    environment. The run is kept in ``store``, and goes on from what is ``saved`` there and from the trainer's
    ``checkpoint``, its version and weights. Raises ``RecipeError``.
    """
    recipe = read_samples(recipe)
    sim, engine, seed = recipe.sim, recipe.engine, recipe.seed
    trace = TraceRecorder(keep_batches=True)
    checked = Checked(
        observer or trace,
        limit=recipe.staleness.limit,
        one_version=recipe.one_version,
        reuse=recipe.buffer.reuse,
        first=max(saved.version, checkpoint[0]),
        stall_s=sim.stall_s,
    )
    tasks = SimTasks(sim, seed=seed)
    trainer = SimTrainer(sim.trainer, recipe.trainer.ranks * recipe.trainer.micro_batch_tokens, checkpoint)
    lengths = TaskLengths(sim, tasks, seed=seed, progress=lambda: trainer.version / recipe.run.steps)
    cost = cost_of(sim.instance)
    peers: dict[str, SimEngine] = {}
    kv_link = KvLink(token_s=kv_token_s(sim.instance), peers=peers) if engine.kv_reuse else None

    def make_engine(i: int) -> SimEngine:
        return SimEngine(
            f"server {i}",
            rng=random.Random(f"{seed}/server {i}"),
            lengths=lengths,
            cost=cost,
            max_running=engine.max_running_requests,
            max_tokens=engine.max_total_tokens,
            context_length=context_length or engine.max_total_tokens,
            stream_interval=engine.stream_interval,
            chunked_prefill=sim.instance.chunked_prefill,
            prefix_cache=sim.instance.prefix_cache,
            load_s=sim.instance.load_s,
            start_s=sim.instance.start_s,
            connect_timeout_s=engine.connect_timeout_s,
            request_timeout_s=engine.request_timeout_s,
            idle_timeout_s=engine.idle_timeout_s,
            control_timeout_s=engine.control_timeout_s,
            kv_link=kv_link,
        )

    engines = [make_engine(i) for i in range(len(engine.urls) or engine.count)]
    peers.update((server.name, server) for server in engines)

    async def join() -> None:
        joined = make_engine(len(engines))
        engines.append(joined)
        peers[joined.name] = joined
        with suppress(EngineError):
            await run.fleet.add(joined)

    def leave(name: str) -> None:
        with suppress(FleetError):  # where it is the last one
            run.fleet.drain(name, forget=True)

    envs = SimEnvs(sim.env, tasks, seed=seed, max_turns=recipe.env.max_turns)
    struck = schedule(sim, servers=len(engines), seed=seed, restartable=recipe.trainer.restarts > 0)
    faults = Faults(struck, engines=engines, trainer=trainer, envs=envs, observer=checked, join=join, leave=leave)
    may_die = any(fault.kind == "trainer_crash" for fault in struck)
    restarting = RestartingTrainer(
        trainer,
        restarts=recipe.trainer.restarts if may_die else 0,  # a trainer that cannot die needs no batches kept
        replay_steps=recipe.trainer.replay_steps,
        backoff_s=recipe.trainer.restart_backoff_s,
        observer=checked,
        note=lambda text: None,
        store=store,
        saved=saved,
    )
    begun = asyncio.Event()

    async def save(version: int) -> None:
        await restarting.save("checkpoints")
        begun.set()

    async def keep() -> None:
        while True:
            await begun.wait()
            begun.clear()
            with suppress(CheckpointLost):
                await restarting.saved()

    world = World(
        engines=engines,
        trainer=restarting,
        transport=SimTransport(
            sim.weights,
            transport_of(recipe),
            servers=len(engines),
            trainer=trainer,
            keep=recipe.weights.keep_versions,
        ),
        tokenizer=SimTokenizer(),
        blocking=SimBlocking(rng=random.Random(f"{seed}/blocking")),
        observer=checked,
        sources={
            "": Played(
                train=tasks.train,
                heldout=tasks.heldout,
                envs=LocalEnvs(lambda: wrap_env(envs.make())),
                replayable=True,
                config=recipe.env,
            )
        },
        checkpoint=save,
        store=store or NoStore(),
        saved=saved,
        own_advantage=load_own(recipe.algorithm.advantage, "algorithm.advantage"),
        own_sampler=load_own(recipe.buffer.sampler, "buffer.sampler"),
        own_writer=load_own(recipe.buffer.writer, "buffer.writer"),
        services=[faults.run, checked.watch, keep, *services],
        launcher=SimLauncher(engines),
        heartbeats=any(fault.kind == "hang" for fault in struck),  # they cost the simulation time
    )
    run = await assemble(recipe, world)
    checked.books = Books(
        ledger=run.buffer.ledger,
        group_size=recipe.rollout.group_size,
        group_size_redundancy=recipe.rollout.group_size_redundancy,
        staleness=lambda: run.buffer.snapshot().staleness,
        initial=lambda: run.buffer.snapshot().initial,
        pulling=lambda name: any(i.pulling for i in run.proxy.instances if i.name == name),
        fleet=run.proxy.snapshot,
        open_envs=lambda: envs.open,
        parts=[run.buffer, run.proxy, trainer, *run.proxy.instances, *engines],
    )
    return Simulation(run=run, engines=engines, trainer=trainer, envs=envs, checked=checked, trace=trace)


def transport_of(recipe: Recipe) -> Transport:
    """How weights travel in the simulated world."""
    transport = recipe.sim.weights.transport
    return recipe.weights.transport if transport == "recipe" else transport
