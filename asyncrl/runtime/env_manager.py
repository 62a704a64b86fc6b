"""EnvManager: one environment slot, playing one episode after another (ROLL Flash §4.2).

reset → generate → step → … → reward. Owns one live ``Env`` and its conversation. While the environment thinks, the
trajectory holds no server slot (§5.2.1); its next turn is routed afresh.

    run()     waits for: a lease           woken by: SampleBuffer
    play()    waits for: tokens, the env   woken by: LLMProxy, the user's code

``EpisodePlayer`` is the part that training and evaluation share: it knows no ledger and no batch.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from asyncrl.core.ledger import State
from asyncrl.core.staleness.base import check_one_version
from asyncrl.core.types import Record, Task, Trajectory, Turn, flatten
from asyncrl.env import Action, Env, Observation, Step
from asyncrl.ports import EngineRejected, EnvSource, Observer
from asyncrl.runtime.conversation import ChatTemplate, Conversation
from asyncrl.runtime.generation import Completion, Prompt
from asyncrl.runtime.lease import EpisodeLog, Lease
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.reward import Scorer, checked_metrics, checked_reward
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.stage import PLACE, SERVER, Stage
from asyncrl.runtime.trajectory_server import Start
from asyncrl.runtime.user_code import EpisodeFailed, FailureWindow, in_own_task, user_call
from asyncrl.shield import to_the_end


class EpisodeLimits(Record, frozen=True, kw_only=True):
    """Lengths in tokens, deadlines in seconds; None where the source of the environments keeps them."""

    max_turns: int
    max_new_tokens: int
    max_tokens: int
    reset_timeout_s: float | None
    step_timeout_s: float | None
    close_timeout_s: float = 10.0


class Episode(Record, frozen=True, kw_only=True):
    """One finished episode."""

    turns: Sequence[Turn]
    reward: float
    finish_reason: str
    metrics: Mapping[str, float]
    reset_s: float = 0.0


class Player(Protocol):
    """What plays the episodes of one kind of task, for training and for evaluation."""

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
        log: EpisodeLog = ...,
    ) -> list[Episode]:
        """``n`` episodes of ``task``, on the servers set aside for an evaluation if ``pinned``; ``stage`` tells how far
        they are. A single one goes on from what its ``log`` has, if it can. Raises ``EpisodeFailed``."""


class EpisodePlayer:
    """Plays episodes of one kind of environment. ``scorer`` adds a reward function's value to that of the steps.

    An episode that another process began goes on where it was: its generations are not sampled again, but given to a
    new environment one by one. That needs one that is ``replayable``: the same task and actions bring the same
    observations. If they do not, or it is none, the episode begins anew. Within its first generation it goes on in any,
    as long as the prompt is the same: what the environment has in mind beside it, the policy has not seen.
    """

    def __init__(
        self,
        *,
        envs: EnvSource,
        scorer: Scorer | None,
        proxy: LLMProxy,
        template: ChatTemplate,
        limits: EpisodeLimits,
        replayable: bool = False,
    ) -> None:
        self._envs = envs
        self._replayable = replayable
        self._scorer = scorer
        self._proxy = proxy
        self._template = template
        self._limits = limits

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
        """``n`` episodes of ``task``; more than one share their first request, so they must have a single turn.

        Raises ``EpisodeFailed``. Every environment that was made is closed, whatever happens.
        """
        log = log or EpisodeLog()
        if log.turns and not self._replayable:
            log = EpisodeLog(log.keep)
        sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "pinned": pinned}
        try:
            return await self._play(task, start, n, sampling, stage, log)
        except _OtherObservation:
            return await self._play(task, start, n, sampling, stage, EpisodeLog(log.keep))

    async def _play(
        self,
        task: Task,
        start: Start,
        n: int,
        sampling: Mapping[str, Any],
        stage: Stage,
        log: EpisodeLog,
    ) -> list[Episode]:
        envs: list[Env] = []
        whole = False
        try:
            dialogues = [await self._begin(task, envs, stage) for _ in range(n)]
            if n == 1:
                episodes = [await self._turns(task, envs[0], dialogues[0], start, sampling, stage, log)]
                whole = True
                return episodes
            if any(d.ids != dialogues[0].ids for d in dialogues):
                raise EpisodeFailed(
                    "reset", "gave different prompts for one task; set rollout.expand_num_return_sequences = true"
                )
            completions = await self._generate(dialogues[0], start, sampling, n, None, stage, {})
            episodes = []
            for env, dialogue, completion in zip(envs, dialogues, completions, strict=True):
                step, reward = await self._step(task, env, dialogue, completion, 0, stage)
                episodes.append(_ended(dialogue, reward, completion.finish_reason, step))
            whole = True
            return episodes
        finally:
            stage.enter("its environment to close", self._limits.close_timeout_s)
            await self._release(envs, whole)

    async def _begin(self, task: Task, envs: list[Env], stage: Stage) -> Conversation:
        """An environment, appended to ``envs``, and the dialogue that its reset opens."""
        stage.enter(PLACE)
        async with user_call("reset", None):  # the wait for a place is not the environment's fault
            envs.append(await self._envs.acquire())
        began = asyncio.get_running_loop().time()
        stage.enter("env reset", self._limits.reset_timeout_s, "env.reset_timeout_s")
        async with user_call("reset", self._limits.reset_timeout_s):
            observation = await in_own_task(envs[-1].reset(task))
        dialogue = Conversation(self._template, max_tokens=self._limits.max_tokens)
        dialogue.reset_s = asyncio.get_running_loop().time() - began
        _observe(dialogue, "reset", observation)
        if len(dialogue.ids) >= self._limits.max_tokens:
            raise EpisodeFailed(
                "reset",
                f"the prompt has {len(dialogue.ids)} tokens; raise rollout.max_tokens ({self._limits.max_tokens})",
            )
        return dialogue

    async def _turns(
        self,
        task: Task,
        env: Env,
        dialogue: Conversation,
        start: Start,
        sampling: Mapping[str, Any],
        stage: Stage,
        log: EpisodeLog,
    ) -> Episode:
        """generate → step → observe, until the environment is done or a limit is reached."""
        reward, turn = 0.0, 0
        before: Completion | None = None
        while True:
            known = log.turn(turn)
            if known is not None and known.prompt_ids != dialogue.pending:
                raise _OtherObservation
            if turn < len(log.turns):
                completion = _recorded(log.turns[turn])
            else:
                keeping = {"begun": known, "keep": partial(_keep_piece, log, turn, dialogue.pending)}
                [completion] = await self._generate(dialogue, start, sampling, 1, before, stage, keeping)
                log.keep(turn, None, _turn(dialogue.pending, completion))
            step, gained = await self._step(task, env, dialogue, completion, turn, stage)
            reward, before, turn = reward + gained, completion, turn + 1
            if step.done or turn == self._limits.max_turns:
                return _ended(dialogue, reward, completion.finish_reason, step)
            _observe(dialogue, "step", step.observation)
            if len(dialogue.ids) >= self._limits.max_tokens:
                return _ended(dialogue, reward, "length", step)

    async def _generate(
        self,
        dialogue: Conversation,
        start: Start,
        sampling: Mapping[str, Any],
        n: int,
        before: Completion | None,
        stage: Stage,
        keeping: Mapping[str, Any],
    ) -> list[Completion]:
        room = min(self._limits.max_new_tokens, self._limits.max_tokens - len(dialogue.ids))
        prompt = Prompt(
            ids=dialogue.ids[:],
            start=start,
            max_new_tokens=room,
            home=None if before is None else before.server or None,
            prefix=0 if before is None else dialogue.served,
            after=-1 if before is None else before.versions[-1],
            **sampling,
            **keeping,
        )
        stage.enter(SERVER)
        try:
            return await self._proxy.generate(prompt, n, stage.at)
        except EngineRejected as error:
            raise EpisodeFailed("generate", str(error), infra=True) from error

    async def _step(
        self, task: Task, env: Env, dialogue: Conversation, completion: Completion, turn: int, stage: Stage
    ) -> tuple[Step, float]:
        """Apply one generation; the step and the reward it brought."""
        text = dialogue.add_output(
            completion.output_ids, completion.logprobs, completion.versions, completion.finish_reason
        )
        began = asyncio.get_running_loop().time()
        action = Action(
            text=text,
            token_ids=completion.output_ids,
            finish_reason=completion.finish_reason,
            turn=turn,
            tool_calls=dialogue.tool_calls(text),
        )
        stage.enter(f"env step {turn + 1}", self._limits.step_timeout_s, "env.step_timeout_s")
        async with user_call("step", self._limits.step_timeout_s):
            step = await in_own_task(env.step(action))
            if not isinstance(step, Step):
                raise EpisodeFailed("step", f"returned {type(step).__name__}; it must return asyncrl.Step")
            if not isinstance(step.done, bool):
                step = msgspec.structs.replace(step, done=bool(step.done))
            step = msgspec.structs.replace(step, metrics=checked_metrics("step", step.metrics))
            reward = checked_reward("step", step.reward)
        if self._scorer is not None and (step.done or turn + 1 == self._limits.max_turns):
            stage.enter("its reward", self._scorer.timeout_s, "env.reward_timeout_s")
            reward += await self._scorer.score(task, action)
        stage.turns += 1
        in_env = asyncio.get_running_loop().time() - began
        dialogue.credit(reward, (completion.waited_s, completion.seconds - completion.waited_s, in_env))
        return step, reward

    async def _release(self, envs: Sequence[Env], whole: bool) -> None:
        """Close all that are not used again, within the deadline, also when cancelled; a failing close loses nothing:
        the episode is over."""
        closings = [c for env in envs if (c := self._envs.release(env, whole=whole)) is not None]
        if not closings:
            return

        async def close(closing: Coroutine[Any, Any, None]) -> None:
            with suppress(EpisodeFailed):
                async with user_call("close", self._limits.close_timeout_s):
                    await closing

        async def close_all() -> None:
            async with asyncio.TaskGroup() as group:
                for closing in closings:
                    group.create_task(close(closing))

        with suppress(TimeoutError):  # one that shields itself from its deadline
            await to_the_end(close_all(), self._limits.close_timeout_s + 1.0)


class _OtherObservation(Exception):
    """An episode that is played again sees something else than it did."""


def _turn(prompt_ids: array[int], completion: Completion) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        output_ids=completion.output_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        seconds=(completion.waited_s, completion.seconds - completion.waited_s, 0.0),
    )


def _recorded(turn: Turn) -> Completion:
    """What was generated in another process."""
    waited_s, generated_s, _ = turn.seconds
    return Completion(
        output_ids=turn.output_ids,
        logprobs=turn.logprobs,
        versions=turn.versions,
        finish_reason=turn.finish_reason,
        server="",
        interruptions=0,
        waited_s=waited_s,
        seconds=waited_s + generated_s,
    )


def _keep_piece(log: EpisodeLog, number: int, prompt_ids: array[int], piece: int, turn: Turn) -> None:
    log.keep(number, piece, turn if piece else msgspec.structs.replace(turn, prompt_ids=prompt_ids))


class EpisodePlayers:
    """One player for each source of tasks, by its name."""

    def __init__(self, players: Mapping[str, Player]) -> None:
        self._players = players

    async def play(self, task: Task, **how: Any) -> list[Episode]:
        """As ``Player.play``."""
        return await self._players[task.source].play(task, **how)


def _ended(dialogue: Conversation, reward: float, finish_reason: str, step: Step) -> Episode:
    return Episode(
        turns=dialogue.turns,
        reward=reward,
        finish_reason=finish_reason,
        metrics=step.metrics,
        reset_s=dialogue.reset_s,
    )


def _observe(dialogue: Conversation, where: str, observation: Observation | str) -> None:
    if not isinstance(observation, (Observation, str)):
        raise EpisodeFailed(where, f"gave {type(observation).__name__} as observation; give text or an Observation")
    try:
        dialogue.observe(observation)
    except (ValueError, TypeError) as error:  # the latter where its fields are of wrong types
        raise EpisodeFailed(where, str(error)) from error
    if not dialogue.ids:
        raise EpisodeFailed(where, "gave an empty first observation, so there is nothing to continue")


class EnvManager:
    """One slot. ``name`` is its track in the trace; ``failures`` are by the source of the task. ``one_version``: each
    trajectory must be one version's, which is asserted when it has ended."""

    def __init__(
        self,
        *,
        name: str,
        buffer: SampleBuffer,
        player: EpisodePlayers,
        failures: Mapping[str, FailureWindow],
        observer: Observer,
        episode_timeout_s: float,
        temperature: float,
        top_p: float,
        one_version: bool = False,
    ) -> None:
        self._name = name
        self._buffer = buffer
        self._player = player
        self._failures = failures
        self._observer = observer
        self._episode_timeout_s = episode_timeout_s
        self._temperature = temperature
        self._top_p = top_p
        self._one_version = one_version

    async def run(self) -> None:
        """Episodes without end, until cancelled. Raises ``EnvFailing``, and whatever is a bug of the runtime."""
        while True:
            await self.episode(await self._buffer.lease())

    async def episode(self, lease: Lease) -> None:
        """Play what was leased, and report it: put, failed, or nothing if it was revoked meanwhile."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        outcome = "cancelled"
        lease.stage = stage = Stage(
            on_running=lambda running: self._buffer.mark(lease, State.RUNNING if running else State.WAITING)
        )
        try:
            async with asyncio.timeout(self._episode_timeout_s) as scope:
                stage.scope = scope
                lease.on_revoke = lambda: None if scope.expired() else scope.reschedule(loop.time())
                if lease.revoked:
                    return
                self._buffer.mark(lease, State.WAITING)
                episodes = await self._player.play(
                    lease.task,
                    start=lease.start,
                    n=len(lease.trajectory_ids),
                    temperature=self._temperature,
                    top_p=self._top_p,
                    stage=stage,
                    log=self._buffer.log(lease),
                )
            outcome = "done"
        except TimeoutError:
            if not scope.expired():
                raise
            if not lease.revoked:
                why = stage.cut_why or f"no end within {self._episode_timeout_s:g} s"
                self._fail(lease, EpisodeFailed("episode", why, infra=bool(stage.cut_why)))
            outcome = lease.revoked or "timeout"
        except EpisodeFailed as failure:
            if not lease.revoked:
                self._fail(lease, failure)
            outcome = "failed"
        else:
            if not lease.revoked:
                self._failures[lease.task.source].succeeded()
                for trajectory_id, index, episode in zip(lease.trajectory_ids, lease.indices, episodes, strict=True):
                    trajectory = _trajectory(lease, trajectory_id, index, episode)
                    if self._one_version:
                        check_one_version(trajectory)
                    self._buffer.put(lease, trajectory)
        finally:
            lease.on_revoke = None
            self._observer.span(
                self._name, "episode", started, loop.time(), {"group": lease.group_id, "outcome": outcome}
            )

    def _fail(self, lease: Lease, failure: EpisodeFailed) -> None:
        self._buffer.fail(lease, str(failure), infra=failure.infra)
        self._failures[lease.task.source].failed(failure)


def _trajectory(lease: Lease, trajectory_id: int, index: int, episode: Episode) -> Trajectory:
    tokens, loss_mask, logprobs, versions = flatten(episode.turns)
    turn_ends = tuple(accumulate(len(turn.prompt_ids) + len(turn.output_ids) for turn in episode.turns))
    starts = [end for end, after in zip(turn_ends, episode.turns[1:], strict=False) if after.new_segment]
    return Trajectory(
        id=trajectory_id,
        group_id=lease.group_id,
        index=index,
        task_id=lease.task.id,
        v_traj=lease.v_traj,
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        turns=len(episode.turns),
        reward=episode.reward,
        finish_reason=episode.finish_reason,
        metrics=episode.metrics,
        turn_ends=turn_ends,
        turn_rewards=tuple(turn.reward for turn in episode.turns),
        turn_seconds=tuple(turn.seconds for turn in episode.turns),
        reset_s=episode.reset_s,
        segment_ends=(*starts, len(tokens)) if starts else (),
    )
