"""RolloutPlayer: plays episodes whose program drives the model itself (``async def rollout(task, agent)``).

It has ``EpisodePlayer``'s interface, and the same deadlines and limits: ``env.step_timeout_s`` is how long the program
may go without asking the model, ``env.max_turns`` how often it may ask.

    play()    waits for: the program, which waits for the Session    woken by: the user's code, LLMProxy
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from asyncrl.core.types import Task
from asyncrl.env import Agent, EpisodeOver
from asyncrl.runtime.conversation import ChatTemplate
from asyncrl.runtime.env_manager import Episode
from asyncrl.runtime.lease import EpisodeLog
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.reward import checked_metrics, checked_reward
from asyncrl.runtime.session import Session, SessionLimits
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.trajectory_server import Start
from asyncrl.runtime.user_code import EpisodeFailed, in_own_task, user_call

Rollout = Callable[[Task, Agent], "Coroutine[Any, Any, float | None] | Awaitable[float | None]"]


class RolloutPlayer:
    """``admit`` opens the gateway to a session, and closes it afterwards; None: there is no gateway."""

    def __init__(
        self,
        *,
        rollout: Rollout,
        proxy: LLMProxy,
        template: ChatTemplate,
        limits: SessionLimits,
        idle_timeout_s: float,
        admit: Callable[[Session], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._rollout = rollout
        self._proxy = proxy
        self._template = template
        self._limits = limits
        self._idle_timeout_s = idle_timeout_s
        self._admit = admit

    async def play(
        self,
        task: Task,
        *,
        start: Start,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        pinned: bool = False,
        stage: Stage,
        log: EpisodeLog | None = None,
    ) -> list[Episode]:
        """One episode of ``task``, always from its beginning. Raises ``EpisodeFailed``. Nothing is generated for it
        afterwards."""
        if n != 1:
            raise ValueError("an agent program makes its requests one by one")
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(self._idle_timeout_s)

        def on_busy(busy: bool) -> None:
            stage.on_running(busy)
            if busy:
                stage.enter("replies of the model for its program")
            else:
                stage.turns += 1
                stage.enter("its program", self._idle_timeout_s, "env.step_timeout_s")
            if not scope.expired():
                scope.reschedule(None if busy else loop.time() + self._idle_timeout_s)

        session = Session(
            proxy=self._proxy,
            template=self._template,
            limits=self._limits,
            start=start,
            temperature=temperature,
            top_p=top_p,
            pinned=pinned,
            on_busy=on_busy,
        )
        stage.enter("its program", self._idle_timeout_s, "env.step_timeout_s")
        try:
            async with scope, user_call("rollout", None):
                returned = await in_own_task(self._program(task, session))
                metrics = checked_metrics("rollout", session.metrics)
        except TimeoutError:
            raise EpisodeFailed(
                "rollout", f"neither asked the model nor ended within env.step_timeout_s = {self._idle_timeout_s:g} s"
            ) from None
        finally:
            session.close()
        if not session.turns:
            raise EpisodeFailed("rollout", "ended without a reply of the model, so there is nothing to train")
        if returned:
            session.credit_last(returned)
        turns = session.turns
        reward = checked_reward("rollout", sum(turn.reward for turn in turns))
        return [
            Episode(
                turns=turns,
                reward=reward,
                finish_reason=session.finish_reason,
                metrics=metrics,
                reset_s=session.reset_s,
            )
        ]

    async def _program(self, task: Task, session: Session) -> float:
        """The user's program; what it returned. A limit is no failure; ``finish_reason`` tells of it."""
        try:
            with nullcontext() if self._admit is None else self._admit(session):
                returned = await self._rollout(task, session)
        except (Exception, SystemExit) as error:
            failed = error.split(EpisodeOver)[1] if isinstance(error, ExceptionGroup) else error
            if failed is None or isinstance(failed, EpisodeOver):
                return 0.0
            raise failed from None
        return 0.0 if returned is None else checked_reward("rollout", returned)
