"""TaskSource: every task once an epoch, in an order of the seed and the epoch alone, from any cursor on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.types import Task
from asyncrl.runtime.task_source import Cursor, TaskSource


def tasks(n: int) -> list[Task]:
    return [Task(id=str(i), data={}) for i in range(n)]


def take(source: TaskSource, n: int) -> list[str]:
    return [source.next().id for _ in range(n)]


@given(n=st.integers(1, 20), seed=st.integers(0, 10), shuffle=st.booleans())
def test_an_epoch_has_every_task_once(n: int, seed: int, shuffle: bool) -> None:
    source = TaskSource(tasks(n), seed=seed, shuffle=shuffle)
    for _ in range(3):
        assert sorted(take(source, n), key=int) == [str(i) for i in range(n)]


@given(n=st.integers(1, 20), seed=st.integers(0, 10), before=st.integers(0, 60), shuffle=st.booleans())
def test_a_cursor_goes_on_exactly_where_it_was_taken(n: int, seed: int, before: int, shuffle: bool) -> None:
    whole = TaskSource(tasks(n), seed=seed, shuffle=shuffle)
    take(whole, before)
    resumed = TaskSource(tasks(n), seed=seed, shuffle=shuffle, cursor=whole.cursor)
    assert take(resumed, 2 * n) == take(whole, 2 * n)
    assert resumed.cursor == whole.cursor


def test_order_of_the_file_without_shuffling() -> None:
    assert take(TaskSource(tasks(3), seed=0, shuffle=False), 7) == ["0", "1", "2", "0", "1", "2", "0"]


def test_shuffled_anew_every_epoch_and_for_every_seed() -> None:
    source, n = TaskSource(tasks(50), seed=0), 50
    orders = [take(source, n), take(source, n), take(TaskSource(tasks(50), seed=1), n)]
    assert len({tuple(o) for o in orders}) == 3


def test_the_order_is_the_same_in_every_process() -> None:
    code = (
        "from asyncrl.core.types import Task; from asyncrl.runtime.task_source import TaskSource\n"
        "s = TaskSource([Task(id=str(i), data={}) for i in range(20)], seed=3)\n"
        "print(*[s.next().id for _ in range(30)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == take(TaskSource(tasks(20), seed=3), 30)


def test_the_start_is_the_zero_cursor_and_no_tasks_are_refused() -> None:
    assert TaskSource(tasks(2), seed=0).cursor == Cursor()
    with pytest.raises(ValueError, match="at least one task"):
        TaskSource([], seed=0)
