"""What a run that goes on has from its store."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncrl.build.checkpoints import ResumePoint
from asyncrl.build.sources import Loaded
from asyncrl.build.unchanged import check_unchanged
from asyncrl.config import Recipe
from asyncrl.core.journal import Saved
from asyncrl.core.types import Task
from asyncrl.observe.run_dir import Resumed
from asyncrl.observe.saved import FindTask
from asyncrl.observe.store import Store


def task_finder(sources: Mapping[str, Loaded]) -> FindTask:
    """The training tasks by source and id; looked through when one is asked for."""
    tasks: dict[tuple[str, str], Task] = {}

    def find_task(source: str, name: str) -> Task:
        if not tasks:
            tasks.update({(s, task.id): task for s, loaded in sources.items() for task in loaded.train})
        return tasks[source, name]

    return find_task


def restore(store: Store, point: ResumePoint, recipe: Recipe) -> tuple[Saved, Resumed]:
    """For the runtime, and for the files of the run directory. Raises ``RunDirError``, and ``RecipeError`` before
    anything is changed."""
    check_unchanged(recipe, store.notes)
    version, entry = point.entry.version, point.entry
    if point.back:
        store.rewind(version, entry.tasks)
    saved = store.load(version)
    if point.back:
        saved = msgspec.structs.replace(saved, tasks_done=entry.tasks, baseline=entry.baseline)
        return saved, Resumed(version=version, at=entry.at)
    live = {
        slot.trajectory_id
        for group in saved.groups
        for slot in group.slots
        if not group.uses and (slot.live or slot.trajectory)
    }

    def has_ended(trajectory: int) -> bool:
        return trajectory < saved.next_trajectory and trajectory not in live

    return saved, Resumed(
        version=saved.version,
        at=float(saved.notes.get("seconds", 0.0)),
        evaluated=int(saved.notes.get("evaluated", -1)),
        has_ended=has_ended,
    )
