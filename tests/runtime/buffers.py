"""A SampleBuffer without anything around it, and short ways to lease from it and put into it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.core.ledger import State
from asyncrl.core.staleness.base import StalenessControl
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.types import Task, Trajectory, flatten
from asyncrl.runtime.lease import Lease
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.task_source import TaskSource
from asyncrl.sim.trace import TraceRecorder


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
        redundant_groups=redundant,
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


async def woken(waiter: asyncio.Task[Lease]) -> int:
    """The group that a waiting slot was given."""
    async with asyncio.timeout(1):
        return (await waiter).group_id


def ended(buffer: SampleBuffer) -> list[tuple[int, str]]:
    """What the observer heard: trajectory and final state, in order."""
    assert isinstance(buffer._accounts._observer, TraceRecorder)
    return [(e[1], e[2]) for e in buffer._accounts._observer.events if e[0] == "trajectory"]
