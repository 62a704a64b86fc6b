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
    the user's code swallowed it (a bare ``except`` must not keep a run from ending)."""
    task = asyncio.current_task()
    assert task is not None
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
    except (Exception, SystemExit) as error:
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
    cancellations wrong, which would pass for a cancellation of ours."""
    outcome: _Outcome[T] = _Outcome()
    async with asyncio.TaskGroup() as group:
        group.create_task(enter(work, outcome))
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


async def enter(work: Awaitable[T], outcome: _Outcome[T]) -> None:
    """Where user code begins. Never raises: if it was cancelled, so was whoever waits for it."""
    try:
        outcome.value = await work
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome.error = error


def _failed(where: str, error: BaseException, *, infra: bool = False) -> EpisodeFailed:
    reason = str(error).splitlines()[0] if str(error) else ""
    details = "".join(traceback.format_exception(error))
    named = reason if infra and reason else f"{type(error).__name__}{': ' if reason else ''}{reason}"
    return EpisodeFailed(where, named[:MAX_REASON], details, infra=infra)


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
