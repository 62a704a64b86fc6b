"""The files of a run directory: their names, and how they are written so that a kill or a full disk loses little.

A ``LineFile`` only grows, by whole lines: a write that fails is cut off again, so earlier lines stay readable. Other
files appear complete, under their final name, or not at all. Readers accept a last line that a kill cut short.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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


class RunDirError(Exception):
    """A file of the run directory cannot be written or read; one line naming the file and the remedy."""


def _cannot_write(path: Path, error: OSError) -> RunDirError:
    return RunDirError(f"{path}: cannot write ({error.strerror or error}): free space there, or give another --run-dir")


class LineFile:
    """A new file that grows by whole lines. ``write`` gives the lines to the kernel at once: a killed process loses
    none of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise RunDirError(f"{path}: already exists: this folder holds a run; give another --run-dir") from None
        except OSError as error:
            raise _cannot_write(path, error) from None
        self._size = 0

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

    def close(self) -> None:
        self._file.close()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is either absent (or the old one) or complete. Raises ``RunDirError``."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


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
