"""SampleBuffer: admission, groups, filtering, retries, surplus, and leases under cancellation."""

from __future__ import annotations

import asyncio
import random

import pytest

from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.runtime.lease import Lease
from asyncrl.sim.loop import run

from .buffers import blocked, ended, leases, make, put, woken
from .world import aim, cancelled_at


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


def test_retries_wait_longer_and_longer_and_the_slot_plays_something_else() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        buffer = make(batch=2, group_size=1, retries=3, backoff_s=10, rng=random.Random(1))
        waits: list[float] = []
        [lost] = await leases(buffer, 1)
        for _ in range(3):
            buffer.fail(lost, "down", infra=True)
            failed_at = loop.time()
            if not waits:
                assert (await leases(buffer, 1))[0].group_id == 1
            lost = await buffer.lease()
            assert lost.group_id == 0
            waits.append(loop.time() - failed_at)
        assert all(0.5 <= w / (10 * 2**k) <= 1.5 for k, w in enumerate(waits)), waits
        assert (buffer.snapshot().failed_task, buffer.snapshot().failed_infra) == (0, 3)

    run(main())


def test_a_retry_that_waits_is_dropped_with_its_group() -> None:
    async def main() -> None:
        buffer = make(batch=1, retries=1, backoff_s=10)
        a, b = await leases(buffer, 2)
        buffer.fail(a, "down")
        buffer.close("run ended")
        await asyncio.sleep(100)
        assert buffer.snapshot().unclaimed == 0
        buffer.ledger.check_balanced()
        assert b.revoked

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


def test_a_waiting_slot_gets_the_place_of_a_filtered_group_and_that_of_a_surplus_one() -> None:
    async def main() -> None:
        buffer = make(batch=1, alpha=1, redundant=1, filter_zero_variance=True)
        got = await leases(buffer, 6)
        async with asyncio.TaskGroup() as group:
            waiter = group.create_task(buffer.lease())
            await asyncio.sleep(1)
            put(buffer, got[4], (1.0,))
            put(buffer, got[5], (1.0,))
            assert await woken(waiter) == 3
            for lease, reward in zip(got[:4], (0.0, 1.0, 0.0, 1.0), strict=True):
                put(buffer, lease, (reward,))
            assert [g.id for g in (await buffer.get_batch(0)).groups] == [0]
            buffer.set_version(1)
            await leases(buffer, 3)  # the rest of group 3, and group 4
            waiter = group.create_task(buffer.lease())
            await asyncio.sleep(1)
            assert not waiter.done()
            assert [g.id for g in (await buffer.get_batch(1)).groups] == [1]
            assert buffer.ledger.reasons()["surplus"] == {"batch complete": 2}, "group 3 was due"
            assert await woken(waiter) == 5

    run(main())


def test_a_group_that_fails_frees_the_batch_that_waited_for_it() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=1, alpha=1)
        slow, fast = await leases(buffer, 2)
        put(buffer, fast)
        await buffer.get_batch(0)
        buffer.set_version(1)
        [young] = await leases(buffer, 1)
        put(buffer, young)
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(buffer.get_batch(1))
            await asyncio.sleep(1)
            assert not batch.done(), "the slow one is due"
            buffer.fail(slow, "crash")
        assert [g.id for g in batch.result().groups] == [young.group_id]

    run(main())


def test_the_first_group_size_members_that_end_complete_a_group_and_the_rest_is_interrupted() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=2, group_size_redundancy=2)
        a, b, c = await leases(buffer, 3)
        stopped: list[str] = []
        b.on_revoke = lambda: stopped.append(b.revoked)
        put(buffer, c, (1.0,))
        assert not stopped
        put(buffer, a, (0.5,))
        assert stopped == ["group complete"], "at once, not when the batch is taken"
        assert await blocked(buffer), "the member that nobody had begun is handed out no more"
        [group] = (await buffer.get_batch(0)).groups
        assert [(t.index, t.reward) for t in group.trajectories] == [(0, 0.5), (2, 1.0)]
        buffer.ledger.check_balanced()
        assert buffer.ledger.reasons() == {"surplus": {"group complete": 2}}
        assert ended(buffer) == [(0, "consumed"), (2, "consumed")]

    run(main())


def test_a_waiting_slot_goes_past_the_revoked_members_to_the_next_group() -> None:
    async def main() -> None:
        buffer = make(batch=2, group_size=1, group_size_redundancy=2)
        [first] = await leases(buffer, 1)
        put(buffer, first)
        assert [(lease.group_id, lease.indices) for lease in await leases(buffer, 3)] == [
            (1, (0,)),
            (1, (1,)),
            (1, (2,)),
        ]

    run(main())


def test_a_failed_member_starts_anew_only_where_its_group_would_be_too_small() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=2, group_size_redundancy=1, retries=1)
        a, b, c = await leases(buffer, 3)
        buffer.fail(a, "crash")
        assert buffer.snapshot().retried == 0
        assert await blocked(buffer)
        put(buffer, b)
        buffer.fail(c, "crash")
        [again] = await leases(buffer, 1)
        assert (again.group_id, again.indices) == (0, (0,)), "the one that started anew least often, the first of them"
        buffer.fail(again, "crash")
        [again] = await leases(buffer, 1)
        assert again.indices == (2,)
        put(buffer, again)
        assert [t.index for t in (await buffer.get_batch(0)).trajectories] == [1, 2]
        buffer.ledger.check_balanced()
        assert buffer.ledger.reasons() == {"failed": {"crash": 3}}
        assert (buffer.snapshot().failed_task, buffer.snapshot().retried) == (3, 2)

    run(main())


def test_a_group_with_redundancy_is_given_up_when_the_retries_of_all_lost_members_are_used() -> None:
    async def main() -> None:
        buffer = make(batch=1, group_size=2, group_size_redundancy=1, retries=1)
        a, b, c = await leases(buffer, 3)
        put(buffer, b)
        buffer.fail(a, "crash")
        for lost in (c, *[None] * 2):
            buffer.fail(lost or (await leases(buffer, 1))[0], "crash")
        assert [lease.group_id for lease in await leases(buffer, 3)] == [1, 1, 1]
        assert buffer.ledger.reasons() == {"failed": {"crash": 4}, "aborted": {"group failed": 1}}
        assert ended(buffer) == [(1, "aborted")]

    run(main())


def test_nothing_is_begun_that_no_step_could_train() -> None:
    async def main() -> None:
        buffer = make(batch=2, group_size=1, alpha=1, total_groups=3)
        await leases(buffer, 3)
        assert await blocked(buffer)

    run(main())


def test_the_last_batch_has_its_redundant_groups_too_and_after_it_nothing_is_begun() -> None:
    async def main() -> None:
        buffer = make(batch=2, group_size=1, redundant=1, total_groups=4)
        for step in range(2):
            got = await leases(buffer, 3)
            assert await blocked(buffer)
            for lease in got[:2]:
                put(buffer, lease)
            await buffer.get_batch(step)
            assert got[2].revoked == "batch complete"
            buffer.set_version(step + 1)
        assert await blocked(buffer)

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
        mixed = Lease(c.start, c.task, a.trajectory_ids, c.indices)
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
