"""Programs that drive the model themselves: their requests become segments of one trajectory, whatever they do."""

from __future__ import annotations

import asyncio
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.types import Task, flatten
from asyncrl.env import Agent, EpisodeOver
from asyncrl.runtime.conversation import ChatTemplate
from asyncrl.runtime.env_manager import Episode
from asyncrl.runtime.rollout import Rollout, RolloutPlayer
from asyncrl.runtime.session import Session, SessionLimits
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.trajectory_server import Start
from asyncrl.runtime.user_code import EpisodeFailed
from asyncrl.sim.loop import run
from asyncrl.sim.tokenizer import SimTokenizer

from .families import make_tokenizer
from .speaking import Answer, Speaker, proxy_of
from .test_chat_templates import CALL, TOOL, say
from .world import cancelled_at, proxy_over, sim_engine

TASK = Task(id="t", data={})
LIMITS = {"max_turns": 10, "max_new_tokens": 200, "max_tokens": 1000}


class Played:
    """An episode, and what the server was asked for it."""

    def __init__(self, episode: Episode, speaker: Speaker) -> None:
        self.episode = episode
        self.speaker = speaker

    @property
    def segments(self) -> list[list[int]]:
        turns = self.episode.turns
        tokens, mask, _, _ = flatten(turns)
        ends = list(accumulate(len(t.prompt_ids) + len(t.output_ids) for t in turns))
        cuts = [0, *(end for end, after in zip(ends, turns[1:], strict=False) if after.new_segment), len(tokens)]
        assert sum(mask) == sum(len(turn.output_ids) for turn in turns)
        return [tokens[a:b].tolist() for a, b in pairwise(cuts)]

    def check_prompts(self) -> None:
        """Each generation was prompted with exactly what stands before it in its segment."""
        asked = sorted(request.input_ids.tolist() for request in self.speaker.requests)
        seen: list[list[int]] = []
        before: list[int] = []
        for turn in self.episode.turns:
            before = [*([] if turn.new_segment else before), *turn.prompt_ids]
            seen.append(before)
            before = [*before, *turn.output_ids]
        assert sorted(seen) == asked


def play(
    folder: Path,
    rollout: Rollout,
    answer: Answer = lambda prompt: "yes ab",
    *,
    family: str = "qwen2.5",
    seconds: float = 1.0,
    idle_timeout_s: float = 5.0,
    history: Any = "segments",
    busy: list[bool] | None = None,
    **limits: Any,
) -> Played:
    async def main() -> Played:
        tokenizer = make_tokenizer(folder, family)
        speaker = Speaker(tokenizer, answer, seconds=seconds)
        proxy = await proxy_of(speaker)
        player = RolloutPlayer(
            rollout=rollout,
            proxy=proxy,
            template=ChatTemplate(tokenizer, history=history),
            limits=SessionLimits(**{**LIMITS, **limits}),
            idle_timeout_s=idle_timeout_s,
        )
        try:
            heard = busy.append if busy is not None else lambda running: None
            [episode] = await player.play(TASK, start=Start(0), stage=Stage(on_running=heard))
        finally:
            assert speaker.running == 0 and all(i.running == 0 for i in proxy.instances)
        return Played(episode, speaker)

    return run(main())


def failure(folder: Path, rollout: Rollout, **kwargs: Any) -> str:
    with pytest.raises(EpisodeFailed) as caught:
        play(folder, rollout, **kwargs)
    return str(caught.value)


def test_a_conversation_is_one_sequence(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        messages: list[Any] = [say("user", "hi ab")]
        for i in range(3):
            reply = await agent.chat(messages)
            assert (reply.text, reply.finish_reason) == ("yes ab", "stop")
            agent.reward(0.25)
            agent.metrics["replies"] = i + 1
            messages += [reply.message, say("user", f"more {i}")]
        return 2.0

    played = play(tmp_path, rollout)
    assert len(played.segments) == 1
    played.check_prompts()
    episode = played.episode
    assert [turn.reward for turn in episode.turns] == [0.25, 0.25, 2.25]
    assert (episode.reward, episode.finish_reason, episode.metrics) == (2.75, "stop", {"replies": 3})


def test_a_branch_shares_the_ids_before_it(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        messages: list[Any] = [say("user", "hi")]
        reply = await agent.chat(messages)
        messages.append(reply.message)
        await agent.chat([*messages, say("user", "left")])
        await agent.chat([*messages, say("user", "right")])
        return 1

    played = play(tmp_path, rollout)
    played.check_prompts()
    left, right = played.segments
    first = played.episode.turns[0]
    shared = [*first.prompt_ids, *first.output_ids]
    assert left[: len(shared)] == right[: len(shared)] == shared
    _, mask, _, _ = flatten(played.episode.turns)
    assert sum(mask[len(left) : len(left) + len(shared)]) == 0, "what was sampled once is trained once"


def test_sub_agents_side_by_side(tmp_path: Path) -> None:
    busy: list[bool] = []

    async def rollout(task: Task, agent: Agent) -> float:
        async def sub(name: str) -> None:
            messages: list[Any] = [say("user", name)]
            for _ in range(2):
                reply = await agent.chat(messages)
                messages += [reply.message, say("user", "go on")]

        async with asyncio.TaskGroup() as group:
            for name in ("one", "two", "three"):
                group.create_task(sub(name))
        return 1

    played = play(tmp_path, rollout, busy=busy)
    played.check_prompts()
    assert len(played.segments) == 3 and len(played.episode.turns) == 6
    assert busy[0] and not busy[-1] and busy == [True, False] * (len(busy) // 2)


def times(played: Played) -> list[float]:
    """The program's: before the first reply, and after each."""
    return [played.episode.reset_s, *(turn.seconds[2] for turn in played.episode.turns)]


def test_the_program_s_own_time_is_the_environment_s(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        messages: list[Any] = [say("user", "hi")]
        await asyncio.sleep(0.5)
        for i in range(2):
            reply = await agent.chat(messages)
            await asyncio.sleep(0.25)
            with pytest.raises(ValueError):
                await agent.chat([])
            await asyncio.sleep(i)
            messages += [reply.message, say("user", "more")]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await agent.chat(messages)
        await asyncio.sleep(2)
        return 1

    played = play(tmp_path, rollout)
    assert times(played) == pytest.approx([0.5, 0.25, 3.25]), "a request that is cancelled is no time of the program"
    assert [sum(turn.seconds[:2]) for turn in played.episode.turns] == pytest.approx([1, 1])


def test_no_time_of_sub_agents_is_counted_twice(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        async def sub(name: str, before_s: float, after_s: float) -> None:
            await asyncio.sleep(before_s)
            reply = await agent.chat([say("user", name)])
            await asyncio.sleep(after_s)
            await agent.chat([say("user", name), reply.message, say("user", "go on")])

        async with asyncio.TaskGroup() as group:  # each asks for a second: from 0, from 0.5, and 1 and 2 s later
            group.create_task(sub("one", 0, 1.0))
            group.create_task(sub("two", 0.5, 2.0))
        return 1

    # Nothing is asked from 1.5 to 2 and from 3 to 3.5; "one" works from 1 to 1.5 beside the reply to "two".
    played = play(tmp_path, rollout)
    assert times(played) == pytest.approx([0, 0.5, 0.5, 0.5, 0])
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, True, False]


def test_two_requests_from_one_place_at_once(tmp_path: Path) -> None:
    """The second to end is a branch; nothing is overwritten."""

    async def rollout(task: Task, agent: Agent) -> float:
        reply = await agent.chat([say("user", "hi")])
        messages = [say("user", "hi"), reply.message]
        async with asyncio.TaskGroup() as group:
            for word in ("left", "right"):
                group.create_task(agent.chat([*messages, say("user", word)]))
        return 1

    played = play(tmp_path, rollout)
    played.check_prompts()
    assert len(played.segments) == 2


def test_in_order_a_conversation_goes_on_in_a_new_segment_once_another_had_its_turn(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        messages: list[Any] = [say("user", "hi")]
        for i in range(3):
            messages.append((await agent.chat(messages)).message)
            agent.reward(i)
            if i == 1:
                await agent.chat([say("user", "sub")])
                agent.reward(10)
            messages.append(say("user", f"more {i}"))
        return 100

    played = play(tmp_path, rollout, in_order=True)
    played.check_prompts()
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, True, True]
    assert [turn.reward for turn in played.episode.turns] == [0, 1, 10, 102]
    first, _, last = played.segments
    assert last[: len(first)] == first
    _, mask, _, _ = flatten(played.episode.turns)
    assert sum(mask[-len(last) :][: len(first)]) == 0, "what was sampled once is trained once"


def test_in_order_a_request_beside_another_is_refused(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.chat([say("user", "left")]))
            await asyncio.sleep(0.5)
            with pytest.raises(ValueError, match=r'^one request at a time: algorithm\.advantage = "gae" judges each'):
                await agent.chat([say("user", "right")])
        return 1

    assert len(play(tmp_path, rollout, in_order=True).episode.turns) == 1


def test_a_request_that_is_cancelled_leaves_no_trace(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        messages: list[Any] = [say("user", "hi")]
        reply = await agent.chat(messages)
        messages += [reply.message, say("user", "more")]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await agent.chat(messages)
        await agent.chat(messages)
        return 1

    played = play(tmp_path, rollout)
    assert len(played.segments) == 1 and len(played.episode.turns) == 2
    assert len(played.speaker.requests) == 3


def test_calls_and_their_results_stay_in_one_sequence(tmp_path: Path) -> None:
    """Also where the program sends the reply back as OpenAI's API has it, or as text."""
    for as_text in (False, True):

        async def rollout(task: Task, agent: Agent, as_text: bool = as_text) -> float:
            messages: list[Any] = [say("user", "look")]
            for _ in range(3):
                reply = await agent.chat(messages, tools=[TOOL])
                [call] = reply.tool_calls
                assert (call.name, call.arguments) == ("bash", {"command": "ab"})
                assert reply.message["content"] == "I look."
                said = say("assistant", reply.text) if as_text else {**reply.message, "refusal": None}
                messages += [said, {**say("tool", "x"), "tool_call_id": call.id}]
            return 1

        played = play(tmp_path, rollout, lambda prompt: f"I look.\n{CALL}")
        played.check_prompts()
        assert len(played.segments) == 1


@pytest.mark.parametrize(("history", "segments"), [("segments", 2), ("keep", 1)])
def test_dropped_thoughts_begin_a_segment(tmp_path: Path, history: str, segments: int) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        reply = await agent.chat([say("user", "hi")])
        await agent.chat([say("user", "hi"), reply.message, say("user", "more")])
        return 1

    played = play(tmp_path, rollout, lambda p: "<think>\nhm\n</think>\n\nyes", family="qwen3", history=history)
    assert len(played.segments) == segments


def test_text_and_ids_are_continued_too(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        reply = await agent.complete("3+4=")
        second = await agent.complete(f"3+4={reply.text}, 1+1=")
        assert second.prompt_tokens > reply.prompt_tokens
        await agent.complete("other")
        ids = agent._conversations[1].ids.tolist()  # type: ignore[attr-defined]
        await agent.complete([*ids, *ids[:2]])
        return 1

    played = play(tmp_path, rollout)
    played.check_prompts()
    assert [len(turn.output_ids) for turn in played.episode.turns] == [7, 7, 7, 7]
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, True, False]


def test_a_stop_string_ends_where_the_server_would_have(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        reply = await agent.chat([say("user", "hi")], stop=["END"])
        assert (reply.text, reply.finish_reason) == ("one END", "stop")
        await agent.chat([say("user", "hi"), reply.message, say("user", "more")], stop=["nothing", ""])
        return 1

    played = play(tmp_path, rollout, lambda prompt: "one END two")
    played.check_prompts()
    assert len(played.segments) == 1 and len(played.episode.turns[0].output_ids) == 7
    played.check_prompts()


def test_what_is_no_unicode_costs_nothing(tmp_path: Path) -> None:
    """Half of a surrogate pair, in what a program tells the model and in a call that the model makes."""
    spoken = '<tool_call>\n{"name": "bash", "arguments": {"command": "\\ud83d"}}\n</tool_call>'

    async def rollout(task: Task, agent: Agent) -> float:
        messages = [say("user", "hi \ud83d")]
        reply = await agent.chat(messages, tools=[TOOL])
        [call] = reply.tool_calls
        assert "surrogate" in call.error and reply.message["content"] == reply.text
        await agent.chat([*messages, reply.message, say("tool", call.error)], tools=[TOOL])
        await agent.complete("hi \ud83d")
        return 1

    played = play(tmp_path, rollout, lambda prompt: spoken)
    played.check_prompts()
    assert len(played.segments) == 2


# --- limits and failures ----------------------------------------------------------------------------------------------


async def endless(task: Task, agent: Agent) -> float:
    messages: list[Any] = [say("user", "hi")]
    while True:
        reply = await agent.chat(messages)
        agent.reward(1)
        messages += [reply.message, say("user", "more")]


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 3}, 3), ({"max_tokens": 150, "max_turns": 99}, 4)])
def test_a_limit_ends_the_episode_with_the_rewards_so_far(tmp_path: Path, limits: Any, turns: int) -> None:
    played = play(tmp_path, endless, **limits)
    assert len(played.segments[0]) <= limits.get("max_tokens", 1000)
    episode = played.episode
    assert (len(episode.turns), episode.reward, episode.finish_reason) == (turns, turns, "length")


def test_a_limit_within_a_task_group_is_one_too(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(endless(task, agent))
        return 5

    assert play(tmp_path, rollout, max_turns=2).episode.reward == 2


def test_of_a_prompt_that_is_too_long_only_a_beginning_is_encoded(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def rollout(task: Task, agent: Agent) -> float:
        await agent.chat([say("user", "hi")])
        tokenizer = agent._template.tokenizer  # type: ignore[attr-defined]
        encode = tokenizer.encode
        tokenizer.encode = lambda text: sizes.append(len(text)) or encode(text)
        for call in (agent.chat([say("user", "ab" * 10**6)]), agent.complete("ab" * 10**6)):
            with pytest.raises(EpisodeOver, match="maximum context length is 150 tokens"):
                await call
        return 1

    assert play(tmp_path, rollout, max_tokens=150).episode.finish_reason == "length"
    assert len(sizes) == 2 and max(sizes) < 10_000


def test_a_program_may_catch_the_limit(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        try:
            return await endless(task, agent)
        except EpisodeOver as over:
            assert "env.max_turns = 2" in str(over)
            return 10

    assert play(tmp_path, rollout, max_turns=2).episode.reward == 12


def test_a_reply_can_be_cut_short_and_gone_on_from(tmp_path: Path) -> None:
    async def rollout(task: Task, agent: Agent) -> float:
        reply = await agent.chat([say("user", "hi")], max_tokens=2)
        assert (reply.text, reply.finish_reason) == ("ye", "length")
        await agent.chat([say("user", "hi"), reply.message, say("user", "more")])
        return 1

    played = play(tmp_path, rollout)
    played.check_prompts()
    assert len(played.segments) == 1


def test_failures_are_the_episode_s(tmp_path: Path) -> None:
    async def raises(task: Task, agent: Agent) -> float:
        raise KeyError("answer")

    async def hangs(task: Task, agent: Agent) -> float:
        await agent.chat([say("user", "hi")])
        await asyncio.sleep(1e6)
        return 0

    async def silent(task: Task, agent: Agent) -> float:
        return 1

    async def bad_reward(task: Task, agent: Agent) -> Any:
        await agent.chat([say("user", "hi")])
        return "much"

    async def bad_messages(task: Task, agent: Agent) -> Any:
        await agent.chat([{"text": "hi"}])

    async def own_timeout(task: Task, agent: Agent) -> Any:
        async with asyncio.timeout(0.1):
            await agent.chat([say("user", "hi")])

    async def cancels(task: Task, agent: Agent) -> Any:
        raise asyncio.CancelledError

    async def exits(task: Task, agent: Agent) -> Any:
        raise SystemExit(3)

    async def no_metrics(task: Task, agent: Agent) -> Any:
        await agent.chat([say("user", "hi")])
        agent.metrics = None  # type: ignore[assignment]

    async def fails_in_a_group(task: Task, agent: Agent) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(raises(task, agent))

    assert "CancelledError" in failure(tmp_path, cancels)
    assert "SystemExit: 3" in failure(tmp_path, exits)
    assert "AttributeError: 'NoneType'" in failure(tmp_path, no_metrics)
    assert "ExceptionGroup" in failure(tmp_path, fails_in_a_group)
    assert failure(tmp_path, raises) == "rollout: KeyError: 'answer'"
    assert "env.step_timeout_s = 5 s" in failure(tmp_path, hangs)
    assert "without a reply" in failure(tmp_path, silent)
    assert "rollout" in failure(tmp_path, bad_reward)
    assert "not a chat message" in failure(tmp_path, bad_messages)
    assert "TimeoutError" in failure(tmp_path, own_timeout)


def test_generating_for_long_is_not_idling(tmp_path: Path) -> None:
    assert len(play(tmp_path, endless, seconds=50.0, max_turns=3).episode.turns) == 3


def test_nothing_is_generated_after_the_end(tmp_path: Path) -> None:
    """Not for a program that left requests running in another task, and not for one that kept its agent."""
    over: list[str] = []

    async def main() -> None:
        async def ask(agent: Agent, text: str) -> None:
            try:
                await agent.chat([say("user", text)])
            except EpisodeOver as error:
                over.append(str(error))

        async with asyncio.TaskGroup() as group:

            async def rollout(task: Task, agent: Agent) -> float:
                agents.append(agent)
                await agent.chat([say("user", "hi")])
                group.create_task(ask(agent, "left alone"))
                await asyncio.sleep(0.5)
                return 1

            agents: list[Agent] = []
            tokenizer = make_tokenizer(tmp_path, "qwen2.5")
            speaker = Speaker(tokenizer, lambda prompt: "yes", seconds=1.0)
            player = RolloutPlayer(
                rollout=rollout,
                proxy=await proxy_of(speaker),
                template=ChatTemplate(tokenizer),
                limits=SessionLimits(**LIMITS),
                idle_timeout_s=5,
            )
            [episode] = await player.play(TASK, start=Start(0), stage=Stage())
            assert len(episode.turns) == 1
            await ask(agents[0], "more")
            with pytest.raises(EpisodeOver):
                agents[0].reward(1)
        assert over == ["the episode has ended"] * 2 and speaker.running == 0

    run(main())


async def simulated() -> list[Episode]:
    async def rollout(task: Task, agent: Agent) -> float:
        messages: list[Any] = [say("user", "hi")]
        reply = await agent.chat(messages)
        async with asyncio.TaskGroup() as group:
            for word in ("a", "b"):
                group.create_task(agent.chat([*messages, reply.message, say("user", word)]))
        return 1

    proxy = await proxy_over(sim_engine())
    player = RolloutPlayer(
        rollout=rollout,
        proxy=proxy,
        template=ChatTemplate(SimTokenizer()),
        limits=SessionLimits(**LIMITS),
        idle_timeout_s=5,
    )
    try:
        return await player.play(TASK, start=Start(0), stage=Stage())
    finally:
        assert all(i.running == 0 for i in proxy.instances)


def test_simulated_servers_play_along() -> None:
    [episode] = run(simulated())
    assert [len(turn.output_ids) for turn in episode.turns] == [20, 20, 20]


def test_cancelled_at_every_turn_of_the_loop_it_leaves_nothing_running() -> None:
    turn = 1
    while cancelled_at(turn, simulated()):
        turn += 1
    assert turn > 10


def test_a_long_conversation_costs_its_own_length(tmp_path: Path) -> None:
    """Each request names all messages, and only the new ones are rendered and encoded."""
    costs = []
    for turns in (100, 200):

        async def main(turns: int = turns) -> int:
            tokenizer = make_tokenizer(tmp_path / str(turns), "qwen2.5")
            speaker = Speaker(tokenizer, lambda prompt: "north")
            session = Session(
                proxy=await proxy_of(speaker),
                template=ChatTemplate(tokenizer),
                limits=SessionLimits(max_turns=1000, max_new_tokens=50, max_tokens=10**5),
                start=Start(0),
                temperature=1.0,
                top_p=1.0,
                pinned=False,
                on_busy=lambda busy: None,
            )
            messages: list[Any] = [say("user", "begin")]
            for _ in range(turns):
                reply = await session.chat(messages)
                messages += [reply.message, say("user", "You are in a room.")]
            assert len(session._conversations) == 1
            return tokenizer.rendered + tokenizer.encoded

        costs.append(run(main()))
    assert costs[1] < 2.1 * costs[0]
