"""The files of a run directory: their names, and how they are written so that a kill or a full disk loses little.

A ``LineFile`` only grows, by whole lines: a write that fails is cut off again, so earlier lines stay readable. Other
files appear complete, under their final name, or not at all. Readers accept a last line that a kill cut short.
"""

from __future__ import annotations

import os
import shutil
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


_ROW = msgspec.json.Decoder(_Row)
_CUT = ".cut-at-"
"""Between a file's name and the byte where what was put aside of it belongs."""


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
    for name, keep in stays.items():
        path = run_dir / name
        try:
            _put_back(path)
            _cut(path, keep)
        except FileNotFoundError:
            continue
        except msgspec.DecodeError as error:
            raise RunDirError(f"{path}: has a line that is not a JSON object ({error}): remove it") from None
        except OSError as error:
            raise _cannot_write(path, error) from None
    if (trace := run_dir / TRACE).exists():
        trace.replace(run_dir / f"trace-before-v{version}.json")


def _cut(path: Path, keep: Callable[[_Row], bool]) -> None:
    """Cut off the file from the first line that does not stay. Those after it that do (few, most that go are at the
    end) are put aside first and put back then, so that no space is needed for the rest, and a kill loses none."""
    part, cut = path.with_name(f"{path.name}.part"), 0
    with path.open("rb") as lines:
        for line in lines:
            if not (line.endswith(b"\n") and keep(_ROW.decode(line))):
                break
            cut += len(line)
        else:
            return
        try:
            with part.open("wb") as aside:
                aside.writelines(line for line in lines if line.endswith(b"\n") and keep(_ROW.decode(line)))
                aside.flush()
                os.fsync(aside.fileno())
            part.rename(path.with_name(f"{path.name}{_CUT}{cut}"))
        finally:
            part.unlink(missing_ok=True)
    _put_back(path)


def _put_back(path: Path) -> None:
    """What ``_cut`` has put aside, this time or before a kill."""
    for aside in path.parent.glob(f"{path.name}{_CUT}*"):
        with path.open("r+b") as file, aside.open("rb") as lines:
            file.seek(int(aside.name.removeprefix(f"{path.name}{_CUT}")))
            file.truncate()
            shutil.copyfileobj(lines, file)
            file.flush()
            os.fsync(file.fileno())
        aside.unlink()


def newest_ids(run_dir: Path) -> tuple[int, int]:
    """The highest group and trajectory of the folder's run, by the trajectories that have ended; −1 without any. Raises
    ``RunDirError``."""
    found = [(row["group"], row["id"]) for row in read_lines(run_dir / TRAJECTORIES)]
    return max((group for group, _ in found), default=-1), max((number for _, number in found), default=-1)


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
