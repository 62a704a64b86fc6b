"""The run store: what of a run must outlive its processes, in ``run.db`` (SQLite) and ``segments/`` (token data).

``put`` appends to a queue; ``run`` writes the queue on the ``Blocking`` port, everything that came while the last write
ran in one transaction, payloads before what refers to them. Who must rely on what was put waits in ``committed``: the
train step does, so that nothing is ever trained that a restart would not know. All else is written within ``LINGER_S``
and the time of a write; a kill loses at most that, and whole records.

    committed()   waits for: the write that has all that was put    woken by: run
    run()         waits for: an entry; then LINGER_S at most        woken by: put; committed

Any tool reads the database while the run goes on. Payloads are dropped when nobody needs them any more: those of turns
when their trajectory ends, those of a group when it leaves untrained, or when a checkpoint has its step. The rows stay.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.core import journal
from asyncrl.core.types import Trajectory
from asyncrl.observe.database import STORE, WHOLE, connect, exclusive, translated
from asyncrl.observe.run_dir import RunDirError, newest_ids
from asyncrl.observe.saved import FindTask, Reader
from asyncrl.observe.segments import Segments, decode, encode
from asyncrl.observe.spill import Spill
from asyncrl.ports import Blocking

SEGMENTS = "segments"
LOCK = "run.lock"
LINGER_S = 0.1
"""How long an entry that nobody waits for may wait for others to be written with."""
QUEUE_LIMIT = 65_536
"""Entries that may wait for a write; who puts one more writes them on the spot."""


class Store:
    """The store of the run in ``run_dir``, made if there is none. Raises ``RunDirError``, also where another process
    has it open. ``before`` is called ahead of each transaction, on the thread that writes: files that must not lag
    behind the database. ``seconds`` is how long the run has lasted. ``memory_bytes`` is what the tokens of finished
    trajectories may take that wait for their batch (observe/spill.py)."""

    keeps = True

    def __init__(self, run_dir: Path, *, blocking: Blocking, find_task: FindTask, memory_bytes: int = 1 << 62) -> None:
        self.path = run_dir / STORE
        self.before: Callable[[], None] = lambda: None
        self.seconds: Callable[[], float] = lambda: 0.0
        self._blocking = blocking
        self._mutex = threading.Lock()  # held while writing
        self._queue: deque[journal.Entry] = deque()
        self._put = self._done = 0
        self._running = False
        self._error: RunDirError | None = None
        self._wake, self._urgent = asyncio.Event(), asyncio.Event()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._lock = exclusive(run_dir / LOCK)
        try:
            self.db = connect(self.path)
            with translated(self.path):
                self._freed: list[str] = []
                live = self.db.execute(
                    "SELECT payload FROM trajectories WHERE payload IS NOT NULL UNION ALL "
                    "SELECT payload FROM turns UNION ALL SELECT payload FROM given WHERE payload IS NOT NULL"
                )
                self.segments = Segments(run_dir / SEGMENTS, (payload for (payload,) in live))
                self._spill = Spill(memory_bytes, self._columns)
                self._scored: deque[tuple[Trajectory, str]] = deque()
                """Those that the last write has brought onto the disk, for the loop's thread."""
                self._reader = Reader(self.path, self.db, self.segments, find_task, on_scored=self._found)
                self._ready = self._scalar("SELECT max(position) FROM groups WHERE state IN ('ready', 'used')") or 0
        except BaseException:
            os.close(self._lock)
            raise

    # --- what the runtime calls

    def put(self, entry: journal.Entry) -> None:
        match entry:
            case journal.Scored(trajectory=trajectory):
                self._spill.hold(trajectory)
            case journal.GroupEnded(group=group):
                self._spill.release([group])
            case journal.BatchTaken(groups=groups):
                self._spill.release(groups)
        if len(self._queue) >= QUEUE_LIMIT:
            self.write()
        self._queue.append(entry)
        self._put += 1
        self._wake.set()

    async def committed(self) -> None:
        if self._done >= self._put:
            return
        if not self._running:  # the run has ended, and its last checkpoint is written
            await self._blocking.run(self.write, self._put)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._put, future))
        self._urgent.set()
        await future

    async def fill(self, trajectories: Sequence[Trajectory]) -> None:
        self._spill.release({t.group_id for t in trajectories})
        if any(map(self._spill.is_empty, trajectories)):
            await self._blocking.run(self._fill, trajectories)

    def _fill(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self._spill.fill(trajectory)

    def fill_now(self, trajectory: Trajectory) -> None:
        """As ``fill``, for one that has ended. On any thread. Raises ``RunDirError``."""
        self._spill.fill(trajectory)

    def _columns(self, name: str) -> dict[str, Any]:
        return decode(self.segments.read(name))  # type: ignore[no-any-return]

    def _found(self, trajectory: Trajectory, name: str) -> None:
        """By a run that goes on."""
        self._spill.hold(trajectory)
        self._spill.stored(trajectory, name)
        self._spill.empty()

    async def trained_on(self, step: int) -> journal.SavedStep:
        await self.committed()
        return await self._blocking.run(self._read_step, step)

    def _read_step(self, step: int) -> journal.SavedStep:
        with self._mutex, translated(self.path):
            return self._reader.step(step)

    async def run(self) -> None:
        """Beside the run, until cancelled. Raises ``RunDirError``."""
        self._running = True
        try:
            while True:
                await self._wake.wait()
                if not self._waiters:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LINGER_S):
                            await self._urgent.wait()
                self._wake.clear()
                self._urgent.clear()
                # What comes meanwhile may be half of what belongs together.
                await self._blocking.run(self.write, self._put)
                while self._scored:
                    self._spill.stored(*self._scored.popleft())
                self._spill.empty()
                while self._waiters and self._waiters[0][0] <= self._done:
                    _, future = self._waiters.popleft()
                    if not future.done():
                        future.set_result(None)
                if self._waiters:
                    self._wake.set()
        finally:
            self._running = False

    def close(self) -> None:
        """Write what is left, and let go of the run directory. Raises ``RunDirError``."""
        try:
            self.write()
        finally:
            self.segments.close()
            self.db.close()
            os.close(self._lock)

    # --- a run that goes on

    def load(self, checkpoint: int) -> journal.Saved:
        """Where the run stands, whose newest checkpoint is of version ``checkpoint``. Raises ``RunDirError``."""
        with translated(self.path), self.db:
            saved = self._reader.saved(checkpoint)
            # A batch that was not trained is given anew, and perhaps not in the same parts.
            given = self.db.execute("DELETE FROM given WHERE step >= ? RETURNING payload", (saved.version,)).fetchall()
            self._freed += (payload for (payload,) in given)
            return saved

    @property
    def notes(self) -> dict[str, float | str]:
        with translated(self.path):
            return dict(self.db.execute("SELECT key, value FROM notes"))

    def rewind(self, version: int, tasks_done: int) -> None:
        """Take the run back to where its weights were of ``version``, with ``tasks_done`` tasks given out: what had not
        been consumed by then is given up. Raises ``RunDirError``."""
        db, reason = self.db, f"the run went back to version {version}"
        with translated(self.path), db:
            lost = db.execute("SELECT id FROM groups WHERE step >= ? OR state IN ('open', 'ready')", (version,))
            for (group,) in lost.fetchall():
                self._end_group(group, "aborted", reason)
            db.execute("UPDATE groups SET step = NULL WHERE step >= ?", (version,))
            db.execute("DELETE FROM uses WHERE step >= ?", (version,))
            db.execute("UPDATE groups SET state = 'consumed' WHERE state = 'used'")
            db.execute("DELETE FROM steps WHERE step >= ?", (version,))
            for (payload,) in db.execute("DELETE FROM given WHERE step >= ? RETURNING payload", (version,)).fetchall():
                self._free(payload)
            db.executemany(
                "INSERT OR IGNORE INTO steps (step, checksum) VALUES (?, '0')", [(step,) for step in range(version)]
            )  # where the store itself was lost
            db.execute("UPDATE notes SET value = min(value, ?) WHERE key = 'evaluated'", (version - 1,))
            if self._scalar("SELECT max(id) FROM groups") is None:  # likewise; its numbers are not given out again
                group, trajectory = newest_ids(self.path.parent)
                self._note("first_group", group + 1)
                self._note("first_trajectory", trajectory + 1)
                self._note("first_task", tasks_done)
            db.execute("UPDATE groups SET tasks_done = ? WHERE id = (SELECT max(id) FROM groups)", (tasks_done,))

    # --- the transaction

    def write(self, put: int | None = None) -> None:
        """Everything that was put before the call, or the first ``put`` of all entries ever. On any thread. Raises
        ``RunDirError``, again once it has failed."""
        with self._mutex:
            if self._error is not None:
                raise self._error
            count = len(self._queue) if put is None else max(0, put - self._done)
            entries = [self._queue.popleft() for _ in range(count)]
            if not entries:
                return
            try:
                self.before()
                with translated(self.path), self.db:
                    scored = self._apply(entries)
                    self._note("seconds", self.seconds())
                    self.segments.sync()
            except RunDirError as error:
                self._error = error
                raise
            self._scored += scored
            self._done += len(entries)
            freed, self._freed = self._freed, []
            for payload in freed:
                self.segments.free(payload)

    def _apply(self, entries: Sequence[journal.Entry]) -> list[tuple[Trajectory, str]]:
        """The trajectories that were scored, with the names of their payloads."""
        scored: list[tuple[Trajectory, str]] = []
        # A trajectory that ends within this transaction needs no turns in between.
        ended = {e.trajectory.id for e in entries if isinstance(e, journal.Scored)}
        ended |= {e.trajectory for e in entries if isinstance(e, journal.Ended)}
        do = self.db.execute
        for entry in entries:
            match entry:
                case journal.TurnPiece():
                    if entry.trajectory not in ended:
                        self._keep_turn(entry)
                case journal.Scored(trajectory=t):
                    self._drop_turns(t.id)
                    payload = self._payload(t)
                    scored.append((t, payload))
                    do(
                        "UPDATE trajectories SET state = 'scored', reward = ?, turns = ?, tokens = ?, finish_reason = ?"
                        ", payload = ? WHERE id = ?",
                        (t.reward, t.turns, len(t.tokens), t.finish_reason, payload, t.id),
                    )
                case journal.GroupOpened(task=task):
                    do(
                        "INSERT INTO groups (id, source, task, tasks_done, state) VALUES (?, ?, ?, ?, 'open')",
                        (entry.group, task.source, task.id, entry.tasks_done),
                    )
                    for member, number in enumerate(entry.trajectories):
                        self._begin(number, entry.group, member, 0)
                case journal.GroupStarted():
                    do(
                        "UPDATE groups SET v_traj = ?, deadline = ? WHERE id = ?",
                        (entry.v_traj, entry.deadline, entry.group),
                    )
                case journal.Retried(group=group, index=member):
                    attempt = self._scalar(
                        "SELECT count(*) FROM trajectories WHERE group_id = ? AND member = ?", (group, member)
                    )
                    self._begin(entry.trajectory, group, member, attempt)
                case journal.Ended(trajectory=number):
                    self._drop_turns(number)
                    do(
                        "UPDATE trajectories SET state = ?, reason = ?, infra = ? WHERE id = ?",
                        (entry.state, entry.reason, entry.infra, number),
                    )
                case journal.GroupReady():
                    self._ready += 1
                    do("UPDATE groups SET state = 'ready', position = ? WHERE id = ?", (self._ready, entry.group))
                    for number, reward in entry.rewards.items():
                        do("UPDATE trajectories SET reward = ? WHERE id = ?", (reward, number))
                case journal.GroupEnded():
                    self._end_group(entry.group, entry.state, entry.reason)
                case journal.BatchTaken(step=step):
                    for position, group in enumerate(entry.groups):
                        do("INSERT INTO uses VALUES (?, ?, ?)", (step, position, group))
                        do("UPDATE groups SET state = 'consumed', step = ifnull(step, ?) WHERE id = ?", (step, group))
                        do(
                            "UPDATE trajectories SET state = 'consumed' WHERE group_id = ? AND state = 'scored'",
                            (group,),
                        )
                    for group in entry.again:
                        self._ready += 1
                        do("UPDATE groups SET state = 'used', position = ? WHERE id = ?", (self._ready, group))
                    do("INSERT INTO steps (step) VALUES (?)", (step,))
                case journal.Spent(groups=groups):
                    for group in groups:
                        do("UPDATE groups SET state = 'consumed' WHERE id = ?", (group,))
                case journal.Given(step=step):
                    payload = self._payload((entry.groups, entry.advantages))
                    part = WHOLE if entry.part is None else entry.part
                    old = self._scalar("SELECT payload FROM given WHERE step = ? AND part = ?", (step, part))
                    self._free(old)
                    do("INSERT OR REPLACE INTO given VALUES (?, ?, ?)", (step, part, payload))
                    if entry.part is None:
                        do("UPDATE steps SET baseline = ? WHERE step = ?", (entry.baseline, step))
                case journal.Trained(step=step, checksum=checksum):
                    do("UPDATE steps SET checksum = ? WHERE step = ?", (f"{checksum:x}", step))
                case journal.Checkpointed(version=version):
                    self._drop_trained(version)
                case journal.Noted():
                    self._note(entry.key, entry.value)
        return scored

    def _begin(self, number: int, group: int, member: int, attempt: int) -> None:
        self.db.execute(
            "INSERT INTO trajectories (id, group_id, member, attempt, state) VALUES (?, ?, ?, ?, 'live')",
            (number, group, member, attempt),
        )

    def _keep_turn(self, entry: journal.TurnPiece) -> None:
        if not entry.piece:
            self._drop_turns(entry.trajectory, entry.number)
        payload = self._payload(entry.turn)
        row = (entry.trajectory, entry.number, entry.piece or 0, entry.piece is None, payload)
        self.db.execute("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?)", row)

    def _drop_turns(self, trajectory: int, first: int = 0) -> None:
        rows = self.db.execute(
            "DELETE FROM turns WHERE trajectory = ? AND number >= ? RETURNING payload", (trajectory, first)
        ).fetchall()
        self._freed += (payload for (payload,) in rows)

    def _end_group(self, group: int, state: str, reason: str) -> None:
        self.db.execute("UPDATE groups SET state = ?, reason = ? WHERE id = ?", (state, reason, group))
        for number, payload in self.db.execute(
            "SELECT id, payload FROM trajectories WHERE group_id = ? AND state IN ('live', 'scored', 'consumed')",
            (group,),
        ).fetchall():
            self._drop_turns(number)
            self._free(payload)
            self.db.execute(
                "UPDATE trajectories SET state = ?, reason = ?, payload = NULL WHERE id = ?", (state, reason, number)
            )

    def _drop_trained(self, version: int) -> None:
        """A checkpoint has all steps before ``version``; what is of these only is not needed any more."""
        rows = self.db.execute(
            "SELECT id, payload FROM trajectories AS t WHERE payload IS NOT NULL "
            "AND EXISTS (SELECT 1 FROM groups AS g WHERE g.id = t.group_id AND g.step < ? AND g.state = 'consumed') "
            "AND NOT EXISTS (SELECT 1 FROM uses AS u WHERE u.group_id = t.group_id AND u.step >= ?)",
            (version, version),
        ).fetchall()
        self.db.executemany("UPDATE trajectories SET payload = NULL WHERE id = ?", [(number,) for number, _ in rows])
        given = self.db.execute("DELETE FROM given WHERE step < ? RETURNING payload", (version,)).fetchall()
        self._freed += (payload for _, payload in rows)
        self._freed += (payload for (payload,) in given)

    def _payload(self, value: object) -> str:
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        return self.segments.write(encode(value))

    def _free(self, payload: str | None) -> None:
        if payload:
            self._freed.append(payload)

    def _note(self, key: str, value: float | str) -> None:
        self.db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))

    def _scalar(self, query: str, values: Sequence[object] = ()) -> Any:
        row = self.db.execute(query, values).fetchone()
        return row[0] if row else None
