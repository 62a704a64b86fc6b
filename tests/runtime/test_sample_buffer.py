"""SampleBuffer: admission, groups, filtering, retries, surplus, queues that evict, batch rollout, and cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from asyncrl.core.ledger import State
from asyncrl.core.staleness import make_control
from asyncrl.core.staleness.base import StalenessControl, StalenessViolation
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.staleness.queue import QueueDrop, QueueMax
from asyncrl.core.types import Batch, Task, Trajectory, flatten
from asyncrl.runtime.sample_buffer import Lease, SampleBuffer
from asyncrl.runtime.task_source import TaskSource
from asyncrl.sim.loop import run
from asyncrl.sim.trace import TraceRecorder

from .world import aim, cancelled_at


def make(
    batch: int = 2,
    group_size: int = 2,
    alpha: float = 0,
    redundant: int = 0,
    control: StalenessControl | None = None,
    **kwargs: object,
) -> SampleBuffer:
    return SampleBuffer(
        control=control or InflightCap(batch=batch, alpha=alpha, redundant=redundant),
        tasks=TaskSource([Task(id=f"t{i}", data={}) for i in range(100)], seed=0, shuffle=False),
        group_size=group_size,
        observer=TraceRecorder(),
        **kwargs,  # type: ignore[arg-type]
    )


def put(buffer: SampleBuffer, lease: Lease, rewards: Sequence[float] = (0.0,)) -> None:
    """Finish the lease's trajectories with these rewards."""
    buffer.mark(lease, State.WAITING)
    tokens, mask, logprobs, versions = flatten([])
    for trajectory_id, index, reward in zip(lease.trajectory_ids, lease.indices, rewards, strict=True):
        buffer.put(
            lease,
            Trajectory(
                id=trajectory_id,
                group_id=lease.group_id,
                index=index,
                task_id=lease.task.id,
                v_traj=lease.v_traj,
                tokens=tokens,
                loss_mask=mask,
                logprobs=logprobs,
                versions=versions,
                turns=1,
                reward=reward,
                finish_reason="stop",
            ),
        )


async def leases(buffer: SampleBuffer, n: int) -> list[Lease]:
    return [await asyncio.wait_for(buffer.lease(), 1) for _ in range(n)]


async def blocked(buffer: SampleBuffer) -> bool:
    try:
        await asyncio.wait_for(buffer.lease(), 1)
    except TimeoutError:
        return True
    return False


def test_a_groups_episodes_are_handed_out_one_by_one_then_the_next_group() -> None:
    async def main() -> None:
        got = await leases(make(), 4)
        assert [(lease.group_id, lease.indices, lease.task.id) for lease in got] == [
            (0, (0,), "t0"),
            (0, (1,), "t0"),
            (1, (0,), "t1"),
            (1, (1,), "t1"),
        ]

    run(main())


def test_without_replication_a_lease_is_a_whole_group() -> None:
    async def main() -> None:
        buffer = make(replicate=False, group_size=3)
        first, second = await leases(buffer, 2)
        assert [first.indices, second.indices] == [(0, 1, 2), (0, 1, 2)]
        put(buffer, first, (0.0, 1.0, 0.0))
        put(buffer, second, (1.0, 1.0, 0.0))
        assert [g.rewards for g in (await buffer.get_batch(0)).groups] == [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]

    run(main())


def test_admission_waits_for_the_version_with_alpha_zero() -> None:
    async def main() -> None:
        buffer = make()
        for lease in await leases(buffer, 4):
            put(buffer, lease)
        assert await blocked(buffer)
        await buffer.get_batch(0)
        assert await blocked(buffer)
        buffer.set_version(1)
        assert (await leases(buffer, 1))[0].v_traj == 1

    run(main())


def test_get_batch_wakes_at_the_last_occupy() -> None:
    async def main() -> None:
        buffer = make()
        got = await leases(buffer, 4)
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(buffer.get_batch(0))
            for lease in got[:3]:
                put(buffer, lease)
                await asyncio.sleep(0)
                assert not batch.done()
            put(buffer, got[3])
        assert [g.id for g in batch.result().groups] == [0, 1]
        assert batch.result().staleness == [0, 0]

    run(main())


def test_zero_variance_groups_are_filtered_and_exactly_refilled() -> None:
    async def main() -> None:
        buffer = make(filter_zero_variance=True)
        a, b, c, d = await leases(buffer, 4)
        assert await blocked(buffer)
        put(buffer, a, (1.0,))
        put(buffer, b, (1.0,))
        refill = await leases(buffer, 2)
        assert [lease.group_id for lease in refill] == [2, 2]
        assert await blocked(buffer)
        for lease, reward in ((c, 1.0), (d, 0.0), (refill[0], 0.0), (refill[1], 1.0)):
            put(buffer, lease, (reward,))
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [1, 2]
        assert buffer.ledger.counts()["filtered"] == 2

    run(main())


def test_a_failed_episode_is_retried_in_its_place_then_its_group_is_given_up() -> None:
    async def main() -> None:
        buffer = make(batch=1, retries=1)
        a, b = await leases(buffer, 2)
        buffer.fail(a, "crash")
        [again] = await leases(buffer, 1)
        assert (again.group_id, again.indices, again.task.id) == (0, (0,), "t0")
        assert again.trajectory_ids != a.trajectory_ids
        interrupted: list[str] = []
        b.on_revoke = lambda: interrupted.append(b.revoked)
        buffer.fail(again, "crash")
        assert interrupted == ["group failed"]
        c, d = await leases(buffer, 2)
        assert c.group_id == 1, "another task takes the place"
        put(buffer, c)
        put(buffer, d)
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [1]
        buffer.ledger.check_balanced()
        assert buffer.ledger.reasons() == {"failed": {"crash": 2}, "aborted": {"group failed": 1}}

    run(main())


def test_surplus_groups_are_interrupted_when_the_batch_is_complete() -> None:
    async def main() -> None:
        buffer = make(batch=1, redundant=1)
        a, b, c, d = await leases(buffer, 4)
        put(buffer, a)
        put(buffer, c)
        stopped: list[str] = []
        d.on_revoke = lambda: stopped.append(d.revoked)
        put(buffer, b)
        batch = await buffer.get_batch(0)
        assert [g.id for g in batch.groups] == [0]
        assert stopped == ["batch complete"]
        assert buffer.ledger.counts()["surplus"] == 2
        buffer.ledger.check_balanced()

    run(main())


def test_close_ends_everything_that_lives_and_admits_no_more() -> None:
    async def main() -> None:
        buffer = make(alpha=1)
        got = await leases(buffer, 5)
        put(buffer, got[0])
        put(buffer, got[1])
        buffer.close("over")
        buffer.ledger.check_balanced()
        assert buffer.ledger.reasons() == {"aborted": {"over": 6}}
        assert all(lease.revoked for lease in got[2:])
        assert await blocked(buffer)

    run(main())


def test_putting_twice_or_into_another_group_is_refused() -> None:
    async def main() -> None:
        buffer = make()
        a, _b, c, _d = await leases(buffer, 4)
        put(buffer, a)
        with pytest.raises(StalenessViolation, match="put twice"):
            put(buffer, a)
        mixed = Lease(c.group_id, c.task, c.v_traj, a.trajectory_ids, c.indices)
        with pytest.raises(StalenessViolation, match="does not belong"):
            put(buffer, mixed)

    run(main())


def test_versions_never_go_back() -> None:
    async def main() -> None:
        buffer = make()
        buffer.set_version(0)
        with pytest.raises(StalenessViolation, match="back from 0 to -1"):
            buffer.set_version(-1)

    run(main())


# --- queues that evict


def ended(buffer: SampleBuffer) -> list[tuple[int, str]]:
    """What the observer heard: trajectory and final state, in order."""
    assert isinstance(buffer._observer, TraceRecorder)
    return [(e[1], e[2]) for e in buffer._observer.events if e[0] == "trajectory"]


def test_a_group_that_finds_the_queue_full_drops_the_oldest_whose_trajectories_are_surplus_once() -> None:
    async def main() -> None:
        buffer = make(group_size=1, control=QueueDrop(batch=2, capacity=3))
        for lease in reversed(await leases(buffer, 5)):
            put(buffer, lease)
        assert ended(buffer) == [(4, "surplus"), (3, "surplus")]
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [2, 1]
        buffer.close("over")
        buffer.ledger.check_balanced()
        assert buffer.ledger.reasons() == {"surplus": {"queue full": 2}, "aborted": {"over": 1}}
        assert sorted(i for i, _ in ended(buffer)) == [0, 1, 2, 3, 4]

    run(main())


def test_a_group_that_ends_too_stale_is_surplus_and_the_trainer_goes_on_waiting() -> None:
    async def main() -> None:
        buffer = make(group_size=2, control=QueueMax(batch=1, bound=0))
        a, b, c, d = await leases(buffer, 4)
        put(buffer, a)
        put(buffer, b)
        assert (await buffer.get_batch(0)).staleness == [0]
        assert await blocked(buffer), "the servers still hold version 0, and nothing of it can be trained"
        buffer.set_version(1)
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(buffer.get_batch(1))
            await asyncio.sleep(1)
            put(buffer, c)
            put(buffer, d)
            await asyncio.sleep(1)
            assert not batch.done()
            for lease in await leases(buffer, 2):
                put(buffer, lease)
        assert [g.id for g in batch.result().groups] == [2]
        assert batch.result().staleness == [0]
        assert buffer.ledger.reasons() == {"surplus": {"too stale": 2}}
        buffer.ledger.check_balanced()

    run(main())


def test_a_waiting_trainer_has_its_batch_before_the_next_group_of_the_same_tick_can_drop_it() -> None:
    async def main() -> None:
        buffer = make(group_size=1, control=QueueDrop(batch=2, capacity=2))
        got = await leases(buffer, 4)
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(buffer.get_batch(0))
            await asyncio.sleep(1)
            for lease in got:
                put(buffer, lease)
        assert [g.id for g in batch.result().groups] == [0, 1]
        assert [g.id for g in (await buffer.get_batch(1)).groups] == [2, 3]
        assert buffer.ledger.reasons() == {}

    run(main())


def test_a_batch_that_was_made_for_a_cancelled_train_loop_is_there_for_the_next_call() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=1)
        [lease] = await leases(buffer, 1)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(buffer.get_batch(0))
            await asyncio.sleep(1)
            put(buffer, lease)
            first.cancel()
        assert first.cancelled()
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [0]

    run(main())


@pytest.mark.parametrize("control", [QueueDrop(batch=2, capacity=2), QueueMax(batch=2, bound=1)])
def test_with_a_queue_the_slots_stay_busy_until_the_last_batch_is_taken(control: StalenessControl) -> None:
    async def main() -> None:
        buffer = make(group_size=1, control=control, total_groups=2)
        got = await leases(buffer, 6)
        put(buffer, got[0])
        got += await leases(buffer, 1)
        put(buffer, got[6])
        assert len((await buffer.get_batch(0)).groups) == 2
        buffer.set_version(1)
        assert await blocked(buffer), "no step is left to train what would begin now"

    run(main())


# --- batch rollout


def test_a_wave_is_what_the_batch_misses_and_the_next_begins_when_all_of_it_ended() -> None:
    async def main() -> None:
        buffer = make(batch=3, group_size=2, alpha=5, queue_scheduling=False, filter_zero_variance=True)
        wave = await leases(buffer, 6)
        assert await blocked(buffer), "alpha would admit more"
        for lease, reward in zip(wave[:5], (1.0, 1.0, 0.0, 1.0, 1.0), strict=True):
            put(buffer, lease, (reward,))
        assert await blocked(buffer)
        assert buffer.snapshot().staleness.occupied == 0, "nothing counts before the whole wave has ended"
        assert buffer.snapshot().filtered == 0
        put(buffer, wave[5], (0.0,))
        assert buffer.snapshot().staleness.occupied == 2
        assert buffer.snapshot().filtered == 1
        second = await leases(buffer, 2)
        assert [lease.group_id for lease in second] == [3, 3]
        assert await blocked(buffer), "one group was missing"
        put(buffer, second[0], (0.0,))
        put(buffer, second[1], (1.0,))
        third = await leases(buffer, 6)
        assert {lease.group_id for lease in third} == {4, 5, 6}
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [1, 2, 3]

    run(main())


def test_a_batch_waits_for_the_redundant_groups_of_its_wave_which_then_are_surplus() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=1, redundant=2, queue_scheduling=False, total_groups=9)
        a, b, c = await leases(buffer, 3)
        assert await blocked(buffer)
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(buffer.get_batch(0))
            put(buffer, b)
            put(buffer, c)
            await asyncio.sleep(1)
            assert not batch.done()
            put(buffer, a)
        assert [g.id for g in batch.result().groups] == [1]
        assert buffer.ledger.reasons() == {"surplus": {"batch complete": 2}}
        buffer.set_version(1)
        assert [lease.group_id for lease in await leases(buffer, 3)] == [3, 4, 5]

    run(main())


def test_a_wave_ends_without_its_failed_groups_and_the_next_replaces_them() -> None:
    async def main() -> None:
        buffer = make(batch=2, group_size=1, queue_scheduling=False, retries=1)
        a, b = await leases(buffer, 2)
        put(buffer, a)
        buffer.fail(b, "crash")
        [again] = await leases(buffer, 1)
        assert again.group_id == 1
        assert await blocked(buffer)
        buffer.fail(again, "crash")
        [c] = await leases(buffer, 1)
        assert await blocked(buffer)
        put(buffer, c)
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [0, 2]

    run(main())


# --- everything at once


async def train(
    buffer: SampleBuffer, rng: random.Random, *, slots: int, steps: int, crash: float, train_s: float, at_once: int
) -> list[Batch]:
    """Slots that play for a drawn time (often the same, so that many end in one tick) beside a train loop. ``at_once``
    is the most groups that may be unfinished."""

    async def slot() -> None:
        while True:
            lease = await buffer.lease()
            assert buffer.snapshot().staleness.reserved <= at_once
            await asyncio.sleep(rng.choice([1, 1, 1, 3, 20]))
            if not lease.revoked:
                if rng.random() < crash:
                    buffer.fail(lease, "crash")
                else:
                    put(buffer, lease, [rng.choice([0.0, 1.0]) for _ in lease.indices])
            counts = buffer.snapshot().staleness
            assert counts.occupied <= counts.capacity

    batches = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(slot()) for _ in range(slots)]
            for step in range(steps):
                batches.append(await asyncio.wait_for(buffer.get_batch(step), 5000))
                await asyncio.sleep(train_s)
                buffer.set_version(step + 1)
            for task in tasks:
                task.cancel()
    finally:
        buffer.close("over")
        buffer.ledger.check_balanced()
    return batches


def drawn(seed: int) -> tuple[SampleBuffer, dict[str, float]]:
    """A buffer with drawn settings, and what ``train`` needs."""
    rng = random.Random(seed)
    batch, group_size, slots, steps = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 12), 6
    redundant, queue_scheduling = rng.choice([0, 0, 2]), rng.random() < 0.6
    control = make_control(
        rng.choice(["inflight_cap", "queue_drop", "queue_max"]),
        batch=batch,
        bound=rng.choice([0, 0.5, 1, 2, 3]),
        queue=rng.choice([1, 1.5, 3]),
        redundant=redundant,
    )
    buffer = make(
        group_size=group_size,
        control=control,
        replicate=rng.random() < 0.7,
        queue_scheduling=queue_scheduling,
        filter_zero_variance=group_size > 1 and rng.random() < 0.4,
        retries=rng.randint(0, 2),
        total_groups=steps * batch,
    )
    # A slot holds each unfinished group but the one being handed out; a wave holds its own until all have ended.
    at_once = slots + 1 if queue_scheduling else slots + 1 + batch + redundant
    train_s = rng.choice([0, 1, 10])
    return buffer, {
        "slots": slots,
        "steps": steps,
        "crash": rng.choice([0, 0.2]),
        "train_s": train_s,
        "at_once": at_once,
    }


@pytest.mark.parametrize("seed", range(200))
def test_every_run_ends_within_its_bound_with_every_trajectory_reported_once(seed: int) -> None:
    buffer, settings = drawn(seed)
    batches = run(train(buffer, random.Random(seed), **settings))  # type: ignore[arg-type]
    limit = buffer._control.limit
    assert [b.step for b in batches] == list(range(6))
    assert limit is None or all(0 <= s <= limit for b in batches for s in b.staleness)
    assert len({len(b.groups) for b in batches}) == 1
    counts, heard = buffer.ledger.counts(), ended(buffer)
    assert len(heard) == len({i for i, _ in heard}), "a trajectory was reported twice"
    assert sum(state == "consumed" for _, state in heard) == counts["consumed"]
    assert sorted(i for i, state in heard if state == "consumed") == sorted(
        t.id for b in batches for t in b.trajectories
    )
    assert not buffer._ready and not buffer._open and not buffer._ended


@pytest.mark.parametrize("seed", [1, 5, 9, 13])
def test_cancelling_the_run_at_any_turn_leaves_the_books_right(seed: int) -> None:
    turn = 1
    while True:
        buffer, settings = drawn(seed)
        if not cancelled_at(turn, train(buffer, random.Random(seed), **settings)):  # type: ignore[arg-type]
            break
        turn += 1
    assert turn > 20


def test_cancelling_a_waiter_at_any_await_loses_no_episode() -> None:
    turn = 1
    while True:
        taken: list[Lease] = []

        async def main(taken: list[Lease] = taken) -> None:
            buffer = make(batch=1, group_size=3)

            async def waiter() -> None:
                taken.append(await buffer.lease())

            async def victim() -> None:
                lease = await buffer.lease()
                await asyncio.sleep(0)
                taken.append(lease)

            async with asyncio.TaskGroup() as group:
                aim(group.create_task(victim()))
                await asyncio.sleep(0)
                others = [group.create_task(waiter()) for _ in range(3)]
                await asyncio.sleep(1)
                for task in others:
                    task.cancel()
            # Whatever the victim did not report, the others got: three episodes, each handed out once.
            ids = [i for lease in taken for i in lease.trajectory_ids]
            assert len(ids) == len(set(ids)) >= 2

        if not cancelled_at(turn, main()):
            break
        turn += 1
    assert turn > 3
