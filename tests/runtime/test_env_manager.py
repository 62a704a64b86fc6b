"""Episodes: turns, limits, deadlines and the user's errors, played against a simulated server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.types import Task
from asyncrl.env import Action, Env, Observation, Step
from asyncrl.envs.single_turn import SingleTurn
from asyncrl.runtime.conversation import ChatTemplate
from asyncrl.runtime.env_manager import EnvManager, Episode, EpisodeLimits, EpisodePlayer, _trajectory
from asyncrl.runtime.env_source import LocalEnvs
from asyncrl.runtime.reward import Scorer
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.task_source import TaskSource
from asyncrl.runtime.trajectory_server import Start
from asyncrl.runtime.user_code import EpisodeFailed, FailureWindow
from asyncrl.sim.blocking import SimBlocking
from asyncrl.sim.engine import GENERATED
from asyncrl.sim.loop import run
from asyncrl.sim.tokenizer import SimTokenizer
from asyncrl.sim.trace import TraceRecorder

from .world import cancelled_at, proxy_over, sim_engine

TASK = Task(id="t", data={"prompt": "ab", "answer": "x"})


class Dialogue(Env):
    """Three turns; remembers what it was given. ``open`` counts environments that were not closed."""

    open = 0
    seen: list[Action]

    def __init__(self) -> None:
        type(self).open += 1
        self.seen = []

    async def reset(self, task: Task) -> Observation | str:
        await asyncio.sleep(0.1)
        return "ab"

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(0.1)
        self.seen.append(action)
        return Step(observation="cd", reward=0.5, done=len(self.seen) == 3, metrics={"turns": len(self.seen)})

    async def close(self) -> None:
        await asyncio.sleep(0.1)
        type(self).open -= 1


async def play(
    make_env: Callable[[], Env] = Dialogue,
    *,
    n: int = 1,
    length: int = 4,
    reward: Any = None,
    tokenizer: SimTokenizer | None = None,
    **limits: Any,
) -> list[Episode]:
    import random

    proxy = await proxy_over(sim_engine(length=length))
    defaults: dict[str, Any] = {
        "max_turns": 5,
        "max_new_tokens": 50,
        "max_tokens": 200,
        "reset_timeout_s": 5,
        "step_timeout_s": 5,
    }
    blocking = SimBlocking(rng=random.Random(0))
    player = EpisodePlayer(
        envs=LocalEnvs(make_env),
        scorer=None if reward is None else Scorer(reward, blocking=blocking, timeout_s=5),
        proxy=proxy,
        template=ChatTemplate(tokenizer or SimTokenizer()),
        limits=EpisodeLimits(**{**defaults, **limits}),
    )
    try:
        return await player.play(TASK, start=Start(0), n=n, stage=Stage())
    finally:
        assert all(i.running == 0 for i in proxy.instances)


def failure(make_env: Callable[[], Env] = Dialogue, **kwargs: Any) -> str:
    Dialogue.open = 0
    with pytest.raises(EpisodeFailed) as caught:
        run(play(make_env, **kwargs))
    assert Dialogue.open == 0
    return str(caught.value)


def test_a_dialogue_is_appended_turn_by_turn() -> None:
    [episode] = run(play())
    generated = [GENERATED + r for r in (3, 2, 1, 0)]
    assert [(list(t.prompt_ids), list(t.output_ids)) for t in episode.turns] == [
        (list(b"ab"), generated),
        (list(b"cd"), generated),
        (list(b"cd"), generated),
    ]
    assert episode.reward == 1.5
    assert [t.reward for t in episode.turns] == [0.5, 0.5, 0.5]
    assert episode.finish_reason == "stop"
    assert episode.metrics == {"turns": 3}


def test_a_trajectory_knows_where_its_segments_end() -> None:
    [episode] = run(play())
    first, second, third = episode.turns
    turns = [first, second, msgspec.structs.replace(third, new_segment=True)]
    lease = SimpleNamespace(group_id=3, task=TASK, v_traj=0)
    trajectory = _trajectory(lease, 7, 1, msgspec.structs.replace(episode, turns=turns))  # type: ignore[arg-type]
    assert trajectory.segment_ends == (12, 18) == trajectory.turn_ends[1:]
    assert _trajectory(lease, 7, 1, episode).segment_ends == ()  # type: ignore[arg-type]


class WithTools(Dialogue):
    """Its tools go to the template, and the calls of them come back parsed."""

    async def reset(self, task: Task) -> Observation | str:
        return Observation(messages=[{"role": "user", "content": "go"}], tools=[{"function": {"name": "look"}}])

    async def step(self, action: Action) -> Step:
        [call] = action.tool_calls
        return Step(done=True, reward=float((call.name, call.arguments) == ("look", {"at": "it"})))


class Caller(SimTokenizer):
    """Whatever is generated reads as a call."""

    def decode(self, ids: Any) -> str:
        return '{"name": "look", "arguments": {"at": "it"}}' if ids[0] >= GENERATED else super().decode(ids)


def test_tools_go_to_the_template_and_calls_come_back() -> None:
    [episode] = run(play(WithTools, tokenizer=Caller()))
    assert bytes(list(episode.turns[0].prompt_ids)) == b"<tool>look\x00<user>go\x00<assistant>"
    assert episode.reward == 1


def test_a_trajectory_knows_what_each_turn_brought() -> None:
    class Growing(Dialogue):
        async def reset(self, task: Task) -> str:
            await asyncio.sleep(0.5)
            return await super().reset(task)

        async def step(self, action: Action) -> Step:
            await asyncio.sleep(action.turn / 8)
            return msgspec.structs.replace(await super().step(action), reward=float(action.turn))

    [episode] = run(play(Growing))
    lease = SimpleNamespace(group_id=3, task=TASK, v_traj=0)
    trajectory = _trajectory(lease, 7, 1, episode)  # type: ignore[arg-type]
    assert trajectory.turn_rewards == (0.0, 1.0, 2.0)
    assert trajectory.turn_ends == (6, 12, 18)  # prompts of 2, outputs of 4
    assert trajectory.reward == 3.0
    assert len(trajectory.tokens) == 18
    waited, generated, in_env = zip(*trajectory.turn_seconds, strict=True)
    assert (trajectory.reset_s, *in_env) == pytest.approx((0.6, 0.1, 0.225, 0.35))  # 0.1 of each is Dialogue's
    assert waited == (0, 0, 0)
    assert all(seconds > 0 for seconds in generated)


def test_the_turn_limit_ends_an_episode() -> None:
    assert len(run(play(max_turns=2))[0].turns) == 2


def test_the_token_limit_ends_an_episode_as_length() -> None:
    [episode] = run(play(max_tokens=13))
    assert [len(t.output_ids) for t in episode.turns] == [4, 4]  # 2 + 4 + 2 + 4 + 2: the third prompt does not fit
    assert episode.finish_reason == "length"


def test_a_generation_is_cut_to_what_fits() -> None:
    [episode] = run(play(max_tokens=10, length=100))
    assert len(episode.turns[0].output_ids) == 8
    assert episode.turns[0].finish_reason == "length"


def test_single_turn_work_is_judged_by_the_reward_function() -> None:
    seen: list[tuple[str, str]] = []

    def reward(task: Task, response: Action) -> float:
        seen.append((task.data["answer"], response.finish_reason))
        return 0.25

    [episode] = run(play(SingleTurn, reward=reward))
    assert (episode.reward, len(episode.turns), seen) == (0.25, 1, [("x", "stop")])


def test_an_async_reward_runs_on_the_loop() -> None:
    async def reward(task: Task, response: Action) -> float:
        await asyncio.sleep(1)
        return 1.0

    assert run(play(SingleTurn, reward=reward))[0].reward == 1.0


def test_a_group_in_one_request_gives_independent_episodes() -> None:
    episodes = run(play(SingleTurn, n=3, reward=lambda task, response: 1.0))
    assert len(episodes) == 3
    assert all(e.reward == 1.0 and len(e.turns) == 1 for e in episodes)
    assert len({id(e.turns) for e in episodes}) == 3


def test_a_group_in_one_request_needs_one_prompt() -> None:
    class Random(SingleTurn):
        count = 0

        async def reset(self, task: Task) -> Observation:
            type(self).count += 1
            return Observation(text=f"prompt {self.count}")

    assert "expand_num_return_sequences" in failure(Random, n=2)


class Undecided:
    def __bool__(self) -> bool:
        raise ValueError("the truth of an array is ambiguous")


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


class Broken(Dialogue):
    """Misbehaves in the way that ``how`` says."""

    how = ""

    async def reset(self, task: Task) -> Observation | str:
        match self.how:
            case "reset raises":
                raise KeyError("board")
            case "reset hangs":
                await asyncio.get_running_loop().create_future()
            case "reset gives bytes":
                return b"ab"  # type: ignore[return-value]
            case "reset gives nothing":
                return ""
            case "prompt too long":
                return "x" * 500
            case "messages without template":
                return Observation(messages=[{"role": "user", "content": "hi"}])
        return "ab"

    async def step(self, action: Action) -> Step:
        match self.how:
            case "step raises":
                raise ValueError("no such move\nsecond line")
            case "step hangs":
                await asyncio.sleep(1e9)
            case "step times out itself":
                raise TimeoutError("judge")
            case "step gives a tuple":
                return (1, 2)  # type: ignore[return-value]
            case "reward is nan":
                return Step(reward=float("nan"))
            case "reward is text":
                return Step(reward="high")  # type: ignore[arg-type]
            case "reward has no name":
                return Step(reward=Nameless())  # type: ignore[arg-type]
            case "messages are a number":
                return Step(observation=Observation(messages=5))  # type: ignore[arg-type]
            case "done is no truth":
                return Step(done=Undecided())  # type: ignore[arg-type]
            case "metrics are odd":
                return Step(metrics=[1, 2])  # type: ignore[arg-type]
            case "metrics are empty":
                return Step(metrics=[])  # type: ignore[arg-type]
            case "metrics are none":
                return Step(metrics=None)  # type: ignore[arg-type]
        return await super().step(action)


class NoTemplate(SimTokenizer):
    def render(self, messages: Any, add_generation_prompt: bool, tools: Any = ()) -> str:
        raise ValueError("the model has no chat template; observations must be plain text")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reset raises", "reset: KeyError: 'board'"),
        ("reset hangs", "reset: no answer within 5 s"),
        ("reset gives bytes", "reset: gave bytes as observation; give text or an Observation"),
        ("reset gives nothing", "reset: gave an empty first observation, so there is nothing to continue"),
        ("prompt too long", "reset: the prompt has 500 tokens; raise rollout.max_tokens (200)"),
        (
            "messages without template",
            "reset: the model has no chat template; observations must be plain text",
        ),
        ("step raises", "step: ValueError: no such move"),
        ("step hangs", "step: no answer within 5 s"),
        ("step times out itself", "step: TimeoutError: judge"),
        ("step gives a tuple", "step: returned tuple; it must return asyncrl.Step"),
        ("reward is nan", "step: gave nan as the reward; it must be finite"),
        ("metrics are odd", "step: AttributeError: 'list' object has no attribute 'items'"),
        ("metrics are empty", "step: AttributeError: 'list' object has no attribute 'items'"),
        ("metrics are none", "step: AttributeError: 'NoneType' object has no attribute 'items'"),
        ("reward has no name", "step: RuntimeError: no name"),
        ("messages are a number", "step: Value after * must be an iterable, not int"),
        ("done is no truth", "step: ValueError: the truth of an array is ambiguous"),
        ("reward is text", "step: gave 'high' as the reward; it must be a number"),
    ],
)
def test_each_misbehaviour_is_one_line_and_the_env_is_closed(how: str, message: str) -> None:
    Broken.open, Broken.how = 0, how
    with pytest.raises(EpisodeFailed) as caught:
        run(play(Broken, tokenizer=NoTemplate()))
    assert str(caught.value) == message
    assert Broken.open == 0


def test_a_constructor_that_raises_fails_the_reset() -> None:
    class Unmade(Dialogue):
        def __init__(self) -> None:
            raise OSError("no display")

    assert failure(Unmade) == "reset: OSError: no display"


def test_a_close_that_raises_or_hangs_loses_nothing() -> None:
    class Sticky(Dialogue):
        async def close(self) -> None:
            await asyncio.sleep(1e9)

    class Shielded(Dialogue):
        async def close(self) -> None:
            for _ in range(30):  # what it does has to be done, whatever the deadline
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)

    class Endless(Dialogue):
        async def close(self) -> None:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)

    class Rude(Dialogue):
        async def close(self) -> None:
            raise RuntimeError("already closed")

    for env in (Sticky, Shielded, Endless, Rude):
        assert run(play(env), limit=1000)[0].reward == 1.5


def test_the_first_traceback_of_user_code_is_kept() -> None:
    Broken.open, Broken.how = 0, "step raises"
    with pytest.raises(EpisodeFailed) as caught:
        run(play(Broken))
    assert "no such move" in caught.value.details and "Traceback" in caught.value.details


def test_a_deadline_and_a_revocation_in_the_same_tick_do_not_meet() -> None:
    """The run's end must not fail because an episode ran into its deadline at that very moment."""

    class Hanging(SingleTurn):
        async def reset(self, task: Task) -> Observation:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> dict[str, dict[str, int]]:
        buffer = SampleBuffer(
            control=InflightCap(batch=1, alpha=0),
            tasks=TaskSource([TASK], seed=0),
            group_size=2,
            observer=TraceRecorder(),
        )
        manager = EnvManager(
            name="env 0",
            buffer=buffer,
            player=EpisodePlayer(
                envs=LocalEnvs(Hanging),
                scorer=None,
                proxy=await proxy_over(sim_engine()),
                template=ChatTemplate(SimTokenizer()),
                limits=EpisodeLimits(
                    max_turns=1, max_new_tokens=5, max_tokens=50, reset_timeout_s=90, step_timeout_s=90
                ),
            ),
            failures={"": FailureWindow(size=10, max_rate=1.0)},
            observer=TraceRecorder(),
            episode_timeout_s=10,
            temperature=1.0,
            top_p=1.0,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(manager.run())
            asyncio.get_running_loop().call_at(10 + 1e-10, buffer.close, "over")  # in the deadline's tick, behind it
            await asyncio.sleep(11)
            running.cancel()
        buffer.ledger.check_balanced()
        return buffer.ledger.reasons()

    assert run(main()) == {"aborted": {"over": 2}}


def test_cancelling_an_episode_at_any_await_closes_its_env() -> None:
    turn = 1
    while True:
        Dialogue.open = 0
        if not cancelled_at(turn, play()):
            break
        assert Dialogue.open == 0
        turn += 1
    assert turn > 20


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_task_group_of_the_environment_that_fails_costs_an_episode_and_no_slot(method: str) -> None:
    """CPython 3.11 leaves the task's count of cancellations wrong then, which must not pass for one of ours."""

    async def fail() -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("a child failed")

    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    class Grouped(Dialogue):
        async def reset(self, task: Task) -> str:
            if method == "reset":
                await fails()
            return await super().reset(task)

        async def step(self, action: Action) -> Step:
            await fails()
            return await super().step(action)

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(EpisodeFailed, match=rf"{method}: ExceptionGroup: unhandled errors"):
            await play(Grouped)
        return task.cancelling()

    assert run(main()) == 0
