"""The run store by itself: what it keeps, what it lets go of, and what it refuses."""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.core import journal
from asyncrl.core.advantage import TurnRewards
from asyncrl.core.experience import Generated
from asyncrl.core.journal import Saved
from asyncrl.core.types import Task, Trajectory, Turn
from asyncrl.observe import database, segments, store
from asyncrl.observe.database import STORE, connect
from asyncrl.observe.run_dir import TRAJECTORIES, RunDirError
from asyncrl.observe.store import SEGMENTS, Store

TASKS = {f"t{i}": Task(id=f"t{i}", data={"n": i}) for i in range(10)}


def find_task(source: str, name: str) -> Task:
    return TASKS[name]


class Inline:
    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return fn(*args)

    async def close(self) -> None: ...


def turn(*output: int, prompt: tuple[int, ...] = ()) -> Turn:
    return Turn(
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
        logprobs=array("f", [-0.5] * len(output)),
        versions=array("i", [1] * len(output)),
        finish_reason="stop",
    )


def trajectory(number: int, group: int, index: int = 0) -> Trajectory:
    return Trajectory(
        id=number,
        group_id=group,
        index=index,
        task_id=f"t{group}",
        v_traj=0,
        tokens=array("i", [7, number]),
        loss_mask=array("b", [0, 1]),
        logprobs=array("f", [0.0, -1.25]),
        versions=array("i", [-1, 0]),
        turns=1,
        reward=0.5,
        finish_reason="stop",
        metrics={"solved": 1.0},
        turn_ends=(2,),
        turn_rewards=(0.5,),
        turn_seconds=((0.1, 0.2, 0.3),),
    )


def opened(group: int, *trajectories: int) -> journal.GroupOpened:
    return journal.GroupOpened(group=group, task=TASKS[f"t{group}"], tasks_done=group + 1, trajectories=trajectories)


def finished(group: int, number: int) -> list[journal.Entry]:
    """A group of one, from its beginning until it waits for its batch."""
    return [
        opened(group, number),
        journal.GroupStarted(group=group, v_traj=0, deadline=1),
        journal.Scored(trajectory=trajectory(number, group)),
        journal.GroupReady(group=group),
    ]


def kept(folder: Path, entries: list[journal.Entry]) -> None:
    """A process that puts these and ends."""
    with closing(Store(folder, blocking=Inline(), find_task=find_task)) as opened_store:
        for entry in entries:
            opened_store.put(entry)


def found(folder: Path, checkpoint: int = 0) -> Saved:
    with closing(Store(folder, blocking=Inline(), find_task=find_task)) as opened_store:
        return opened_store.load(checkpoint)


async def test_what_was_put_is_found_again(tmp_path: Path) -> None:
    advantages = [0.5, TurnRewards(ends=(2,), rewards=(1.0,)), None, array("f", [0.0, 1.0])]
    kept(
        tmp_path,
        [
            *finished(0, 0),
            *finished(1, 1),
            opened(2, 2, 3, 4),
            journal.TurnPiece(trajectory=2, number=0, turn=turn(1, 2, prompt=(9,))),
            journal.TurnPiece(trajectory=2, number=1, piece=0, turn=turn(3, prompt=(8,))),
            journal.TurnPiece(trajectory=2, number=1, piece=1, turn=turn(4)),
            journal.Ended(trajectory=3, state="failed", reason="step: no", infra=True),
            journal.Retried(group=2, index=1, trajectory=5),
            journal.Scored(trajectory=trajectory(4, 2, index=2)),
            journal.BatchTaken(step=0, groups=(1,)),
            journal.Given(step=0, part=0, groups=(1,), advantages=advantages[:1]),
            journal.Given(step=0, groups=(1,), advantages=advantages, baseline=0.25),
            journal.Trained(step=0, checksum=2**63 + 1),
            journal.BatchTaken(step=1, groups=(0,)),
            journal.Noted(key="bound", value=1.5),
            journal.Noted(key="control", value="buffers"),
        ],
    )
    saved = found(tmp_path)
    assert (saved.version, saved.consumed, saved.baseline) == (1, 2, 0.25)
    assert (saved.tasks_done, saved.next_group, saved.next_trajectory) == (3, 3, 6)
    assert saved.final == {("consumed", ""): 2, ("failed", "step: no"): 1}
    assert (saved.retried, saved.failed_task, saved.failed_infra) == (1, 0, 1)
    assert saved.notes["bound"] == 1.5 and saved.notes["control"] == "buffers"
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
        step = await opened_store.trained_on(0)
    assert step.checksum == 2**63 + 1
    assert list(step.work.advantages) == advantages and [list(w.advantages) for w in step.fed] == [advantages[:1]]
    assert step.work.batch.groups[0].trajectories == (trajectory(1, 1),)
    assert step.work.batch.groups[0].task == TASKS["t1"]
    assert saved.taken is not None and saved.taken.groups[0].id == 0
    [group] = saved.groups
    first, second, third = group.slots
    assert not group.ready and group.v_traj is None
    assert first.live and first.turns == (turn(1, 2, prompt=(9,)),) and first.partial == turn(3, 4, prompt=(8,))
    assert second.live and (second.trajectory_id, second.attempt) == (5, 1) and not second.turns
    assert not third.live and third.trajectory == trajectory(4, 2, index=2)


def test_a_turn_takes_the_place_of_its_pieces_and_of_an_episode_that_began_anew(tmp_path: Path) -> None:
    pieces = [journal.TurnPiece(trajectory=0, number=0, piece=i, turn=turn(i, prompt=(9,))) for i in range(2)]
    later = journal.TurnPiece(trajectory=0, number=1, turn=turn(7, prompt=(8,)))
    again = journal.TurnPiece(trajectory=0, number=0, turn=turn(5, prompt=(9,)))
    kept(tmp_path, [opened(0, 0), *pieces, again, later])
    assert found(tmp_path).groups[0].slots[0].turns == (again.turn, later.turn)
    kept(tmp_path, [again])
    assert found(tmp_path).groups[0].slots[0].turns == (again.turn,)


def test_tokens_are_kept_until_a_checkpoint_has_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)  # a file for each payload

    def files() -> int:
        return len(list((tmp_path / SEGMENTS).iterdir()))

    kept(tmp_path, [*finished(0, 0), *finished(1, 1), opened(2, 2)])
    assert files() == 2
    kept(tmp_path, [journal.TurnPiece(trajectory=2, number=0, turn=turn(1))])
    assert files() == 3
    kept(tmp_path, [journal.Ended(trajectory=2, state="aborted", reason="run ended")])
    assert files() == 2
    kept(tmp_path, [journal.BatchTaken(step=0, groups=(0,)), journal.Given(step=0, groups=(0,), advantages=[1.0])])
    kept(tmp_path, [journal.Trained(step=0, checksum=1)])
    assert files() == 3 and found(tmp_path).version == 1
    kept(tmp_path, [journal.Checkpointed(version=1)])
    assert files() == 1
    assert found(tmp_path, checkpoint=1).groups[1].slots[0].trajectory == trajectory(1, 1)
    kept(tmp_path, [journal.GroupEnded(group=1, state="surplus", reason="queue full")])
    assert files() == 0
    with pytest.raises(RunDirError, match=r"step 0 is not kept, and the newest checkpoint is older"):
        found(tmp_path, checkpoint=0)


def test_a_step_that_only_the_last_checkpoint_tells_of_is_trained(tmp_path: Path) -> None:
    kept(
        tmp_path,
        [
            *finished(0, 0),
            journal.BatchTaken(step=0, groups=(0,)),
            journal.Given(step=0, groups=(0,), advantages=[1.0], baseline=0.5),
            journal.Checkpointed(version=1),
        ],
    )
    saved = found(tmp_path, checkpoint=1)
    assert (saved.version, saved.consumed, saved.taken, saved.baseline) == (1, 1, None, 0.5)


def test_a_torn_write_is_not_seen_and_damage_is_named(tmp_path: Path) -> None:
    kept(tmp_path, finished(0, 0))
    segment = tmp_path / SEGMENTS / "segment-1"
    whole = segment.read_bytes()
    segment.write_bytes(whole + b"torn")  # nothing refers to it
    kept(tmp_path, finished(1, 1))
    assert [group.id for group in found(tmp_path).groups] == [0, 1]
    segment.write_bytes(whole[:-1])
    with pytest.raises(RunDirError, match=r"segment-1: damaged at byte 0; go on from a checkpoint: --resume "):
        found(tmp_path)


def test_a_run_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    entries: list[journal.Entry] = []
    for step in range(3):
        entries += [
            *finished(step, step),
            journal.BatchTaken(step=step, groups=(step,)),
            journal.Given(step=step, groups=(step,), advantages=[1.0]),
            journal.Trained(step=step, checksum=step),
        ]
    kept(tmp_path, [*entries, *finished(3, 3), opened(4, 4)])
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
        opened_store.rewind(1, tasks_done=2)
    saved = found(tmp_path, checkpoint=1)
    assert (saved.version, saved.consumed, saved.groups, saved.taken) == (1, 1, (), None)
    assert (saved.tasks_done, saved.next_group, saved.next_trajectory) == (2, 5, 5)
    assert saved.final == {("consumed", ""): 1, ("aborted", "the run went back to version 1"): 4}
    kept(tmp_path, [opened(5, 5), journal.BatchTaken(step=1, groups=(5,))])


def test_a_run_that_goes_back_evaluates_again_what_it_gave_up(tmp_path: Path) -> None:
    for evaluated, again in ((4.0, 1.0), (0.0, 0.0)):
        kept(tmp_path, [journal.Noted(key="evaluated", value=evaluated)])
        with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
            opened_store.rewind(2, tasks_done=0)
        assert found(tmp_path, checkpoint=2).notes["evaluated"] == again


def test_a_store_that_was_lost_gives_no_number_out_again(tmp_path: Path) -> None:
    (tmp_path / TRAJECTORIES).write_bytes(b'{"id":8,"group":4}\n{"id":9,"group":3}\n')
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
        opened_store.rewind(1, tasks_done=3)
    for _ in range(2):  # also when that one is killed before it began anything
        saved = found(tmp_path, checkpoint=1)
        assert (saved.tasks_done, saved.next_group, saved.next_trajectory) == (3, 5, 10)
    kept(tmp_path, [opened(5, 10)])
    saved = found(tmp_path, checkpoint=1)
    assert (saved.next_group, saved.next_trajectory) == (6, 11)


def test_a_store_is_read_whatever_its_path(tmp_path: Path) -> None:
    odd = tmp_path / "x#3 ?mode=rw%20"
    odd.mkdir()
    kept(odd, [opened(0, 0)])
    with closing(connect(odd / STORE, read_only=True)) as db:
        assert db.execute("SELECT count(*) FROM groups").fetchone() == (1,)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM groups")
    assert [path.name for path in tmp_path.iterdir()] == [odd.name]


async def test_who_waits_goes_on_when_all_that_was_put_is_written(tmp_path: Path) -> None:
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
        await opened_store.committed()  # nothing to wait for
        async with asyncio.TaskGroup() as group:
            service = group.create_task(opened_store.run())
            for number in range(3):
                opened_store.put(opened(number, number))
                async with asyncio.timeout(10):
                    await opened_store.committed()
                with closing(sqlite3.connect(tmp_path / STORE)) as db:
                    assert db.execute("SELECT count(*) FROM groups").fetchone() == (number + 1,)
            service.cancel()


async def test_what_is_put_at_once_is_written_at_once(tmp_path: Path) -> None:
    """A thread that writes may come between two calls of the loop's."""
    durable = []

    class Between(Inline):
        async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
            opened_store.put(opened(2, 2))
            fn(*args)
            durable.append(opened_store.db.execute("SELECT count(*) FROM groups").fetchone()[0])
            opened_store.put(opened(3, 3))

    with closing(Store(tmp_path, blocking=Between(), find_task=find_task)) as opened_store:
        async with asyncio.TaskGroup() as group:
            service = group.create_task(opened_store.run())
            opened_store.put(opened(0, 0))
            opened_store.put(opened(1, 1))
            await opened_store.committed()
            service.cancel()
        assert durable[0] == 2
    assert len(found(tmp_path).groups) == 4


def test_a_full_disk_is_one_line_and_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_store = Store(tmp_path, blocking=Inline(), find_task=find_task)
    opened_store.db.execute("PRAGMA max_page_count = 1")
    opened_store.put(opened(0, *range(10_000)))
    for _ in range(2):
        with pytest.raises(RunDirError, match=r"run\.db: database or disk is full; free space there") as caught:
            opened_store.write()
        assert "\n" not in str(caught.value)
    with pytest.raises(RunDirError):
        opened_store.close()
    kept(tmp_path, [opened(0, 0)])  # it can be opened again


def test_a_store_of_a_newer_version_or_in_use_is_refused(tmp_path: Path) -> None:
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as first:
        with pytest.raises(RunDirError, match=r"run\.lock: another process runs in this folder"):
            Store(tmp_path, blocking=Inline(), find_task=find_task)
        first.db.execute(f"PRAGMA user_version = {database.SCHEMA + 1}")
    with pytest.raises(RunDirError, match=r"run\.db: schema 3, but this version of asyncrl reads 2; use the one that"):
        Store(tmp_path, blocking=Inline(), find_task=find_task)


def test_a_full_queue_is_written_on_the_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "QUEUE_LIMIT", 2)
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
        for number in range(3):
            opened_store.put(opened(number, number))
        assert opened_store.db.execute("SELECT count(*) FROM groups").fetchone() == (2,)


def test_a_task_that_is_gone_is_named(tmp_path: Path) -> None:
    kept(tmp_path, [journal.GroupOpened(group=0, task=Task(id="gone", data={}), tasks_done=1, trajectories=(0,))])
    with pytest.raises(RunDirError, match=r"has begun task 'gone', which the training rows do not have any more"):
        found(tmp_path)


async def test_what_waits_beyond_the_memory_given_is_on_the_disk_alone(tmp_path: Path) -> None:
    long = 32_000

    def waiting(number: int) -> Trajectory:
        column = array("i", [number]) * long
        return msgspec.structs.replace(
            trajectory(number, number),
            tokens=column,
            loss_mask=array("b", [1]) * long,
            logprobs=array("f", [-0.5]) * long,
            versions=array("i", [0]) * long,
            turn_ends=(long,),
        )

    limit = 4 * 13 * long
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task, memory_bytes=limit)) as opened_store:
        async with asyncio.TaskGroup() as group:
            service = group.create_task(opened_store.run())
            backlog = [waiting(number) for number in range(10)]
            for t in backlog:
                opened_store.put(opened(t.group_id, t.id))
                opened_store.put(journal.Scored(trajectory=t))
                await opened_store.committed()
            in_memory = [t.id for t in backlog if t.tokens]
            assert in_memory == [0, 1, 2, 3], "those that are trained first"
            await opened_store.fill(backlog[2:5])
            assert backlog[2:5] == [waiting(number) for number in range(2, 5)]
            opened_store.put(journal.GroupEnded(group=8, state="surplus", reason="queue full"))
            opened_store.fill_now(backlog[8])
            assert backlog[8] == waiting(8)
            service.cancel()
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task, memory_bytes=limit)) as opened_store:
        slots = [group.slots[0] for group in opened_store.load(0).groups]
        found_again = [slot.trajectory for slot in slots if slot.trajectory is not None]
        assert sum(13 * len(t.tokens) for t in found_again) <= limit
        await opened_store.fill(found_again)
        assert found_again == [waiting(number) for number in range(10) if number != 8]


def trained(step: int, *groups: int, again: tuple[int, ...] = ()) -> list[journal.Entry]:
    return [
        journal.BatchTaken(step=step, groups=groups, again=again),
        journal.Given(step=step, groups=groups, advantages=[1.0]),
        journal.Trained(step=step, checksum=step),
    ]


def test_groups_between_two_uses_are_found_in_their_order_with_the_rewards_that_the_writer_gave(tmp_path: Path) -> None:
    *begun, ready = finished(1, 1)
    assert isinstance(ready, journal.GroupReady)
    kept(
        tmp_path,
        [*finished(0, 0), *begun, journal.GroupReady(group=1, rewards={1: 2.0}), *finished(2, 2), opened(3, 3)],
    )
    kept(tmp_path, [*trained(0, 1, 0, again=(1, 0)), *trained(1, 0, 2, again=(2,)), journal.Spent(groups=(0,))])
    saved = found(tmp_path)
    assert [(group.id, group.ready, group.uses) for group in saved.groups] == [
        (3, False, 0),
        (1, True, 1),
        (2, True, 1),
    ]
    assert saved.uses == 4 and saved.final == {("consumed", ""): 3}
    [slot] = saved.groups[1].slots
    assert slot.trajectory == trajectory(1, 1).rewarded(2.0) and slot.generated == Generated(tokens=1, version=0.0)
    kept(tmp_path, [journal.BatchTaken(step=2, groups=(1,))])
    taken = found(tmp_path).taken
    assert taken is not None and [group.rewards for group in taken.groups] == [[2.0]]


def test_tokens_are_kept_while_a_group_may_be_used_and_until_a_checkpoint_has_its_last_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)  # a file for each payload

    def files() -> int:
        return len(list((tmp_path / SEGMENTS).iterdir()))

    kept(tmp_path, [*finished(0, 0), *trained(0, 0, again=(0,))])
    kept(tmp_path, [journal.Checkpointed(version=1)])
    assert files() == 1, "it may be used again"
    kept(tmp_path, trained(1, 0))
    kept(tmp_path, [journal.Checkpointed(version=1)])
    assert files() == 2, "step 1 may have to be trained again"
    kept(tmp_path, [journal.Checkpointed(version=2)])
    assert files() == 0


def test_a_run_that_goes_back_forgets_the_uses_since_then(tmp_path: Path) -> None:
    kept(tmp_path, [*finished(0, 0), *finished(1, 1), *trained(0, 0, again=(0,)), *trained(1, 0, 1, again=(1,))])
    with closing(Store(tmp_path, blocking=Inline(), find_task=find_task)) as opened_store:
        opened_store.rewind(1, tasks_done=1)
    saved = found(tmp_path, checkpoint=1)
    assert (saved.version, saved.consumed, saved.uses, saved.groups) == (1, 1, 1, ())
    assert saved.final == {("consumed", ""): 1, ("aborted", "the run went back to version 1"): 1}
