"""The one place that knows every component of the runtime; it is the same for the real and the simulated world.

A ``World`` is what ``assemble`` needs from outside: the ports' implementations, the tasks and the user's environment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.build.budget import BudgetKeeper
from asyncrl.build.experience import blamed, make_experience
from asyncrl.build.profile import cost_of
from asyncrl.build.unchanged import check_unchanged, fixed
from asyncrl.config import AlgorithmConfig, EnvConfig, Recipe, RecipeError
from asyncrl.core.advantage import Advantage, Advantages
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.experience import Sampler, Writer
from asyncrl.core.journal import NOTHING, Noted, Saved
from asyncrl.core.policy.migration import Limits
from asyncrl.core.policy.own_batch import Batches
from asyncrl.core.policy.routing import ROUTING
from asyncrl.core.policy.streaming import Versions
from asyncrl.core.staleness import make_control
from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.types import Batch, Task
from asyncrl.ports import (
    Blocking,
    Engine,
    EngineError,
    EngineInfo,
    EnvSource,
    Observer,
    RunStore,
    Tokenizer,
    WeightTransport,
)
from asyncrl.runtime.controller import AsyncController, Service
from asyncrl.runtime.conversation import ChatTemplate
from asyncrl.runtime.coordination import Coordination
from asyncrl.runtime.env_manager import EnvManager, EpisodeLimits, EpisodePlayer, EpisodePlayers, Player
from asyncrl.runtime.evaluation import Evaluator
from asyncrl.runtime.fleet import Fleet, Launcher
from asyncrl.runtime.gateway import Gateway
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.parameter_server import ParameterServer
from asyncrl.runtime.pulls import PulledParameterServer
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.runtime.reward import RewardFunction, Scorer
from asyncrl.runtime.rollout import Rollout, RolloutPlayer
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.session import SessionLimits
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.stall import StallWatch
from asyncrl.runtime.status import Books
from asyncrl.runtime.task_source import TaskMixture
from asyncrl.runtime.user_code import FailureWindow

ANSWER_S = 10.0
"""A server of a run that goes on is not waited for longer, if there are others."""


class Played(msgspec.Struct, kw_only=True):
    """One kind of tasks, and what plays them. ``config`` has its deadlines."""

    weight: float = 1.0
    train: Sequence[Task]
    heldout: Sequence[Task]
    envs: EnvSource
    replayable: bool = False
    """The same task and actions bring the same observations."""
    rollout: Rollout | None = None
    reward: RewardFunction | None = None
    config: EnvConfig


class World(msgspec.Struct, kw_only=True):
    """Everything outside the runtime. ``engines`` are reachable (or become so within their deadline)."""

    engines: Sequence[Engine]
    trainer: RestartingTrainer
    transport: WeightTransport
    tokenizer: Tokenizer
    blocking: Blocking
    observer: Observer
    sources: Mapping[str, Played]
    """By the name that their tasks carry."""
    checkpoint: Callable[[int], Awaitable[None]]
    store: RunStore
    saved: Saved = NOTHING
    """Where another process left the run."""
    own_advantage: Callable[[Batch], Any] | None = None
    own_sampler: Sampler | None = None
    own_writer: Writer | None = None
    services: Sequence[Service] = ()
    note: Callable[[str], None] = lambda text: None
    """Prints a line for the user."""
    launcher: Launcher | None = None
    """Of servers that were started here."""
    heartbeats: bool = True
    """Servers may hang."""
    gate: Stage = msgspec.field(default_factory=lambda: Stage("the start"))
    """Kept at what the run as a whole waits for."""
    keep_report: Callable[[str], Awaitable[str]] | None = None
    """Keeps a report of a stall; says where, as the end of a sentence."""
    gateway: Gateway | None = None
    """For the programs of rollout functions. It listens already."""


class Run(msgspec.Struct, kw_only=True):
    """One wired run, ready for ``controller.run()``."""

    controller: AsyncController
    advantages: Advantages
    buffer: SampleBuffer
    proxy: LLMProxy
    fleet: Fleet
    parameters: ParameterServer
    books: Books


async def assemble(recipe: Recipe, world: World) -> Run:
    """Connect to trainer and servers, and wire the runtime over them. Raises ``EngineError``, ``TrainerError`` or
    ``RecipeError``."""
    saved = world.saved
    check_unchanged(recipe, saved.notes)
    world.gate.enter("the trainer to be ready", recipe.trainer.connect_timeout_s, "trainer.connect_timeout_s")
    version = await world.trainer.connect()
    if saved.taken is not None and version > saved.taken.step:  # by a job that outlived its controller
        saved = msgspec.structs.replace(saved, version=version, taken=None)
    absent = await _absent(world)
    infos = {}
    for engine in world.engines:
        if engine.name not in absent:
            world.gate.enter(f"{engine.name} to be ready", recipe.engine.connect_timeout_s, "engine.connect_timeout_s")
            infos[engine] = await engine.connect()
    context_length = min(info.context_length for info in infos.values())
    if recipe.rollout.max_tokens > context_length:
        raise RecipeError(
            f"rollout.max_tokens = {recipe.rollout.max_tokens}: the servers take at most {context_length}; lower it"
        )
    consumed = max(version, saved.consumed)
    control = make_control(
        recipe.staleness.control,
        batch=recipe.rollout.batch_groups,
        bound=float(saved.notes.get("bound", recipe.staleness.bound)),
        queue=recipe.staleness.queue,
        redundant=recipe.rollout.max_additional_running_prompts,
        reuse=recipe.buffer.reuse,
        step=consumed,
    )
    keeper = None
    if recipe.staleness.adaptive.target and isinstance(control, InflightCap | StalenessBuffers):
        world.observer = keeper = BudgetKeeper(
            recipe,
            inner=world.observer,
            clock=asyncio.get_running_loop().time,
            set_bound=control.set_bound,
            store=world.store,
            notes=saved.notes,
        )
    life = f"/{saved.life}" if saved.life else ""  # no process draws again what one before it drew
    rng = random.Random(f"{recipe.seed}/proxy{life}")
    proxy = LLMProxy(
        route=None if recipe.coordinated else ROUTING[recipe.engine.routing],
        observer=world.observer,
        context_length=context_length,
        stop_token_ids=world.tokenizer.eos_ids,
        rid_prefix=f"{rng.getrandbits(32):08x}",
    )
    for engine, info in infos.items():
        proxy.add(engine, info)
    rollout = recipe.rollout
    buffer = SampleBuffer(
        control=control,
        tasks=TaskMixture(
            [(source.weight, source.train) for source in world.sources.values()],
            seed=recipe.seed,
            shuffle=recipe.task.shuffle,
            done=saved.tasks_done,
        ),
        group_size=rollout.group_size,
        group_size_redundancy=rollout.group_size_redundancy,
        redundant_groups=rollout.max_additional_running_prompts,
        observer=world.observer,
        version=version,
        replicate=rollout.expand_num_return_sequences,
        queue_scheduling=rollout.queue_scheduling,
        filter_zero_variance=rollout.filter_zero_variance,
        retries=recipe.env.retries,
        backoff_s=recipe.env.backoff_s,
        rng=random.Random(f"{recipe.seed}/backoff{life}"),
        total_groups=(recipe.run.steps - consumed) * rollout.batch_groups,
        store=world.store,
        saved=saved,
        experience=make_experience(recipe, world.own_sampler, world.own_writer),
    )
    if keeper is not None:
        keeper.begin(buffer.keep_idle)
    elif isinstance(control, InflightCap | StalenessBuffers):
        control.set_bound(recipe.staleness.bound)
    bound = recipe.staleness.bound if keeper is None else keeper.setting.bound
    notes = {"life": saved.life + 1, "bound": bound, "one_version": float(recipe.one_version), **fixed(recipe)}
    for key, value in notes.items():
        world.store.put(Noted(key=key, value=value))
    services: list[Service] = []
    parameters: ParameterServer
    coordination = None
    if recipe.coordinated:
        pulled = PulledParameterServer(
            proxy=proxy,
            transport=world.transport,
            trainer=world.trainer,
            observer=world.observer,
            version=version,
            cuts=not recipe.one_version,
        )
        coordination = Coordination(
            coordinator=Coordinator(
                routing=recipe.engine.routing,
                synchronization=recipe.update.synchronization,
                migration=recipe.engine.migration,
                cost=cost_of(recipe.sim.instance),
                mu=recipe.engine.mu,
                limits=Limits(
                    phi_wait=recipe.engine.phi_wait,
                    phi_throughput=recipe.engine.phi_throughput,
                    kv_threshold=recipe.engine.kv_threshold,
                    roofline_batch=recipe.engine.roofline_batch,
                ),
                one_version=_one_version(recipe, control),
            ),
            proxy=proxy,
            parameters=pulled,
            buffer=buffer,
            control=control,
            observer=world.observer,
            stream_interval=recipe.engine.stream_interval if recipe.engine.fit_cost else 0,
            look_s=recipe.engine.rebalance_s if recipe.engine.migration in ("repack", "repartition") else 0.0,
        )
        parameters, services = pulled, [coordination.run]
    else:
        parameters = ParameterServer(
            proxy=proxy,
            transport=world.transport,
            trainer=world.trainer,
            running=recipe.update.running,
            observer=world.observer,
            version=version,
        )
    world.trainer.restage = parameters.restage
    fleet = Fleet(
        proxy=proxy,
        restore=parameters.restore,
        launcher=world.launcher,
        probe_s=recipe.engine.probe_s,
        patience_s=recipe.engine.patience_s,
        hang_s=recipe.engine.hang_s if world.heartbeats else 0.0,
        start_s=recipe.engine.connect_timeout_s,
        cuts=recipe.update.running == "interrupt",
        has_begun=None if coordination is None else coordination.has_begun,
        context_length=rollout.max_tokens,
        note=world.note,
    )
    for engine in world.engines:
        if engine.name in absent:
            limits = EngineInfo(
                name=engine.name,
                version=-1,
                max_running_requests=recipe.engine.max_running_requests,
                max_total_tokens=recipe.engine.max_total_tokens,
                context_length=rollout.max_tokens,
            )
            fleet.expect(engine, limits, absent[engine.name])
    failures = {
        name: FailureWindow(
            name=played.config.target,
            size=played.config.failure_window,
            max_rate=played.config.max_failure_rate,
            max_infra_rate=played.config.max_infra_failure_rate,
        )
        for name, played in world.sources.items()
    }
    template = ChatTemplate(world.tokenizer, history=rollout.history, tool_parser=recipe.model.tool_parser)
    player = EpisodePlayers(
        {name: _player(recipe, world, played, proxy, template) for name, played in world.sources.items()}
    )
    managers = [
        EnvManager(
            name=f"env {i}",
            buffer=buffer,
            player=player,
            failures=failures,
            observer=world.observer,
            episode_timeout_s=recipe.env.episode_timeout_s,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            one_version=recipe.one_version,
        )
        for i in range(rollout.num_envs)
    ]
    advantages = _advantages(recipe.algorithm, world)
    world.trainer.baseline = advantages.running
    heldout = [task for played in world.sources.values() for task in played.heldout[: recipe.run.eval_tasks or None]]
    evaluator = Evaluator(
        tasks=heldout,
        samples=recipe.run.eval_samples,
        temperature=recipe.run.eval_temperature,
        concurrency=rollout.num_envs,
        share=recipe.run.eval_share,
        players=player,
        failures=failures,
        proxy=proxy,
        parameters=parameters,
        observer=world.observer,
        episode_timeout_s=recipe.env.episode_timeout_s,
        store=world.store,
        newest=int(saved.notes.get("evaluated", -1)),
    )
    books = Books(
        gate=world.gate,
        buffer=buffer,
        proxy=proxy,
        parameters=parameters,
        trainer=world.trainer,
        evaluator=evaluator,
        bound=recipe.staleness.limit,
        control_timeout_s=recipe.engine.control_timeout_s,
        launcher=world.launcher,
    )
    watch = StallWatch(
        books,
        stall_s=recipe.stall_s,
        remedy=recipe.run.on_stall,
        keep=world.keep_report,
        note=world.note,
        observer=world.observer,
    )
    controller = AsyncController(
        steps=recipe.run.steps,
        advantages=advantages.compute if world.own_advantage is None else _blaming(recipe.algorithm, advantages),
        buffer=buffer,
        proxy=proxy,
        fleet=fleet,
        parameters=parameters,
        trainer=world.trainer,
        env_managers=managers,
        evaluator=evaluator,
        observer=world.observer,
        gate=world.gate,
        checkpoint=world.checkpoint,
        checkpointed=lambda: world.trainer.checkpointed,
        checkpoint_every=recipe.checkpoint_every,
        overlap=recipe.overlaps_update,
        streamed_groups=recipe.streamed_groups,
        eval_every=recipe.run.eval_every,
        services=(
            *services,
            *world.services,
            watch.run,
            world.trainer.watch,
            *(played.envs.run for played in world.sources.values()),
        ),
    )
    return Run(
        controller=controller,
        advantages=advantages,
        buffer=buffer,
        proxy=proxy,
        fleet=fleet,
        parameters=parameters,
        books=books,
    )


async def _absent(world: World) -> Mapping[str, str]:
    """Servers that a run which goes on had, and cannot use now, and why not. Those that are started here count as
    there; if none is there, all are waited for."""
    outside = [e for e in world.engines if world.launcher is None or world.launcher.began(e.name) is None]
    absent: dict[str, str] = {}

    async def ask(engine: Engine) -> None:
        try:
            await engine.connect(ANSWER_S)
        except EngineError as error:
            absent[engine.name] = str(error)

    if world.saved.life:
        world.gate.enter("servers that were not started here to answer", ANSWER_S)
        async with asyncio.TaskGroup() as asking:
            for engine in outside:
                asking.create_task(ask(engine))
    return absent if len(absent) < len(world.engines) else {}


def _one_version(recipe: Recipe, control: StalenessControl) -> Batches | Versions | None:
    """The books of servers that keep each trajectory to one version."""
    rollout = recipe.rollout
    match recipe.engine.routing:
        case "own_batch":
            return Batches(slots=rollout.num_envs, members=rollout.group_size + rollout.group_size_redundancy)
        case "newest_first":
            return Versions(control)
        case _:
            return None


def _player(recipe: Recipe, world: World, played: Played, proxy: LLMProxy, template: ChatTemplate) -> Player:
    env = played.config
    if played.rollout is not None:
        return RolloutPlayer(
            rollout=played.rollout,
            proxy=proxy,
            template=template,
            limits=SessionLimits(
                max_turns=env.max_turns,
                max_new_tokens=recipe.rollout.max_new_tokens,
                max_tokens=recipe.rollout.max_tokens,
                in_order=recipe.algorithm.uses_critic,
            ),
            idle_timeout_s=env.step_timeout_s,
            admit=None if world.gateway is None else world.gateway.admit,
        )
    return EpisodePlayer(
        envs=played.envs,
        scorer=None
        if played.reward is None
        else Scorer(played.reward, blocking=world.blocking, timeout_s=env.reward_timeout_s),
        proxy=proxy,
        template=template,
        limits=EpisodeLimits(
            max_turns=env.max_turns,
            max_new_tokens=recipe.rollout.max_new_tokens,
            max_tokens=recipe.rollout.max_tokens,
            reset_timeout_s=None if played.envs.keeps_deadlines else env.reset_timeout_s,
            step_timeout_s=None if played.envs.keeps_deadlines else env.step_timeout_s,
        ),
        replayable=played.replayable,
    )


def _advantages(config: AlgorithmConfig, world: World) -> Advantages:
    return Advantages(
        advantage=config.advantage,
        credit=config.credit,
        gamma=config.gamma,
        baseline=config.baseline,
        baseline_decay=config.baseline_decay,
        reward_norm=config.reward_norm,
        overlong_limit=config.overlong_limit,
        overlong_buffer=config.overlong_buffer,
        overlong_penalty=config.overlong_penalty,
        overlong_filter=config.overlong_filter,
        own=world.own_advantage,
        running=world.saved.baseline,
    )


def _blaming(config: AlgorithmConfig, estimator: Advantages) -> Callable[[Batch], Sequence[Advantage]]:
    """A user's estimator, whose failure is a ``RecipeError``."""

    def compute(batch: Batch) -> Sequence[Advantage]:
        with blamed(f"algorithm.advantage: {config.advantage}"):
            return estimator.compute(batch)

    return compute
