"""Clean-up that a cancellation must not cut short (DESIGN rule 6). Used by runtime and engine alike."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
