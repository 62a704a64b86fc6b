"""RestartingTrainer: a trainer whose death costs time, and nothing else.

The job is started again from its newest complete checkpoint (or the initial model), and trained once more on the
batches of the steps since then, which the run store has; then goes on what was interrupted. Rollouts never stop: they
go on as far as the staleness control admits, and the buffer and its ledger know nothing of it.

What counts as trained once: a batch is consumed once by the ledger and once in the history of the weights that
survive. A step is trained again only when the weights that it made are lost, on the very same batch and advantages. On
CPUs it must give the very same weights, as their checksum says, or the run ends. On GPUs it need not repeat itself to
the last bit: a difference is told, and the run goes on. Either way servers keep the versions they have.

    attempt()   waits for: its work; the job to be back   woken by: the trainer; whoever brings the job back
    watch()     waits for: the job's death                woken by: its exit
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from asyncrl.core import journal
from asyncrl.core.advantage import Advantage
from asyncrl.core.journal import NOTHING, Saved, SavedStep, Work
from asyncrl.core.types import Batch
from asyncrl.ports import CheckpointLost, NoStore, Observer, RunStore, StepResult, Trainer, TrainerDied, TrainerError
from asyncrl.runtime.stage import Stage

T = TypeVar("T")


class RestartingTrainer:
    """``ports.Trainer`` over ``job``, which it starts again up to ``restarts`` times without a new step in between,
    after ``backoff_s``, and twice as long each further time. ``note`` prints a line for the user.

    A run that goes on from what is ``saved`` begins in the same way. Without a store that keeps them, at most ``2 ·
    replay_steps`` steps are kept in memory, so that one checkpoint every ``replay_steps`` may fail.
    """

    def __init__(
        self,
        job: Trainer,
        *,
        restarts: int,
        replay_steps: int,
        backoff_s: float,
        observer: Observer,
        note: Callable[[str], None],
        store: RunStore | None = None,
        saved: Saved = NOTHING,
    ) -> None:
        self._job = job
        self._store = store or NoStore()
        self._restarts = restarts
        self._replay_steps = replay_steps
        self._backoff_s = backoff_s
        self._observer = observer
        self._note = note
        self._version = saved.version
        self._saved = saved
        self._kept: dict[int, SavedStep] = {}
        """Step → what it was trained on, in order, where the store does not keep it."""
        self._fed: list[Work] = []
        """Parts of the batch to come that the job has taken."""
        self._life = 0
        """How many jobs there were before this one."""
        self._died: TrainerDied | None = None
        """Why there is no job that can be used."""
        self._tries = 0
        """Restarts since the last new step."""
        self._bringing_back = asyncio.Lock()
        self._saving = 0, 0
        """Version and life of the checkpoint that was begun last."""
        self.checkpointed = 0
        """The version at which a checkpoint was tried last, or of the one that the job has begun from since."""
        self.baseline: Callable[[int], float | None] = lambda step: None
        """The running mean of returns that a step subtracts."""
        self.stages: list[Stage] = []
        """What is being waited for, the oldest first."""
        self.restage: Callable[[int], Awaitable[None]] = _nothing
        """Called each time that a new job has reached a version: what servers still need of it was lost too."""

    @property
    def up(self) -> bool:
        """False from the moment that a death is noticed until the new job has all that the old one had."""
        return self._died is None

    @property
    def version(self) -> int:
        """The newest that was trained."""
        return self._version

    async def doing(self) -> str:
        """As in the port."""
        return await self._job.doing() if self._died is None else ""

    def give_up(self) -> None:
        self._job.give_up()

    def no_restarts(self) -> None:
        """The run ends: a job that dies from here on stays dead."""
        self._restarts = 0

    async def connect(self) -> int:
        """As in the port. Where another process had trained on, it is trained to there; a job that dies on the way is
        started again, as ever. One that never trained is not, for most likely it cannot."""
        while True:
            try:
                steps = await self._catch_up()
                break
            except TrainerDied as died:
                if self._saved.life == 0:
                    raise
                await self._before_another(died)
        if steps:
            self._note(f"trainer: at version {self._version}, {steps} steps since its checkpoint trained again")
        return self._version

    async def _catch_up(self) -> int:
        saved, version = self._saved, await self._job.connect()
        if saved.life == 0:
            self._version = version
            return 0
        if saved.taken is not None and version == self._version + 1:  # a job that outlived its controller
            self._store.put(journal.Trained(step=self._version, checksum=0))
            self._version = version
            return 0
        return await self._replay(version, exact=False)

    async def feed(self, part: Batch, advantages: Sequence[Advantage]) -> bool:
        fed = sum(work.batch.step == part.step for work in self._fed)
        await self._remember(part, advantages, fed)
        begun = await self.attempt(lambda: self._job.feed(part, advantages), f"a part of step {part.step}")
        self._fed.append(Work(batch=part, advantages=advantages))
        return begun

    async def train_step(self, batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
        await self._remember(batch, advantages, None)
        result = await self.attempt(lambda: self._job.train_step(batch, advantages), f"step {batch.step}")
        fed, self._fed = [part for part in self._fed if part.batch.step == batch.step], []
        if self._restarts and not self._store.keeps:
            work = Work(batch=batch, advantages=advantages)
            self._kept[batch.step] = SavedStep(fed=fed, work=work, checksum=result.checksum)
            if len(self._kept) > 2 * self._replay_steps:
                del self._kept[next(iter(self._kept))]
        self._store.put(journal.Trained(step=batch.step, checksum=result.checksum))
        self._version = result.version
        self._tries = 0
        return result

    async def _remember(self, batch: Batch, advantages: Sequence[Advantage], part: int | None) -> None:
        """The trainer is given only what would still be known if this process died now."""
        self._store.put(
            journal.Given(
                step=batch.step,
                part=part,
                groups=tuple(group.id for group in batch.groups),
                advantages=advantages,
                baseline=self.baseline(batch.step + 1) if part is None else None,
            )
        )
        await self._store.committed()

    async def save(self, folder: str) -> int:
        await self._store.committed()  # no checkpoint is ahead of the store
        self.checkpointed = self._version
        version = await self.attempt(lambda: self._job.save(folder), "a checkpoint to begin", cut=False)
        self._saving = version, self._life
        return version

    async def saved(self) -> None:
        """As in the port. Raises ``CheckpointLost`` when the job that was to write it has died."""
        version, life = self._saving

        async def written() -> None:
            if life != self._life:
                raise CheckpointLost(f"trainer: checkpoint version-{version} was lost with the job that wrote it")
            await self._job.saved()

        await self.attempt(written, f"the checkpoint of version {version} to be written", cut=False)
        self._store.put(journal.Checkpointed(version=version))
        for step in [step for step in self._kept if step < version]:
            del self._kept[step]

    async def close(self) -> None:
        await self._job.close()

    async def watch(self) -> None:
        """A service of the run: a job that dies while nobody asks it for anything is brought back at once."""
        await self.attempt(self._job.watch)

    async def attempt(self, work: Callable[[], Awaitable[T]], what: str = "", *, cut: bool = True) -> T:
        """``work``'s result; begun anew on a new job when the trainer dies under it. ``what`` names it for the status;
        work that is named may be ``cut``, which counts as the trainer's death. Raises ``TrainerError`` when the trainer
        cannot be brought back."""
        if what:
            self.stages.append(stage := Stage("trainer"))
        try:
            while True:
                life, died = self._life, self._died
                if died is None:
                    try:
                        if not what:
                            return await work()
                        stage.enter(what)
                        return await (self._cuttable(work, stage) if cut else work())
                    except TrainerDied as error:
                        died = error
                if what:
                    stage.enter(f"a new job, as the old one died, for {what}")
                await self._bring_back(life, died)
        finally:
            if what:
                self.stages.remove(stage)

    async def _cuttable(self, work: Callable[[], Awaitable[T]], stage: Stage) -> T:
        try:
            async with asyncio.timeout(None) as stage.scope:
                return await work()
        except TimeoutError:
            if not stage.cut_why:
                raise
            self._job.give_up()
            raise TrainerDied(f"trainer: {stage.cut_why}") from None
        finally:
            stage.scope = None

    async def _bring_back(self, life: int, died: TrainerDied) -> None:
        """Return with a job at the version of the one that died in ``life``."""
        loop = asyncio.get_running_loop()
        async with self._bringing_back:
            if life != self._life:
                return  # somebody else did
            started = loop.time()
            self._observer.instant("trainer", "died", started, {"error": str(died), "version": self._version})
            while True:
                self._died = died
                await self._before_another(died)
                try:
                    steps = await self._replay(await self._job.connect(), exact=True)
                    break
                except TrainerDied as error:
                    died = error
                except TrainerError:
                    self._tries = self._restarts  # another try would come to the same
                    raise
            self._life += 1
            self._died = None
        seconds = loop.time() - started
        self._observer.span("trainer", "restart", started, loop.time(), {"version": self._version, "steps": steps})
        self._note(f"trainer: back at version {self._version} after {seconds:.0f} s, {steps} steps trained again")

    async def _before_another(self, died: TrainerDied) -> None:
        """Say it, and wait a while. Raises ``died`` after too many."""
        if self._tries >= self._restarts:
            raise died
        self._tries += 1
        self._note(f"{died}; starting it again ({self._tries} of {self._restarts}), rollouts go on within their bound")
        await asyncio.sleep(self._backoff_s * 2 ** (self._tries - 1))

    async def _replay(self, first: int, *, exact: bool) -> int:
        """Bring a job from version ``first`` to where the last one was; the number of steps that this took. ``exact``:
        the weights must be the same, for there are servers that have them, if the job repeats itself exactly. Else
        they may differ by rounding, as on GPUs or with another number of ranks, which is told once."""
        step = self.checkpointed = first
        told = False
        await self.restage(step)
        while step < self._version:
            trained = await self._store.trained_on(step) if self._store.keeps else self._kept.get(step)
            if trained is None:
                raise TrainerError(
                    f"trainer: its newest checkpoint is of version {first}, and step {step} is not kept any more; "
                    "make room for checkpoints and go on from it with --resume"
                )
            await self._feed(trained.fed)
            result = await self._job.train_step(trained.work.batch, trained.work.advantages)
            differs = trained.checksum not in (0, result.checksum)  # 0: by a job that outlived its controller
            if differs and exact and result.repeats:
                raise TrainerError(
                    f"trainer: step {step}, trained again, gave other weights than before (checksum {result.checksum:x}"
                    f", was {trained.checksum:x}): it does not repeat itself exactly here; go on from its newest "
                    "checkpoint with --resume"
                )
            if differs:
                self._store.put(journal.Trained(step=step, checksum=result.checksum))
                if step in self._kept:
                    self._kept[step] = msgspec.structs.replace(trained, checksum=result.checksum)
                if not told:
                    self._note(
                        f"trainer: step {step}, trained again, gave other weights than before, as it may on GPUs or "
                        "with another number of ranks; going on with these"
                    )
                told = True
            step += 1
            await self.restage(step)
        if step > self._version:
            raise TrainerError(f"trainer: it started again at version {step}, beyond version {self._version}")
        await self._feed([part for part in self._fed if part.batch.step == step])
        return step - first

    async def _feed(self, parts: Sequence[Work]) -> None:
        for part in parts:
            await self._job.feed(part.batch, part.advantages)


async def _nothing(version: int) -> None:
    """Where no servers need anything."""
