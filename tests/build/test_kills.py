"""A run that is killed at any moment goes on from what its store holds: nothing lost, nothing trained twice.

On virtual time, with the real store. A kill leaves what was on the disk at that moment: the store as its last write
left it, and the trainer's newest complete checkpoint. So between two writes all kill points are the same, and the run
goes on from each such state once.
"""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.build.virtual import simulated
from asyncrl.config import Recipe, RecipeError, load_table
from asyncrl.core.advantage import Advantage
from asyncrl.core.ledger import FINAL
from asyncrl.core.types import Batch, Trajectory, flatten
from asyncrl.observe.database import STORE, WHOLE, connect
from asyncrl.observe.store import SEGMENTS, Store
from asyncrl.ports import Observer, StepResult
from asyncrl.runtime.task_source import TaskMixture
from asyncrl.sim.blocking import SimBlocking
from asyncrl.sim.loop import run
from asyncrl.sim.tasks import SimTasks

SMALL: dict[str, Any] = {
    "env": {"max_turns": 1, "failure_window": 1000, "max_failure_rate": 1.0, "retries": 2},
    "rollout": {"batch_groups": 2, "group_size": 2, "num_envs": 6, "max_new_tokens": 60, "max_tokens": 400},
    "engine": {"count": 2, "max_running_requests": 3, "max_total_tokens": 1000, "stream_interval": 8},
    "run": {"steps": 4, "checkpoint_every": 2},
    "sim": {
        "instance": {"load_s": 0.5, "start_s": 0.5},
        "trainer": {"fixed_s": 1.0, "save_s": 1.0},
        "weights": {"gigabytes": 0.2},
        "lengths": {"kind": "lognormal", "mean": 90, "tailness": 77},
        "prompt_tokens": {"kind": "constant", "value": 10},
        "tasks": 20,
        "stall_s": 1e5,
    },
}


def recipe(*tables: dict[str, Any]) -> Recipe:
    merged = {name: dict(value) for name, value in SMALL.items()}
    for table in tables:
        for name, value in table.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return load_table(merged)


GENERATION_BOUND = {
    "rollout": {"num_envs": 4},
    "sim": {"trainer": {"fixed_s": 0.2, "save_s": 1.0}},
    "run": {"steps": 7},
}
OWN = Path(__file__).parent / "own_experience.py"
MULTI_TURN = {"env": {"max_turns": 3}}
ODD = {
    "env": {"max_turns": 2},
    "rollout": {
        "group_size_redundancy": 1,
        "filter_zero_variance": True,
        "max_additional_running_prompts": 1,
    },
    "trainer": {"stream": True, "micro_batch_tokens": 1},
    "sim": {
        **SMALL["sim"],
        "env": {"crash": 0.1, "observation_tokens": {"kind": "lognormal", "mean": 9, "tailness": 9}},
    },
}
RECIPES = {
    "sync": recipe({"preset": "sync"}),
    "sync, multi-turn": recipe({"preset": "sync"}, MULTI_TURN),
    "roll-flash": recipe({"preset": "roll-flash", "staleness": {"bound": 1.5}}),
    "asyncrl, multi-turn": recipe({"trainer": {"micro_batch_tokens": 1}}, MULTI_TURN),
    "asyncrl, odd": recipe({}, ODD),
    "staleflow": recipe({"preset": "staleflow", "staleness": {"bound": 2}}),
    "staleflow, multi-turn": recipe({"preset": "staleflow", "staleness": {"bound": 1}}, MULTI_TURN),
    "laminar": recipe({"preset": "laminar"}),
    "laminar, multi-turn": recipe({"preset": "laminar"}, MULTI_TURN),
    "dora": recipe({"preset": "dora"}),
    "dora, multi-turn": recipe({"preset": "dora"}, MULTI_TURN),
    "queue-max": recipe({"preset": "queue-max", "staleness": {"bound": 1}}, MULTI_TURN),
    "queue-drop": recipe({"preset": "queue-drop"}),
    "batch rollout": recipe({"rollout": {"queue_scheduling": False}}),
    "reuse": recipe(
        {"preset": "roll-flash", "staleness": {"bound": 3}, "buffer": {"sampler": "advantage", "reuse": 2}},
        GENERATION_BOUND,
    ),
    "reuse, multi-turn": recipe(
        {
            "preset": "laminar",
            "buffer": {"sampler": f"{OWN}:shortest", "writer": f"{OWN}:no_failures", "reuse": 3, "capacity": 2.0},
        },
        GENERATION_BOUND,
        MULTI_TURN,
    ),
    "whole groups": recipe({"rollout": {"expand_num_return_sequences": False}}),
}


@pytest.fixture(autouse=True)
def no_machine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is found again, without waiting for a disk."""
    monkeypatch.setattr("os.fsync", lambda file: None)


class Disk(msgspec.Struct):
    """What a kill leaves."""

    database: bytes
    segments: dict[str, bytes]
    checkpoint: tuple[int, int]
    """Version and weights."""

    def unpack(self, run_dir: Path) -> None:
        (run_dir / SEGMENTS).mkdir(parents=True)
        (run_dir / STORE).write_bytes(self.database)
        for name, data in self.segments.items():
            (run_dir / SEGMENTS / name).write_bytes(data)


class Filling:
    """What the laws are checked on has its tokens, as what the Recorder writes."""

    def __init__(self, inner: Observer, store: Store) -> None:
        self._inner = inner
        self._store = store

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        self._store.fill_now(trajectory)
        self._inner.trajectory(trajectory, state)


class Life:
    """One process's part of a run: what it found, what it did, and all that was ever on the disk meanwhile, if it is to
    be ``watched``. A job that ``outlived`` the process before has trained the batch that it was given."""

    def __init__(
        self,
        settings: Recipe,
        run_dir: Path,
        *,
        checkpoint: tuple[int, int] = (0, 0),
        watched: bool = False,
        outlived: bool = False,
    ) -> None:
        self.settings = settings
        self.outlived = outlived
        self.run_dir = run_dir
        self.checkpoint = checkpoint
        self.watched = watched
        self.disks: list[Disk] = []
        self.told = 0
        """Steps whose metrics were on the disk when the last write began."""
        run_dir.mkdir(exist_ok=True)
        run(self._live(), limit=1e6)

    async def _live(self) -> None:
        tasks = {task.id: task for task in SimTasks(self.settings.sim, seed=self.settings.seed).train}
        blocking = SimBlocking(rng=random.Random("store"))
        memory_bytes = 0 if self.settings.env.max_turns > 1 else 1 << 30  # nothing of what waits is in memory, or all
        store = Store(
            self.run_dir, blocking=blocking, find_task=lambda source, name: tasks[name], memory_bytes=memory_bytes
        )
        store.db.execute("PRAGMA synchronous = OFF")
        self.saved = store.load(self.checkpoint[0])
        if self.outlived:
            self.checkpoint = self.saved.version + 1, 777
        store.before = self._flush
        write = store.write

        def watched_write(put: int | None = None) -> None:
            self._look(store)  # a checkpoint may have been completed since
            write(put)
            self._look(store)

        if self.watched:
            store.write = watched_write  # type: ignore[method-assign]
        self.simulation = await simulated(
            self.settings, services=[store.run], store=store, saved=self.saved, checkpoint=self.checkpoint
        )
        accounts = self.simulation.run.buffer._accounts
        accounts._observer = Filling(accounts._observer, store)  # type: ignore[assignment]
        train_step = self.simulation.trainer.train_step

        async def known(batch: Batch, advantages: Sequence[Advantage]) -> StepResult:
            given = store.db.execute("SELECT count(*) FROM given WHERE step = ? AND part = ?", (batch.step, WHOLE))
            assert given.fetchone() == (1,), "the trainer is given a batch that is not durable"
            return await train_step(batch, advantages)

        self.simulation.trainer.train_step = known  # type: ignore[method-assign]
        await self.simulation.play()
        store.close()

    def _flush(self) -> None:
        self.told = sum(event[0] == "step" for event in self.simulation.trace.events)

    def _look(self, store: Store) -> None:
        [(trained,)] = store.db.execute("SELECT count(*) FROM steps WHERE checksum IS NOT NULL")
        assert trained <= self.saved.version + self.told, "a step is trained of which metrics.jsonl has no line"
        folder = self.run_dir / SEGMENTS
        segments = {path.name: path.read_bytes() for path in folder.iterdir()}
        disk = Disk(store.db.serialize(), segments, self.simulation.trainer.checkpoint)
        if not self.disks or disk != self.disks[-1]:
            self.disks.append(disk)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        db = connect(self.run_dir / STORE, read_only=True)
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()


USES = "FROM uses JOIN groups ON id = group_id"
CONSUMED = f"SELECT uses.step, uses.position, id, v_traj {USES} ORDER BY 1, 2"
OFTEN = f"SELECT group_id, count(*) {USES} WHERE state = 'consumed' GROUP BY 1"
CHECKSUMS = "SELECT step, checksum FROM steps WHERE checksum IS NOT NULL ORDER BY step"
ENDS = "SELECT state, count(*) FROM trajectories GROUP BY state"


def check(life: Life, before: Disk, earlier: Life) -> None:
    """``life`` went on to the end from ``before``, which ``earlier`` left."""
    settings, saved = life.settings, life.saved
    steps, size = settings.run.steps, settings.rollout.batch_groups
    trainer = life.simulation.trainer
    # Every step is trained once in the history that survives, and what was trained is trained on the same.
    assert trainer.version == steps
    assert trainer.trained == list(range(life.checkpoint[0], steps))
    consumed = life.rows(CONSUMED)
    assert [step for step, *_ in consumed] == [step for step in range(steps) for _ in range(size)]
    limit = settings.staleness.limit
    assert all(v_traj <= step and (limit is None or step - v_traj <= limit) for step, _, _, v_traj in consumed)
    db = sqlite3.connect(":memory:")
    db.deserialize(before.database.replace(b"\x02\x02", b"\x01\x01", 1))  # memory has no WAL
    with closing(db):
        assert consumed[: saved.consumed * size] == db.execute(CONSUMED).fetchall(), "a consumed group was lost"
        known = db.execute(CHECKSUMS).fetchall()
        assert life.rows(CHECKSUMS)[: len(known)] == known, "a step was trained on something else"
        ids = {number for (number,) in db.execute("SELECT id FROM trajectories")}
        scored = {number for (number,) in db.execute("SELECT id FROM trajectories WHERE state = 'scored'")}
    # Tasks come in their order, none twice.
    order = TaskMixture([(1.0, SimTasks(settings.sim, seed=settings.seed).train)], seed=settings.seed)
    tasks = life.rows("SELECT task FROM groups ORDER BY id")
    assert tasks == [(order.next().id,) for _ in tasks]
    # The ledger's law holds over both lives.
    uses = dict(life.rows(OFTEN))
    assert sum(uses.values()) == len(consumed), "a group that was trained is not consumed"
    assert max(uses.values()) == settings.buffer.reuse
    ends = dict(life.rows(ENDS))
    assert set(ends) <= {str(state) for state in FINAL}
    counts = life.simulation.run.buffer.ledger.counts()
    assert ends == {state: n for state, n in counts.items() if n and state != "reserved_ever"}
    assert counts["reserved_ever"] == sum(ends.values())
    ledger = life.simulation.run.buffer.ledger
    assert ledger.uses == steps * settings.batch_trajectories
    state_of = dict(life.rows("SELECT id, state FROM trajectories"))
    assert ids <= set(state_of)
    assert not scored & {number for number, state in state_of.items() if state == "failed"}
    # What had ended is trained as it was, but for rewards by a writer, which may ask how its group has ended since.
    was, now = trained_by(earlier), trained_by(life)
    if settings.buffer.writer:
        was, now = (
            {n: replace(t, reward=0.0, turn_rewards=(0.0,) * t.turns) for n, t in x.items()} for x in (was, now)
        )
    assert all(now[number] == was[number] for number in scored & set(was) & set(now))


def trained_by(life: Life) -> dict[int, Trajectory]:
    return {t.id: t for batch in life.simulation.trace.batches for t in batch.trajectories}


def went_on(life: Life) -> list[bool]:
    """Of each trajectory that was unfinished and is trained now: whether it has the tokens that it had."""
    trained, found = trained_by(life), []
    for group in life.saved.groups:
        for slot in group.slots:
            t = trained.get(slot.trajectory_id)
            turns = [*slot.turns, *([slot.partial] if slot.partial else [])]
            if t is not None and slot.live and turns:
                tokens, *_ = flatten(turns)
                found.append(t.tokens[: len(tokens)] == tokens)
    return found


def go_on(earlier: Life, disk: Disk, run_dir: Path, *, watched: bool = False) -> Life:
    disk.unpack(run_dir)
    life = Life(earlier.settings, run_dir, checkpoint=disk.checkpoint, watched=watched)
    check(life, disk, earlier)
    shutil.rmtree(run_dir)
    return life


def killed(name: str, tmp_path: Path, points: int | None, seed: int = 0) -> None:
    """At so many of the moments that leave something else on the disk; None: at all."""
    whole = Life(replace(RECIPES[name], seed=seed), tmp_path / "whole", watched=True)
    chosen = whole.disks if points is None else random.Random(name).sample(whole.disks, points)
    kept = [went for disk in chosen for went in went_on(go_on(whole, disk, tmp_path / "again"))]
    if "multi-turn" in name:  # whose environments say the same to the same actions
        assert kept and all(kept)


@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_run_loses_nothing_and_trains_nothing_twice(name: str, tmp_path: Path) -> None:
    killed(name, tmp_path, points=6)


@pytest.mark.parametrize("name", ["roll-flash", "asyncrl, odd", "staleflow, multi-turn", "reuse"])
def test_a_job_that_outlived_its_controller_trains_no_batch_twice(name: str, tmp_path: Path) -> None:
    whole = Life(RECIPES[name], tmp_path / "whole", watched=True)
    tried = 0
    for disk in whole.disks:
        disk.unpack(tmp_path / "again")
        with closing(connect(tmp_path / "again" / STORE, read_only=True)) as db:
            given = "SELECT count(*) FROM given JOIN steps USING (step) WHERE part = ? AND checksum IS NULL"
            [(begun,)] = db.execute(given, (WHOLE,))
        if begun:
            life = Life(whole.settings, tmp_path / "again", checkpoint=disk.checkpoint, outlived=True)
            check(life, disk, whole)
            tried += 1
        shutil.rmtree(tmp_path / "again")
    assert tried >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", RECIPES)
def test_so_it_is_at_every_moment(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that waits for nothing writes most often: thousands of moments, all in all."""
    monkeypatch.setattr("asyncrl.observe.store.LINGER_S", 0.0)
    killed(name, tmp_path, points=None, seed=seed)


@pytest.mark.parametrize("name", ["asyncrl, odd", "staleflow, multi-turn"])
def test_a_run_that_is_killed_again_and_again_comes_to_its_end(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    life = Life(RECIPES[name], tmp_path / "whole", watched=True)
    for kill in range(4):
        number = rng.randrange(len(life.disks))
        life = go_on(life, life.disks[number], tmp_path / f"kill {kill}", watched=True)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("asyncrl, multi-turn", recipe({"preset": "areal", "engine": {"count": 3}}, MULTI_TURN)),
        ("sync, multi-turn", recipe({"preset": "roll-flash", "engine": {"count": 1}}, MULTI_TURN)),
        ("staleflow, multi-turn", recipe({"preset": "staleflow", "engine": {"count": 1}}, MULTI_TURN)),
        ("laminar, multi-turn", recipe({"preset": "laminar", "engine": {"count": 1}}, MULTI_TURN)),
        ("laminar, multi-turn", recipe({"preset": "laminar", "engine": {"count": 3}}, MULTI_TURN)),
        ("dora, multi-turn", recipe({"preset": "dora", "engine": {"count": 1}}, MULTI_TURN)),
        ("dora, multi-turn", recipe({"preset": "dora", "engine": {"count": 3}}, MULTI_TURN)),
    ],
)
def test_a_killed_run_goes_on_with_other_servers_and_presets(name: str, other: Recipe, tmp_path: Path) -> None:
    whole = Life(RECIPES[name], tmp_path / "whole", watched=True)
    for disk in random.Random(name).sample(whole.disks, 3):
        disk.unpack(tmp_path / "again")
        life = Life(other, tmp_path / "again", checkpoint=disk.checkpoint)
        check(life, disk, whole)
        assert all(went_on(life))
        shutil.rmtree(tmp_path / "again")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"preset": "dora"},
            "staleness.control = window: the run that is to go on was begun with buffers; set it back",
        ),
        (
            {"preset": "laminar", "staleness": {"control": "buffers", "bound": 1}},
            'update.running = "drain" with engine.routing = "own_batch": no trajectory may have several versions',
        ),
    ],
)
def test_a_preset_that_cannot_go_on_with_what_is_there_is_refused(
    table: dict[str, Any], said: str, tmp_path: Path
) -> None:
    whole = Life(RECIPES["staleflow"], tmp_path / "whole", watched=True)
    whole.disks[-1].unpack(tmp_path / "again")
    with pytest.raises(RecipeError, match=f"^{re.escape(said)}"):
        Life(recipe(table), tmp_path / "again", checkpoint=whole.disks[-1].checkpoint)
