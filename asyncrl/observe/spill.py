"""Spill: what finished trajectories may take of memory while they wait for their batch.

Beyond ``limit`` bytes, the token columns of those that are on the disk already are emptied, the newest first, for they
are trained last. Everything else of them stays, so whoever decides on groups notices nothing. ``fill`` reads them back
before anybody looks at tokens: the trainer, and what writes them down.

The loop's thread holds, releases and empties; ``fill`` may run on any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.core.types import Trajectory

COLUMNS = ("tokens", "loss_mask", "logprobs", "versions")


class Spill:
    """``read`` gives the columns of a trajectory, by the name under which it was stored."""

    def __init__(self, limit: int, read: Callable[[str], dict[str, Any]]) -> None:
        self._limit = limit
        self._read = read
        self._groups: dict[int, list[Trajectory]] = {}
        """Those that wait."""
        self._stored: dict[int, tuple[Trajectory, str]] = {}
        """Of them, those that are in memory and on the disk."""
        self._bytes = 0
        """What those that wait take of memory."""
        self._lock = threading.Lock()
        self._emptied: dict[int, str] = {}

    def hold(self, trajectory: Trajectory) -> None:
        """It waits from now on."""
        self._groups.setdefault(trajectory.group_id, []).append(trajectory)
        self._bytes += _size(trajectory)

    def stored(self, trajectory: Trajectory, name: str) -> None:
        """It is on the disk."""
        if trajectory in self._groups.get(trajectory.group_id, ()):
            self._stored[trajectory.id] = trajectory, name

    def release(self, groups: Iterable[int]) -> None:
        """They do not wait any more: what is in memory of them stays there."""
        for group in groups:
            for trajectory in self._groups.pop(group, ()):
                self._bytes -= _size(trajectory)
                self._stored.pop(trajectory.id, None)

    def empty(self) -> None:
        """As far as it takes."""
        while self._bytes > self._limit and self._stored:
            number, (trajectory, name) = self._stored.popitem()
            self._bytes -= _size(trajectory)
            self._emptied[number] = name
            for column in COLUMNS:
                del getattr(trajectory, column)[:]

    def is_empty(self, trajectory: Trajectory) -> bool:
        return trajectory.id in self._emptied

    def fill(self, trajectory: Trajectory) -> None:
        """Its columns as they were. Raises ``RunDirError``."""
        with self._lock:
            if (name := self._emptied.get(trajectory.id)) is not None:
                columns = self._read(name)
                for column in COLUMNS:
                    getattr(trajectory, column).extend(columns[column])
                del self._emptied[trajectory.id]


def _size(trajectory: Trajectory) -> int:
    return sum(len(column) * column.itemsize for column in (getattr(trajectory, name) for name in COLUMNS))
