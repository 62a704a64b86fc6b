"""What a run goes on from, out of its store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncrl.core.experience import generated
from asyncrl.core.journal import Saved, SavedGroup, SavedSlot, SavedStep, Work, joined
from asyncrl.core.types import Batch, Group, Task, Trajectory, Turn
from asyncrl.observe.database import WHOLE
from asyncrl.observe.run_dir import RunDirError
from asyncrl.observe.segments import Segments, advantage, decode

FindTask = Callable[[str, str], Task]
"""The task of a source with an id. Raises ``KeyError``."""


class Reader:
    """Of the database and the segments of the run at ``path``. ``on_scored`` hears of each trajectory that waits for
    its batch, and of the name of its payload. Raises ``RunDirError``, and SQLite's errors."""

    def __init__(
        self,
        path: Path,
        db: sqlite3.Connection,
        segments: Segments,
        find_task: FindTask,
        *,
        on_scored: Callable[[Trajectory, str], None],
    ) -> None:
        self._on_scored = on_scored
        self._path = path
        self._db = db
        self._segments = segments
        self._find_task = find_task

    def saved(self, checkpoint: int) -> Saved:
        """Where the run stands, whose newest checkpoint is of version ``checkpoint``."""
        db = self._db
        # The step that was being trained when the run ended may be in its last checkpoint.
        db.execute("UPDATE steps SET checksum = '0' WHERE step < ? AND checksum IS NULL", (checkpoint,))
        [(consumed,)] = db.execute("SELECT count(*) FROM steps").fetchall()
        checksums = dict(db.execute("SELECT step, checksum FROM steps WHERE checksum IS NOT NULL"))
        version = max(checksums, default=-1) + 1
        kept = {step for (step,) in db.execute("SELECT step FROM given WHERE part = ?", (WHOLE,))}
        if missing := [step for step in range(checkpoint, version) if step not in kept]:
            raise RunDirError(
                f"{self._path}: step {missing[0]} is not kept, and the newest checkpoint is older; go on from that: "
                "--resume RUN/checkpoints/version-N"
            )
        taken = self._batch(version) if version < consumed else None
        baseline = db.execute("SELECT baseline FROM steps WHERE step = ?", (version - 1,)).fetchone()
        final = db.execute(
            "SELECT state, ifnull(reason, ''), count(*) FROM trajectories WHERE state NOT IN ('live', 'scored') "
            "GROUP BY 1, 2"
        )
        [(groups, filtered)] = db.execute(
            "SELECT ifnull(max(id) + 1, 0), count(*) FILTER (WHERE state = 'filtered') FROM groups"
        )
        [(trajectories, retried, failed, failed_infra)] = db.execute(
            "SELECT ifnull(max(id) + 1, 0), count(*) FILTER (WHERE attempt > 0), "
            "count(*) FILTER (WHERE state = 'failed'), count(*) FILTER (WHERE state = 'failed' AND infra) "
            "FROM trajectories"
        )
        [(uses,)] = db.execute(
            "SELECT count(*) FROM uses JOIN trajectories USING (group_id) WHERE trajectories.state = 'consumed'"
        )
        done = db.execute("SELECT tasks_done FROM groups WHERE id = ?", (groups - 1,)).fetchone()
        notes = dict(db.execute("SELECT key, value FROM notes"))  # those of first_… where an earlier store was lost
        return Saved(
            life=int(notes.get("life", 0)),
            version=version,
            consumed=consumed,
            taken=taken,
            groups=tuple(self._groups()),
            tasks_done=done[0] if done else int(notes.get("first_task", 0)),
            next_group=max(groups, int(notes.get("first_group", 0))),
            next_trajectory=max(trajectories, int(notes.get("first_trajectory", 0))),
            final={(state, reason): count for state, reason, count in final},
            uses=uses,
            filtered=filtered,
            retried=retried,
            failed_task=failed - failed_infra,
            failed_infra=failed_infra,
            baseline=baseline[0] if baseline else None,
            notes=notes,
        )

    # --- what was trained

    def step(self, step: int) -> SavedStep:
        """What a step was trained on, which no checkpoint has."""
        parts = self._db.execute("SELECT part, payload FROM given WHERE step = ? ORDER BY part", (step,)).fetchall()
        [(checksum,)] = self._db.execute("SELECT checksum FROM steps WHERE step = ?", (step,)).fetchall()
        works: list[Work] = []
        groups = {group.id: group for group in self._batch(step).groups}
        for _, payload in parts:
            ids, advantages = self._read(payload)
            batch = Batch(step=step, groups=tuple(groups[i] for i in ids))
            works.append(Work(batch=batch, advantages=[advantage(a) for a in advantages]))
        whole, *fed = works
        return SavedStep(fed=fed, work=whole, checksum=int(checksum, 16))

    def _batch(self, step: int) -> Batch:
        rows = self._db.execute(
            "SELECT id, source, task, v_traj FROM uses JOIN groups ON id = group_id WHERE uses.step = ? "
            "ORDER BY uses.position",
            (step,),
        ).fetchall()
        groups = [
            Group(
                id=group,
                task=self._task(source, task),
                v_traj=v_traj,
                trajectories=tuple(
                    self._trajectory(payload, reward)
                    for payload, reward in self._db.execute(
                        "SELECT payload, reward FROM trajectories WHERE group_id = ? AND state = 'consumed' "
                        "ORDER BY member",
                        (group,),
                    )
                ),
            )
            for group, source, task, v_traj in rows
        ]
        return Batch(step=step, groups=tuple(groups))

    # --- what was not

    def _groups(self) -> Iterator[SavedGroup]:
        rows = self._db.execute(
            "SELECT id, source, task, v_traj, deadline, state, (SELECT count(*) FROM uses WHERE group_id = id) "
            "FROM groups WHERE state IN ('open', 'ready', 'used') ORDER BY state, ifnull(position, id)"
        ).fetchall()
        for group, source, task, v_traj, deadline, state, uses in rows:
            members = self._db.execute(
                "SELECT id, member, attempt, state, payload, reward FROM trajectories WHERE group_id = ? "
                "ORDER BY member, id",
                (group,),
            ).fetchall()
            newest = [list(attempts)[-1] for _, attempts in groupby(members, lambda row: row[1])]
            yield SavedGroup(
                id=group,
                task=self._task(source, task),
                v_traj=v_traj,
                deadline=deadline,
                ready=state != "open",
                uses=uses,
                slots=tuple(self._slot(*row) for row in newest),
            )

    def _slot(
        self, number: int, _member: int, attempt: int, state: str, payload: str | None, reward: float | None
    ) -> SavedSlot:
        trajectory = told = None
        if state in ("scored", "consumed") and payload:
            trajectory = self._trajectory(payload, reward)
            told = generated(trajectory)
            if state == "scored":  # what was trained stays in memory
                self._on_scored(trajectory, payload)
        turns, partial = turns_of(self._db, number, self._segments.read)
        return SavedSlot(
            trajectory_id=number,
            attempt=attempt,
            live=state == "live",
            trajectory=trajectory,
            generated=told,
            turns=turns,
            partial=partial,
        )

    # --- payloads

    def _read(self, payload: str) -> Any:
        return decode(self._segments.read(payload))

    def _trajectory(self, payload: str, reward: float | None) -> Trajectory:
        """With the reward that the writer gave it, if it did."""
        trajectory = Trajectory(**self._read(payload))
        return trajectory if reward in (None, trajectory.reward) else trajectory.rewarded(reward)

    def _task(self, source: str, name: str) -> Task:
        try:
            return self._find_task(source, name)
        except KeyError:
            raise RunDirError(
                f"{self._path}: the run has begun task {name!r}, which the training rows do not have any more; "
                "put it back, or begin a new run"
            ) from None


def turns_of(
    db: sqlite3.Connection, trajectory: int, read: Callable[[str], bytes]
) -> tuple[tuple[Turn, ...], Turn | None]:
    """What there is of one that has not ended: its finished turns, and what the one after them has. ``read`` gives a
    payload by its name. Raises ``RunDirError``, and SQLite's errors."""
    turns: list[Turn] = []
    pieces: list[Turn] = []
    for whole, name in db.execute(
        "SELECT whole, payload FROM turns WHERE trajectory = ? ORDER BY number, piece", (trajectory,)
    ):
        (turns if whole else pieces).append(Turn(**decode(read(name))))
    return tuple(turns), joined(pieces) if pieces else None
