"""SGLang's HTTP API (the subset in ``asyncrl/wire.py``) over an ``Engine``: aiohttp handlers, no decisions.

Runs on the event loop; the engine has its own thread, and reading or receiving weights another. Field names and
meaning are SGLang 0.5.23's, with these differences: streams are always incremental (as with SGLang's
``--incremental-streaming-output``); there is no tokenizer, so ``text`` is empty; new weights always drop the cached
prefixes, whatever ``flush_cache`` says; a token id out of the vocabulary is refused instead of ending the server; an
update that would need to flush the KV of requests paused in place is refused before the weights change; with ``n`` > 1
replies are named ``rid_0`` …, and the request's rid aborts all of them. A client that goes away aborts its request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from asyncrl.access import guard
from asyncrl.core.types import Record
from asyncrl.serve.kv_cache import KVCache
from asyncrl.serve.kv_transfer import KvTransfer
from asyncrl.serve.loop import Engine, Output
from asyncrl.serve.model import Model
from asyncrl.serve.sampler import Sampler
from asyncrl.serve.scheduler import Scheduler, Sequence
from asyncrl.serve.spec import ServeError
from asyncrl.serve.weights import UpdateGroups, read_folder
from asyncrl.wire import (
    AbortReq,
    DestroyGroupReq,
    InitGroupReq,
    PauseReq,
    SamplingParams,
    StatusReply,
    UpdateFromDiskReq,
    UpdateFromDistributedReq,
)

MAX_BODY = 64 * 2**20

T = TypeVar("T")


class _StrictSampling(SamplingParams, kw_only=True, forbid_unknown_fields=True):
    """SGLang refuses unknown sampling parameters, though not unknown keys beside them."""


class _Generate(msgspec.Struct, kw_only=True):
    """POST /generate as it arrives; ``wire.GenerateReq`` with the sampling parameters still to be checked."""

    input_ids: list[int]
    rid: str | None = None
    sampling_params: _StrictSampling = msgspec.field(default_factory=_StrictSampling)
    return_logprob: bool = False
    stream: bool = False
    kv_from: str | None = None


class _NewVersion(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class _Empty(msgspec.Struct):
    pass


class _Sink(NamedTuple):
    """Where a sequence's outputs go: its request's queue, and what it is called in the reply."""

    queue: asyncio.Queue[Output]
    number: int
    rid: str


class Limits(Record, frozen=True, kw_only=True):
    """What the server was started with, in tokens and requests."""

    context_length: int
    max_running_requests: int
    max_total_tokens: int
    prefix_cache: bool = True
    host_kv_tokens: int = 0
    kv_reuse: bool = False


class Server:
    """An engine and its handlers; made on the event loop that will run them. Serves once ``engine`` is started."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        *,
        model_path: Path,
        served_name: str,
        seed: int,
        on_crash: Callable[[BaseException], None],
        token: str = "",
    ) -> None:
        spec = model.spec
        self._token = token
        self.engine = Engine(
            model,
            KVCache(
                spec,
                context_length=limits.context_length,
                max_tokens=limits.max_total_tokens,
                dtype=model.dtype,
                device=model.device,
                prefix_cache=limits.prefix_cache,
                host_tokens=limits.host_kv_tokens,
            ),
            Scheduler(max_running=limits.max_running_requests, max_tokens=limits.max_total_tokens),
            Sampler(seed, model.device),
            deliver=_deliver,
            on_crash=on_crash,
            kv_reuse=limits.kv_reuse,
        )
        self._kv = KvTransfer(self.engine, max_tokens=limits.max_total_tokens, token=token) if limits.kv_reuse else None
        self._groups = UpdateGroups(model.device)
        self._spec = spec
        self._limits = limits
        self._model_path = str(model_path)
        self._served_name = served_name
        self._live: set[str] = set()  # rids of unfinished requests
        self._counter = itertools.count()
        self._worker = ThreadPoolExecutor(1, "weights")
        self.working = 0  # calls that are on the worker thread or queued for it

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard(self._token), _errors])
        router = app.router
        router.add_get("/health", self._health)
        router.add_get("/ready", self._ready)
        router.add_get("/model_info", self._model_info)
        router.add_get("/server_info", self._server_info)
        router.add_get("/v1/loads", self._loads)
        router.add_get("/v1/models", self._models)
        router.add_post("/generate", self._generate)
        router.add_post("/abort_request", self._abort)
        router.add_post("/pause_generation", self._pause)
        router.add_post("/continue_generation", self._continue)
        router.add_route("*", "/flush_cache", self._flush)
        router.add_post("/update_weights_from_disk", _status(self._update_from_disk))
        router.add_post("/init_weights_update_group", _status(self._init_group))
        router.add_post("/destroy_weights_update_group", _status(self._destroy_group))
        router.add_post("/begin_weight_update", _status(self._begin_update))
        router.add_post("/update_weights_from_distributed", _status(self._update_from_distributed))
        router.add_post("/end_weight_update", _status(self._end_update))
        router.add_post("/update_weight_version", self._update_version)
        if self._kv is not None:
            router.add_post("/kv_cache", self._kv.give)
            app.on_cleanup.append(self._kv.close)
        return app

    # --- Generation ---------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _decode(request, _Generate)
        self._check(body)
        rid = body.rid or f"{next(self._counter):016x}"
        if rid in self._live:
            raise ServeError(f"Duplicate request ID detected: {rid}")
        queue: asyncio.Queue[Output] = asyncio.Queue()  # bounded by the request's own max_new_tokens
        sequences = [self._sequence(body, rid, i, queue) for i in range(body.sampling_params.n)]
        self._live.add(rid)
        mine = set(sequences)
        try:
            if self._kv is None or not body.kv_from:
                self.engine.add(sequences)
                return await self._answer(request, body, rid, queue)
            async with self._kv.taking(body.kv_from, sequences):
                return await self._answer(request, body, rid, queue)
        finally:
            self._live.discard(rid)
            if any(s.finish is None for s in sequences):  # nobody reads the rest
                self.engine.abort(mine.__contains__)

    async def _answer(
        self, request: web.Request, body: _Generate, rid: str, queue: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        try:
            if body.stream:
                return await self._stream(request, body, rid, queue)
            count = body.sampling_params.n
            replies: dict[int, dict[str, Any]] = {}
            while len(replies) < count:
                output = await queue.get()
                replies[_sink(output).number] = self._reply(output, body)
            return _json(replies[0] if count == 1 else [replies[i] for i in range(count)])
        except ConnectionResetError:  # the client went away in the middle of a write
            return web.Response()

    async def _stream(
        self, request: web.Request, body: _Generate, rid: str, queue: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        unfinished = body.sampling_params.n
        while unfinished:
            outputs = [await queue.get()]
            while not queue.empty():
                outputs.append(queue.get_nowait())
            unfinished -= sum(o.finish is not None for o in outputs)
            lines = [b"data: " + msgspec.json.encode(self._reply(o, body)) + b"\n\n" for o in outputs]
            if not unfinished:
                self._live.discard(rid)  # before the client can see the end and use the rid again
                lines.append(b"data: [DONE]\n\n")
            await response.write(b"".join(lines))
        await response.write_eof()
        return response

    def _check(self, body: _Generate) -> None:
        ids, params, limits = body.input_ids, body.sampling_params, self._limits
        if not ids:
            raise ServeError("input_ids is empty; send at least one token")
        if min(ids) < 0 or max(ids) >= self._spec.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._spec.vocab_size)
            raise ServeError(f"input_ids holds {bad}, outside the vocabulary of {self._spec.vocab_size}; "
                             "is the tokenizer another model's?")  # fmt: skip
        if params.max_new_tokens < 1:
            raise ServeError(f"max_new_tokens must be at least 1, got {params.max_new_tokens}")
        for name, limit in (("context length", limits.context_length), ("KV cache", limits.max_total_tokens)):
            if len(ids) + params.max_new_tokens > limit:
                raise ServeError(f"{len(ids)} input tokens and max_new_tokens {params.max_new_tokens} exceed "
                                 f"the {name} of {limit} tokens")  # fmt: skip
        if not 0 <= params.min_new_tokens <= params.max_new_tokens:
            raise ServeError(f"min_new_tokens must be in [0, max_new_tokens], got {params.min_new_tokens}")
        if not 0.0 <= params.temperature < float("inf"):
            raise ServeError(f"temperature must be non-negative, got {params.temperature}")
        if not 0.0 < params.top_p <= 1.0:
            raise ServeError(f"top_p must be in (0, 1], got {params.top_p}")
        if params.top_k < 1 and params.top_k != -1:
            raise ServeError(f"top_k must be -1 (off) or at least 1, got {params.top_k}")
        if params.n < 1:
            raise ServeError(f"n must be at least 1, got {params.n}")
        if params.stream_interval is not None and params.stream_interval < 1:
            raise ServeError(f"stream_interval must be at least 1, got {params.stream_interval}")
        for token in params.stop_token_ids or ():
            if not 0 <= token < self._spec.vocab_size:
                raise ServeError(f"stop_token_ids holds {token}, outside the vocabulary of {self._spec.vocab_size}")

    def _sequence(self, body: _Generate, rid: str, index: int, queue: asyncio.Queue[Output]) -> Sequence:
        params = body.sampling_params
        stop_ids = frozenset() if params.ignore_eos else self._spec.eos_ids | frozenset(params.stop_token_ids or ())
        return Sequence(
            rid=rid,
            prompt=body.input_ids,
            max_new=params.max_new_tokens,
            min_new=params.min_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_ids=stop_ids,
            interval=(params.stream_interval or 1) if body.stream else 0,
            sink=_Sink(queue, index, rid if params.n == 1 else f"{rid}_{index}"),
        )

    def _reply(self, output: Output, body: _Generate) -> dict[str, Any]:
        sink = _sink(output)
        meta: dict[str, Any] = {
            "id": sink.rid,
            "finish_reason": output.finish,
            "prompt_tokens": len(body.input_ids),
            "completion_tokens": output.done,
            "cached_tokens": output.sequence.cached,
            "num_retractions": output.sequence.retractions,
            "weight_version": output.version,
        }
        if output.spans is not None:
            meta["weight_versions"] = output.spans
        if body.return_logprob:
            meta["output_token_logprobs"] = [
                (lp, token, None) for lp, token in zip(output.logprobs, output.ids, strict=True)
            ]
        return {"text": "", "output_ids": output.ids, "meta_info": meta, "index": sink.number}

    # --- Control ------------------------------------------------------------------------------------------------------

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _decode(request, AbortReq)
        rid = body.rid
        if body.abort_all:
            await self.engine.abort(lambda sequence: True)
        elif rid in self._live:  # SGLang's rule: a live rid also aborts those that it is a prefix of
            await self.engine.abort(lambda sequence: sequence.rid.startswith(rid))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        await self.engine.pause((await _decode(request, PauseReq)).mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await _decode(request, _Empty)
        await self.engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError:
            raise ServeError(f"timeout must be a number of seconds, got {request.query['timeout']!r}") from None
        try:
            async with asyncio.timeout(timeout or None):
                flushed = await self.engine.flush(wait=timeout > 0)
        except TimeoutError:
            flushed = False
        return web.Response(text="Cache flushed." if flushed else "Flush cache failed.", status=200 if flushed else 400)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.scheduler.frozen else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        info = {
            "model_path": self._model_path,
            "served_model_name": self._served_name,
            "tokenizer_path": self._model_path,
            "is_generation": True,
            "weight_version": self.engine.weight_version,
            "model_type": self._spec.model_type,
            "architectures": [self._spec.architecture],
        }
        return _json(info)

    async def _server_info(self, request: web.Request) -> web.Response:
        info = {
            "status": "ready",
            "version": package_version("asyncrl"),
            "engine": "asyncrl",
            "model_path": self._model_path,
            "served_model_name": self._served_name,
            "weight_version": self.engine.weight_version,
            "max_running_requests": self._limits.max_running_requests,
            "max_total_num_tokens": self._limits.max_total_tokens,
            "max_req_input_len": self._limits.context_length - 1,
            "context_length": self._limits.context_length,
            "incremental_streaming_output": True,
            "disable_radix_cache": not self._limits.prefix_cache,
            "prefilled_tokens": self.engine.prefilled,
            "kv_reuse": self._kv is not None,
            "kv_transfers": {} if self._kv is None else self._kv.counts,
            "device": str(self.engine.model.device),
            "dtype": str(self.engine.model.dtype).removeprefix("torch."),
        }
        return _json(info)

    async def _loads(self, request: web.Request) -> web.Response:
        now = self.engine.load
        load = {
            "num_running_reqs": now.running,
            "num_waiting_reqs": now.waiting,
            "num_used_tokens": now.used_tokens,
            "num_total_tokens": now.used_tokens,
            "max_total_num_tokens": self._limits.max_total_tokens,
            "max_running_requests": self._limits.max_running_requests,
            "gen_throughput": now.throughput,
        }
        return _json({"version": package_version("asyncrl"), "loads": [load]})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._served_name, "object": "model", "owned_by": "asyncrl", "root": self._model_path,
                 "max_model_len": self._limits.context_length}  # fmt: skip
        return _json({"object": "list", "data": [model]})

    # --- Weights ------------------------------------------------------------------------------------------------------

    async def _update_from_disk(self, request: web.Request) -> str:
        body = await _decode(request, UpdateFromDiskReq)
        engine = self.engine
        await engine.check_update(flush_cache=body.flush_cache, session=False)
        tensors = await self._blocking(lambda: read_folder(Path(body.model_path), engine.model.parameters))
        await engine.update(
            tensors,
            body.weight_version,
            flush_cache=body.flush_cache,
            session=False,
            abort_all=body.abort_all_requests,
        )
        self._model_path = body.model_path
        return "Succeeded to update model weights."

    async def _init_group(self, request: web.Request) -> str:
        body = await _decode(request, InitGroupReq)
        await self._blocking(lambda: self._groups.join(body))
        return "Succeeded to initialize custom process group."

    async def _destroy_group(self, request: web.Request) -> str:
        body = await _decode(request, DestroyGroupReq)
        await self._blocking(lambda: self._groups.leave(body.group_name))
        return "Succeeded to destroy custom process group."

    async def _begin_update(self, request: web.Request) -> str:
        await _decode(request, _Empty)
        await self.engine.begin_update()
        return "Weight update begun."

    async def _update_from_distributed(self, request: web.Request) -> str:
        body = await _decode(request, UpdateFromDistributedReq)
        engine = self.engine
        await engine.check_update(flush_cache=body.flush_cache, session=True)
        tensors = await self._blocking(lambda: self._groups.receive(body, engine.model.parameters))
        await engine.update(tensors, body.weight_version, flush_cache=body.flush_cache, session=True)
        return "Succeeded to update parameters online."

    async def _end_update(self, request: web.Request) -> str:
        await _decode(request, _Empty)
        await self.engine.end_update()
        return "Weight update ended."

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await _decode(request, _NewVersion)
        await self.engine.set_version(body.new_version, abort_all=body.abort_all_requests)
        return _json({"success": True, "message": f"Weight version updated to {body.new_version}",
                      "new_version": body.new_version})  # fmt: skip

    async def _blocking(self, function: Callable[[], T]) -> T:
        """Run on the worker thread, after what is there already."""
        self.working += 1
        future = asyncio.get_running_loop().run_in_executor(self._worker, function)
        future.add_done_callback(self._worked)
        return await asyncio.shield(future)

    def _worked(self, future: asyncio.Future[Any]) -> None:
        self.working -= 1
        if not future.cancelled():
            future.exception()  # its client may have gone: nobody else looks


def _deliver(outputs: list[Output]) -> None:
    """Sort a hand-over of the engine into the requests' queues."""
    for output in outputs:
        _sink(output).queue.put_nowait(output)


async def _decode(request: web.Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.read(), type=kind)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _sink(output: Output) -> _Sink:
    sink = output.sequence.sink
    assert isinstance(sink, _Sink)
    return sink


def _status(handler: Callable[[web.Request], Awaitable[str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """SGLang's shape for the weight endpoints: success and message, with 400 for a refusal."""

    async def respond(request: web.Request) -> web.Response:
        try:
            reply, status = StatusReply(message=await handler(request)), 200
        except (ServeError, msgspec.DecodeError) as error:
            reply, status = StatusReply(success=False, message=str(error)), 400
        body = {"success": reply.success, "message": reply.message}
        return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")

    return respond


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ServeError, msgspec.DecodeError) as error:
        body = msgspec.json.encode({"error": {"message": str(error)}})
        return web.Response(body=body, status=400, content_type="application/json")
