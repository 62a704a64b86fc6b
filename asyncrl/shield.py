"""Waits that a cancellation must not cut short (DESIGN rule 6), and those that another's failure does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Await ``work`` within its deadline, even if the caller is cancelled meanwhile; that cancellation is raised
    afterwards. Raises ``TimeoutError`` at the deadline, else what ``work`` raises."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await work

    # The one task outside a TaskGroup: it never outlives this call.
    task = asyncio.get_running_loop().create_task(bounded())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen, so that the loop does not complain about it
        raise cancelled
    return task.result()


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all of them; when one fails the others are cancelled, and what it raises is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def unless(failure: Coroutine[Any, Any, None], work: Awaitable[T]) -> T:
    """``work``'s result; given up as soon as ``failure`` raises, with what that raises."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(failure)
            result = await work
            watch.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return result
