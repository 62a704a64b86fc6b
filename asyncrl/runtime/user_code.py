"""The border to user code: deadlines, and the one error that an episode's failure becomes (rule 5: failures are data).

``FailureWindow`` is the other side of that rule: one bad episode never ends a run, a persistently failing environment
does, with the reason and the first traceback.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from asyncrl.env import EnvDown
from asyncrl.ports import RemoteError, TooManyStuck

T = TypeVar("T")

MAX_REASON = 200
"""Characters of a reason in the ledger."""
GRACES_S = (10.0, 1.0, 1.0, 1.0, 1.0)
"""How long user code may go on after its first, second … cancellation; it is left behind after the last."""
MAX_STUCK = 32
"""How many calls that were left behind may go on at once."""

_stuck: dict[asyncio.Task[None], str] = {}
"""Tasks that were left behind, and whose they are. Held, so that none is collected at a time of its own."""


class EpisodeFailed(Exception):
    """An episode cannot go on. ``where`` is ``reset``, ``step``, ``reward`` or ``episode``; ``why`` one line.
    ``infra``: the fault is of the machinery around the task (``EnvDown``, a dead worker, a refused generation)."""

    def __init__(self, where: str, why: str, details: str = "", *, infra: bool = False) -> None:
        super().__init__(f"{'infra: ' if infra else ''}{where}: {why}")
        self.where = where
        self.infra = infra
        self.details = details
        """The traceback of the user's code, where there is one."""


class EnvFailing(Exception):
    """The environment fails too often for the run to go on. The message ends with the first traceback."""


@asynccontextmanager
async def user_call(where: str, timeout_s: float | None) -> AsyncIterator[None]:
    """Run user code: an exception or a missed deadline comes out as ``EpisodeFailed``; cancellation passes, even where
    the user's code swallowed it (a bare ``except`` must not keep a run from ending). Raises ``TooManyStuck``."""
    task = asyncio.current_task()
    assert task is not None
    stuck = [name for left, name in _stuck.items() if left.get_loop() is task.get_loop()]
    if len(stuck) > MAX_STUCK:
        raise TooManyStuck(
            f"more than {MAX_STUCK} calls of user code went on after {len(GRACES_S)} cancellations; find what swallows "
            f"CancelledError in {stuck[0]}"
        )
    cancellations = task.cancelling()
    try:
        async with asyncio.timeout(timeout_s) as scope:
            yield
    except (EpisodeFailed, TooManyStuck):
        raise
    except RemoteError as error:
        raise EpisodeFailed(where, str(error)[:MAX_REASON], error.details) from None
    except EnvDown as error:
        raise _failed(where, error, infra=True) from error
    except TimeoutError as error:
        if scope.expired():
            raise EpisodeFailed(where, f"no answer within {timeout_s:g} s") from None
        raise _failed(where, error) from error
    except asyncio.CancelledError as error:
        if task.cancelling() > cancellations:
            raise
        raise _failed(where, error) from error  # nobody cancelled us: the user's code raised it
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a Rust extension is no Exception
        raise _failed(where, error) from error
    finally:
        if task.cancelling() > cancellations:
            raise asyncio.CancelledError


class _Outcome(Generic[T]):
    """What a task brought: ``value``, unless there is an ``error``."""

    value: T
    error: BaseException | None = None


async def in_own_task(work: Awaitable[T]) -> T:
    """Await user code in a task of its own: a ``TaskGroup`` of the user's that fails leaves CPython 3.11's count of
    cancellations wrong, which would pass for a cancellation of ours; and what no cancellation ends can be left."""
    outcome: _Outcome[T] = _Outcome()
    task = asyncio.get_running_loop().create_task(enter(work, outcome))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _end(task, getattr(work, "__qualname__", type(work).__name__))
        raise
    task.result()  # a KeyboardInterrupt
    if isinstance(outcome.error, GeneratorExit):  # only a coroutine that is closed may raise it
        raise RuntimeError("user code raised GeneratorExit") from outcome.error
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


async def _end(task: asyncio.Task[None], name: str) -> None:
    """Cancel user code until it has ended; or leave it behind, so that the run can go on, or end."""
    loop = asyncio.get_running_loop()
    for grace_s in GRACES_S:
        if task.done():
            return
        task.cancel()
        deadline = loop.time() + grace_s
        while True:
            try:
                await asyncio.wait([task], timeout=max(0.0, deadline - loop.time()))
                break
            except asyncio.CancelledError:  # another one, of an outer deadline
                task.cancel()
    if not task.done():
        for left in [left for left in _stuck if left.get_loop().is_closed()]:
            del _stuck[left]
        _stuck[task] = name
        task.add_done_callback(_stuck.pop)
        asyncio.tasks._unregister_task(task)  # the end of the loop would wait for it
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # its episode has told of it


async def enter(work: Awaitable[T], outcome: _Outcome[T]) -> None:
    """Where user code begins. Never raises: if it was cancelled, so was whoever waits for it."""
    try:
        outcome.value = await work
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome.error = error


def _failed(where: str, error: BaseException, *, infra: bool = False) -> EpisodeFailed:
    reason = _first_line(error)
    details = utf8("".join(traceback.format_exception(error)))
    named = reason if infra and reason else f"{type(error).__name__}{': ' if reason else ''}{reason}"
    return EpisodeFailed(where, named[:MAX_REASON], details, infra=infra)


def _first_line(error: BaseException) -> str:
    try:
        return (utf8(str(error)).splitlines() or [""])[0]
    except Exception:  # a conversion of the user's own
        return ""


def utf8(text: str) -> str:
    """Without halves of surrogate pairs, which no log takes."""
    return text.encode(errors="replace").decode()


class FailureWindow:
    """Outcomes of the last ``size`` episodes of the environment ``name``. The run ends when, of a full window, more
    than ``max_rate`` failed by the environment's own fault, or more than ``max_infra_rate`` by that of what it runs
    on."""

    def __init__(self, *, size: int, max_rate: float, max_infra_rate: float = 1.0, name: str = "") -> None:
        self._outcomes: deque[EpisodeFailed | None] = deque(maxlen=size)
        self._max_rate = max_rate
        self._max_infra_rate = max_infra_rate
        self._name = name
        self._gave_up = False

    def succeeded(self) -> None:
        self._outcomes.append(None)

    def failed(self, failure: EpisodeFailed) -> None:
        """Raises ``EnvFailing`` when this was one too many: once, however many fail in the same tick."""
        self._outcomes.append(failure)
        if len(self._outcomes) < (self._outcomes.maxlen or 0) or self._gave_up:
            return
        failures = [f for f in self._outcomes if f is not None and f.infra == failure.infra]
        rate = len(failures) / len(self._outcomes)
        if failure.infra:
            key, limit = "env.max_infra_failure_rate", self._max_infra_rate
        else:
            key, limit = "env.max_failure_rate", self._max_rate
        if rate > limit:
            self._gave_up = True
            of = f" of {self._name}" if self._name else ""
            raise EnvFailing(
                f"{rate:.0%} of the last {len(self._outcomes)} episodes{of} failed ({key} is {limit:.0%}); "
                f"the first of them was {failures[0]}\n{failures[0].details}".rstrip()
            )
