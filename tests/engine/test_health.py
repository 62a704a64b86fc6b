"""HealthMonitor: tells each change once, and only after enough failures in a row."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from asyncrl.engine.health import HealthMonitor
from asyncrl.ports import Engine


class Probed:
    """Answers the probes in ``answers``, then hangs."""

    def __init__(self, name: str, answers: str) -> None:
        self.name = name
        self.answers = list(answers)
        self.done = asyncio.Event()

    async def health(self) -> bool:
        if not self.answers:
            self.done.set()
            await asyncio.Event().wait()
        return self.answers.pop(0) == "+"


async def watch(failures: int, *engines: Probed) -> tuple[list[tuple[str, bool]], HealthMonitor]:
    """What a monitor reported of these engines, as (name, up)."""
    changes: list[tuple[str, bool]] = []
    probed = cast("list[Engine]", list(engines))
    monitor = HealthMonitor(probed, 0.0, failures, lambda engine, up: changes.append((engine.name, up)))
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        for engine in engines:
            await engine.done.wait()
        task.cancel()
    return changes, monitor


@pytest.mark.parametrize(
    ("probes", "failures", "reported"),
    [
        ("+++", 2, []),
        ("-+-+-", 2, []),
        ("--", 2, [False]),
        ("-----", 2, [False]),
        ("--+", 2, [False, True]),
        ("--+-+--++", 2, [False, True, False, True]),
        ("-+", 1, [False, True]),
    ],
)
async def test_each_change_is_reported_once(probes: str, failures: int, reported: list[bool]) -> None:
    changes, _ = await watch(failures, Probed("a", probes))
    assert changes == [("a", up) for up in reported]


async def test_a_server_that_hangs_does_not_keep_the_others_from_being_probed() -> None:
    changes, monitor = await watch(3, Probed("hung", ""), Probed("dead", "-----"), Probed("well", "+++"))
    assert changes == [("dead", False)]
    assert monitor.snapshot() == {"hung": True, "dead": False, "well": True}
    assert repr(monitor) == "<HealthMonitor 2 of 3 servers up>"


async def test_a_failing_callback_ends_the_monitor() -> None:
    def fail(engine: Engine, up: bool) -> None:
        raise LookupError(engine.name)

    monitor = HealthMonitor([cast(Engine, Probed("a", "-"))], 0.0, 1, fail)
    with pytest.raises(ExceptionGroup) as failure:
        await monitor.run()
    assert failure.group_contains(LookupError, match="a")


def test_no_failure_at_all_cannot_mean_down() -> None:
    with pytest.raises(ValueError, match="failures"):
        HealthMonitor([], 1.0, 0, lambda engine, up: None)
