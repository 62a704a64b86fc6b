"""Collections are rare inside, as before outside; and the runtime does not need them."""

from __future__ import annotations

import gc
import weakref

import pytest

from asyncrl.build.simulate import play
from asyncrl.config import load_table
from asyncrl.garbage import rare_collections
from asyncrl.observe.tally import Tally


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_collected_later_and_thresholds_come_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="out"), rare_collections(5_000):
        assert gc.get_freeze_count() > 0
        dropped = weakref.ref(Node())
        kept = [Node() for _ in range(2_000)]
        assert dropped() is not None
        kept += [Node() for _ in range(4_000)]
        assert dropped() is None
        raise ValueError("out")
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def cycles_left(steps: int) -> int:
    """Objects in cycles after a whole run: its components, which know each other, and what its episodes left."""
    recipe = load_table(
        {
            "preset": "roll-flash",
            "env": {"max_turns": 3},
            "rollout": {"batch_groups": 4, "group_size": 4, "num_envs": 32, "max_new_tokens": 50, "max_tokens": 500},
            "run": {"steps": steps},
        }
    )
    gc.collect()
    books, error = play(recipe, lambda clock: Tally(recipe, clock))
    assert error is None
    assert books.counts()["consumed"] == 16 * steps
    return gc.collect()


def test_episodes_leave_no_cycles() -> None:
    """As many after a long run as after a short one, though no collection comes within."""
    assert cycles_left(steps=40) - cycles_left(steps=10) < 16
