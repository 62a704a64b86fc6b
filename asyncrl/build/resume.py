"""Opening a run's store, and what a run that goes on has from it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncrl.build.checkpoints import ResumePoint
from asyncrl.build.sources import Loaded
from asyncrl.core.journal import Saved
from asyncrl.core.types import Task
from asyncrl.observe.run_dir import Resumed
from asyncrl.observe.saved import load, rewind
from asyncrl.observe.store import Store


def restore(store: Store, point: ResumePoint, sources: Mapping[str, Loaded]) -> tuple[Saved, Resumed]:
    """For the runtime, and for the files of the run directory. Raises ``RunDirError``."""
    tasks = {(name, task.id): task for name, source in sources.items() for task in source.train}
    version, entry = point.entry.version, point.entry

    def find_task(source: str, name: str) -> Task:
        return tasks[source, name]

    if point.back:
        rewind(store, version, entry.tasks)
    saved = load(store, find_task, checkpoint=version)
    if point.back:
        saved = msgspec.structs.replace(saved, tasks_done=entry.tasks, baseline=entry.baseline)
        return saved, Resumed(version=version, at=entry.at)
    live = {slot.trajectory_id for group in saved.groups for slot in group.slots if slot.live or slot.trajectory}

    def has_ended(trajectory: int) -> bool:
        return trajectory < saved.next_trajectory and trajectory not in live

    return saved, Resumed(
        version=saved.version,
        at=float(saved.notes.get("seconds", 0.0)),
        evaluated=int(saved.notes.get("evaluated", -1)),
        has_ended=has_ended,
    )
