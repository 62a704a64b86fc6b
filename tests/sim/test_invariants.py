"""Each law of a run on its own: what is passed on, what is refused, and in which words."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncrl.core.ledger import Ledger, State
from asyncrl.core.snapshot import FleetSnapshot, InstanceSnapshot
from asyncrl.core.staleness.base import StalenessSnapshot
from asyncrl.core.types import Batch, Group, Task, Trajectory, Turn, flatten
from asyncrl.ports import StepMetrics
from asyncrl.sim.engine import GENERATED
from asyncrl.sim.invariants import Books, Checked, InvariantViolation, Stalled
from asyncrl.sim.loop import run
from asyncrl.sim.trace import TraceRecorder


def turn(length: int, versions: Sequence[int], left: int = 0, prompt: int = 3) -> Turn:
    """A response of ``length`` tokens that count down to ``left`` before its end."""
    return Turn(
        prompt_ids=array("i", [46] * prompt),
        output_ids=array("i", range(GENERATED + left + length - 1, GENERATED + left - 1, -1)),
        logprobs=array("f", [0.0] * length),
        versions=array("i", versions),
        finish_reason="stop" if left == 0 else "length",
    )


def trajectory(number: int, turns: Sequence[Turn], v_traj: int = 0) -> Trajectory:
    tokens, mask, logprobs, versions = flatten(turns)
    ends, end = [], 0
    for t in turns:
        end += len(t.prompt_ids) + len(t.output_ids)
        ends.append(end)
    return Trajectory(
        id=number,
        group_id=number,
        index=0,
        task_id="task 0",
        v_traj=v_traj,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        turns=len(turns),
        reward=0.0,
        finish_reason="stop",
        turn_ends=tuple(ends),
        turn_rewards=(0.0,) * len(turns),
    )


def metrics(step: int, v_traj: int, version: int | None = None) -> StepMetrics:
    one = trajectory(step, [turn(4, [v_traj if version is None else version] * 4)], v_traj)
    group = Group(id=step, task=Task(id="task 0", data={}), v_traj=v_traj, trajectories=(one,))
    return StepMetrics(
        batch=Batch(step=step, groups=(group,)), at=0.0, seconds=0.0, wait_s=0.0, train_s=0.0, update_s=0.0, tokens=0
    )


def heard(*events: Callable[[Checked], None], limit: int | None = 1) -> list[tuple[Any, ...]]:
    """What gets through to the inner observer."""
    inner = TraceRecorder()

    async def main() -> None:
        checked = Checked(inner, limit=limit, stall_s=100.0)
        for event in events:
            event(checked)

    run(main())
    return inner.events


def ends(number: int, *turns: Turn, v_traj: int = 0) -> Callable[[Checked], None]:
    return lambda checked: checked.trajectory(trajectory(number, turns, v_traj), "consumed")


def test_everything_is_passed_on() -> None:
    events = heard(
        lambda c: c.step(metrics(0, 0)),
        ends(5, turn(7, [0] * 7)),
        lambda c: c.server("server 0", 0.0, 3, 1),
        lambda c: c.span("trainer", "train", 0.0, 0.0, {"version": 0}),
        lambda c: c.instant("server 0", "down", 0.0),
        lambda c: c.counter("rollout/waiting", 0.0, 4.0),
        lambda c: c.eval(1, 0.5, 16),
    )
    assert [e[0] for e in events] == ["step", "trajectory", "server", "span", "instant", "counter", "eval"]


def test_a_group_beyond_the_bound_is_refused() -> None:
    heard(*(lambda c, step=step: c.step(metrics(step, max(0, step - 1))) for step in range(3)))  # type: ignore[misc]
    with pytest.raises(InvariantViolation, match=r"step 2 trained group 2 of version 0: staleness 2 is outside 0 … 1"):
        heard(*(lambda c, step=step: c.step(metrics(step, 0)) for step in range(3)))  # type: ignore[misc]
    with pytest.raises(InvariantViolation, match="staleness -1"):
        heard(lambda c: c.step(metrics(0, 1)))
    heard(*(lambda c, step=step: c.step(metrics(step, 0)) for step in range(9)), limit=None)  # type: ignore[misc]


def test_steps_follow_one_another_and_train_no_tokens_of_the_future() -> None:
    with pytest.raises(InvariantViolation, match="step 0 was trained where step 1 was due"):
        heard(lambda c: c.step(metrics(0, 0)), lambda c: c.step(metrics(0, 0)))
    with pytest.raises(InvariantViolation, match="step 0 trained tokens of version 1"):
        heard(lambda c: c.step(metrics(0, 0, version=1)))


def test_a_trajectory_ends_once() -> None:
    heard(ends(7, turn(1, [0])), ends(3, turn(1, [0])), ends(1000, turn(1, [0])))
    with pytest.raises(InvariantViolation, match="trajectory 7 ended twice, the second time as consumed"):
        heard(ends(7, turn(1, [0])), ends(8, turn(1, [0])), ends(7, turn(1, [0])))


def test_versions_of_a_trajectory_never_decrease() -> None:
    heard(ends(0, turn(5, [1, 1, 2, 2, 2]), turn(3, [2, 3, 3]), v_traj=1))
    within, between = turn(5, [1, 2, 2, 1, 2]), (turn(2, [1, 2]), turn(2, [1, 2]))
    with pytest.raises(InvariantViolation, match=r"trajectory 0: .* go back: \[1, 2, 1, 2\]"):
        heard(ends(0, within, v_traj=1))
    with pytest.raises(InvariantViolation, match="go back"):
        heard(ends(0, *between, v_traj=1))
    with pytest.raises(InvariantViolation, match="tokens of version 1, older than V_traj 2"):
        heard(ends(0, turn(2, [1, 2]), v_traj=2))


def test_responses_are_whole() -> None:
    def spoilt(change: Callable[[array[int]], array[int]]) -> Turn:
        whole = turn(6, [0] * 6)
        ids = change(whole.output_ids)
        n = len(ids)
        return Turn(
            prompt_ids=whole.prompt_ids,
            output_ids=ids,
            logprobs=array("f", [0.0] * n),
            versions=array("i", [0] * n),
            finish_reason="stop",
        )

    heard(ends(0, turn(6, [0] * 6), turn(4, [0] * 4, left=9), turn(1, [0])))
    for change in (
        lambda ids: ids + ids[-1:],
        lambda ids: ids[:3] + ids[2:],
        lambda ids: ids[:2] + ids[3:],
        lambda ids: ids[:3] + turn(5, [0] * 5).output_ids,
        lambda ids: array("i", [46, 46]),
    ):
        with pytest.raises(InvariantViolation, match=r"trajectory 0: the response of turn 1 has .* lost or repeated"):
            heard(ends(0, turn(2, [0, 0]), spoilt(change)))
    with pytest.raises(InvariantViolation, match="turn 0 has no response"):
        heard(ends(0, turn(0, [])))


def test_a_server_goes_back_only_if_it_was_down() -> None:
    def say(version: int, up: bool = True) -> Callable[[Checked], None]:
        return lambda c: c.server("server 0", 0.0, 0, version, up)

    heard(say(0), say(2), say(2, up=False), say(1), say(1))
    heard(say(2), say(2, up=False), say(0, up=False), say(3))
    with pytest.raises(InvariantViolation, match="server 0 went back from version 2 to 1 without being down"):
        heard(say(0), say(2), say(1))
    with pytest.raises(InvariantViolation, match="from version 3 to 2"):
        heard(say(3, up=False), say(3), say(2))


def test_slots_are_given_back_once() -> None:
    with pytest.raises(InvariantViolation, match="server 0 runs -1 requests"):
        heard(lambda c: c.server("server 0", 0.0, -1, 0))


@pytest.mark.parametrize(("start", "end"), [(3.0, 2.0), (0.0, 1.0)])
def test_what_lasts_ends_after_it_began_and_not_in_the_future(start: float, end: float) -> None:
    with pytest.raises(InvariantViolation, match="train on trainer lasts from"):
        heard(lambda c: c.span("trainer", "train", start, end))


# --- the books


class Held:
    """Books that a test may falsify; all right as they are."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.reserved = self.occupied = self.waiting = self.open = self.running = self.tokens = self.redundancy = 0

    def books(self) -> Books:
        return Books(
            ledger=self.ledger,
            group_size=2,
            group_size_redundancy=self.redundancy,
            staleness=lambda: StalenessSnapshot(
                step=0, reserved=self.reserved, occupied=self.occupied, due=0, capacity=9
            ),
            fleet=lambda: FleetSnapshot(
                instances=(
                    InstanceSnapshot(
                        name="server 0",
                        version=0,
                        up=True,
                        running=self.running,
                        tokens=self.tokens,
                        max_running=4,
                        max_tokens=100,
                    ),
                ),
                waiting=self.waiting,
                suspended=False,
            ),
            open_envs=lambda: self.open,
            parts=["<a buffer>", *range(20)],
        )


def after(change: Callable[[Held], None], *, at_a_step: bool) -> None:
    async def main() -> None:
        state = Held()
        change(state)
        checked = Checked(TraceRecorder(), limit=1, stall_s=100.0)
        checked.books = state.books()
        if at_a_step:
            checked.step(metrics(0, 0))
        else:
            checked.check_end()

    run(main())


def reserve(state: Held, trajectories: int, **counts: int) -> None:
    for number in range(trajectories):
        state.ledger.reserve(number)
    for name, value in counts.items():
        setattr(state, name, value)


def test_live_trajectories_are_those_of_the_groups_that_the_buffer_holds() -> None:
    after(lambda s: reserve(s, 6, reserved=2, occupied=1), at_a_step=True)
    after(lambda s: reserve(s, 8, reserved=2, occupied=1, redundancy=1), at_a_step=True)
    for count, held in (
        (6, {"reserved": 2}),
        (5, {"reserved": 3}),
        (9, {"reserved": 2, "occupied": 1, "redundancy": 1}),
    ):
        with pytest.raises(InvariantViolation, match=f"{count} trajectories are live, but the buffer holds"):
            after(lambda s, c=count, h=held: reserve(s, c, **h), at_a_step=True)  # type: ignore[misc]


def test_a_ledger_that_lost_a_trajectory_is_found_at_the_next_step() -> None:
    def lose(state: Held) -> None:
        reserve(state, 2, reserved=1)
        state.ledger._live.pop(0)

    with pytest.raises(InvariantViolation, match="2 trajectories were reserved but 1 are accounted for"):
        after(lose, at_a_step=True)


def test_at_the_end_nothing_is_held() -> None:
    def closed(state: Held) -> None:
        reserve(state, 2)
        for number in (0, 1):
            state.ledger.move(number, State.ABORTED)

    after(closed, at_a_step=False)
    changes: dict[str, Callable[[Held], None]] = {
        "2 trajectories never reached a final state": lambda s: reserve(s, 2, reserved=1),
        "server 0 still has 1 requests with 0 tokens": lambda s: setattr(s, "running", 1),
        "server 0 still has 0 requests with 7 tokens": lambda s: setattr(s, "tokens", 7),
        "3 requests still wait for a server": lambda s: setattr(s, "waiting", 3),
        "1 more environments were made than closed": lambda s: setattr(s, "open", 1),
        "-1 more environments were made than closed": lambda s: setattr(s, "open", -1),
    }
    for message, change in changes.items():
        with pytest.raises(InvariantViolation, match=message):
            after(change, at_a_step=False)


# --- progress


def test_a_run_without_steps_is_stopped_and_the_message_names_who_holds_what() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        checked = Checked(TraceRecorder(), limit=1, stall_s=100.0)
        checked.books = Held().books()
        loop = asyncio.get_running_loop()
        loop.call_at(70, checked.step, metrics(0, 0))
        loop.call_at(165, checked.step, metrics(1, 0))
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(wait_for_nothing())
            await checked.watch()

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    [error] = caught.value.exceptions
    assert isinstance(error, Stalled)
    text = str(error)
    assert text.startswith("no train step for 100 s, at 265.000 s; '<a buffer>'; 0; 1; ")
    assert "and 9 more" in text and "wait_for_nothing" in text and "×3" in text and "\n" not in text
