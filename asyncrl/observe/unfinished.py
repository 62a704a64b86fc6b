"""The episodes of a run that have not come to their end, out of its store: for ``asyncrl view``, while the run goes on.

Of one that is being played, the store has the turns whose generation has ended, and of the turn after them what was
generated up to its last interruption, or in steps of 1024 tokens. What the environment gave for a turn, and how long
each took, is not kept before the episode ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncrl.core.types import Trajectory, flatten
from asyncrl.observe.database import STORE, connect, translated
from asyncrl.observe.run_dir import RunDirError
from asyncrl.observe.saved import turns_of
from asyncrl.observe.segments import decode, read_payload
from asyncrl.observe.store import SEGMENTS

STATES = ("reserved", "running", "scored")
"""Its group has no server yet; it is played, or waits for a server; it has ended, and waits for its batch."""
QUERY = """
    SELECT t.id, t.group_id, t.member, t.payload, g.task, g.v_traj,
           CASE WHEN t.state = 'scored' THEN 'scored' WHEN g.v_traj IS NULL THEN 'reserved' ELSE 'running' END
    FROM groups g JOIN trajectories t ON t.group_id = g.id
    WHERE g.state IN ('open', 'ready') AND t.state IN ('live', 'scored')
"""


def list_unfinished(
    run_dir: Path, most: int, *, state: str = "", task: str = ""
) -> tuple[int, list[tuple[str, Trajectory]]]:
    """How many there are of this state and of tasks whose id contains ``task``, if said; and of so many of them, those
    that were begun first, the state and what there is. None where no store is kept. Raises ``RunDirError``."""
    if not (run_dir / STORE).exists():
        return 0, []
    with _opened(run_dir) as db:
        rows = [row for row in db.execute(f"{QUERY} ORDER BY t.id") if state in ("", row[-1]) and task in row[4]]
        found = []
        for row in rows[:most]:
            with suppress(RunDirError):  # it has ended since, and its tokens are gone
                found.append((row[-1], _trajectory(run_dir, db, row)))
        return len(rows), found


def find_unfinished(run_dir: Path, episode: int) -> tuple[str, Trajectory] | None:
    """Its state and what there is. Raises ``RunDirError``, also where it ends at this moment."""
    if not (run_dir / STORE).exists():
        return None
    with _opened(run_dir) as db:
        row = db.execute(f"{QUERY} AND t.id = ?", (episode,)).fetchone()
        return None if row is None else (row[-1], _trajectory(run_dir, db, row))


@contextmanager
def _opened(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """The store as it is now, whatever is written meanwhile."""
    path = run_dir / STORE
    with closing(connect(path, read_only=True)) as db, translated(path):
        db.execute("BEGIN")
        yield db


def _trajectory(run_dir: Path, db: sqlite3.Connection, row: tuple[Any, ...]) -> Trajectory:
    number, group, member, payload, task, v_traj, _ = row
    read = partial(read_payload, run_dir / SEGMENTS)
    if payload is not None:
        return Trajectory(**decode(read(payload)))
    turns, partial_turn = turns_of(db, number, read)
    if partial_turn is not None:
        turns = (*turns, partial_turn)
    tokens, loss_mask, logprobs, versions = flatten(turns)
    ends = tuple(accumulate(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns))
    starts = [end for end, after in zip(ends, turns[1:], strict=False) if after.new_segment]
    return Trajectory(
        id=number,
        group_id=group,
        index=member,
        task_id=task,
        v_traj=v_traj or 0,
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        turns=len(turns),
        reward=0.0,
        finish_reason="",
        turn_ends=ends,
        turn_rewards=(0.0,) * len(ends),
        segment_ends=(*starts, len(tokens)) if starts else (),
    )
