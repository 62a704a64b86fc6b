"""The Engine port over SGLang's HTTP API (0.5.23), for the real server and for the embedded one.

Owns the requests of this client that are on the server, by their ids. Each is one coroutine, the consumer's own:

    generate()    waits for: the server's next bytes                           woken by: the server; abort() giving up
    abort()       waits for: the server; then for a silent request to react    woken by: the stream's first line or end
    pause()       waits for: the requests that it aborted to end; the server   woken by: the last stream's end

What the server is known to do, and what this client does about it:

* It aborts by prefix of the id, so ``#`` ends the part that names the request: none is the beginning of another. The
  number of the attempt follows, as a repeated request may meet its first copy, which the server would refuse.
* It forgets an abort that overtakes its request, or that meets one held by a pause. ``abort`` therefore makes sure of
  a request that has brought nothing yet, and in the end drops its connection, which the server notices by itself.
* With ``n`` > 1 it gives the replies ids of its own: such a request is aborted by dropping its connection.
* Its pause looks once a second whether all requests have ended. ``pause`` ends them first.
* It drops idle connections after 5 s: a request that meets one which was just dropped is sent again on a fresh one.
* Its /health generates a token, unless it was started otherwise, and fails while it is paused. The probe is /model_info
  therefore, of which only its HTTP side knows: /server_info asks the scheduler too, and waits while that loads weights.
  A scheduler that hangs is told by requests that bring nothing, and is found when ``connect`` asks for /server_info.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import aiohttp
import msgspec

from asyncrl import wire
from asyncrl.config import EngineConfig
from asyncrl.engine.buckets import buckets
from asyncrl.engine.http import BUSY, Http, shielded
from asyncrl.engine.live import GaveUp, Live
from asyncrl.engine.replies import BadReply, ReplyReader
from asyncrl.engine.same_model import difference
from asyncrl.engine.shared_kv import SharedKv
from asyncrl.ports import Chunk, EngineError, EngineInfo, EngineLoad, EngineRejected, GenerateRequest

T = TypeVar("T")

HEALTH_TIMEOUT_S = 5.0
"""A server that does not answer its probe for this long is not healthy."""

ABORT_TIMEOUT_S = 5.0
"""Deadline of telling the server that a request is no longer wanted."""

ABORT_GRACE_S = 2.0
"""How long a request may stay silent after its abort, before it is ended on this side."""

_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(wire.GenerateReply).decode
_decode_many = msgspec.json.Decoder(list[wire.GenerateReply]).decode


class SGLangEngine:
    """``url`` is ``http://host:port``. ``version`` is what a server that was never updated holds; None: whatever
    it says it holds, its version is -1 until it was given weights here. ``model_type`` and ``vocabulary`` (as in
    config.json) are those of what it must serve, where that is known, and ``model_path`` is a folder with such a model.
    ``rng`` draws the jitter of retries. ``token`` is what it asks for (``access.py``). ``run`` is in the name of KV
    that it shares.

    ``config.stream_interval`` 0 turns streaming off: one reply at the end, cheaper for short outputs, but a server
    that dies takes all tokens of its requests with it.
    """

    def __init__(
        self,
        url: str,
        name: str,
        config: EngineConfig,
        *,
        rng: random.Random,
        model_type: str | None = None,
        model_path: str = "",
        vocabulary: int = 2**31,
        version: int | None = 0,
        token: str = "",
        run: str = "",
    ) -> None:
        self.name = name
        self.ranks = 1
        self._url = url
        self._config = config
        self._model_type = model_type
        self._model_path = model_path
        self._vocabulary = vocabulary
        self._start_version = -1 if version is None else version
        self._known = version is not None
        """Its weights are those of the version that it names."""
        self._http = Http(url, name, retries=config.retries, rng=rng, token=token)
        self._generate_url = self._http.url("generate")
        self._probe = "model_info" if config.kind == "sglang" else "health"
        shares = config.kv_reuse and config.kind == "sglang"
        self._shared = SharedKv(self._http, config.kv_storage, run, config.control_timeout_s) if shares else None
        self._hierarchical = config.kind == "sglang" and (config.kv_reuse or config.host_kv_tokens > 0)
        """It copies KV to the host's memory."""
        self._replicas = 1
        """Processes of each tensor-parallel rank."""
        self._group = ""
        """The process group that it was to join last."""
        self._live: dict[str, Live] = {}
        self._quiet = asyncio.Event()
        """Set when no request of this client is on the server."""
        self._quiet.set()
        self._paused = False

    def __repr__(self) -> str:
        return f"<SGLangEngine {self.name}: {len(self._live)} requests>"

    # --- what the server is

    async def connect(self, within_s: float | None = None) -> EngineInfo:
        timeout_s = within_s or self._config.connect_timeout_s
        last: EngineError | None = None
        attempt = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._http.call("GET", self._probe, timeout_s=HEALTH_TIMEOUT_S)
                        break
                    except EngineRejected:  # no inference server answers there, and waiting cannot change it
                        raise
                    except EngineError as error:
                        last = error
                    await self._http.backoff(attempt)
                    attempt += 1
                server = await self._get("server_info", wire.ServerInfo)
                model = await self._get("model_info", wire.ModelInfo)
        except TimeoutError:
            limit = f"{timeout_s:g} s" if within_s else f"engine.connect_timeout_s ({timeout_s:g} s)"
            raise self._http.error(f"not ready within {limit}; {last or 'it does not answer'}") from None
        if other := await asyncio.to_thread(difference, self._model_type, self._model_path, server, model):
            raise self._http.error(f"{other}; start it with the recipe's model.path")
        if model.preferred_sampling_params:
            raise self._http.error(
                "was started with --preferred-sampling-params, which change what it samples; start it without"
            )
        self.ranks, self._replicas = server.tp_size, server.dp_size * server.pp_size
        self._hierarchical |= server.enable_hierarchical_cache
        takes_kv = self._config.kv_reuse and self._config.kind == "embedded"
        if takes_kv and not server.kv_reuse:
            raise self._http.rejected("started without --kv-reuse; start it with that, or set engine.kv_reuse = false")
        if self._shared is not None:
            await self._shared.check()
        # SGLang keeps some tokens of the context for itself: it refuses prompts of max_req_input_len or more, and cuts
        # the length limit of a request that comes within 2 tokens of the context without saying so.
        limits = [limit for limit in (server.context_length, server.max_req_input_len) if limit is not None]
        return EngineInfo(
            name=self.name,
            version=self._version(model.weight_version),
            max_running_requests=server.max_running_requests or self._config.max_running_requests,
            max_total_tokens=server.max_total_num_tokens or self._config.max_total_tokens,
            context_length=min(limits, default=0),
            kv_url=self._url if takes_kv else "",
        )

    async def health(self) -> bool:
        try:
            await self._http.call("GET", self._probe, timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def load(self) -> EngineLoad:
        loads = (await self._get("v1/loads", wire.LoadsReply)).loads
        return EngineLoad(
            running=sum(entry.num_running_reqs for entry in loads),
            waiting=sum(entry.num_waiting_reqs for entry in loads),
            used_tokens=sum(entry.num_used_tokens for entry in loads),
        )

    async def close(self) -> None:
        if self._paused:  # a run that was ended within an update, and the server may be of use to others
            await shielded(self.resume(), ABORT_TIMEOUT_S)
        await self._http.close()

    def _version(self, text: str) -> int:
        """SGLang starts with version ``default``; any string that is no integer was not set by asyncrl."""
        return int(text) if self._known and text.isdecimal() else self._start_version

    # --- generation

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if request.rid in self._live:
            raise self._http.rejected(f"request id {request.rid!r} is already running; ids must be unique")
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        live = Live(ReplyReader(request.n, self._version, self._vocabulary), deadline)
        self._live[request.rid] = live
        self._quiet.clear()
        abandoned = False
        try:
            data = await self._open(live, request)
            if self._config.stream_interval == 0:
                whole = data
                while data := await self._receive(live):
                    whole += data
                for reply in self._read_whole(live, whole):
                    yield reply
                return
            rest = b""
            while data:
                *lines, rest = (rest + data).split(b"\n\n")
                for line in lines:
                    chunk = self._read_line(live, line)
                    if chunk is not None:
                        yield chunk
                try:
                    data = await self._receive(live)
                except EngineError:
                    # Only what follows the last token may fail to come.
                    if live.reader.unfinished:
                        raise
                    return
            if live.reader.unfinished:
                raise self._http.error("ended /generate before the last token; did the server die?")
        except GaveUp:
            for last in live.reader.cut():
                yield last
        except (asyncio.CancelledError, GeneratorExit):
            abandoned = True
            raise
        finally:
            del self._live[request.rid]
            if not self._live:
                self._quiet.set()
            live.progress.set()
            live.drop()
            if abandoned:
                await shielded(self._post("abort_request", wire.AbortReq(rid=live.rid)), ABORT_TIMEOUT_S)

    async def _open(self, live: Live, request: GenerateRequest) -> bytes:
        """Send the request, again if need be, until its reply begins; the reply's first bytes."""
        sent = failed = 0
        fresh = False
        while True:
            live.rid = f"{request.rid}#{sent}"
            sent += 1
            try:
                session = self._http.session(fresh=fresh)
                live.response = await self._within(
                    live, session.post(self._generate_url, data=self._body(request, live.rid))
                )
                if live.response.status == 200:
                    return await self._within(live, live.response.content.readany())
                raw = await self._within(live, live.response.read())
                error = self._http.refused("/generate", live.response.status, raw)
                again = live.response.status in BUSY
            except (aiohttp.ClientError, OSError) as broken:
                refused = isinstance(broken, aiohttp.ClientConnectorError)
                dropped = isinstance(broken, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and not refused
                if dropped and not fresh:
                    fresh = True  # maybe an idle connection that the server had just dropped: no fault of it
                    continue
                error, again = self._http.broken("/generate", broken), True
            live.drop()
            if not again or failed >= self._config.retries:
                raise error
            await self._within(live, self._http.backoff(failed))
            failed += 1

    def _body(self, request: GenerateRequest, rid: str) -> bytes:
        ids, stop = request.input_ids, request.stop_token_ids
        streams = self._config.stream_interval > 0
        return _encode(
            wire.GenerateReq(
                input_ids=ids.tolist(),
                rid=rid,
                sampling_params=wire.SamplingParams(
                    max_new_tokens=request.max_new_tokens,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    n=request.n,
                    stop_token_ids=list(stop) if stop else None,
                    ignore_eos=request.ignore_eos,
                    stream_interval=self._config.stream_interval if streams else None,
                ),
                return_logprob=True,
                stream=streams,
                kv_from=request.kv_from or None,
            )
        )

    async def _within(self, live: Live, reply: Awaitable[T]) -> T:
        """Wait for the server: until the request's deadline, or until a stream was idle for too long."""
        now = asyncio.get_running_loop().time()
        # Without streaming nothing comes until the last token: silence says nothing.
        idle_s = self._config.idle_timeout_s if self._config.stream_interval else self._config.request_timeout_s
        try:
            async with asyncio.timeout_at(now if live.given_up else min(now + idle_s, live.deadline)) as live.wait:
                return await reply
        except aiohttp.ClientError:
            raise
        except TimeoutError:
            if live.given_up:
                raise GaveUp from None
            key = "idle_timeout_s" if now + idle_s < live.deadline else "request_timeout_s"
            raise self._http.error(f"/generate brought nothing more within engine.{key}") from None
        finally:
            live.wait = None

    async def _receive(self, live: Live) -> bytes:
        assert live.response is not None
        try:
            return await self._within(live, live.response.content.readany())
        except (aiohttp.ClientError, OSError) as broken:
            raise self._http.broken("/generate", broken) from None

    def _read_line(self, live: Live, line: bytes) -> Chunk | None:
        """One ``data:`` line of a stream."""
        if not line.startswith(b"data: "):
            if line.startswith(b":") or not line:  # a comment, which keeps the connection alive
                return None
            raise self._http.garbage("/generate", line, "no 'data:' line")
        if line == b"data: [DONE]":
            return None
        try:
            reply = _decode_line(line[6:])
        except msgspec.DecodeError as error:
            raise self._http.garbage("/generate", line, error) from None
        return self._read(live, reply)

    def _read_whole(self, live: Live, raw: bytes) -> Iterator[Chunk]:
        """A reply that came at once: one object, or a list where several were asked for."""
        try:
            replies = _decode_many(raw) if raw.startswith(b"[") else [_decode_line(raw)]
        except msgspec.DecodeError as error:
            raise self._http.garbage("/generate", raw, error) from None
        for index, reply in enumerate(replies):
            reply.index = index
            chunk = self._read(live, reply)
            if chunk is not None:
                yield chunk
        if live.reader.unfinished:
            raise self._http.error(f"/generate brought no end of replies {live.reader.unfinished}")

    def _read(self, live: Live, reply: wire.GenerateReply) -> Chunk | None:
        if reply.error is not None:
            raise self._http.refused_in_stream(reply.error.code, reply.error.message)
        finish = reply.meta_info.finish_reason
        if finish is not None and finish.status_code is not None:
            raise self._http.refused_in_stream(finish.status_code, finish.message or "aborted by the server")
        try:
            chunk = live.reader.read(reply)
        except BadReply as error:
            raise self._http.error(f"/generate contradicts itself: {error}") from None
        live.progress.set()
        return chunk

    # --- interruption

    async def abort(self, rid: str) -> None:
        live = self._live.get(rid)
        if live is None:
            return
        if live.reader.replies > 1 or (self._paused and not live.reader.heard):
            live.give_up()
            return
        await self._post("abort_request", wire.AbortReq(rid=live.rid))
        if live.reader.heard:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_GRACE_S):
                await live.progress.wait()
        if self._live.get(rid) is live:
            if live.reader.heard:  # the abort may have overtaken the request
                await self._post("abort_request", wire.AbortReq(rid=live.rid))
            else:
                live.give_up()

    async def pause(self) -> None:
        if self._live:
            await self._post("abort_request", wire.AbortReq(abort_all=True))
            with suppress(TimeoutError):  # then the pause itself waits for them
                async with asyncio.timeout(ABORT_GRACE_S):
                    await self._quiet.wait()
        self._paused = True
        await self._post("pause_generation", wire.PauseReq(mode="abort"))

    async def resume(self) -> None:
        await self._post("continue_generation")
        self._paused = False

    # --- weights

    async def load_from_disk(self, path: str, version: int) -> None:
        body = wire.UpdateFromDiskReq(model_path=path, weight_version=str(version))
        await self._release_kv()
        await self._update("update_weights_from_disk", body)
        await self._check_version(version)

    async def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        if self._replicas > 1:  # the group would wait for members that all have the same number
            raise self._http.rejected(
                "with --dp-size or --pp-size above 1 SGLang takes no weights from a process group; start more servers "
                'in place of its replicas, or set weights.transport = "disk" or "relay"'
            )
        if self._group:  # the trainer has left it, and the server would keep it for good
            left = wire.DestroyGroupReq(group_name=self._group)
            await shielded(self._update("destroy_weights_update_group", left), ABORT_TIMEOUT_S)
        self._group = group
        await self._update(
            "init_weights_update_group",
            wire.InitGroupReq(
                master_address=address,
                master_port=port,
                rank_offset=rank,
                world_size=world_size,
                group_name=group,
                backend=backend,
            ),
        )

    async def load_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int,
        checksums: Sequence[int] = (),
    ) -> None:
        await self._release_kv()
        await self._update("begin_weight_update")
        try:
            for start, end in buckets(dtypes, shapes):
                last = end == len(names)
                await self._update(
                    "update_weights_from_distributed",
                    wire.UpdateFromDistributedReq(
                        names=list(names[start:end]),
                        dtypes=list(dtypes[start:end]),
                        shapes=[list(shape) for shape in shapes[start:end]],
                        group_name=group,
                        weight_version=str(version) if last else None,
                        flush_cache=last,
                        checksums=list(checksums[start:end]) if checksums and self._config.kind == "embedded" else None,
                    ),
                )
        except BaseException:
            # Else the server would refuse every later update.
            await shielded(self._update("end_weight_update"), ABORT_TIMEOUT_S)
            raise
        await self._update("end_weight_update")
        await self._check_version(version)

    async def _release_kv(self) -> None:
        """Before weights change. Copies to the host go on when all requests have ended, and while they do SGLang
        neither detaches a storage nor flushes its cache; weights that it loaded without that it calls refused."""
        if self._hierarchical:
            limit_s = self._config.control_timeout_s
            with suppress(EngineRejected):  # what comes next says whether that matters
                await self._http.call("POST", "flush_cache", query={"timeout": limit_s / 2}, timeout_s=limit_s)
        if self._shared is not None:
            await self._shared.detach()

    async def _check_version(self, version: int) -> None:
        held = (await self._get("model_info", wire.ModelInfo)).weight_version
        if held != str(version):
            raise self._http.error(f"says it holds weights {held!r} after it was given version {version}")
        self._known = True
        if self._shared is not None:
            await self._shared.attach(version)

    # --- calls

    async def _get(self, path: str, reply: type[T]) -> T:
        return await self._http.call("GET", path, reply, timeout_s=self._config.control_timeout_s)

    async def _post(self, path: str, body: msgspec.Struct | None = None) -> None:
        """A control call that can be repeated."""
        await self._http.call("POST", path, body=body, timeout_s=self._config.control_timeout_s)

    async def _update(self, path: str, body: msgspec.Struct | None = None) -> None:
        """A step of a weight update: done once, as the other side of the group takes part once."""
        timeout_s = self._config.control_timeout_s
        reply = await self._http.call("POST", path, wire.StatusReply, body=body, timeout_s=timeout_s, repeatable=False)
        if not reply.success:
            raise self._http.rejected(f"/{path}: {reply.message}")
