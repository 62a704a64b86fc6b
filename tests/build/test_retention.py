"""A run of many steps keeps what may still be needed: its disk, open files and queue do not grow with its length.

On virtual time, with the real store. What stays of a trajectory is its row in the database.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.build.virtual import simulated
from asyncrl.config import load_table
from asyncrl.observe import segments
from asyncrl.observe.database import STORE
from asyncrl.observe.store import SEGMENTS, Store
from asyncrl.sim.blocking import SimBlocking
from asyncrl.sim.loop import run
from asyncrl.sim.tasks import SimTasks

ROW_BYTES = 300
"""Of a trajectory in the database, with its share of its group's rows and of the indices."""

SETTINGS: dict[str, Any] = {
    "preset": "roll-flash",
    "env": {"max_turns": 2},
    "rollout": {"batch_groups": 2, "group_size": 2, "num_envs": 8, "max_new_tokens": 30, "max_tokens": 200},
    "engine": {"count": 2, "max_running_requests": 4, "max_total_tokens": 2000, "stream_interval": 16},
    "run": {"checkpoint_every": 5},
    "sim": {
        "instance": {"load_s": 0.1, "start_s": 0.1},
        "trainer": {"fixed_s": 0.5, "save_s": 0.5},
        "weights": {"gigabytes": 0.01},
        "lengths": {"kind": "lognormal", "mean": 20, "tailness": 20},
        "prompt_tokens": {"kind": "constant", "value": 10},
        "tasks": 20,
    },
}
OTHERS = {"dora": {"preset": "dora"}, "reuse": {"buffer": {"sampler": "advantage", "reuse": 2}}}


class Size:
    """Of what a run has on the disk and in hand, at one moment."""

    def __init__(self, store: Store, run_dir: Path) -> None:
        files = list((run_dir / SEGMENTS).iterdir())
        self.tokens = sum(file.stat().st_size for file in files)
        self.wal = (run_dir / f"{STORE}-wal").stat().st_size
        self.open = len(os.listdir("/proc/self/fd"))
        self.kept = store.db.execute("SELECT count(*) FROM trajectories WHERE payload IS NOT NULL").fetchone()[0]
        self.turns = store.db.execute("SELECT count(*) FROM turns").fetchone()[0]
        self.given = store.db.execute("SELECT count(*) FROM given").fetchone()[0]


def played(settings: dict[str, Any], steps: int, run_dir: Path) -> list[Size]:
    """The sizes now and then."""
    recipe = load_table({**SETTINGS, **settings, "run": {**SETTINGS["run"], "steps": steps}})
    sizes: list[Size] = []

    async def live() -> None:
        tasks = {task.id: task for task in SimTasks(recipe.sim, seed=recipe.seed).train}
        blocking = SimBlocking(rng=random.Random("store"))
        store = Store(run_dir, blocking=blocking, find_task=lambda source, name: tasks[name])
        store.db.execute("PRAGMA synchronous = OFF")
        write, writes = store.write, 0

        def watched(put: int | None = None) -> None:
            nonlocal writes
            write(put)
            writes += 1
            if not writes % 20:
                sizes.append(Size(store, run_dir))

        store.write = watched  # type: ignore[method-assign]
        simulation = await simulated(recipe, services=[store.run], store=store)
        await simulation.play()
        store.close()

    run(live(), limit=1e7)
    return sizes


def most(sizes: Sequence[Size], what: str) -> int:
    return max(getattr(size, what) for size in sizes)


def check(sizes: list[Size], run_dir: Path, trajectories: int) -> None:
    quarter = len(sizes) // 4
    assert quarter >= 10
    for what in ("tokens", "wal", "open", "kept", "turns", "given"):
        first, last = most(sizes[:quarter], what), most(sizes[-quarter:], what)
        assert last <= 1.5 * first, f"{what} grew from {first} to {last}"
    assert (run_dir / STORE).stat().st_size <= ROW_BYTES * trajectories


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux does")
@pytest.mark.parametrize(
    ("name", "steps"),
    [("", 400), *(pytest.param(name, 5000, marks=pytest.mark.slow) for name in ("", *OTHERS))],
)
def test_a_long_run_needs_no_more_than_a_short_one(
    name: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 20_000)
    monkeypatch.setattr("os.fsync", lambda file: None)  # no machine dies here
    sizes = played(OTHERS.get(name, {}), steps, tmp_path)
    check(sizes, tmp_path, 4 * steps)
