"""How often Python's garbage collector runs in a controller.

The runtime makes next to no reference cycles, so what it lets go of is freed at once, and a collection finds nothing.
At Python's settings it looks nevertheless, every 700 new objects, and with thousands of environments each look at the
older ones holds the loop for hundreds of milliseconds. What a user's code leaves in cycles is still collected, later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000
"""New objects between two collections of a real run: some 50 ms of work, every second or so where the loop is busy."""
MIDDLE = 100
OLD = 10


@contextmanager
def rare_collections(young: int = YOUNG) -> Iterator[None]:
    """Inside, new objects are collected every ``young`` of them, and what exists now is not looked at again."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, MIDDLE, OLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
