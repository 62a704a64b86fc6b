"""The files of a run directory: their names, and how they are written so that a kill or a full disk loses little.

A ``LineFile`` only grows, by whole lines: a write that fails is cut off again, so earlier lines stay readable. Other
files appear complete, under their final name, or not at all. Readers accept a last line that a kill cut short.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

RECIPE = "recipe.json"
METRICS = "metrics.jsonl"
EVALS = "evals.jsonl"
TRAJECTORIES = "trajectories.jsonl"
TRACE = "trace.json"
SUMMARY = "summary.json"
REPORT = "report.png"
STATUS = "status.json"
STALLS = "stalls"
CONTROL = "control.json"


class RunDirError(Exception):
    """A file of the run directory cannot be written or read; one line naming the file and the remedy."""


def _cannot_write(path: Path, error: OSError) -> RunDirError:
    return RunDirError(f"{path}: cannot write ({error.strerror or error}): free space there, or give another --run-dir")


class LineFile:
    """A file that grows by whole lines, a new one unless it is said to ``append``. ``write`` gives the lines to the
    kernel at once: a killed process loses none of them."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        try:
            self._file = path.open("ab" if append else "xb", buffering=0)
        except FileExistsError:
            raise RunDirError(f"{path}: already exists: this folder holds a run; give another --run-dir") from None
        except OSError as error:
            raise _cannot_write(path, error) from None
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        """Append ``data`` whole or not at all. Raises ``RunDirError``."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self._size)
            self._file.seek(self._size)
            raise _cannot_write(self.path, error) from None
        self._size += len(data)

    def sync(self) -> None:
        """What was written survives also the machine's death. Raises ``RunDirError``."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        self._file.close()


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that is either absent (or the old one) or complete. Raises ``RunDirError``."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


class _Row(msgspec.Struct):
    """What ``rewind`` looks at in a line."""

    at: float = 0.0
    version: int = 0
    id: int = 0


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run goes on: at ``version``, ``at`` seconds into the run. What the run store knows: ``evaluated``, the
    version that was evaluated last, and whether a trajectory ``has_ended``. Without them the run goes back to a
    checkpoint of that moment, and the version is evaluated again."""

    version: int
    at: float
    evaluated: int | None = None
    has_ended: Callable[[int], bool] | None = None


def rewind(run_dir: Path, to: Resumed) -> None:
    """Leave in a run directory's files what was before the moment ``to``, so that the run that goes on there can append
    to them. Its trace becomes ``trace-before-vN.json``. Raises ``RunDirError``."""
    version, has_ended = to.version, to.has_ended
    evaluated = version - 1 if to.evaluated is None else to.evaluated
    stays: dict[str, Callable[[_Row], bool]] = {
        METRICS: lambda row: row.version <= version,
        EVALS: lambda row: row.version <= evaluated,
        TRAJECTORIES: lambda row: row.at <= to.at if has_ended is None else has_ended(row.id),
    }
    decode = msgspec.json.Decoder(_Row).decode
    for name, keep in stays.items():
        path, part = run_dir / name, run_dir / f"{name}.part"
        try:
            with path.open("rb") as old, part.open("wb") as new:
                new.writelines(line for line in old if line.endswith(b"\n") and keep(decode(line)))
            part.replace(path)
        except FileNotFoundError:
            continue
        except msgspec.DecodeError as error:
            raise RunDirError(f"{path}: has a line that is not a JSON object ({error}): remove it") from None
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _cannot_write(path, error) from None
    if (trace := run_dir / TRACE).exists():
        trace.replace(run_dir / f"trace-before-v{version}.json")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file; none if there is no file. A last line without its newline is skipped."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise RunDirError(f"{path}:{number}: not a JSON object ({error}): remove the line") from None
