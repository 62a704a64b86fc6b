"""Which checkpoints stay, what the index says of them, and which one a run goes on from; the trainer is played."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.build.checkpoints import Entry, Index, Keeper, ResumePoint, best, find, kept, read_index, set_aside
from asyncrl.build.resume import restore
from asyncrl.build.unchanged import fixed
from asyncrl.config import Recipe, RecipeError, load_table
from asyncrl.core.journal import GroupOpened, Noted
from asyncrl.core.types import Task
from asyncrl.observe.run_dir import RunDirError
from asyncrl.observe.store import Store
from asyncrl.ports import CheckpointFailed


def entry(version: int, reward: float | None = None, accuracy: float | None = None) -> Entry:
    return Entry(version=version, reward=reward, accuracy=accuracy)


class PlayedTrainer:
    """Writes a folder when it is let; ``full`` is a disk without room."""

    def __init__(self) -> None:
        self.version = 0
        self.full = False
        self.written = asyncio.Event()
        self.written.set()
        self._target = Path()

    async def save(self, folder: str) -> int:
        self._target = Path(folder) / f"version-{self.version}" / "trainer"
        return self.version

    async def saved(self) -> None:
        await self.written.wait()
        if self.full:
            raise CheckpointFailed(f"trainer: checkpoint {self._target.parent} was not written: no space")
        self._target.mkdir(parents=True, exist_ok=True)
        (self._target / "state.json").touch()


class Inline:
    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    async def close(self) -> None: ...


class Played:
    """A keeper of two, with its trainer."""

    def __init__(self, folder: Path, resumed: int | None = None) -> None:
        self.folder = folder
        self.trainer = PlayedTrainer()
        self.rewards: dict[int, float] = {}
        self.accuracies: dict[int, float] = {}
        self.notes: list[str] = []
        self.keeper = Keeper(
            self.trainer,
            folder,
            keep=2,
            describe=lambda v: Entry(version=v, at=float(v), tasks=8 * v, reward=self.rewards.get(v)),
            accuracy=self.accuracies.get,
            blocking=Inline(),
            note=self.notes.append,
            resumed=resumed,
        )

    async def checkpoint(self, version: int, reward: float | None = None) -> None:
        self.trainer.version = version
        if reward is not None:
            self.rewards[version] = reward
        await self.keeper.begin()

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - {"index.json"}


def test_the_best_is_by_accuracy_only_where_all_were_evaluated() -> None:
    assert best([]) is None
    assert best([entry(1), entry(2)]) is None
    assert best([entry(1, 0.3), entry(2, 0.5), entry(3, 0.5), entry(4)]) == 3
    assert best([entry(1, 0.9), entry(2, 0.5, 1.0)]) == 1
    assert best([entry(1, 0.9, 0.1), entry(2, 0.5, 0.2)]) == 2
    assert best([entry(1, 0.1, 0.0), entry(2, 0.2, 0.0)]) == 2


def test_the_last_few_stay_and_the_best_and_the_one_resumed_from() -> None:
    entries = [entry(v, reward) for v, reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4))]

    def stay(keep: int, resumed: int | None) -> list[int]:
        return [e.version for e in kept(entries, keep, resumed)]

    assert stay(2, None) == [2, 4, 5]
    assert stay(1, 3) == [2, 3, 5]
    assert stay(0, None) == [1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_a_run_keeps_the_last_and_the_best_and_an_index_of_them(tmp_path: Path) -> None:
    played = Played(tmp_path)
    for version, reward in ((1, 0.1), (2, 0.8), (3, 0.2), (4, 0.3)):
        await played.checkpoint(version, reward)
    await played.keeper.last(4)
    assert played.there == {"version-2", "version-3", "version-4"}
    index = read_index(tmp_path)
    assert index.best == 2
    assert [(e.version, e.tasks, e.reward) for e in index.checkpoints] == [(2, 16, 0.8), (3, 24, 0.2), (4, 32, 0.3)]


@pytest.mark.asyncio
async def test_an_evaluation_that_comes_later_enters_the_index(tmp_path: Path) -> None:
    played = Played(tmp_path)
    await played.checkpoint(1, 0.9)
    await played.checkpoint(2, 0.1)
    played.accuracies |= {1: 0.0, 2: 0.5}
    await played.keeper.last(2)
    assert [e.accuracy for e in read_index(tmp_path).checkpoints] == [0.0, 0.5]
    assert read_index(tmp_path).best == 2


@pytest.mark.asyncio
async def test_begin_returns_while_it_is_written_and_the_next_waits_for_that(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.trainer.written.clear()
    await played.checkpoint(1)
    async with asyncio.TaskGroup() as group:
        second = group.create_task(played.checkpoint(2))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        played.trainer.written.set()
    assert [e.version for e in read_index(tmp_path).checkpoints] == [1]


@pytest.mark.asyncio
async def test_what_is_complete_is_entered_without_waiting_for_the_next(tmp_path: Path) -> None:
    played = Played(tmp_path)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(played.keeper.watch())
        await played.checkpoint(1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert [e.version for e in read_index(tmp_path).checkpoints] == [1]
        watch.cancel()


@pytest.mark.asyncio
async def test_a_full_disk_costs_that_checkpoint_and_is_told_and_only_the_last_one_is_an_error(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.trainer.full = True
    await played.checkpoint(1)
    played.trainer.version = 2
    await played.keeper.begin()
    assert played.notes == [
        f"trainer: checkpoint {tmp_path / 'version-1'} was not written: no space; training goes on from memory, and "
        "the next checkpoint is tried in its turn"
    ]
    played.trainer.full = False
    played.trainer.version = 3
    await played.keeper.last(3)
    assert played.there == {"version-2", "version-3"}
    played.trainer.full = True
    played.trainer.version = 4
    with pytest.raises(CheckpointFailed, match="version-4 was not written: no space"):
        await played.keeper.last(4)


@pytest.mark.asyncio
async def test_a_checkpoint_that_a_user_removed_is_no_error(tmp_path: Path) -> None:
    played = Played(tmp_path)
    for version in (1, 2):
        await played.checkpoint(version)
    await played.keeper.last(2)
    shutil.rmtree(tmp_path / "version-1")
    for version in (3, 4):
        await played.checkpoint(version)
    await played.keeper.last(4)
    assert played.there == {"version-3", "version-4"}
    assert played.notes == []


@pytest.mark.asyncio
async def test_an_index_that_cannot_be_written_is_told_and_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise RunDirError(f"{path}: cannot write (no space)")

    played = Played(tmp_path)
    for version in (1, 2):
        await played.checkpoint(version)
    await played.keeper.last(2)
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.build.checkpoints.write_atomic", full)
        await played.checkpoint(3)
        with pytest.raises(CheckpointFailed, match="no space"):
            await played.keeper.last(3)
    assert played.there == {"version-1", "version-2", "version-3"}
    assert "index.json: cannot write (no space); training goes on from memory" in played.notes[0]
    await played.checkpoint(4)
    await played.keeper.last(4)
    assert played.there == {"version-3", "version-4"}
    assert [e.version for e in read_index(tmp_path).checkpoints] == [3, 4]


@pytest.mark.asyncio
async def test_a_cancelled_wait_loses_no_checkpoint(tmp_path: Path) -> None:
    """Cut off at every turn of the loop, the books are those of the files once the last one has been waited for."""
    for turns in range(12):
        played = Played(tmp_path / str(turns))
        await played.checkpoint(1)
        await played.keeper.last(1)
        played.trainer.version = 2
        async with asyncio.TaskGroup() as group:
            task = group.create_task(played.keeper.last(2))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        assert played.keeper.has(2) == (read_index(played.folder).checkpoints[-1].version == 2)
        await played.keeper.last(2)
        assert [e.version for e in read_index(played.folder).checkpoints] == [1, 2], turns
        assert played.there == {"version-1", "version-2"}


def test_versions_after_the_one_resumed_from_are_set_aside_with_what_a_kill_left(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("version-1", "version-2", "version-3", ".version-4.77.part", "lost-version-3"):
        (folder / name / "trainer").mkdir(parents=True)
        (folder / name / "trainer" / "state.json").touch()
    (folder / "lost-version-3" / "old").touch()
    set_aside(ResumePoint(run_dir=tmp_path, checkpoint=folder / "version-2", entry=entry(2), back=True))
    assert {path.name for path in folder.iterdir()} == {"version-1", "version-2", "lost-version-3"}
    assert not (folder / "lost-version-3" / "old").exists()


def test_an_index_that_cannot_be_read_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    assert read_index(tmp_path) == Index()
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(RecipeError, match=r"index\.json: cannot be read \(.*\); remove it to resume without it"):
        read_index(tmp_path)


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    for version in (26, 44):
        (tmp_path / f"version-{version}" / "trainer").mkdir(parents=True)
        (tmp_path / f"version-{version}" / "trainer" / "state.json").touch()
    with pytest.raises(RecipeError, match=r"version-2: not a checkpoint .*; there are version-26, version-44$"):
        find(tmp_path / "version-2", Recipe())


def test_what_a_run_cannot_change_is_refused_before_it_is_taken_back(tmp_path: Path) -> None:
    with closing(Store(tmp_path, blocking=Inline(), find_task=lambda source, name: Task(id=name, data={}))) as store:
        for key, value in fixed(Recipe()).items():
            store.put(Noted(key=key, value=value))
        store.put(GroupOpened(group=0, task=Task(id="t", data={}), tasks_done=1, trajectories=(0,)))
        store.write()
        point = ResumePoint(run_dir=tmp_path, checkpoint=None, entry=Entry(version=0), back=True)
        other = load_table({"rollout": {"batch_groups": 3}})
        with pytest.raises(RecipeError, match=r"rollout.batch_groups = 3: .* was begun with 8; set it back"):
            restore(store, point, other)
        assert store.db.execute("SELECT state FROM groups").fetchall() == [("open",)]


def test_a_folder_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RecipeError, match=rf"--resume {path}: no checkpoint in {path}/checkpoints; begin a new"):
            find(path, Recipe())
