"""TaskSource: every task once an epoch, in an order of the seed and the epoch alone, from any cursor on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.types import Task
from asyncrl.runtime.task_source import Cursor, TaskMixture, TaskSource


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


def mixture(weights: list[float], sizes: list[int], *, seed: int = 0, done: int = 0) -> TaskMixture:
    datasets = [
        (weight, [Task(id=f"{name}/{i}", data={}, source=name) for i in range(n)])
        for name, weight, n in zip("abcd", weights, sizes, strict=False)
    ]
    return TaskMixture(datasets, seed=seed, done=done)


weights = st.lists(st.floats(0.01, 10), min_size=1, max_size=4)


@given(weights=weights, seed=st.integers(0, 5), n=st.integers(1, 200))
def test_every_dataset_has_about_its_share_at_every_moment(weights: list[float], seed: int, n: int) -> None:
    source = mixture(weights, [7] * len(weights), seed=seed)
    given_ = [source.next().source for _ in range(n)]
    for k in range(1, n + 1):
        for name, weight in zip("abcd", weights, strict=False):
            assert abs(given_[:k].count(name) - k * weight / sum(weights)) < len(weights)


@given(weights=weights, done=st.integers(0, 100))
def test_a_mixture_goes_on_exactly_where_it_stopped(weights: list[float], done: int) -> None:
    sizes = [3, 5, 7, 2][: len(weights)]
    whole = mixture(weights, sizes)
    for _ in range(done):
        whole.next()
    resumed = mixture(weights, sizes, done=done)
    assert [resumed.next() for _ in range(30)] == [whole.next() for _ in range(30)]


def test_one_dataset_is_played_in_its_own_order() -> None:
    one = TaskMixture([(3.0, tasks(9))], seed=4)
    assert [one.next().id for _ in range(20)] == take(TaskSource(tasks(9), seed=4), 20)
