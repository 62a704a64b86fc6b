"""SampleBuffer with queues that evict and with batch rollout; then every control and mode at once, over many seeds."""

from __future__ import annotations

import asyncio
import random

import pytest

from asyncrl.core.staleness import make_control
from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.staleness.queue import QueueDrop, QueueMax
from asyncrl.core.types import Batch
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.sim.loop import run

from .buffers import blocked, ended, leases, make, put, woken
from .world import cancelled_at

# --- queues that evict


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


def test_a_wave_larger_than_the_slots_ends_with_its_last_group() -> None:
    async def main() -> None:
        buffer = make(batch=2, group_size=1, alpha=1, queue_scheduling=False)
        for counting in (0, 2, 2, 4):  # a single slot, and alpha has room for two waves
            put(buffer, (await leases(buffer, 1))[0])
            assert buffer.snapshot().staleness.occupied == counting
        assert await blocked(buffer)

    run(main())


def test_a_waiting_slot_gets_the_first_group_of_the_next_wave() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=1, alpha=1, queue_scheduling=False)
        [lease] = await leases(buffer, 1)
        async with asyncio.TaskGroup() as group:
            waiter = group.create_task(buffer.lease())
            await asyncio.sleep(1)
            assert not waiter.done()
            put(buffer, lease)
            assert await woken(waiter) == 1

    run(main())


def test_a_wave_whose_last_running_group_becomes_surplus_has_ended() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=1, alpha=1, redundant=1, queue_scheduling=False)
        for lease in await leases(buffer, 2):
            put(buffer, lease)
        [slow] = await leases(buffer, 1)
        assert await blocked(buffer), "alpha has no room for the second group of the wave"
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [0]
        buffer.set_version(1)
        [fast] = await leases(buffer, 1)
        put(buffer, fast)
        assert [g.id for g in (await buffer.get_batch(1)).groups] == [1]
        assert slow.revoked == "batch complete"
        assert [g.id for g in (await buffer.get_batch(2)).groups] == [fast.group_id]

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


def test_in_a_wave_a_group_ends_with_its_first_members_and_the_run_may_end_before_the_wave() -> None:
    async def main() -> None:
        buffer = make(batch=2, group_size=1, group_size_redundancy=1, queue_scheduling=False)
        a, b, c, d = await leases(buffer, 4)
        put(buffer, b)
        assert a.revoked == "group complete"
        assert buffer.snapshot().staleness.occupied == 0, "the wave goes on"
        buffer.close("over")
        assert c.revoked == d.revoked == "over"
        buffer.ledger.check_balanced()
        assert buffer.ledger.reasons() == {"surplus": {"group complete": 1}, "aborted": {"over": 3}}

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
    replicate = rng.random() < 0.7
    control = make_control(
        rng.choice(["inflight_cap", "queue_drop", "queue_max"]),
        batch=batch,
        bound=rng.choice([0, 0.5, 1, 2, 3]),
        queue=rng.choice([1, 1.5, 3]),
        redundant=redundant,
    )
    buffer = make(
        group_size=group_size,
        group_size_redundancy=rng.choice([0, 1, 3]) if replicate else 0,
        control=control,
        redundant=redundant,
        replicate=replicate,
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
    assert {len(g.trajectories) for b in batches for g in b.groups} == {buffer._group_size}
    counts, heard = buffer.ledger.counts(), ended(buffer)
    assert len(heard) == len({i for i, _ in heard}), "a trajectory was reported twice"
    assert sum(state == "consumed" for _, state in heard) == counts["consumed"]
    assert sorted(i for i, state in heard if state == "consumed") == sorted(
        t.id for b in batches for t in b.trajectories
    )
    assert not buffer._experience.fresh and not buffer._open and not buffer._ended


@pytest.mark.parametrize("seed", [1, 5, 9, 13])
def test_cancelling_the_run_at_any_turn_leaves_the_books_right(seed: int) -> None:
    turn = 1
    while True:
        buffer, settings = drawn(seed)
        if not cancelled_at(turn, train(buffer, random.Random(seed), **settings)):  # type: ignore[arg-type]
            break
        turn += 1
    assert turn > 20
