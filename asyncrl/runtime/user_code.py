"""The border to user code: deadlines, and the one error that an episode's failure becomes (rule 5: failures are data).

``FailureWindow`` is the other side of that rule: one bad episode never ends a run, a persistently failing environment
does, with the reason and the first traceback.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.ports import TooManyStuck


class EpisodeFailed(Exception):
    """An episode cannot go on. ``where`` is ``reset``, ``step``, ``reward`` or ``episode``; ``why`` one line."""

    def __init__(self, where: str, why: str, details: str = "") -> None:
        super().__init__(f"{where}: {why}")
        self.where = where
        self.details = details
        """The traceback of the user's code, where there is one."""


class EnvFailing(Exception):
    """The environment fails too often for the run to go on. The message ends with the first traceback."""


@asynccontextmanager
async def user_call(where: str, timeout_s: float) -> AsyncIterator[None]:
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


def _failed(where: str, error: BaseException) -> EpisodeFailed:
    reason = str(error).splitlines()[0] if str(error) else ""
    details = "".join(traceback.format_exception(error))
    return EpisodeFailed(where, f"{type(error).__name__}{': ' if reason else ''}{reason}"[:200], details)


class FailureWindow:
    """Outcomes of the last ``size`` episodes; more than ``max_rate`` failed of a full window ends the run."""

    def __init__(self, *, size: int, max_rate: float) -> None:
        self._outcomes: deque[EpisodeFailed | None] = deque(maxlen=size)
        self._max_rate = max_rate
        self._gave_up = False

    def succeeded(self) -> None:
        self._outcomes.append(None)

    def failed(self, failure: EpisodeFailed) -> None:
        """Raises ``EnvFailing`` when this was one too many: once, however many fail in the same tick."""
        self._outcomes.append(failure)
        failures = [f for f in self._outcomes if f is not None]
        rate = len(failures) / len(self._outcomes)
        if len(self._outcomes) == self._outcomes.maxlen and rate > self._max_rate and not self._gave_up:
            self._gave_up = True
            raise EnvFailing(
                f"{rate:.0%} of the last {len(self._outcomes)} episodes failed (env.max_failure_rate is "
                f"{self._max_rate:.0%}); the first of them was {failures[0]}\n{failures[0].details}".rstrip()
            )
