"""The real world: processes, sockets and files of one run on this machine, from start to report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TextIO

from asyncrl.build import checkpoints
from asyncrl.build.assemble import Run, World, assemble
from asyncrl.build.control import Control
from asyncrl.build.errors import one_line
from asyncrl.build.members import Members
from asyncrl.build.resume import restore, task_finder
from asyncrl.build.setup import allow_files, checked_token, set_up
from asyncrl.build.sources import load_environments, load_sources
from asyncrl.build.status import StatusFile
from asyncrl.config import Recipe, RecipeError, dumps
from asyncrl.config.deadlines import inversions
from asyncrl.config.relays import relays_of
from asyncrl.core.journal import NOTHING
from asyncrl.core.ledger import Ledger
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.garbage import rare_collections
from asyncrl.loading import check_model, load_own
from asyncrl.observe.progress import Progress
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.report import write_report
from asyncrl.observe.run_dir import RECIPE, RunDirError, write_atomic
from asyncrl.observe.store import Store
from asyncrl.observe.summary import Summary, write_summary
from asyncrl.ports import TrainerError, WeightTransport
from asyncrl.runtime import user_code
from asyncrl.runtime.env_manager import EpisodePlayer
from asyncrl.runtime.fleet import FleetError
from asyncrl.runtime.gateway import Gateway
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.runtime.reward import Scorer
from asyncrl.runtime.stage import Stage
from asyncrl.servers import LocalRelays, LocalServers
from asyncrl.tokenizer import HuggingFaceTokenizer
from asyncrl.train.client import HttpTrainer
from asyncrl.watchdog import LoopLag, LoopWatchdog
from asyncrl.weights.collective import CollectiveTransport
from asyncrl.weights.disk import DiskTransport
from asyncrl.weights.relay_transport import RelayTransport
from asyncrl.workers import ThreadBlocking

FLUSH_S = 2.0
RENDER_S = 0.25
CLOSE_S = 40.0
"""How long a part of the run may take to end: more than any of their own deadlines."""
USER_CODE = frozenset(f.__code__ for f in (user_code.enter, EpisodePlayer._begin, Scorer.score))
"""Where user code is entered: what may be interrupted when it blocks the loop."""


async def train(
    recipe: Recipe, run_dir: Path, *, command: Sequence[str], started: str, out: TextIO, resume: Path | None = None
) -> Summary:
    """One run into ``run_dir``, which must not hold one yet; or the one that ``resume`` names goes on in its own.
    ``started`` is the time of day, for the summary.

    The setup script runs first, if it has to; all inputs are checked before anything else starts or is written. Raises
    whatever ended the run early; in every case the processes are gone, the summary is written and the report drawn when
    it returns.
    """
    environments = load_environments(recipe)
    own_advantage = load_own(recipe.algorithm.advantage, "algorithm.advantage")
    own_sampler = load_own(recipe.buffer.sampler, "buffer.sampler")
    own_writer = load_own(recipe.buffer.writer, "buffer.writer")
    token = checked_token(recipe)
    allow_files(recipe, len(recipe.engine.urls) or recipe.engine.count)
    await set_up(recipe, out)
    model_type, vocabulary = check_model(recipe.model.path)
    sources = load_sources(recipe, environments)
    tokenizer = HuggingFaceTokenizer(Path(recipe.model.path))

    writer = ThreadBlocking(workers=1)  # its own, so that no user code keeps it waiting
    point = None if resume is None else checkpoints.find(resume, recipe)
    find_task = task_finder(sources)
    memory_bytes = recipe.run.buffer_mb << 20
    store, saved, resumed = None, NOTHING, None
    if point is not None:
        run_dir = point.run_dir
        store = Store(run_dir, blocking=writer, find_task=find_task, memory_bytes=memory_bytes)
        saved, resumed = restore(store, point, recipe)
        checkpoints.set_aside(point)
    recorder = Recorder(
        run_dir,
        recipe,
        asyncio.get_running_loop().time,
        decode=tokenizer.decode,
        resume=resumed,
    )
    store = store or Store(run_dir, blocking=writer, find_task=find_task, memory_bytes=memory_bytes)
    store.before, store.seconds = recorder.flush, lambda: recorder.clock() - recorder.start
    recorder.fill = store.fill_now
    write_atomic(run_dir / RECIPE, dumps(recipe))
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    progress = Progress(recorder, out)
    blocking = ThreadBlocking()
    gate, lag = Stage("the start"), LoopLag()
    status = StatusFile(run_dir, gate, lag, blocking)
    members = Members(recipe, saved.notes, store)
    servers = LocalServers(recipe, members.places, logs=logs, note=progress.note, token=token)
    relays = LocalRelays(recipe, logs=logs, note=progress.note, token=token)
    job = HttpTrainer(
        recipe,
        recipe.model.path,
        run_dir=logs,
        log=logs / "trainer.log",
        url=recipe.trainer.url,
        resume=None if point is None else point.checkpoint,
        token=token,
    )
    trainer = RestartingTrainer(
        job,
        restarts=recipe.trainer.restarts if recipe.trainer.restartable else 0,
        replay_steps=recipe.trainer.replay_steps,
        backoff_s=recipe.trainer.restart_backoff_s,
        observer=recorder,
        note=progress.note,
        store=store,
        saved=saved,
    )
    run_name = f"{run_dir.name}-{random.SystemRandom().getrandbits(64):016x}"

    def connect(number: int, own_token: str = "") -> SGLangEngine:
        return SGLangEngine(
            servers.urls[number],
            f"server {number}",
            recipe.engine,
            rng=random.Random(f"{recipe.seed}/{number}"),
            model_type=model_type,
            model_path=recipe.model.path,
            vocabulary=vocabulary,
            version=0 if servers.owns(number) else None,  # who knows what others have had them load
            token=own_token or token,
            run=run_name,
        )

    engines = [connect(number) for number in range(len(servers.urls))]
    services = [servers.watch, relays.watch]
    transport: WeightTransport
    match recipe.weights.transport:
        case "disk":
            folder = recipe.weights.folder
            transport = DiskTransport(job, Path(folder) if folder else run_dir / "weights")
        case "collective":
            transport = CollectiveTransport(job, address=recipe.weights.address, backend=recipe.weights.backend)
        case "relay":
            nearest = relays_of(servers.urls, relays.urls)
            transport = chain = RelayTransport(
                job,
                relays.urls,
                {engine.name: relay for engine, relay in zip(engines, nearest, strict=True) if relay is not None},
                keep=recipe.weights.keep_versions,
                run=run_name,
                timeout_s=recipe.engine.control_timeout_s,
                observer=recorder,
                note=progress.note,
                token=token,
                link=recipe.weights.link,
            )
            services.append(chain.watch)

    def join(number: int, own_token: str) -> SGLangEngine:
        """The engine of a server that was added."""
        engine = connect(number, own_token)
        if isinstance(transport, RelayTransport):
            relay = relays_of(servers.urls, relays.urls)[number]
            if relay is None:
                raise FleetError(f"no relay on the host of {engine.name}; it needs one of weights.relay_urls there")
            transport.place(engine.name, relay)
        engines.append(engine)
        return engine

    run: Run | None = None
    control: Control | None = None

    def describe(version: int) -> checkpoints.Entry:
        done = version * recipe.rollout.batch_groups + (0 if run is None else run.buffer.snapshot().filtered)
        rewards = recorder.rewards[keeper.newest :]
        # A batch that was taken since that step, but is not in these weights, is of the steps to come.
        newest = recorder.metrics if recorder.metrics.get("version") == version else {}
        return checkpoints.Entry(
            version=version,
            at=newest.get("time/at", recorder.clock() - recorder.start),
            tasks=done,
            reward=sum(rewards) / len(rewards) if rewards else None,
            baseline=saved.baseline if run is None else run.advantages.running(version),
        )

    keeper = checkpoints.Keeper(
        trainer,
        run_dir / checkpoints.FOLDER,
        keep=recipe.run.keep_checkpoints,
        describe=describe,
        accuracy=lambda version: next((e.accuracy for e in reversed(recorder.evals) if e.version == version), None),
        blocking=blocking,
        note=progress.note,
        resumed=None if point is None else point.entry.version,
    )

    async def checkpoint(version: int) -> None:
        await blocking.run(recorder.flush)  # so that a run that goes on from it finds the lines of all steps before
        if version < recipe.run.steps:
            await keeper.begin()
        else:
            await keeper.last(version)

    @asynccontextmanager
    async def ending(what: str, limit_s: float) -> AsyncIterator[None]:
        """Count down, on the display and in the status, what the end of the run waits for. Nothing but a cancellation
        may be raised inside."""
        gate.who = "the end of the run"
        gate.enter(what, limit_s)
        loop = asyncio.get_running_loop()

        async def count() -> None:
            until = loop.time() + limit_s
            while True:
                left = f"{max(0.0, until - loop.time()):.0f} s left"
                progress.ending = f"waits for {what}, {left}; another Ctrl-C or SIGTERM stops at once"
                progress.render()
                await asyncio.sleep(RENDER_S)

        async with asyncio.TaskGroup() as group:
            telling = [group.create_task(count()), group.create_task(status.keep())]
            try:
                yield
            finally:
                progress.ending = ""
                for task in telling:
                    task.cancel()

    async def last_checkpoint() -> None:
        """What has been trained is kept, if that can be done in time; a second interrupt cuts it short."""
        trainer.no_restarts()  # where all processes were told to end there is no time for one
        version = 0 if run is None else run.parameters.newest
        if keeper.has(version) or not job.alive or not recipe.run.last_checkpoint_s:
            return
        progress.note("writing a last checkpoint")
        async with ending("a last checkpoint", limit_s := recipe.run.last_checkpoint_s):
            try:
                async with asyncio.timeout(limit_s):
                    await keeper.last(version)
            except TimeoutError:
                progress.note(f"no last checkpoint within run.last_checkpoint_s = {limit_s:g}")
            except (TrainerError, RunDirError) as error:
                progress.note(f"no last checkpoint: {error}")

    async def close_all() -> None:
        """End all processes and give back what they held, one after another. One that does not end in time is left to
        the kernel, which ends it with this process."""
        closes: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("the weights", transport.close),
            ("the trainer", trainer.close),
            *((engine.name, engine.close) for engine in engines),
            ("servers", servers.stop),
            ("relays", relays.stop),
        ]
        if gateway is not None:
            closes.insert(0, ("the gateway", gateway.close))
        if control is not None:
            closes.insert(0, ("its control", control.close))
        for what, close in closes:
            async with ending(f"{what} to end", CLOSE_S):
                try:
                    async with asyncio.timeout(CLOSE_S):
                        await close()
                except TimeoutError:
                    progress.note(f"{what}: no end within {CLOSE_S:g} s; it ends with this process")
        await blocking.close()
        await writer.close()

    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await blocking.run(recorder.flush)

    gateway = None
    if any(environment.rollout is not None for environment in environments.values()):
        keys = random.SystemRandom()  # nothing else depends on them, and others on the machine must not guess them
        gateway = Gateway(
            tokenizer=tokenizer, model=recipe.name, rng=keys, host=recipe.gateway.host, port=recipe.gateway.port
        )

    world = World(
        engines=engines,
        trainer=trainer,
        transport=transport,
        tokenizer=tokenizer,
        blocking=blocking,
        observer=recorder,
        sources={name: source.played(recipe, logs / "env.log") for name, source in sources.items()},
        checkpoint=checkpoint,
        store=store,
        saved=saved,
        own_advantage=own_advantage,
        own_sampler=own_sampler,
        own_writer=own_writer,
        gateway=gateway,
        services=[
            *services,
            store.run,
            flush,
            keeper.watch,
            LoopWatchdog(USER_CODE, limit_s=recipe.env.block_timeout_s, hangs=status.hangs).run,
        ],
        note=progress.note,
        launcher=servers,
        keep_report=status.keep_report,
        gate=gate,
    )

    async def render() -> None:
        while True:
            if run is not None:
                _gauge(recorder, run)
                progress.rollouts = "" if trainer.up else run.books.rollouts()
                recorder.counter("loop/lag_p99", recorder.clock(), lag.p99)
            progress.render()
            await asyncio.sleep(RENDER_S)

    ended = "failed: did not start"
    try:
        async with asyncio.TaskGroup() as group:
            for line in inversions(recipe):
                progress.note(line)
            gate.enter("servers, relays and trainer to be started")
            beside = [group.create_task(work()) for work in (render, lag.run, status.keep)]
            progress.note(f"starting {len(engines)} servers and {recipe.trainer.ranks} trainer ranks, logs in {logs}")
            if members.dropped:
                urls = ", ".join(members.dropped)
                progress.note(f"engine.count or engine.urls has changed: {urls} not used, until added again")
            if gateway is not None:
                await _listen(gateway, recipe)
            await relays.start()
            await servers.start()
            run = status.run = await relays.until_death(servers.until_death(assemble(recipe, world)))
            control = Control(run_dir, fleet=run.fleet, servers=servers, members=members, connect=join, token=token)
            await control.start()
            with rare_collections():
                await run.controller.run()
            for task in beside:
                task.cancel()
        ended = "finished"
    except asyncio.CancelledError:
        ended, status.run = "interrupted", None
        await last_checkpoint()
        raise
    except BaseException as error:
        ended, status.run = f"failed: {one_line(error)}", None
        await last_checkpoint()
        raise
    finally:
        try:
            await close_all()
        finally:  # a second interrupt cuts the above short: the kernel ends the processes with this one
            books = Ledger() if run is None else run.buffer.ledger
            status.remove()
            with closing(store):
                summary = _finish(recorder, progress, run_dir, books, ended=ended, command=command, started=started)
    return summary


def _finish(
    recorder: Recorder,
    progress: Progress,
    run_dir: Path,
    books: Ledger,
    *,
    ended: str,
    command: Sequence[str],
    started: str,
) -> Summary:
    """Flush, summarise and draw. A full disk must not cost the screen its last state, nor hide its own error."""
    summary = report = None
    try:
        recorder.close()
        summary = recorder.summary(
            exit=ended, started=started, command=command, ledger=books.counts(), reasons=books.reasons()
        )
        write_summary(run_dir, summary)
        report = write_report(run_dir) if recorder.rewards else None
    finally:
        progress.close(summary, report)
    return summary


async def _listen(gateway: Gateway, recipe: Recipe) -> None:
    try:
        await gateway.start()
    except OSError as error:
        where = f"gateway.host = {recipe.gateway.host!r}, gateway.port = {recipe.gateway.port}"
        raise RecipeError(f"{where}: cannot listen there ({error.strerror or error})") from None


def _gauge(recorder: Recorder, run: Run) -> None:
    """What the live display shows beside the steps."""
    now = recorder.clock()
    buffer, fleet = run.buffer.snapshot(), run.proxy.snapshot()
    for name, value in (
        ("rollout/waiting", fleet.waiting),
        ("rollout/tokens", run.proxy.generated),
        ("buffer/reserved", buffer.staleness.reserved),
        ("buffer/occupied", buffer.staleness.occupied),
        ("envs/failed_task", buffer.failed_task),
        ("envs/failed_infra", buffer.failed_infra),
        ("envs/retried", buffer.retried),
    ):
        recorder.counter(name, now, value)
