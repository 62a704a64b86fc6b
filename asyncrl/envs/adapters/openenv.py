"""Environments behind an OpenEnv server that is running somewhere.

    [env]
    target = "asyncrl.envs.adapters.openenv:OpenEnv"
    kwargs = { base_url = "http://127.0.0.1:8000" }

Spoken is OpenEnv's WebSocket protocol, one session an object, so nothing of theirs is installed here. The server has to
allow as many sessions as ``rollout.num_envs``: ``SUPPORTS_CONCURRENT_SESSIONS = True`` in its environment class,
``max_concurrent_envs`` in its app. A row's keys are the arguments of its ``reset``, ``seed`` among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from asyncrl.env import Action, Env, EnvDown, Observation, Step, Task
from asyncrl.envs.adapters import seed_of
from asyncrl.envs.dialogue import Dialogue, Style

MAX_MESSAGE = 64 * 2**20


class InvalidAction(Exception):
    """The model's fault, in words that it may read."""


class OpenEnv(Env):
    """``field`` is the one of the server's action schema that gets the reply; by default its only one, or the only one
    that must be there. A text field gets the whole reply without thoughts, another what ``style`` reads. Where there
    are several, the reply has to be a JSON object of them. ``show`` is the field of observations that the model sees;
    by default the only one, or all as JSON. ``instructions`` stand before the first.

    An action that the server does not accept is answered with the reason. Metrics: ``steps``, ``invalid``.
    """

    reusable = True

    def __init__(
        self, base_url: str, field: str = "", show: str = "", instructions: str = "", style: Style = "plain"
    ) -> None:
        self._url = base_url.rstrip("/")
        self._field = field
        self._show = show
        self._instructions = instructions
        self._dialogue = Dialogue(style)
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._schema: Mapping[str, Any] = {}
        self._steps = self._invalid = 0

    async def reset(self, task: Task) -> Observation | str:
        self._steps = self._invalid = 0
        if self._socket is None:
            await self._connect()
        try:
            said = await self._ask("reset", {**task.data, "seed": seed_of(task)})
        except InvalidAction as error:
            raise ValueError(f"the server does not accept the row: {error}") from None
        shown = self._shown(said["observation"])
        return self._dialogue.say(f"{self._instructions}\n\n{shown}" if self._instructions else shown, first=True)

    async def step(self, action: Action) -> Step:
        self._steps += 1
        try:
            said = await self._ask("step", read_action(self._schema, self._field, self._dialogue, action.text))
        except InvalidAction as error:
            self._invalid += 1
            said = {"observation": str(error)}
        return Step(
            observation=self._dialogue.say(self._shown(said["observation"])),
            reward=float(said.get("reward") or 0.0),
            done=bool(said.get("done")),
            metrics={"steps": float(self._steps), "invalid": float(self._invalid)},
        )

    async def close(self) -> None:
        socket, client, self._socket, self._client = self._socket, self._client, None, None
        if socket is not None:
            await socket.close()
        if client is not None:
            await client.close()

    async def _connect(self) -> None:
        try:
            self._client = aiohttp.ClientSession()
            async with self._client.get(f"{self._url}/schema", raise_for_status=True) as reply:
                schema = (await reply.json())["action"]
            self._socket = await self._client.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE)
        except (aiohttp.ClientError, OSError) as error:
            raise EnvDown(f"{self._url}: no OpenEnv server answers there ({error})") from None
        except (ValueError, KeyError, TypeError):
            raise EnvDown(f"{self._url}/schema: not what an OpenEnv server answers") from None
        self._schema = schema
        if self._field and self._field not in fields_of(schema):
            raise ValueError(f"env.kwargs.field = {self._field!r}: the server's are {', '.join(fields_of(schema))}")

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The server's observation. Raises ``EnvDown``, ``InvalidAction``, and ``RuntimeError`` with what the
        environment raised."""
        assert self._socket is not None
        with suppress(ConnectionError):  # it may have said why before it closed
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvDown(f"{self._url}: the server closed the connection at a {kind}")
        answer = json.loads(message.data)
        said: dict[str, Any] = answer["data"]
        if answer["type"] == "observation":
            return said
        why, code = str(said.get("message")), said.get("code")
        if code == "VALIDATION_ERROR":
            reasons = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in said.get("errors", ()))
            raise InvalidAction("; ".join(reasons) or why)
        if code == "EXECUTION_ERROR":
            raise RuntimeError(why)
        if code == "CAPACITY_REACHED":
            why += "; start it with max_concurrent_envs of at least rollout.num_envs"
        raise EnvDown(f"{self._url}: {why}")

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, dict):
            kept = {name: value for name, value in observation.items() if name != "metadata"}
            if self._show and self._show not in kept:
                raise ValueError(f"env.kwargs.show = {self._show!r}: the observation has {', '.join(kept)}")
            observation = kept[self._show] if self._show else next(iter(kept.values())) if len(kept) == 1 else kept
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


def fields_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an action, by name; every one of OpenEnv's also has ``metadata``."""
    return {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}


def read_action(schema: Mapping[str, Any], field: str, dialogue: Dialogue, reply: str) -> dict[str, Any]:
    """The action in a reply; the server checks its values. Raises ``InvalidAction``."""
    fields = fields_of(schema)
    needed = [name for name in schema.get("required", ()) if name in fields]
    only = [field] if field else [*fields] if len(fields) == 1 else needed
    whole = reply.rpartition("</think>")[2].strip()
    if len(only) == 1:
        [name] = only
        if fields[name].get("type") == "string" and "enum" not in fields[name]:
            return {name: whole}
        command = dialogue.read(reply)
        try:
            return {name: json.loads(command)}
        except ValueError:
            return {name: command}
    try:
        action = json.loads(whole[whole.index("{") : whole.rindex("}") + 1])
    except ValueError:
        listed = ", ".join(f"{name} ({kind.get('type', 'any')})" for name, kind in fields.items())
        raise InvalidAction(f"That is no action here. Write a JSON object with: {listed}.") from None
    return dict(action)
