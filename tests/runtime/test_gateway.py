"""The gateway with the real ``openai`` client: any program can be an agent, and its tokens become a trajectory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import openai
import pytest

from asyncrl.core.types import Task
from asyncrl.env import Agent
from asyncrl.runtime import gateway as gateway_module
from asyncrl.runtime.conversation import ChatTemplate
from asyncrl.runtime.env_manager import Episode
from asyncrl.runtime.gateway import Gateway
from asyncrl.runtime.rollout import Rollout, RolloutPlayer
from asyncrl.runtime.session import SessionLimits
from asyncrl.runtime.stage import Stage
from asyncrl.runtime.trajectory_server import Start

from .families import make_tokenizer
from .speaking import Answer, Speaker, proxy_of
from .test_chat_templates import CALL, TOOL, say
from .test_rollout import Played

TASK = Task(id="t", data={})
Program = Callable[[Agent, openai.AsyncOpenAI], Awaitable[Any]]


@asynccontextmanager
async def client_of(agent: Agent) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
        yield client


async def play(
    folder: Path,
    program: Program,
    answer: Answer = lambda prompt: "yes ab",
    **options: Any,
) -> Played:
    async def rollout(task: Task, agent: Agent) -> float:
        async with client_of(agent) as client:
            await program(agent, client)
        return 1.0

    return await play_rollout(folder, rollout, answer, **options)


async def play_rollout(
    folder: Path,
    rollout: Rollout,
    answer: Answer,
    *,
    task: Task = TASK,
    seconds: float = 0.0,
    idle_timeout_s: float = 20.0,
    **limits: Any,
) -> Played:
    tokenizer = make_tokenizer(folder, "qwen2.5")
    speaker = Speaker(tokenizer, answer, seconds=seconds)
    proxy = await proxy_of(speaker)
    gateway = Gateway(tokenizer=tokenizer, model="tiny", rng=Random(0))
    await gateway.start()

    player = RolloutPlayer(
        rollout=rollout,
        proxy=proxy,
        template=ChatTemplate(tokenizer),
        limits=SessionLimits(**{"max_turns": 10, "max_new_tokens": 200, "max_tokens": 1000, **limits}),
        idle_timeout_s=idle_timeout_s,
        admit=gateway.admit,
    )
    try:
        [episode] = await player.play(task, start=Start(0), stage=Stage())
        return Played(episode, speaker)
    finally:
        await gateway.close()
        assert speaker.running == 0


async def test_a_chat_with_the_real_client_is_one_sequence(tmp_path: Path) -> None:
    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        messages: list[Any] = [say("user", "hi ab")]
        for _ in range(3):
            completion = await client.chat.completions.create(
                model="whatever", messages=messages, temperature=0, logprobs=True
            )
            [choice] = completion.choices
            assert (choice.message.content, choice.finish_reason) == ("yes ab", "stop")
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert "".join(entry.token for entry in choice.logprobs.content) == "yes ab"
            assert {entry.logprob for entry in choice.logprobs.content} == {-0.25}
            assert completion.usage is not None and completion.usage.completion_tokens == 7
            messages += [choice.message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]

    played = await play(tmp_path, program)
    played.check_prompts()
    assert len(played.segments) == 1 and played.episode.reward == 1
    assert {request.temperature for request in played.speaker.requests} == {1.0}, "the run's, not the client's"


async def test_tools_with_the_real_client(tmp_path: Path) -> None:
    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [say("user", "look")]
        tools: Any = [TOOL]
        for _ in range(3):
            completion = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            [choice] = completion.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
            assert choice.message.tool_calls is not None
            [call] = choice.message.tool_calls
            assert call.type == "function" and call.function.name == "bash"
            assert json.loads(call.function.arguments) == {"command": "ab"}
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "x"}]
        quiet = await client.chat.completions.create(model="m", messages=messages, tools=tools, tool_choice="none")
        assert quiet.choices[0].finish_reason == "stop"

    played = await play(tmp_path, program, lambda prompt: f"I look.\n{CALL}")
    played.check_prompts()
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, False, True]


async def test_streams_with_the_real_client(tmp_path: Path) -> None:
    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        messages: Any = [say("user", "look")]
        tools: Any = [TOOL]
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "I look."
        [calls] = [c.choices[0].delta.tool_calls for c in chunks if c.choices and c.choices[0].delta.tool_calls]
        assert calls[0].index == 0 and calls[0].function is not None and calls[0].function.name == "bash"
        assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "tool_calls"]
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 10
        async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls is not None

    played = await play(tmp_path, program, lambda prompt: f"I look.\n{CALL}")
    played.check_prompts()


async def test_text_completions_with_the_real_client(tmp_path: Path) -> None:
    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        one = await client.completions.create(model="m", prompt="3+4=", max_tokens=4, logprobs=1)
        assert (one.choices[0].text, one.choices[0].finish_reason) == ("yes ", "length")
        assert one.choices[0].logprobs is not None and one.choices[0].logprobs.token_logprobs == [-0.25] * 4
        two = await client.completions.create(model="m", prompt="3+4=yes so", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in two]) == "yes ab"
        three = await client.completions.create(model="m", prompt=[5, 6, 7], stop="a")
        assert (three.choices[0].text, three.choices[0].finish_reason) == ("yes ", "stop")

    played = await play(tmp_path, program)
    played.check_prompts()
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, True]


async def test_a_client_gets_no_stop_string_and_goes_on_from_it(tmp_path: Path) -> None:
    """What was sampled has it, and stays as it was."""

    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [say("user", "hi")]
        for stop in ("END", ["nothing", "ND"]):
            completion = await client.chat.completions.create(model="m", messages=messages, stop=stop)
            [choice] = completion.choices
            assert (choice.message.content, choice.finish_reason) == ("one " if stop == "END" else "one E", "stop")
            messages += [choice.message, say("user", "more")]
        stream = await client.chat.completions.create(model="m", messages=messages, stop="END", stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "one "
        text = (await client.completions.create(model="m", prompt="say:", stop="END")).choices[0].text
        assert text == "one "
        await client.completions.create(model="m", prompt=f"say:{text}END and")
        await client.completions.create(model="m", prompt=f"say:{text}and")

    played = await play(tmp_path, program, lambda prompt: "one END two")
    played.check_prompts()
    assert [len(turn.output_ids) for turn in played.episode.turns[:3]] == [7, 7, 7]
    assert [turn.new_segment for turn in played.episode.turns] == [False, False, False, True, False, True]


async def test_a_stop_string_beside_a_call(tmp_path: Path) -> None:
    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [say("user", "look")]
        tools: Any = [TOOL]
        for _ in range(2):
            completion = await client.chat.completions.create(
                model="m", messages=messages, tools=tools, stop="</tool_call>"
            )
            [choice] = completion.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
            assert choice.message.tool_calls is not None
            [call] = choice.message.tool_calls
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "x"}]

    played = await play(tmp_path, program, lambda prompt: f"I look.\n{CALL} and more")
    played.check_prompts()
    assert len(played.segments) == 1


def spoken(call: Any) -> bytes:
    """A request in which the model is said to have made this call."""
    messages = [say("user", "?"), {"role": "assistant", "tool_calls": [call]}, say("tool", "no")]
    return json.dumps({"messages": messages}).encode()


async def test_what_is_wrong_is_said_in_openai_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "MAX_BODY", 2**16)
    hi: list[Any] = [say("user", "hi")]

    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.create
        await create(model="m", messages=hi)
        with pytest.raises(openai.BadRequestError, match="n: 2; an episode takes one reply at a time"):
            await create(model="m", messages=hi, n=2)
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await create(model="m", messages=hi, tool_choice="required")
        with pytest.raises(openai.BadRequestError, match="only text can be content"):
            image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            await create(model="m", messages=[image])
        with pytest.raises(openai.BadRequestError, match="messages: empty"):
            await create(model="m", messages=[])
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="m", messages=[say("user", "long " * 300)])  # type: ignore[list-item]
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="known are POST /v1/chat/completions"):
            await client.embeddings.create(model="m", input="x")
        with pytest.raises(openai.AuthenticationError, match="none of a running episode"):
            await client.with_options(api_key="sk-other").models.list()
        async with aiohttp.ClientSession() as session:
            right = {"Authorization": f"Bearer {agent.api_key}"}
            for headers, body, status in (
                ({}, b"{}", 401),
                ({"Authorization": "Basic x"}, b"{}", 401),
                (right, b"{", 400),
                (right, b'{"messages": 3}', 400),
                (right, b"\xff", 400),
                (right, b'{"messages": [{"role": "user"}], "n": 0}', 400),
                (right, b" " * 70_000, 413),
                (right, spoken({"function": "ls"}), 400),
                (right, spoken({"function": {"name": "ls", "arguments": "{"}}), 400),
                (right, spoken({"function": {"name": "ls", "arguments": "[1]"}}), 400),
                (
                    {"Authorization": f"Bearer {agent.api_key}"},
                    b'{"messages": [{"role": "user"}], "max_tokens": 0}',
                    400,
                ),
            ):
                url = f"{agent.base_url}/chat/completions"
                async with session.post(url, data=body, headers=headers) as response:
                    assert response.status == status, await response.text()
                    assert "message" in (await response.json())["error"]

        for outside in ([-1], [10**6], [10**12]):
            with pytest.raises(openai.BadRequestError, match="outside the model's vocabulary"):
                await client.completions.create(model="m", prompt=outside)

    played = await play(tmp_path, program)
    assert len(played.episode.turns) == 1


async def test_a_client_that_goes_away_gives_its_generation_up(tmp_path: Path) -> None:
    async def program(agent: Agent, client: openai.AsyncOpenAI) -> None:
        hi: list[Any] = [say("user", "hi")]
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.1, max_retries=0).chat.completions.create(model="m", messages=hi)
        await client.chat.completions.create(model="m", messages=hi)

    played = await play(tmp_path, program, seconds=0.3)
    assert len(played.speaker.requests) == 2 and len(played.episode.turns) == 1


async def test_after_the_end_and_after_the_last_turn(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen2.5")
    gateway = Gateway(tokenizer=tokenizer, model="tiny", rng=Random(0))
    await gateway.start()
    hi: list[Any] = [say("user", "hi")]
    agents: list[Agent] = []

    async with asyncio.TaskGroup() as group:

        async def ask(agent: Agent) -> None:
            async with client_of(agent) as client:
                with pytest.raises(openai.ConflictError, match="ended"):
                    await client.chat.completions.create(model="m", messages=hi)

        async def rollout(task: Task, agent: Agent) -> None:
            agents.append(agent)
            async with client_of(agent) as client:
                await client.chat.completions.create(model="m", messages=hi)
                speaker.seconds = 600.0
                speaker.asked.clear()
                group.create_task(ask(agent))  # its generation is given up when the episode ends
                await speaker.asked.wait()
                with pytest.raises(openai.ConflictError, match=r"env\.max_turns = 2"):
                    await client.chat.completions.create(model="m", messages=hi)

        speaker = Speaker(tokenizer, lambda prompt: "yes")
        player = RolloutPlayer(
            rollout=rollout,
            proxy=await proxy_of(speaker),
            template=ChatTemplate(tokenizer),
            limits=SessionLimits(max_turns=2, max_new_tokens=200, max_tokens=1000),
            idle_timeout_s=120,
            admit=gateway.admit,
        )
        [episode] = await player.play(TASK, start=Start(0), stage=Stage())
        await ask(agents[0])
    await gateway.close()
    assert len(episode.turns) == 1 and speaker.running == 0


async def test_episodes_side_by_side_do_not_meet(tmp_path: Path) -> None:
    """Each key has its own conversations, though all say the same."""
    tokenizer = make_tokenizer(tmp_path, "qwen2.5")
    gateway = Gateway(tokenizer=tokenizer, model="tiny", rng=Random(0))
    await gateway.start()
    speaker = Speaker(tokenizer, lambda prompt: "yes", seconds=0.01)
    keys: set[str] = set()

    async def rollout(task: Task, agent: Agent) -> float:
        keys.add(agent.api_key)
        messages: list[Any] = [say("user", "hi")]
        async with client_of(agent) as client:
            for _ in range(3):
                completion = await client.chat.completions.create(model="m", messages=messages)
                messages += [completion.choices[0].message, say("user", "more")]
        return 1

    player = RolloutPlayer(
        rollout=rollout,
        proxy=await proxy_of(speaker),
        template=ChatTemplate(tokenizer),
        limits=SessionLimits(max_turns=5, max_new_tokens=200, max_tokens=1000),
        idle_timeout_s=120,
        admit=gateway.admit,
    )
    episodes: list[Episode] = []

    async def one() -> None:
        episodes.extend(await player.play(TASK, start=Start(0), stage=Stage()))

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(one())
    await gateway.close()
    assert len(keys) == 8 and [len(episode.turns) for episode in episodes] == [3] * 8
    assert not any(turn.new_segment for episode in episodes for turn in episode.turns)
    assert gateway._sessions == {}
