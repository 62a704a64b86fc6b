"""The run store's database: its tables, how it is opened, and SQLite's errors as one line."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.observe.run_dir import RunDirError

STORE = "run.db"
SCHEMA = 2

TABLES = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, source TEXT, task TEXT, tasks_done INTEGER, v_traj INTEGER, deadline INTEGER,
    state TEXT, reason TEXT, step INTEGER, position INTEGER  -- its first step; its place among those that wait
);
CREATE INDEX groups_live ON groups (state) WHERE state IN ('open', 'ready', 'used');
CREATE INDEX groups_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE uses (step INTEGER, position INTEGER, group_id INTEGER, PRIMARY KEY (step, position)) WITHOUT ROWID;
CREATE INDEX uses_group ON uses (group_id);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, group_id INTEGER, member INTEGER, attempt INTEGER, state TEXT, reason TEXT, infra INTEGER,
    reward REAL, turns INTEGER, tokens INTEGER, finish_reason TEXT, payload TEXT
);
CREATE INDEX trajectories_group ON trajectories (group_id);
CREATE INDEX trajectories_kept ON trajectories (id) WHERE payload IS NOT NULL;
CREATE TABLE turns (
    trajectory INTEGER, number INTEGER, piece INTEGER, whole INTEGER, payload TEXT,
    PRIMARY KEY (trajectory, number, piece)
) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, baseline REAL, checksum TEXT);
CREATE TABLE given (step INTEGER, part INTEGER, payload TEXT, PRIMARY KEY (step, part)) WITHOUT ROWID;
CREATE TABLE notes (key TEXT PRIMARY KEY, value REAL) WITHOUT ROWID;
"""
WHOLE = -1
"""``given.part`` of a batch."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """The database, with its tables. Raises ``RunDirError``."""
    with translated(path):
        name = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path)
        db = sqlite3.connect(name, uri=read_only, check_same_thread=False)
        try:
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            if schema not in (0, SCHEMA):
                raise RunDirError(
                    f"{path}: schema {schema}, but this version of asyncrl reads {SCHEMA}; use the one that made it"
                )
            if not read_only:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                if not schema:
                    with db:
                        db.executescript(f"BEGIN;{TABLES}PRAGMA user_version = {SCHEMA};COMMIT;")
        except BaseException:
            db.close()
            raise
        return db


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """SQLite's errors as ``RunDirError``."""
    try:
        yield
    except sqlite3.Error as error:
        remedy = "free space there, or see what else uses it"
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            remedy = "remove it, and go on from the newest checkpoint with --resume"
        raise RunDirError(f"{path}: {error}; {remedy}") from error


def exclusive(path: Path) -> int:
    """A lock that ends with this process. Raises ``RunDirError`` where another has it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(f"{path}: cannot write ({error.strerror}): give another --run-dir") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise RunDirError(f"{path}: another process runs in this folder; end it, or give another --run-dir") from None
    return file
