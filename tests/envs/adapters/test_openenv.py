"""OpenEnv: a real server of the package in a process of its own, and what a server may do wrong.

python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv==0.10
OPENENV_PYTHON=/tmp/openenv/bin/python python -m pytest tests/envs/adapters/test_openenv.py
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.env import Action, EnvDown, Observation, Task
from asyncrl.envs.adapters.openenv import InvalidAction, OpenEnv, read_action
from asyncrl.envs.dialogue import Dialogue

PYTHON = os.environ.get("OPENENV_PYTHON")
SERVER = Path(__file__).with_name("openenv_server.py")
TASK = Task(id="t/1", data={"seed": 4})
GUESS = {"properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}}, "required": ["number"]}


def act(text: str) -> Action:
    return Action(text=text, token_ids=[], finish_reason="stop")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The real ones, by what they are for."""
    if not PYTHON:
        pytest.skip("OpenEnv is not installed; see the top of this file")
    with subprocess.Popen([PYTHON, str(SERVER)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield {name: f"http://127.0.0.1:{int(process.stdout.readline())}/" for name in ("guess", "bet", "small")}
        finally:
            process.kill()


@asynccontextmanager
async def playing(url: str, **kwargs: Any) -> AsyncIterator[OpenEnv]:
    env = OpenEnv(url, **kwargs)
    try:
        yield env
    finally:
        await env.close()


async def test_a_game_on_a_real_server(servers: dict[str, str]) -> None:
    async with playing(servers["guess"]) as env:
        assert await env.reset(Task(id="t/1", data={"seed": 4, "top": 5, "other": [1]})) == "A number from 1 to 5:\n>"
        wrong = await env.step(act("3\nI guess"))
        assert (wrong.observation, wrong.reward, wrong.done) == ("\nWrong.\n>", 0.0, False)
        odd = await env.step(act("three"))
        assert not odd.done and odd.metrics == {"steps": 2.0, "invalid": 1.0}
        assert str(odd.observation).startswith("\nnumber: Input should be a valid integer")
        right = await env.step(act("5"))
        assert (right.reward, right.done) == (1.0, True)
        assert await env.reset(TASK) == "A number from 1 to 9:\n>", "the session serves the next episode"
        with pytest.raises(RuntimeError, match="devil's number"):
            await env.step(act("666"))


async def test_many_sessions_at_once_are_apart(servers: dict[str, str]) -> None:
    async def play(seed: int) -> list[float]:
        async with playing(servers["guess"]) as env:
            await env.reset(Task(id="t", data={"seed": seed}))
            return [(await env.step(act(str(number)))).reward for number in range(1, 10)]

    async with asyncio.TaskGroup() as group:
        episodes = [group.create_task(play(seed)) for seed in range(40)]
    assert [episode.result().index(1.0) for episode in episodes] == [seed % 9 for seed in range(40)]


async def test_actions_of_several_fields_are_json(servers: dict[str, str]) -> None:
    async with playing(servers["bet"], style="chat", instructions="Bet.") as env:
        first = await env.reset(TASK)
        assert isinstance(first, Observation) and first.messages[0]["content"] == "Bet.\n\nA number from 1 to 9:"

        async def said(reply: str) -> tuple[str, float]:
            step = await env.step(act(reply))
            assert isinstance(step.observation, Observation)
            return step.observation.messages[0]["content"], step.reward

        hint = "That is no action here. Write a JSON object with: number (integer), word (string)."
        assert await said("5") == (hint, 0.0)
        assert (await said('{"number": 5}'))[0].startswith("word: Field required")
        assert (await said('{"number": 5, "word": "so"}'))[0].startswith("word: Input should be 'more' or 'less'")
        assert await said('I think:\n```json\n{"number": 5, "word": "more"}\n```') == ("Right.", 1.0)
    async with playing(servers["guess"], field="colour") as env:
        with pytest.raises(ValueError, match=r"env.kwargs.field = 'colour': the server's are number"):
            await env.reset(TASK)


async def test_a_server_without_room_and_one_that_dies(servers: dict[str, str]) -> None:
    url = servers["small"]
    async with playing(url) as env:
        await env.reset(TASK)
        async with playing(url) as second:
            with pytest.raises(EnvDown, match=r"max_concurrent_envs of at least rollout.num_envs"):
                await second.reset(TASK)
        # The last one that needs these servers: it ends them.
        with pytest.raises(EnvDown, match="closed the connection at a step"):
            await env.step(act("999"))
        async with playing(url) as late:
            with pytest.raises(EnvDown, match="no OpenEnv server answers there"):
                await late.reset(TASK)


# --- what needs no package --------------------------------------------------------------------------------------------


@asynccontextmanager
async def pretending(
    talk: Callable[[web.WebSocketResponse], Awaitable[None]], schema: object = None
) -> AsyncIterator[str]:
    """A server that does what a test tells it to."""

    async def socket(request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        await talk(response)
        return response

    async def schemas(request: web.Request) -> web.Response:
        return web.json_response({"action": GUESS} if schema is None else schema)

    app = web.Application()
    app.add_routes([web.get("/ws", socket), web.get("/schema", schemas)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def observe(socket: web.WebSocketResponse) -> None:
    async for message in socket:
        assert message.json()["data"]["seed"] >= 0
        data = {"observation": {"board": [1, 2], "hint": "é", "metadata": {}}, "reward": None, "done": False}
        await socket.send_json({"type": "observation", "data": data})


async def test_observations_of_several_fields() -> None:
    async with pretending(observe) as url:
        async with playing(url) as env:
            assert await env.reset(Task(id="t/1", data={})) == '{"board": [1, 2], "hint": "é"}\n>'
        async with playing(url, show="hint") as env:
            assert await env.reset(TASK) == "é\n>"
        async with playing(url, show="sound") as env:
            with pytest.raises(ValueError, match="the observation has board, hint"):
                await env.reset(TASK)


async def test_a_server_that_closes_is_down() -> None:
    async def close(socket: web.WebSocketResponse) -> None:
        await socket.receive()

    async with pretending(close) as url, playing(url) as env:
        with pytest.raises(EnvDown, match="closed the connection at a reset"):
            await env.reset(TASK)


async def test_what_is_no_openenv_server_is_down() -> None:
    async with pretending(observe, schema=[]) as url, playing(url) as env:
        with pytest.raises(EnvDown, match="not what an OpenEnv server answers"):
            await env.reset(TASK)


def test_how_replies_become_actions() -> None:
    plain, chat = Dialogue("plain"), Dialogue("chat")
    assert read_action(GUESS, "", plain, "4\nmore") == {"number": 4}
    assert read_action(GUESS, "", chat, "<think>Action: 3</think>So\nAction: 4") == {"number": 4}
    assert read_action(GUESS, "", chat, "4") == {"number": ""}
    code = {"properties": {"code": {"type": "string"}, "language": {"type": "string"}}, "required": ["code"]}
    assert read_action(code, "", plain, "<think>x</think>\na\nb\n") == {"code": "a\nb"}
    assert read_action(code, "language", plain, "c") == {"language": "c"}
    for nothing in ("", "{", "}{", "[1]"):
        with pytest.raises(InvalidAction, match=r"JSON object with: a \(any\), b \(string\)"):
            read_action({"properties": {"a": {}, "b": {"type": "string"}}}, "", plain, nothing)
