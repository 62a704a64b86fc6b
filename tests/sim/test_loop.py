"""The virtual-time loop: jumps, deadlocks, limits, and no way out to the real world. Guards asyncio's private hooks."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncrl.sim.loop import DeadlockError, RealWorldError, VirtualTimeLimit, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_to_the_next_timer_and_costs_nothing() -> None:
    async def main() -> list[float]:
        woken: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(now())

        async with asyncio.TaskGroup() as group:
            for seconds in (86_400.0, 0.5, 3.0, 0.25):
                group.create_task(sleeper(seconds))
        return woken

    began = time.monotonic()
    assert run(main()) == [0.25, 0.5, 3.0, 86_400.0]
    assert time.monotonic() - began < 5


def test_ready_work_does_not_move_the_clock() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run(main()) == 0.0


def test_timeouts_fire_exactly_and_clean_up_in_virtual_time() -> None:
    async def main() -> tuple[float, float]:
        async def slow() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(1)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await slow()
        cleaned = now()
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(slow())
                await asyncio.sleep(0.5)
                raise ValueError("boom")
        return cleaned, now()

    assert run(main()) == (3.0, 4.5)


def test_a_cancelled_timer_is_not_jumped_to() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(1, lambda: None).cancel()
        loop.call_later(50, lambda: None).cancel()
        await asyncio.sleep(10)
        return now()

    assert run(main()) == 10.0


def test_deadlock_is_an_error_that_names_who_waits() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"0\.000 s; waiting: .*stuck"):
        run(stuck())


def test_a_deadlock_after_some_time_says_when() -> None:
    async def main() -> None:
        await asyncio.sleep(7)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match=r"at 7\.000 s"):
        run(main())


def test_virtual_time_is_bounded() -> None:
    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    with pytest.raises(VirtualTimeLimit, match="passed 100 s"):
        run(main(), limit=100)


def test_threads_and_sockets_are_refused() -> None:
    async def thread() -> None:
        await asyncio.to_thread(print)

    async def sockets() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    for attempt in (thread, sockets):
        with pytest.raises(RealWorldError):
            run(attempt())


def test_the_same_program_takes_the_same_order() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def worker(i: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0.1 * (i % 3))
                order.append(i)

        async with asyncio.TaskGroup() as group:
            for i in range(9):
                group.create_task(worker(i))
        return order

    assert run(main()) == run(main())


def test_a_callback_that_raises_ends_the_simulation() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run(main())
