"""SGLang's HTTP API without a model, in a process of its own: every reply is ``TOKENS`` tokens after a fixed time.

So the controller's side of a request is as it is with a real server, and the server is never the bottleneck. It holds
no weights, but says which version it was given last. It ignores aborts: a reply is a fraction of a second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import uvloop
from aiohttp import web

from asyncrl import wire
from asyncrl.sim.engine import GENERATED

TOKENS = 8
"""Of each reply; the last one ends the turn."""
IDS = array("i", range(GENERATED + TOKENS - 1, GENERATED - 1, -1))
CONTEXT = 1 << 20


class Server:
    """``seconds`` is the time of one reply."""

    def __init__(self, seconds: float, max_running: int) -> None:
        self._seconds = seconds
        self._info = msgspec.json.encode(
            wire.ServerInfo(max_running_requests=max_running, max_total_num_tokens=1 << 30, context_length=CONTEXT)
        )
        self._set_version("0")

    def _set_version(self, version: str) -> None:
        self._model = msgspec.json.encode(wire.ModelInfo(model_path="none", weight_version=version))
        self._reply = msgspec.json.encode(
            wire.GenerateReply(
                output_ids=IDS.tolist(),
                meta_info=wire.MetaInfo(
                    finish_reason=wire.FinishReason(type="stop"),
                    completion_tokens=TOKENS,
                    weight_version=version,
                    output_token_logprobs=[(-1.0, token, None) for token in IDS],
                ),
            )
        )

    async def generate(self, request: web.Request) -> web.Response:
        reply = self._reply
        await request.read()
        await asyncio.sleep(self._seconds)
        return web.Response(body=reply, content_type="application/json")

    async def update_weights(self, request: web.Request) -> web.Response:
        update = msgspec.json.decode(await request.read(), type=wire.UpdateFromDiskReq)
        self._set_version(update.weight_version or "0")
        return web.Response(body=msgspec.json.encode(wire.StatusReply()), content_type="application/json")

    def app(self) -> web.Application:
        def always(body: bytes) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        async def done(request: web.Request) -> web.Response:
            return always(b"{}")

        async def server_info(request: web.Request) -> web.Response:
            return always(self._info)

        async def model_info(request: web.Request) -> web.Response:
            return always(self._model)

        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weights_from_disk", self.update_weights)
        app.router.add_get("/server_info", server_info)
        app.router.add_get("/model_info", model_info)
        app.router.add_get("/health", done)
        for path in ("abort_request", "pause_generation", "continue_generation"):
            app.router.add_post(f"/{path}", done)
        return app


def serve(seconds: float, max_running: int, ready: Connection) -> None:
    """The process: announces its port, and ends when the other end of ``ready`` closes."""

    async def run() -> None:
        runner = web.AppRunner(Server(seconds, max_running).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ready.send(runner.addresses[0][1])
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(ready.fileno(), ended.set)
        await ended.wait()
        await runner.cleanup()

    uvloop.run(run())


@contextmanager
def scripted_server(seconds: float, max_running: int) -> Iterator[str]:
    """Its address, while it runs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(seconds, max_running, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
