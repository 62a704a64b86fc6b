"""Gateway: the model of every running episode behind OpenAI's HTTP API, so that any program can be an agent.

``/v1/chat/completions`` (tools, streaming, stop strings, logprobs), ``/v1/completions`` and ``/v1/models``. The API key
says which episode a request belongs to; the rest is its Session's. A reply is streamed when it is complete: until then
it may yet be interrupted and continued elsewhere. Its text ends before the stop string; what is trained, and the
``logprobs``, have it as it was sampled. A chat goes on from there all the same, a text completion where the client's
prompt has the stop string again. Temperature and top_p are the run's, whatever a client asks for: what is trained must
have been sampled as the trainer assumes.

Owns the listening socket and the keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.env import EpisodeOver, Reply
from asyncrl.ports import Tokenizer
from asyncrl.runtime.session import ContextFull, Session, before_stop, without_stop
from asyncrl.runtime.user_code import EpisodeFailed

MAX_BODY = 64 * 2**20
ENDED_KEYS = 10_000
"""How many keys of ended episodes are remembered, for a clear answer."""


class _Shared(msgspec.Struct, kw_only=True):
    """What both endpoints take; other fields (``temperature``, ``user`` …) are passed over."""

    model: str = ""
    n: int | None = 1
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(_Shared, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False


class CompletionRequest(_Shared, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = False


class ApiError(Exception):
    """Becomes OpenAI's error JSON."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


class Gateway:
    """Listens on ``host``; ``port`` 0 takes a free one. Keys are drawn from ``rng``, which has to be unpredictable
    where others can reach the port."""

    def __init__(
        self, *, tokenizer: Tokenizer, model: str, rng: Random, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._rng = rng
        self._host = host
        self._port = port
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._number = 0
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Listen. Raises ``OSError``."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._answered(self._chat))
        app.router.add_post("/v1/completions", self._answered(self._complete))
        app.router.add_get("/v1/models", self._answered(self._models))
        app.router.add_route("*", "/{path:.*}", self._answered(self._unknown))
        # A client that goes away gives up its generation.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        self.base_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def admit(self, session: Session) -> Iterator[None]:
        """A key for this session, good while inside."""
        key = f"episode-{self._rng.getrandbits(128):032x}"
        self._sessions[key] = session
        session.base_url, session.api_key = self.base_url, key
        try:
            yield
        finally:
            del self._sessions[key]
            self._ended[key] = None
            while len(self._ended) > ENDED_KEYS:
                del self._ended[next(iter(self._ended))]

    # --- endpoints

    async def _chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        asked = await _body(request, ChatRequest)
        tools = asked.tools or []
        if asked.tool_choice == "none":
            tools = []
        elif asked.tool_choice not in (None, "auto"):
            raise ApiError(400, f'tool_choice: {asked.tool_choice!r} is not known here; use "auto" or "none"')
        reply = await session.chat(
            asked.messages,
            tools=tools,
            max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
            stop=asked.stops,
        )
        message = without_stop(reply.message, asked.stops)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_wire_call(call) for call in calls]
        finish_reason = "tool_calls" if calls else reply.finish_reason
        logprobs = {"content": self._logprobs(reply)} if asked.logprobs else None
        if not asked.stream:
            choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
            return _json(self._envelope("chat.completion", [choice], reply))
        if calls:
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        deltas = [
            {"index": 0, "delta": message, "logprobs": logprobs, "finish_reason": None},
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason},
        ]
        return await self._stream(request, "chat.completion.chunk", deltas, reply, asked.stream_options)

    async def _complete(self, request: web.Request, session: Session) -> web.StreamResponse:
        asked = await _body(request, CompletionRequest)
        if asked.echo:
            raise ApiError(400, "echo: is not known here; leave it out")
        reply = await session.complete(asked.prompt, max_tokens=asked.max_tokens, stop=asked.stops)
        logprobs = None
        if asked.logprobs is not None:
            tokens = [entry["token"] for entry in self._logprobs(reply)]
            logprobs = {"tokens": tokens, "token_logprobs": list(reply.logprobs)}
        text = before_stop(reply.text, asked.stops)
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reply.finish_reason}
        if asked.stream:
            return await self._stream(request, "text_completion", [choice], reply, asked.stream_options)
        return _json(self._envelope("text_completion", [choice], reply))

    async def _models(self, request: web.Request, session: Session) -> web.StreamResponse:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return _json({"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request, session: Session) -> web.StreamResponse:
        known = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
        raise ApiError(404, f"{request.method} {request.path}: not here; known are {known}")

    # --- the way in and out

    def _answered(
        self, endpoint: Callable[[web.Request, Session], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await endpoint(request, self._session(request))
            except ApiError as error:
                failed = error
            except web.HTTPRequestEntityTooLarge:
                failed = ApiError(413, f"the body is longer than {MAX_BODY} bytes")
            except ContextFull as error:
                failed = ApiError(400, str(error), code="context_length_exceeded")
            except EpisodeOver as error:
                failed = ApiError(409, str(error), "episode_over")
            except ValueError as error:
                failed = ApiError(400, str(error))
            except EpisodeFailed as error:
                failed = ApiError(400, str(error), "engine_error")
            # Clients try some of these again by themselves, which can never help.
            return _json(failed.body, status=failed.status, headers={"x-should-retry": "false"})

        return handle

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(401, "no API key; send agent.api_key as Authorization: Bearer KEY", code="invalid_api_key")
        if key in self._ended:
            raise EpisodeOver("the episode has ended")
        if key not in self._sessions:
            raise ApiError(401, "the API key is none of a running episode", code="invalid_api_key")
        return self._sessions[key]

    def _logprobs(self, reply: Reply) -> list[dict[str, Any]]:
        tokens = [self._tokenizer.decode([i]) for i in reply.token_ids]
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, reply.logprobs, strict=True)
        ]

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]], reply: Reply | None) -> dict[str, Any]:
        self._number += 1
        envelope = {
            "id": f"asyncrl-{self._number}",
            "object": kind,
            "created": int(asyncio.get_running_loop().time()),
            "model": self._model,
            "choices": choices,
        }
        if reply is not None:
            n, m = reply.prompt_tokens, len(reply.token_ids)
            envelope["usage"] = {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}
        return envelope

    async def _stream(
        self,
        request: web.Request,
        kind: str,
        choices: Sequence[dict[str, Any]],
        reply: Reply,
        options: dict[str, Any] | None,
    ) -> web.StreamResponse:
        chunks = [self._envelope(kind, [choice], None) for choice in choices]
        if (options or {}).get("include_usage"):
            chunks.append(self._envelope(kind, [], reply))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in chunks:
            chunk["id"] = chunks[0]["id"]
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _body(request: web.Request, kind: type[Any]) -> Any:
    try:
        asked = msgspec.json.decode(await request.read(), type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        raise ApiError(400, f"{where.strip('`').removeprefix('$.') or 'body'}: {what}") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if asked.n not in (None, 1):
        raise ApiError(400, f"n: {asked.n}; an episode takes one reply at a time, so it must be 1")
    return asked


def _wire_call(call: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI has it: the arguments are text."""
    function = call["function"]
    arguments = msgspec.json.encode(function["arguments"]).decode()
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
