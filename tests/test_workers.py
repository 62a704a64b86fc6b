"""User code on worker threads: results, errors, deadlines, and what hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from asyncrl.ports import TooManyStuck
from asyncrl.workers import ThreadBlocking

DEADLINE_S = 10.0
"""Of what must happen at once; only a failing test takes so long."""


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "asyncrl-blocking"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in threads)
            await asyncio.sleep(0.001)


class Gate:
    """A function that hangs until it is opened."""

    def __init__(self) -> None:
        self.entered = 0
        self._open = threading.Event()

    def __call__(self) -> str:
        self.entered += 1
        self._open.wait(DEADLINE_S)
        return "late"

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()
    await until(lambda: not threads())


async def test_results_and_errors_come_back_from_another_thread() -> None:
    blocking = ThreadBlocking()
    assert await blocking.run(lambda a, b: a + b, 1, 2) == 3
    assert await blocking.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError, match="gone"):
        await blocking.run({}.__getitem__, "gone")
    await blocking.close()
    await until(lambda: not threads())


async def test_what_asyncio_gives_a_meaning_of_its_own_reaches_the_caller_as_an_error() -> None:
    """``next()`` on an empty iterator is a common slip; no future takes a StopIteration."""
    blocking = ThreadBlocking()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RuntimeError, match="StopIteration") as error:
            await blocking.run(next, iter([]))
        assert isinstance(error.value.__cause__, StopIteration)
        assert await blocking.run(str, 1) == "1"
    await blocking.close()
    await until(lambda: not threads())


async def test_calls_run_at_once_up_to_the_number_of_workers_and_no_more(gate: Gate) -> None:
    blocking = ThreadBlocking(workers=3)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(blocking.run(gate)) for _ in range(5)]
        await until(lambda: gate.entered == 3)
        await asyncio.sleep(0.02)
        assert gate.entered == len(threads()) == 3
        gate.open()
    assert [c.result() for c in calls] == ["late"] * 5
    await blocking.close()


async def test_a_worker_is_used_again() -> None:
    blocking = ThreadBlocking(workers=8)
    idents = {await blocking.run(threading.get_ident) for _ in range(50)}
    assert len(idents) == 1
    await blocking.close()
    await until(lambda: not threads())


async def test_a_missed_deadline_costs_one_thread_and_later_calls_run(gate: Gate) -> None:
    blocking = ThreadBlocking(workers=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await blocking.run(gate)
    assert await blocking.run(str, 1) == "1"
    assert len(threads()) == 2, "the stuck one and its replacement"
    gate.open()
    await until(lambda: len(threads()) == 1)
    await blocking.close()


async def test_calls_that_wait_behind_a_stuck_one_get_its_replacement(gate: Gate) -> None:
    blocking = ThreadBlocking(workers=1)
    async with asyncio.TaskGroup() as group:
        stuck = group.create_task(blocking.run(gate))
        await until(lambda: gate.entered == 1)
        waiting = [group.create_task(blocking.run(str, i)) for i in range(3)]
        await asyncio.sleep(0)
        stuck.cancel()
        async with asyncio.timeout(DEADLINE_S / 2):
            assert [await w for w in waiting] == ["0", "1", "2"]
    await blocking.close()


async def test_a_call_cancelled_before_it_began_never_runs(gate: Gate) -> None:
    blocking = ThreadBlocking(workers=1)
    ran: list[int] = []
    async with asyncio.TaskGroup() as group:
        first = group.create_task(blocking.run(gate))
        await until(lambda: gate.entered == 1)
        queued = group.create_task(blocking.run(ran.append, 1))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.sleep(0)
        gate.open()
        assert await first == "late"
        assert await blocking.run(str, 2) == "2"
    assert ran == []
    await blocking.close()


async def test_too_many_stuck_calls_are_an_error_that_names_the_function(gate: Gate) -> None:
    blocking = ThreadBlocking(workers=2, max_stuck=2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await blocking.run(gate)
    with pytest.raises(TooManyStuck, match=r"3 calls of user code hang in worker threads.*Gate"):
        await blocking.run(gate)


async def test_a_slow_call_that_returns_after_all_does_not_count_as_stuck() -> None:
    blocking = ThreadBlocking(workers=2, max_stuck=1)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await blocking.run(time.sleep, 0.03)
        await until(lambda: not any(t.is_alive() for t in threads()) or blocking._stuck == 0)
    assert await blocking.run(str, 1) == "1"
    await blocking.close()
    await until(lambda: not threads())


async def test_a_call_that_ends_while_its_wait_is_cancelled_keeps_the_books_right() -> None:
    """The race between end and abandon, many times over: no worker is lost, none is made in excess."""
    blocking = ThreadBlocking(workers=2, max_stuck=10_000)
    for i in range(200):
        try:
            async with asyncio.timeout(0.0005):
                await blocking.run(time.sleep, 0.0004 + (i % 5) * 0.0001)
        except TimeoutError:
            pass
    await until(lambda: blocking._stuck == 0)
    assert 0 <= blocking._workers <= 2
    async with asyncio.timeout(DEADLINE_S):
        assert await blocking.run(str, 1) == "1"
    await blocking.close()
    await until(lambda: not threads())


async def test_nothing_is_left_behind_on_a_loop_that_has_ended() -> None:
    """A stuck call that returns after the run is over finds its loop closed."""
    gate = Gate()

    def run() -> None:
        async def main() -> None:
            blocking = ThreadBlocking()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await blocking.run(gate)
            await blocking.close()

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    await until(lambda: not thread.is_alive())
    gate.open()
    await until(lambda: not threads())
