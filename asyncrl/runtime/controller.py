"""AsyncController: the root TaskGroup, the train loop and the end of a run (ROLL Flash §4.2).

      EnvManager × num_envs ──put──▶ SampleBuffer ──get_batch──▶ ┌─────────── train loop ───────────┐
        ▲    │ lease                      ▲          (get_part)  │ get_batch → train_step → prepare │
        │    └── generate ──▶ LLMProxy    └──── set_version ──── └──────────────────────────────────┘
        └────────────────────────┘ ▲                                        │
                                   └── suspend · load · resume ◀── deliver ─┘

    loop          waits for                                  woken by
    train loop    get_part, get_batch; feed, train_step;     an occupy, the last occupy; the trainer;
                  prepare; the delivery before               the servers
    deliver       the servers, one version at a time         the servers
    EnvManager    a lease; a completion; the env             admission; the proxy; the user's code
    fleet         a server that failed; the next heartbeat   mark_down; the clock
    services      whatever the composition root adds (progress, flushing)

Training overlaps generation by as much as the staleness control admits: with α = 0 nothing is admitted until the new
version is live, so the same loop is synchronous. Streaming overlaps it with the rest of the same batch's rollout too:
what is certain of the batch is trained while its last groups run. With ``overlap`` a step begins while the servers
still take the version that it starts from: admission goes by what they hold, and the trainer is never two versions
ahead of them when it begins another. The first exception of any child cancels all others;
afterwards the ledger must balance, or that is the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.core.advantage import Advantage
from asyncrl.core.types import Batch
from asyncrl.ports import Observer, StepMetrics, Trainer
from asyncrl.runtime.env_manager import EnvManager
from asyncrl.runtime.evaluation import Evaluator
from asyncrl.runtime.fleet import Fleet
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.parameter_server import ParameterServer
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.stage import Stage

Service = Callable[[], Awaitable[None]]

BATCH, TRAINER, DELIVERY = "its batch", "the trainer", "the new weights on the servers"
EVALUATION, EPISODES = "an evaluation", "episodes to close their environments"


class AsyncController:
    """Runs ``steps`` train steps, with an evaluation before and after when there are held-out tasks.

    ``streamed_groups``: so many first groups of a batch may go to the trainer before the others; 0: none.
    ``eval_every``: steps between evaluations beside training; 0: none.
    ``gate`` is kept at what the run as a whole waits for.
    ``checkpoint`` is awaited with the version ``checkpoint_every`` steps after that of ``checkpointed`` (0: only at the
    end): one that was lost with its trainer is made up for at once, not in its turn.
    """

    def __init__(
        self,
        *,
        steps: int,
        advantages: Callable[[Batch], Sequence[Advantage]],
        buffer: SampleBuffer,
        proxy: LLMProxy,
        fleet: Fleet,
        parameters: ParameterServer,
        trainer: Trainer,
        env_managers: Sequence[EnvManager],
        evaluator: Evaluator,
        observer: Observer,
        gate: Stage,
        checkpoint: Callable[[int], Awaitable[None]],
        checkpointed: Callable[[], int],
        checkpoint_every: int = 0,
        overlap: bool = False,
        streamed_groups: int = 0,
        eval_every: int = 0,
        services: Sequence[Service] = (),
    ) -> None:
        self._steps = steps
        self._advantages = advantages
        self._buffer = buffer
        self._proxy = proxy
        self._fleet = fleet
        self._parameters = parameters
        self._trainer = trainer
        self._env_managers = env_managers
        self._evaluator = evaluator
        self._observer = observer
        self._checkpoint = checkpoint
        self._checkpointed = checkpointed
        self._checkpoint_every = checkpoint_every
        self._overlap = overlap
        self._delivery: asyncio.Task[None] | None = None
        """Puts the newest version on the servers."""
        self._update_s = 0.0  # that the newest version took from the trainer's step to the next
        self._streamed_groups = streamed_groups
        self._eval_every = eval_every
        self._services = services
        self._gate = gate

    async def run(self) -> None:
        """To the last step. Afterwards every trajectory is in a final state, or ``LedgerError`` is raised."""
        reason = "run ended"
        try:
            async with asyncio.TaskGroup() as root:
                services = (*self._services, self._fleet.run, self._evaluator.run)
                background = [root.create_task(_forever(service)) for service in services]
                self._enter("the run", "the trainer's weights on all servers")
                await self._parameters.align()
                self._enter("the run", EVALUATION)
                await self._evaluate_first()
                managers = [root.create_task(manager.run()) for manager in self._env_managers]
                for step in range(self._parameters.version, self._steps):
                    await self._step(step, root)
                self._enter("the end of the run", DELIVERY)
                await self._delivered()
                self._buffer.close(reason)
                self._enter("the end of the run", EPISODES)
                await _stop(managers)
                self._enter("the end of the run", EVALUATION)
                await self._parameters.catch_up()  # for which an evaluation may wait, and no work makes servers pull
                await self._evaluator.idle.wait()
                await self._evaluator.whole()
                self._enter("the end of the run", TRAINER)
                await self._checkpoint(self._parameters.version)
                self._enter("the end of the run", "services to stop")
                await _stop(background)
        except BaseException:
            reason = "run stopped"
            raise
        finally:
            self._buffer.close(reason, resumable=True)
            self._buffer.ledger.check_balanced()

    async def _evaluate_first(self) -> None:
        """A run that goes on has had its first one; one that was due when it ended is made up for beside training."""
        version, newest = self._parameters.version, self._evaluator.newest
        if newest < 0:
            await self._evaluator.whole()
        elif self._eval_every and newest < version < self._steps and version % self._eval_every == 0:
            self._evaluator.ask()

    async def _step(self, step: int, root: asyncio.TaskGroup) -> None:
        """Consume one batch, train on it, gather the new version and have it put on the servers."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        who = f"step {step}"
        self._enter(who, BATCH)
        streamed_s = await self._stream(step) if self._streamed_groups else 0.0
        batch = await self._buffer.get_batch(step)
        self._enter(who, TRAINER)
        got = loop.time()
        result = await self._trainer.train_step(batch, self._advantages(batch))
        trained = loop.time()
        self._observer.span("trainer", "train", got, trained, {"version": step})
        # Before the next await: nothing makes durable that the step is trained before what is told of it.
        snapshot = self._buffer.snapshot()
        self._observer.step(
            StepMetrics(
                batch=batch,
                at=trained,
                seconds=self._update_s + trained - started,
                wait_s=got - started - streamed_s,
                train_s=trained - got + streamed_s,
                streamed_s=streamed_s,
                update_s=self._update_s,
                tokens=self._proxy.generated,
                trainer=result.metrics,
                buffer={
                    "reserved": snapshot.staleness.reserved,
                    "occupied": snapshot.staleness.occupied,
                    "capacity": snapshot.staleness.capacity,
                    "filtered": snapshot.filtered,
                    "reused": snapshot.reused,
                },
                envs={
                    "retried": snapshot.retried,
                    "failed_task": snapshot.failed_task,
                    "failed_infra": snapshot.failed_infra,
                },
                ledger=self._buffer.ledger.counts(),
            )
        )
        await self._hand_over(who, result.version, root)
        self._update_s = loop.time() - trained
        due = self._checkpoint_every and step + 1 >= self._checkpointed() + self._checkpoint_every
        if due and step + 1 < self._steps:
            self._enter(who, TRAINER)
            await self._checkpoint(result.version)

    async def _hand_over(self, who: str, version: int, root: asyncio.TaskGroup) -> None:
        """Take the new version from the trainer, and begin to put it on the servers; without overlap to the end."""
        self._enter(who, DELIVERY)
        await self._delivered()  # the version before, which the next would take the place of
        self._enter(who, TRAINER)
        await self._parameters.prepare(version)
        self._enter(who, DELIVERY)
        self._delivery = root.create_task(self._deliver(version))
        if not self._overlap:
            await self._delivered()

    def _enter(self, who: str, what: str) -> None:
        self._gate.who = who
        self._gate.enter(what)

    async def _deliver(self, version: int) -> None:
        await self._parameters.deliver(version)
        self._buffer.set_version(version)
        if self._eval_every and version % self._eval_every == 0 and version < self._steps:
            self._evaluator.ask()

    async def _delivered(self) -> None:
        """Wait until the servers hold what was prepared last. If that fails the TaskGroup cancels this."""
        if self._delivery is not None:
            await asyncio.wait([self._delivery])

    async def _stream(self, step: int) -> float:
        """Until the batch is complete, have the trainer begin with what is certain of it; the seconds of its passes."""
        loop = asyncio.get_running_loop()
        seconds = 0.0
        while groups := await self._buffer.get_part(self._streamed_groups):
            part = Batch(step=step, groups=groups)
            began = loop.time()
            if await self._trainer.feed(part, self._advantages(part)):
                ended = loop.time()
                seconds += ended - began
                self._observer.span("trainer", "train", began, ended, {"version": step, "part": True})
        return seconds


async def _forever(service: Service) -> None:
    await service()


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel and wait; a task that fails meanwhile is the TaskGroup's business."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
