"""Which checkpoints a run keeps, and where it goes on from one.

``RUN/checkpoints/`` holds folders ``version-N`` and ``index.json``, which says of each what the controller has to know
to go on from it, and which is the best. Keeper owns that folder, but for what the trainer writes there.

    begin()   waits for: the checkpoint before; the trainer's copy   woken by: the trainer
    watch()   waits for: a checkpoint that was begun; its end        woken by: begin; the trainer

A checkpoint that cannot be written is told, and the next one is tried in its turn; only the last of a run has to be.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.config import Recipe, RecipeError
from asyncrl.core.types import Record
from asyncrl.observe.database import STORE
from asyncrl.observe.run_dir import METRICS, SUMMARY, RunDirError, read_lines, write_atomic
from asyncrl.ports import Blocking, CheckpointFailed, CheckpointLost
from asyncrl.shield import to_the_end
from asyncrl.train.description import PREFIX, CheckpointError, check, version_of, versions

FOLDER = "checkpoints"
INDEX = "index.json"
WRITE_S = 30.0
"""How long it may take to write the index."""


class Entry(Record, frozen=True, kw_only=True):
    """One checkpoint: when its last step ended, in seconds since the run began; about how many tasks were done with by
    then; the mean reward of the steps since the one before; the accuracy on the held-out tasks, if they were played;
    the running mean of returns that the next step subtracts (``algorithm.baseline = "running"``)."""

    version: int
    at: float = 0.0
    tasks: int = 0
    reward: float | None = None
    accuracy: float | None = None
    baseline: float | None = None


class Index(Record, frozen=True, kw_only=True):
    """``index.json``. ``best`` is a version."""

    best: int | None = None
    checkpoints: list[Entry] = []


class ResumePoint(Record, frozen=True, kw_only=True):
    """The checkpoint that the trainer of the run in ``run_dir`` goes on from; None: the initial model. ``back``: the
    run goes back to it, and gives up what came after."""

    run_dir: Path
    checkpoint: Path | None
    entry: Entry
    back: bool


class Saver(Protocol):
    """What Keeper needs of the trainer's client."""

    async def save(self, folder: str) -> int: ...

    async def saved(self) -> None: ...


def best(entries: Sequence[Entry]) -> int | None:
    """By accuracy where all have one, else by reward; of equals the newest."""
    key = "accuracy" if all(e.accuracy is not None for e in entries) else "reward"
    scored = [(getattr(e, key), e.version) for e in entries if getattr(e, key) is not None]
    return max(scored)[1] if scored else None


def kept(entries: Sequence[Entry], keep: int, resumed: int | None) -> list[Entry]:
    """The last ``keep`` (0: all), the best, and the one that the run was resumed from."""
    if not keep:
        return list(entries)
    stay = {e.version for e in entries[-keep:]} | {best(entries), resumed}
    return [e for e in entries if e.version in stay]


def read_index(folder: Path) -> Index:
    """Raises ``RecipeError``."""
    try:
        return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    except FileNotFoundError:
        return Index()
    except (OSError, msgspec.DecodeError) as error:
        raise RecipeError(f"{folder / INDEX}: cannot be read ({error}); remove it to resume without it") from None


def find(path: Path, recipe: Recipe) -> ResumePoint:
    """What ``--resume`` names: a run directory (its newest checkpoint) or one of its checkpoints. Raises
    ``RecipeError`` if the recipe cannot go on from it."""
    path = path.absolute()
    back = version_of(path) is not None and not (path / FOLDER).is_dir()
    if not back:
        if not (found := versions(path / FOLDER)):
            if not (path / STORE).exists():
                raise RecipeError(f"--resume {path}: no checkpoint in {path / FOLDER}; begin a new run")
            return ResumePoint(run_dir=path, checkpoint=None, entry=Entry(version=0), back=False)
        path = path / FOLDER / f"{PREFIX}{found[-1]}"
    folder = path.parent
    try:
        version = check(path, recipe, Path(recipe.model.path)).version
    except CheckpointError as error:
        raise RecipeError(str(error)) from None
    if version >= recipe.run.steps and (back or _finished(folder.parent)):
        raise RecipeError(f"run.steps = {recipe.run.steps}: {path} is of version {version} already; set it higher")
    entry = next((e for e in read_index(folder).checkpoints if e.version == version), None)
    if entry is None:  # killed between the two
        at = [row["time/at"] for row in read_lines(folder.parent / METRICS) if row["version"] == version]
        entry = Entry(version=version, at=at[0] if at else 0.0, tasks=version * recipe.rollout.batch_groups)
    back = back or not (folder.parent / STORE).exists()
    return ResumePoint(run_dir=folder.parent, checkpoint=path, entry=entry, back=back)


def _finished(run_dir: Path) -> bool:
    """False also for a run that was killed after its last step."""
    try:
        return msgspec.json.decode((run_dir / SUMMARY).read_bytes(), type=dict).get("exit") == "finished"
    except (OSError, msgspec.DecodeError):
        return False


def clear_up(folder: Path) -> None:
    """Remove what a trainer that was killed had not finished writing, and what a run had not finished removing."""
    for path in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(point: ResumePoint) -> None:
    """Clear up what a killed run left, and rename checkpoints that are newer than the one resumed from: they are of
    steps that will be trained anew."""
    folder = point.run_dir / FOLDER
    clear_up(folder)
    for version in versions(folder):
        if version > point.entry.version:
            target = folder / f"lost-{PREFIX}{version}"
            shutil.rmtree(target, ignore_errors=True)
            (folder / f"{PREFIX}{version}").rename(target)


class Keeper:
    """``describe`` gives a version's ``Entry`` at the time of the call, ``accuracy`` what an evaluation of a version
    came to, ``note`` prints a line for the user."""

    def __init__(
        self,
        trainer: Saver,
        folder: Path,
        *,
        keep: int,
        describe: Callable[[int], Entry],
        accuracy: Callable[[int], float | None],
        blocking: Blocking,
        note: Callable[[str], None],
        resumed: int | None = None,
    ) -> None:
        self._trainer = trainer
        self._folder = folder
        self._keep = keep
        self._describe = describe
        self._accuracy = accuracy
        self._blocking = blocking
        self._note = note
        self._resumed = resumed
        self._entries = [e for e in read_index(folder).checkpoints if e.version in versions(folder)]
        self._lock = asyncio.Lock()
        self._begun = asyncio.Event()
        self._pending: Entry | None = None
        self._failure: CheckpointFailed | None = None
        self.newest = resumed or 0
        """The version that was begun last, or resumed from."""

    async def begin(self) -> None:
        """A checkpoint of the trainer's version. Returns when training may go on."""
        async with self._lock:
            await self._settle()
            await self._blocking.run(clear_up, self._folder)
            try:
                version = await self._trainer.save(str(self._folder))
            except CheckpointFailed as error:
                self._failed(error)
            else:
                self._pending, self.newest = self._describe(version), version
                self._begun.set()

    def has(self, version: int) -> bool:
        """True if a checkpoint of ``version`` or later is complete and in the index."""
        return self.newest >= version and self._pending is None

    async def last(self, version: int) -> None:
        """Return when a checkpoint of ``version`` or later is complete. Raises ``CheckpointFailed``."""
        while True:
            self._failure = None
            if self.newest < version:
                await self.begin()
            async with self._lock:
                await self._settle()
            if self._failure is None:
                return
            if not isinstance(self._failure, CheckpointLost):
                raise self._failure

    async def watch(self) -> None:
        """Until cancelled: enter what is complete into the index, and remove what need not be kept."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            async with self._lock:
                await self._settle()

    async def _settle(self) -> None:
        if (entry := self._pending) is None:
            return
        try:
            await self._trainer.saved()
        except CheckpointFailed as error:
            self._pending = None
            self._failed(error)
            return
        entries = [e for e in self._entries if e.version != entry.version] + [entry]
        for i, e in enumerate(entries):
            if (accuracy := self._accuracy(e.version)) is not None:
                entries[i] = msgspec.structs.replace(e, accuracy=accuracy)
        self._entries, stay = entries, kept(entries, self._keep, self._resumed)
        self._pending = None
        gone = {e.version for e in entries} - {e.version for e in stay}
        index = Index(best=best(stay), checkpoints=stay)
        # An interrupt that comes now must not leave files and books apart; the slow removing may be cut short.
        try:
            asides = await to_the_end(self._blocking.run(self._write, index, gone), WRITE_S)
        except (RunDirError, OSError) as error:
            self._failed(CheckpointFailed(f"checkpoints: {error or 'the disk does not answer'}"))
            return
        self._entries = stay
        for aside in asides:
            await self._blocking.run(shutil.rmtree, aside, True)

    def _write(self, index: Index, gone: set[int]) -> list[Path]:
        """Where what need not stay has been put, so that nobody takes half of it for a checkpoint."""
        write_atomic(self._folder / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
        asides = []
        for version in sorted(gone):
            aside = self._folder / f".{PREFIX}{version}.old"
            with suppress(FileNotFoundError):  # a user has removed it
                (self._folder / f"{PREFIX}{version}").rename(aside)
                asides.append(aside)
        return asides

    def _failed(self, error: CheckpointFailed) -> None:
        self._failure = error
        self.newest = self._entries[-1].version if self._entries else self._resumed or 0
        self._note(f"{error}; training goes on from memory, and the next checkpoint is tried in its turn")
