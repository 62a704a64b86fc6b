"""Scorer: rewards of any kind of function, and everything that is no reward."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from asyncrl.core.types import Task
from asyncrl.env import Action
from asyncrl.runtime.reward import Scorer, checked_reward
from asyncrl.runtime.user_code import EpisodeFailed
from asyncrl.sim.blocking import SimBlocking
from asyncrl.sim.loop import run
from asyncrl.workers import ThreadBlocking

TASK = Task(id="t", data={"answer": "4"})
ACTION = Action(text="4", token_ids=[1], finish_reason="stop")


def score(function: Callable[..., Any], timeout_s: float = 5.0) -> float:
    async def main() -> float:
        blocking = SimBlocking(rng=random.Random(0))
        return await Scorer(function, blocking=blocking, timeout_s=timeout_s).score(TASK, ACTION)

    return run(main())


def refused(function: Callable[..., Any]) -> str:
    with pytest.raises(EpisodeFailed) as error:
        score(function)
    assert error.value.where == "reward"
    assert "\n" not in str(error.value)
    return str(error.value)


def plain(task: Task, action: Action) -> float:
    return float(action.text == task.data["answer"])


async def later(task: Task, action: Action) -> float:
    await asyncio.sleep(1)
    return plain(task, action)


class Judge:
    """A callable whose call is asynchronous, which ``inspect.iscoroutinefunction`` does not see."""

    async def __call__(self, task: Task, action: Action) -> float:
        return await later(task, action)


@pytest.mark.parametrize("function", [plain, later, Judge(), lambda task, action: later(task, action)])
def test_every_kind_of_function_gives_its_reward(function: Callable[..., Any]) -> None:
    assert score(function) == 1.0


@pytest.mark.parametrize("value", [1, 0.5, True, -2, np.float32(0.25), np.array(3), Fraction(1, 2)])
def test_what_python_can_make_a_number_of_is_a_reward(value: Any) -> None:
    got = score(lambda task, action: value)
    assert got == float(value)
    assert type(got) is float


class Odd:
    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        return "odd\nvalue " + "x" * 500


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "reward: gave None as the reward; it must be a number"),
        ("high", "reward: gave 'high' as the reward; it must be a number"),
        ([1.0], "reward: gave [1.0] as the reward; it must be a number"),
        (10**400, "reward: gave 1" + "0" * 79 + " as the reward; it must be a number"),
        (np.zeros((2, 2)), "reward: gave array([[0., 0.], [0., 0.]]) as the reward; it must be a number"),
        (Odd(), "reward: gave odd value " + "x" * 70 + " as the reward; it must be a number"),
        (float("nan"), "reward: gave nan as the reward; it must be finite"),
        (float("-inf"), "reward: gave -inf as the reward; it must be finite"),
    ],
)
def test_what_is_no_finite_number_is_the_episode_s_failure(value: Any, message: str) -> None:
    assert refused(lambda task, action: value) == message


def test_a_function_that_raises_is_the_episode_s_failure() -> None:
    def broken(task: Task, action: Action) -> float:
        return 1.0 / len(task.data["missing"])

    async def broken_later(task: Task, action: Action) -> float:
        return broken(task, action)

    assert refused(broken) == refused(broken_later) == "reward: KeyError: 'missing'"


def test_a_missed_deadline_is_the_episode_s_failure() -> None:
    async def hang(task: Task, action: Action) -> float:
        await asyncio.get_running_loop().create_future()
        return 1.0

    assert refused(hang) == "reward: no answer within 5 s"


def test_the_limit_holds_and_the_deadline_starts_with_the_run() -> None:
    running, most = 0, 0

    async def slow(task: Task, action: Action) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(3)
        running -= 1
        return 1.0

    async def main() -> float:
        scorer = Scorer(slow, blocking=SimBlocking(rng=random.Random(0)), timeout_s=5, limit=2)
        async with asyncio.TaskGroup() as group:
            scores = [group.create_task(scorer.score(TASK, ACTION)) for _ in range(6)]
        assert [s.result() for s in scores] == [1.0] * 6
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(9), "the last began after 6 s and had its own 5"
    assert most == 2


def test_a_cancelled_score_frees_its_place() -> None:
    async def hang(task: Task, action: Action) -> float:
        await asyncio.sleep(100)
        return 1.0

    async def main() -> float:
        scorer = Scorer(hang, blocking=SimBlocking(rng=random.Random(0)), timeout_s=1000, limit=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await scorer.score(TASK, ACTION)
        return await scorer.score(TASK, ACTION)

    assert run(main()) == 1.0


async def test_a_plain_function_runs_off_the_loop_and_a_coroutine_on_it() -> None:
    blocking = ThreadBlocking()
    idents: list[int] = []

    def plain(task: Task, action: Action) -> float:
        idents.append(threading.get_ident())
        return 0.0

    async def later(task: Task, action: Action) -> float:
        return plain(task, action)

    functions: list[Callable[[Task, Action], float | Awaitable[float]]] = [plain, later]
    for function in functions:
        await Scorer(function, blocking=blocking, timeout_s=5).score(TASK, ACTION)
    await blocking.close()
    assert idents[0] != threading.get_ident() == idents[1]


def test_a_step_s_reward_is_checked_under_its_own_name() -> None:
    assert checked_reward("step", 2) == 2.0
    with pytest.raises(EpisodeFailed, match=r"^step: gave None as the reward; it must be a number$"):
        checked_reward("step", None)
