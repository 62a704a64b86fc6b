"""User code that blocks the loop is cut off where it blocks; the runtime's own code never is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from asyncrl.watchdog import LoopBlocked, LoopLag, LoopWatchdog


async def enters_user_code(block: Callable[[], Awaitable[None]]) -> None:
    await block()


async def sleeps() -> None:
    await asyncio.sleep(0)
    time.sleep(30)  # noqa: ASYNC251 (what the watchdog is for)


async def spins() -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        pass


async def watched(block: Callable[[], Awaitable[None]], entry: Callable[..., Awaitable[None]]) -> float:
    watchdog = LoopWatchdog(frozenset({enters_user_code.__code__}), limit_s=0.4)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watchdog.run())
        await asyncio.sleep(0.1)
        try:
            await entry(block)
        finally:
            watching.cancel()
    return time.monotonic() - began


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("block", [sleeps, spins])
def test_a_blocking_environment_is_interrupted_where_it_blocks(
    run: Callable[[Awaitable[float]], float], block: Callable[[], Awaitable[None]]
) -> None:
    began = time.monotonic()
    with pytest.raises(ExceptionGroup) as caught:
        run(watched(block, enters_user_code))
    assert caught.group_contains(LoopBlocked, match=r"blocked the event loop for .* at .*test_watchdog\.py:\d+")
    assert time.monotonic() - began < 15


def test_other_code_is_never_interrupted() -> None:
    async def slow() -> None:
        time.sleep(1.5)  # noqa: ASYNC251

    async def elsewhere(block: Callable[[], Awaitable[None]]) -> None:
        await block()

    assert uvloop.run(watched(slow, elsewhere)) >= 1.5


def test_what_cannot_be_interrupted_is_reported_with_where_it_hangs() -> None:
    told: list[str] = []

    async def main() -> None:
        watchdog = LoopWatchdog(frozenset(), limit_s=0.1, hangs=told.append)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watchdog.run())
            await asyncio.sleep(0.05)
            until = time.monotonic() + 30
            while not told and time.monotonic() < until:
                time.sleep(0.1)  # noqa: ASYNC251
            time.sleep(0.3)  # noqa: ASYNC251
            watching.cancel()

    asyncio.run(main())
    [report] = told
    assert report.startswith("the event loop does not answer for")
    assert "MainThread:" in report and "in main" in report


def test_the_lag_of_the_loop_is_what_timers_come_late() -> None:
    async def main() -> tuple[float, float]:
        lag = LoopLag(every_s=0.01)
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(lag.run())
            await asyncio.sleep(0.03)
            before = lag.p99
            time.sleep(0.5)  # noqa: ASYNC251
            await asyncio.sleep(0.03)
            measuring.cancel()
        return before, lag.p99

    before, after = asyncio.run(main())
    assert after >= 0.4 > 0.0 <= before
