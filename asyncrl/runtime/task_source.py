"""TaskSource: which task comes next. A seeded, resumable cursor over a dataset, shuffled anew every epoch; and
TaskMixture, which takes turns among several.

Synchronous and never waits: the SampleBuffer asks for a task at the moment it admits a group.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.core.types import Record, Task


class Cursor(Record, frozen=True, kw_only=True):
    """Where a TaskSource stands; a new one started from it goes on exactly there."""

    epoch: int = 0
    index: int = 0


class TaskSource:
    """Endless; ``tasks`` must not be empty. The order depends on the seed and the epoch alone."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True, cursor: Cursor | None = None) -> None:
        if not tasks:
            raise ValueError("a TaskSource needs at least one task")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = cursor.epoch if cursor else 0
        self._index = cursor.index if cursor else 0
        self._order = self._permutation()

    def next(self) -> Task:
        if self._index == len(self._order):
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self._permutation()
        task = self._tasks[self._order[self._index]]
        self._index += 1
        return task

    @property
    def cursor(self) -> Cursor:
        return Cursor(epoch=self._epoch, index=self._index)

    def _permutation(self) -> Sequence[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


class TaskMixture:
    """Tasks of several datasets, ``(weight, tasks)`` each, so that at every moment each has had about its share: the
    next is of the one that lags most behind. ``done`` tasks were given before; the order goes on behind them."""

    def __init__(
        self, datasets: Sequence[tuple[float, Sequence[Task]]], *, seed: int, shuffle: bool = True, done: int = 0
    ) -> None:
        total = sum(weight for weight, _ in datasets)
        self._shares = [weight / total for weight, _ in datasets]
        self._given = [0] * len(datasets)
        for _ in range(done):
            self._turn()
        self._sources = [
            TaskSource(
                tasks, seed=seed, shuffle=shuffle, cursor=Cursor(epoch=given // len(tasks), index=given % len(tasks))
            )
            for (_, tasks), given in zip(datasets, self._given, strict=True)
        ]

    def next(self) -> Task:
        return self._sources[self._turn()].next()

    def _turn(self) -> int:
        """The number of the dataset whose turn it is, counted as given."""
        after = sum(self._given) + 1
        lags = [share * after - given for share, given in zip(self._shares, self._given, strict=True)]
        turn = lags.index(max(lags))
        self._given[turn] += 1
        return turn
