"""A small server that answers /generate as a test's script says, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from asyncrl.config import EngineConfig
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.ports import Chunk, GenerateRequest

Answer = Callable[["Exchange"], Awaitable[web.StreamResponse]]


class Exchange:
    """One request to the server."""

    def __init__(self, request: web.Request, body: Any) -> None:
        self.request = request
        self.body = body
        assert request.transport is not None
        self.peer = request.transport.get_extra_info("peername")
        """The client's end of the connection: differs for each one."""

    @property
    def path(self) -> str:
        return self.request.path

    async def stream(self, *pieces: bytes) -> web.StreamResponse:
        """Status 200 and these bytes; the body goes on until the answer returns."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(self.request)
        for piece in pieces:
            await response.write(piece)
        return response

    def hang_up(self) -> None:
        """Drop the connection without another byte."""
        assert self.request.transport is not None
        self.request.transport.abort()


class Server:
    """``answers`` serve /generate in order, the last one for ever; ``control`` holds the bodies of other replies."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [finished(8)]
        self.exchanges: list[Exchange] = []
        self.open = 0
        """Requests being answered now."""
        self.answered: list[Exchange] = []
        """Those whose client waited for the answer."""
        self.control: dict[str, Any] = {
            "/health": None,
            "/server_info": {
                "max_running_requests": 4,
                "max_total_num_tokens": 1000,
                "context_length": 96,
                "max_req_input_len": 90,
            },
            "/model_info": {"model_path": "m", "model_type": "qwen3", "weight_version": "default"},
        }
        self.on_control: dict[str, Answer] = {}
        self.changed = asyncio.Event()
        """Set at each new request, and at each end of one."""
        self.url = ""

    def asked(self, path: str) -> list[Any]:
        """Bodies of the requests to ``path`` so far."""
        return [exchange.body for exchange in self.exchanges if exchange.path == path]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for ``condition``, which can change when a request comes or ends."""
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        exchange = Exchange(request, json.loads(raw) if raw else None)
        self.exchanges.append(exchange)
        self.open += 1
        self.changed.set()
        try:
            response = await self.answer(exchange)
            self.answered.append(exchange)
            return response
        finally:
            self.open -= 1
            self.changed.set()

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        if exchange.path == "/generate":
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return await answer(exchange)
        if exchange.path in self.on_control:
            return await self.on_control[exchange.path](exchange)
        return web.json_response(self.control.get(exchange.path, {"success": True, "message": "ok"}))


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def make_engine(url: str, *, version: int | None = 0, model_path: str = "", **config: Any) -> SGLangEngine:
    settings: dict[str, Any] = {
        "stream_interval": 4,
        "retries": 2,
        "connect_timeout_s": 5.0,
        "request_timeout_s": 5.0,
        "idle_timeout_s": 5.0,
        "control_timeout_s": 5.0,
    }
    return SGLangEngine(
        url,
        "s0",
        EngineConfig(**{**settings, **config}),
        rng=random.Random(0),
        model_type="qwen3",
        model_path=model_path,
        run="run",
        vocabulary=64,
        version=version,
    )


def ask(rid: str = "r1", n: int = 1, tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=array("i", [1, 2, 3]), max_new_tokens=tokens, n=n)


async def collect(engine: SGLangEngine, request: GenerateRequest | None = None) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request or ask())]


# --- what SGLang would send


def reply(
    ids: list[int], total: int, finish: dict[str, Any] | None = None, *, version: str = "0", **extra: Any
) -> dict[str, Any]:
    """A reply that holds ``ids``, of ``total`` tokens so far. Token i has logprob -i/8."""
    meta = {
        "id": "x",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "completion_tokens": total,
        "cached_tokens": 2,
        "weight_version": version,
        "output_token_logprobs": extra.pop("rows", [[-i / 8, i, None] for i in ids]),
    }
    return {"text": "", "output_ids": ids, "meta_info": {**meta, **extra.pop("meta", {})}, **extra}


def line(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
LENGTH = {"type": "length", "length": 8}


def lines(tokens: int, step: int = 4, *, cumulative: bool = False, version: str = "0") -> list[bytes]:
    """A whole stream of ``tokens`` tokens (1, 2, 3 …), ``step`` a line."""
    parts = []
    for end in range(step, tokens + step, step):
        end = min(end, tokens)
        start = 0 if cumulative else (end - 1) // step * step
        ids = list(range(start + 1, end + 1))
        parts.append(line(reply(ids, end, LENGTH if end == tokens else None, version=version)))
    return [*parts, DONE]


def finished(tokens: int) -> Answer:
    """Answers rightly."""

    async def answer(exchange: Exchange) -> web.StreamResponse:
        if exchange.body.get("stream"):
            return await exchange.stream(*lines(tokens))
        return web.json_response(reply(list(range(1, tokens + 1)), tokens, LENGTH))

    return answer


def sends(*pieces: bytes) -> Answer:
    """Sends these bytes, whatever they are, and ends the body."""

    async def answer(exchange: Exchange) -> web.StreamResponse:
        return await exchange.stream(*pieces)

    return answer


def hangs(*pieces: bytes, headers: bool = True) -> Answer:
    """Sends these bytes and then nothing more."""

    async def answer(exchange: Exchange) -> web.StreamResponse:
        if headers:
            await exchange.stream(*pieces)
        await asyncio.sleep(60)
        raise AssertionError("the client never left")

    return answer


def hangs_up(*pieces: bytes) -> Answer:
    """Sends these bytes (without any, not even headers) and drops the connection."""

    async def answer(exchange: Exchange) -> web.StreamResponse:
        response = await exchange.stream(*pieces) if pieces else web.Response()
        if pieces:
            await asyncio.sleep(0.02)  # an abort throws away what the socket has not sent
        exchange.hang_up()
        return response

    return answer


def refuses(status: int, message: Any = "no") -> Answer:
    async def answer(exchange: Exchange) -> web.StreamResponse:
        if isinstance(message, str):
            return web.Response(status=status, text=message)
        return web.json_response(message, status=status)

    return answer
