"""The border to user code, on virtual time: what comes out as an episode's failure, and what passes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from asyncrl.env import EnvDown
from asyncrl.ports import RemoteError, TooManyStuck
from asyncrl.runtime import user_code
from asyncrl.runtime.user_code import (
    GRACES_S,
    MAX_STUCK,
    EnvFailing,
    EpisodeFailed,
    FailureWindow,
    in_own_task,
    user_call,
)
from asyncrl.sim.loop import run

Code = Callable[[], Awaitable[Any]]


async def called(code: Code, timeout_s: float = 5.0) -> Any:
    async with user_call("step", timeout_s):
        return await code()


def failure(code: Code) -> EpisodeFailed:
    async def main() -> EpisodeFailed:
        with pytest.raises(EpisodeFailed) as error:
            await called(code)
        return error.value

    return run(main())


class Panic(BaseException):
    """As that of a Rust extension, which is no ``Exception``."""


class Mute(Exception):
    """It cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def raising(error: BaseException) -> Code:
    async def code() -> None:
        await asyncio.sleep(1)
        raise error

    return code


def test_an_answer_in_time_passes_through() -> None:
    async def code() -> str:
        await asyncio.sleep(4.9)
        return "answer"

    assert run(called(code)) == "answer"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such tool"), "step: ValueError: no such tool"),
        (ValueError("first\nsecond"), "step: ValueError: first"),
        (KeyError(), "step: KeyError"),
        (ValueError("x" * 500), "step: ValueError: " + "x" * 188),
        (TimeoutError("of the user's own"), "step: TimeoutError: of the user's own"),
        (asyncio.CancelledError(), "step: CancelledError"),
        (SystemExit(3), "step: SystemExit: 3"),
        (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "step: ExceptionGroup: two (2 sub-exceptions)"),
        (Panic("index out of bounds"), "step: Panic: index out of bounds"),
        (BaseExceptionGroup("one", [Panic()]), "step: BaseExceptionGroup: one (1 sub-exception)"),
        (Mute(), "step: Mute"),
        (ValueError("half of a pair: \ud83d"), "step: ValueError: half of a pair: ?"),
    ],
)
def test_whatever_user_code_raises_is_one_line_and_a_traceback(error: BaseException, message: str) -> None:
    got = failure(raising(error))
    assert str(got) == message
    assert got.where == "step"
    assert "in code" in got.details and "raise error" in got.details


def test_a_missed_deadline_is_a_failure_at_that_time() -> None:
    async def main() -> float:
        with pytest.raises(EpisodeFailed, match=r"^step: no answer within 2.5 s$"):
            await called(forever, 2.5)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(2.5)


def test_a_failure_that_is_one_already_passes_unchanged() -> None:
    inner = EpisodeFailed("reward", "why")
    assert failure(raising(inner)) is inner


async def swallows() -> str:
    try:
        await forever()
    except BaseException:
        return "swallowed"
    return ""


async def hides() -> None:
    try:
        await forever()
    except asyncio.CancelledError:
        raise ValueError("my cleanup failed") from None


async def goes_on() -> None:
    try:
        await forever()
    except asyncio.CancelledError:
        await asyncio.sleep(1)


async def plain_timeout() -> None:
    async with asyncio.timeout(100):
        await forever()


@pytest.mark.parametrize("code", [forever, swallows, hides, goes_on, plain_timeout])
def test_cancellation_passes_whatever_user_code_does_with_it(code: Code) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(called(code))
            await asyncio.sleep(1)
            task.cancel()
        assert task.cancelled()

    run(main())


@pytest.mark.parametrize("code", [forever, swallows, hides, goes_on, plain_timeout])
def test_an_outer_deadline_is_the_outer_one_s_timeout(code: Code) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await called(code)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    run(main())


@pytest.mark.parametrize("code", [forever, swallows, hides, goes_on, plain_timeout])
def test_the_own_deadline_never_looks_like_a_cancellation(code: Code) -> None:
    async def main() -> None:
        with contextlib.suppress(EpisodeFailed):
            await called(code, 1)
        await asyncio.sleep(1)  # a cancellation that lingered would come out here

    run(main())


def test_clean_up_of_a_cancelled_task_may_call_user_code() -> None:
    """Only a cancellation that arrives during the call counts."""
    done: list[str] = []

    async def close() -> None:
        await asyncio.sleep(1)
        done.append("closed")

    async def episode() -> None:
        try:
            await forever()
        finally:
            await called(close)
            done.append("and went on")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(episode())
            await asyncio.sleep(0)
            task.cancel()
        assert task.cancelled()

    run(main())
    assert done == ["closed", "and went on"]


def test_a_keyboard_interrupt_is_not_the_episode_s() -> None:
    def main() -> Coroutine[Any, Any, Any]:
        return called(raising(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        run(main())


def test_a_coroutine_that_is_closed_fails_nothing() -> None:
    async def main() -> None:
        opened = called(forever)
        opened.send(None)
        opened.close()
        with pytest.raises(EpisodeFailed, match=r"^step: RuntimeError: user code raised GeneratorExit$"):
            await called(in_a_task_of_its_own(raising(GeneratorExit())))

    run(main())


# --- what no cancellation ends ----------------------------------------------------------------------------------------


def in_a_task_of_its_own(code: Code) -> Code:
    return lambda: in_own_task(code())


class Stubborn:
    """Swallows ``times`` cancellations, and waits on."""

    def __init__(self, times: float = float("inf")) -> None:
        self.times = times
        self.swallowed: list[float] = []
        self.open = asyncio.Event()

    async def __call__(self) -> str:
        while not self.open.is_set():
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.swallowed.append(asyncio.get_running_loop().time())
                if len(self.swallowed) > self.times:
                    raise
        raise ValueError("too late")


AT = [5.0, 15.0, 16.0, 17.0, 18.0]
"""When a call with a deadline of 5 s is cancelled."""


@pytest.mark.parametrize("times", [0, 1, 4])
def test_what_swallows_a_cancellation_gets_another(times: int) -> None:
    async def main() -> None:
        code = Stubborn(times)
        with pytest.raises(EpisodeFailed, match="no answer within 5 s"):
            await called(in_a_task_of_its_own(code))
        assert code.swallowed == pytest.approx(AT[: times + 1])
        assert asyncio.get_running_loop().time() == pytest.approx(AT[times])

    run(main())


def test_clean_up_may_take_its_time() -> None:
    cleaned: list[float] = []

    async def code() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(GRACES_S[0] - 1)
            cleaned.append(asyncio.get_running_loop().time())

    async def main() -> None:
        with pytest.raises(EpisodeFailed, match="no answer within 5 s"):
            await called(in_a_task_of_its_own(code))

    run(main())
    assert cleaned == pytest.approx([14.0])


def test_what_no_cancellation_ends_is_left_behind() -> None:
    """The deadline costs the episode, and the loop ends without it; what it raises later is nobody's."""

    async def main() -> None:
        code, other = Stubborn(), Stubborn()
        with pytest.raises(EpisodeFailed, match="no answer within 5 s"):
            await called(in_a_task_of_its_own(code))
        assert code.swallowed == pytest.approx(AT)
        assert asyncio.get_running_loop().time() == pytest.approx(AT[-1] + GRACES_S[-1])
        code.open.set()
        await asyncio.sleep(1)
        gc.collect()
        with pytest.raises(EpisodeFailed):
            await called(in_a_task_of_its_own(other))

    run(main(), limit=100)


def test_a_loop_says_no_word_of_what_was_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_code, "GRACES_S", (0.01,))

    async def main() -> None:
        with pytest.raises(EpisodeFailed):
            await called(in_a_task_of_its_own(Stubborn()), 0.01)

    asyncio.run(main())
    assert user_code._stuck
    user_code._stuck.clear()
    gc.collect()
    assert not caplog.records


def test_all_deadlines_around_it_are_delivered() -> None:
    async def main() -> None:
        code = Stubborn()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await called(in_a_task_of_its_own(code))
        assert code.swallowed == pytest.approx(sorted([*AT, 7.0]))
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    run(main(), limit=100)


def test_too_many_that_go_on_end_the_run() -> None:
    async def main() -> None:
        codes = [Stubborn() for _ in range(MAX_STUCK + 1)]
        async with asyncio.TaskGroup() as group:
            for code in codes:
                group.create_task(failed_call(code))
        with pytest.raises(TooManyStuck, match=r"^more than 32 calls of user code went on .* in Stubborn.__call__"):
            await called(in_a_task_of_its_own(forever))
        codes[0].open.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(EpisodeFailed):
            await called(in_a_task_of_its_own(forever))

    async def failed_call(code: Code) -> None:
        with pytest.raises(EpisodeFailed):
            await called(in_a_task_of_its_own(code))

    run(main(), limit=100)

    async def another() -> None:
        await called(in_a_task_of_its_own(asyncio.Event().wait), 1)

    with pytest.raises(EpisodeFailed):  # another run's are not counted
        run(another())


# --- the failure window -----------------------------------------------------------------------------------------------


def failed(why: str = "boom", details: str = "") -> EpisodeFailed:
    return EpisodeFailed("step", why, details)


def test_a_window_that_is_not_full_never_ends_the_run() -> None:
    window = FailureWindow(size=4, max_rate=0.0)
    for _ in range(3):
        window.failed(failed())
    with pytest.raises(EnvFailing):
        window.failed(failed())


def test_the_rate_must_be_exceeded_within_the_last_episodes() -> None:
    window = FailureWindow(size=4, max_rate=0.5)
    for _ in range(100):  # half fail, for ever
        window.failed(failed())
        window.succeeded()
    window.failed(failed())
    with pytest.raises(EnvFailing, match="75% of the last 4 episodes failed"):
        window.failed(failed())


def test_a_rate_of_one_tolerates_everything() -> None:
    window = FailureWindow(size=2, max_rate=1.0)
    for _ in range(10):
        window.failed(failed())


def test_the_end_comes_with_the_first_failure_and_its_traceback() -> None:
    window = FailureWindow(size=2, max_rate=0.4)
    window.failed(failed("the cause", "Traceback:\n  File x\n"))
    with pytest.raises(EnvFailing) as error:
        window.failed(failed("a consequence", "other"))
    first, *details = str(error.value).splitlines()
    assert first == (
        "100% of the last 2 episodes failed (env.max_failure_rate is 40%); the first of them was step: the cause"
    )
    assert details == ["Traceback:", "  File x"]


def test_the_machines_failures_have_a_rate_of_their_own() -> None:
    window = FailureWindow(name="env.py:Guess", size=4, max_rate=0.25, max_infra_rate=0.5)
    down = EpisodeFailed("reset", "no container", infra=True)
    window.failed(failed())
    for _ in range(2):
        window.failed(down)
    window.succeeded()  # 25 % and 50 %: neither is exceeded
    with pytest.raises(EnvFailing) as error:
        window.failed(down)
    assert str(error.value) == (
        "75% of the last 4 episodes of env.py:Guess failed (env.max_infra_failure_rate is 50%); "
        "the first of them was infra: reset: no container"
    )


def test_what_is_down_and_what_failed_elsewhere() -> None:
    down = failure(raising(EnvDown("no container\nafter 3 tries")))
    assert (str(down), down.infra) == ("infra: step: no container", True)
    nameless = failure(raising(EnvDown()))
    assert str(nameless) == "infra: step: EnvDown"
    remote = failure(raising(RemoteError("ValueError: no such tool", "Traceback …")))
    assert (str(remote), remote.infra, remote.details) == ("step: ValueError: no such tool", False, "Traceback …")


def test_the_run_ends_once_however_many_fail_together() -> None:
    window = FailureWindow(size=2, max_rate=0.0)
    window.failed(EpisodeFailed("step", "first"))
    with pytest.raises(EnvFailing):
        window.failed(EpisodeFailed("step", "second"))
    window.failed(EpisodeFailed("step", "third"))  # a thousand others that fail in the same tick are no news
