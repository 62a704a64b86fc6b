"""Groups that get their V_traj only when the first of their requests is routed (StaleFlow §4.1, §5.1)."""

from __future__ import annotations

import pytest

from asyncrl.core.ledger import State
from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.sim.loop import run

from .buffers import blocked, ended, leases, make, put


def control(batch: int = 2, bound: int = 1, redundant: int = 0) -> StalenessBuffers:
    return StalenessBuffers(batch=batch, bound=bound, redundant=redundant)


def test_groups_open_without_a_version_up_to_the_capacity() -> None:
    async def main() -> None:
        buffer = make(control=control(batch=2, bound=1))
        got = await leases(buffer, 8)  # (η + 1) · 2 groups of 2
        assert {lease.start.v_traj for lease in got} == {None}
        assert await blocked(buffer)
        snapshot = buffer.snapshot()
        assert (snapshot.initial, snapshot.staleness.reserved) == (4, 0)

    run(main())


def test_the_first_routed_member_gives_the_group_its_version() -> None:
    async def main() -> None:
        buffer = make(control=control())
        a, b, c, d = await leases(buffer, 4)
        assert buffer.assign(a.group_id, 0)
        assert (a.v_traj, b.v_traj, c.start.v_traj) == (0, 0, None)
        with pytest.raises(StalenessViolation):  # it has one
            buffer.assign(a.group_id, 0)
        with pytest.raises(AssertionError):
            _ = d.v_traj
        assert not buffer.assign(77, 0)  # a group that has left

    run(main())


def test_the_control_refuses_versions_whose_buffers_are_full() -> None:
    async def main() -> None:
        buffer = make(control=control(batch=2, bound=0, redundant=1))  # three entries, all for step 0
        got = await leases(buffer, 6)
        groups = sorted({lease.group_id for lease in got})
        assert [buffer.assign(g, 0) for g in groups] == [True] * 3
        assert buffer.room(0) == 0

    run(main())


def test_what_leaves_before_it_has_a_version_was_never_reserved() -> None:
    async def main() -> None:
        buffer = make(control=control())
        a, _, c, d = await leases(buffer, 4)
        buffer.fail(a, "reset failed")
        assert buffer.snapshot().initial == 1  # the group of c and d
        assert buffer.assign(c.group_id, 0)
        for lease in (c, d):
            put(buffer, lease)
        buffer.close("over")
        buffer.ledger.check_balanced()
        assert buffer.snapshot().staleness.reserved == buffer.snapshot().staleness.occupied == 0
        counts = buffer.ledger.counts()
        assert (counts["failed"], counts["aborted"]) == (1, 3)

    run(main())


def test_a_retry_keeps_the_version_of_its_group() -> None:
    async def main() -> None:
        buffer = make(control=control(), retries=1, backoff_s=0.1)
        a, b = await leases(buffer, 2)
        assert buffer.assign(a.group_id, 0)
        buffer.fail(b, "step failed")
        rest = await leases(buffer, 6)
        [again] = [lease for lease in rest if lease.group_id == a.group_id] or await leases(buffer, 1)
        assert again.v_traj == 0 and again.trajectory_ids != b.trajectory_ids

    run(main())


def test_batches_are_taken_and_surplus_is_dropped_whether_it_has_a_version_or_not() -> None:
    async def main() -> None:
        buffer = make(control=control(batch=1, bound=0, redundant=1), group_size=1)
        a, b = await leases(buffer, 2)
        assert buffer.assign(a.group_id, 0) and buffer.assign(b.group_id, 0)
        put(buffer, a)
        batch = await buffer.get_batch(0)
        assert [g.id for g in batch.groups] == [a.group_id] and batch.staleness == [0]
        assert b.revoked == "batch complete"
        [c] = await leases(buffer, 1)
        assert c.start.v_traj is None and not buffer.assign(c.group_id, 0)  # due at step 0, which is over
        assert buffer.assign(c.group_id, 1)
        assert ended(buffer) == [(0, str(State.CONSUMED))]

    run(main())
