"""Groups that are certain of their batch are trained before it is complete; the batches and the books stay right."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.ledger import State
from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.core.staleness.queue import QueueDrop
from asyncrl.ports import StepMetrics, TrainerError
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.sim.loop import run
from asyncrl.sim.trace import TraceRecorder
from asyncrl.sim.trainer import SimTrainer

from .buffers import leases, make, put
from .world import cancelled_at, check_laws, play, recipe, started

Span = tuple[float, float]


def long_training(stream: bool, bound: float = 0, **tables: Any) -> Recipe:
    """Training takes about as long as the rollout, whose lengths have a long tail."""
    return recipe(
        staleness={"bound": bound},
        trainer={"stream": stream, "micro_batch_tokens": 1, "restarts": 0},
        rollout={"batch_groups": 6, "num_envs": 12},
        run={"steps": 6},
        sim={"trainer": {"fixed_s": 0.1, "tokens_per_s": 600, "gpus": 1}},
        **tables,
    )


def train_spans(simulation: Simulation) -> list[Span]:
    return [(e[3], e[4]) for e in simulation.trace.events if e[:3] == ("span", "trainer", "train")]


def steps_ended(simulation: Simulation) -> list[float]:
    return [e[1] for e in simulation.trace.events if e[0] == "step"]


@pytest.mark.parametrize("bound", [0, 1])
def test_training_overlaps_the_tail_of_its_own_batch(bound: float) -> None:
    whole = play(long_training(False, bound))
    streamed = play(settings := long_training(True, bound))
    check_laws(settings, streamed)
    spans = train_spans(streamed)
    assert len(spans) > 12, "most batches came in parts"
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert steps_ended(streamed)[-1] < (0.9 if bound == 0 else 0.95) * steps_ended(whole)[-1]
    requests = [(e[3], e[4]) for e in streamed.trace.events if e[0] == "span" and e[2] == "generate"]
    if bound == 0:  # the batch that is trained is the only one that there is
        assert any(start < b and a < end for a, b in spans for start, end in requests)


def test_without_the_switch_nothing_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def feed(*_: object) -> bool:
        raise AssertionError("fed")

    monkeypatch.setattr(SimTrainer, "feed", feed)
    assert len(train_spans(play(long_training(False)))) == 6


def test_the_seconds_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[StepMetrics] = []
    monkeypatch.setattr(TraceRecorder, "step", lambda self, metrics: steps.append(metrics))
    simulation = play(long_training(True))
    spans = train_spans(simulation)
    assert sum(end - start for start, end in spans) == pytest.approx(sum(s.train_s for s in steps))
    for step in steps:
        assert step.wait_s >= 0
        assert step.seconds == pytest.approx(step.wait_s + step.train_s + step.update_s)
        assert (step.streamed_s > 0) == (step.trainer.get("streamed_sequences", 0) > 0)
        assert step.streamed_s < step.train_s
    assert sum(s.streamed_s > 0 for s in steps) >= 4


def test_a_trainer_that_dies_in_a_part_ends_the_run_and_its_groups_are_aborted() -> None:
    simulations: list[Simulation] = []

    async def sabotage(simulation: Simulation) -> None:
        fed = simulation.trainer.feed

        async def feed(part: Any, advantages: Any) -> bool:
            if part.step == 1:
                simulation.trainer.crash()
            return await fed(part, advantages)

        simulation.trainer.feed = feed  # type: ignore[method-assign]

    with pytest.raises(ExceptionGroup) as caught:
        run(started(long_training(True), simulations, sabotage), limit=1e6)
    assert caught.group_contains(TrainerError, match="it died at version 1")
    counts = simulations[0].run.buffer.ledger.counts()
    assert counts["consumed"] == 6 * 2, "only what step 0 trained"
    assert counts["aborted"] > 0


def test_cancelling_at_any_turn_of_the_loop_leaves_the_books_right() -> None:
    settings = recipe(
        trainer={"stream": True, "micro_batch_tokens": 1},
        rollout={"batch_groups": 3, "num_envs": 6},
        staleness={"bound": 0},
        run={"steps": 1},
        sim={"trainer": {"fixed_s": 0.1, "tokens_per_s": 200, "gpus": 1}},
    )
    turn = 1
    while cancelled_at(turn, started(settings, [])):
        turn += 1
    assert turn > 150


# --- the buffer -------------------------------------------------------------------------------------------------------


async def open_groups(buffer: SampleBuffer, n: int) -> list[list[Any]]:
    """Leases of ``n`` groups of two."""
    return [await leases(buffer, 2) for _ in range(n)]


def end(buffer: SampleBuffer, group: list[Any]) -> None:
    for lease in group:
        put(buffer, lease)


def test_each_group_is_given_once_as_soon_as_it_is_certain_and_then_the_batch() -> None:
    async def main() -> None:
        buffer = make(batch=3)
        groups = await open_groups(buffer, 3)
        end(buffer, groups[2])
        assert [g.id for g in await buffer.get_part(3)] == [2]
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(buffer.get_part(3))
            await asyncio.sleep(1)
            assert not waiting.done()
            end(buffer, groups[0])
        assert [g.id for g in waiting.result()] == [0]
        assert buffer.ledger.counts()["occupied"] == 4, "they are the buffer's until the batch is complete"
        end(buffer, groups[1])
        assert buffer.ledger.counts()["consumed"] == 6, "taken the moment it is complete, also while a part is trained"
        assert await buffer.get_part(3) == ()
        assert [g.id for g in (await buffer.get_batch(0)).groups] == [2, 0, 1]

    run(main())


def test_a_part_is_only_of_the_head_of_the_batch() -> None:
    async def main() -> None:
        buffer = make(batch=3)
        groups = await open_groups(buffer, 3)
        for first in groups[:2]:
            end(buffer, first)
        assert [g.id for g in await buffer.get_part(1)] == [0]
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(buffer.get_part(1))
            await asyncio.sleep(1)
            assert not waiting.done()
            end(buffer, groups[2])
        assert waiting.result() == ()

    run(main())


def test_a_batch_that_is_there_already_has_no_parts() -> None:
    async def main() -> None:
        buffer = make(batch=2)
        for group in await open_groups(buffer, 2):
            end(buffer, group)
        assert await buffer.get_part(2) == ()

    run(main())


def test_what_was_given_and_never_trained_is_aborted_with_the_run() -> None:
    async def main() -> None:
        buffer = make(batch=2)
        groups = await open_groups(buffer, 2)
        end(buffer, groups[0])
        assert len(await buffer.get_part(2)) == 1
        buffer.close("run stopped")
        buffer.ledger.check_balanced()
        assert buffer.ledger.counts()["aborted"] == 4

    run(main())


class _Forgetful(QueueDrop):
    """Calls certain what it then drops, or leaves behind."""

    def __init__(self, leave: bool) -> None:
        super().__init__(batch=2, capacity=2)
        self._leave = leave

    def occupy(self, group_id: int) -> dict[int, str]:
        if not self._leave and self._occupied:
            super().occupy(group_id)
            first = next(iter(self._occupied))
            del self._occupied[first]
            return {first: "queue full"}
        return super().occupy(group_id)

    def consume(self) -> tuple[list[int], list[int]] | None:
        if (taken := super().consume()) is None:
            return None
        return ([taken[0][1]], []) if self._leave else taken


@pytest.mark.parametrize(
    ("leave", "says"), [(False, "group 0 is being trained, but would leave"), (True, "not in their")]
)
def test_a_group_that_is_being_trained_cannot_leave_its_batch_unseen(leave: bool, says: str) -> None:
    async def main() -> None:
        buffer = make(control=_Forgetful(leave))
        groups = await open_groups(buffer, 2)
        end(buffer, groups[0])
        assert len(await buffer.get_part(2)) == 1
        with pytest.raises(StalenessViolation, match=says):
            end(buffer, groups[1])
        assert buffer.ledger.state(groups[0][0].trajectory_ids[0]) is State.OCCUPIED

    run(main())
