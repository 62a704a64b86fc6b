"""CPU time of one generation request on the controller's side, against a bare aiohttp + msgspec client.

    python bench/controller_client.py [--quick] [--json PATH]

A mock server in a process of its own answers with SGLang-shaped streams (token ids and logprobs, a line every
``stream_interval`` tokens, spread over time). Each client plays the same requests, 64 in flight; only its own process'
CPU time counts, so a busy machine disturbs little. Clients take turns, round after round; the figure is the median.
Budget: the whole controller (dispatch, stream, parse, ledger) at most 1.5 times the bare client at 1k tokens.

Another client is one more function in ``CLIENTS``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiohttp
import msgspec
import uvloop

from asyncrl.config import EngineConfig
from asyncrl.core.policy.routing import ROUTING
from asyncrl.core.staleness.inflight_cap import InflightCap
from asyncrl.core.types import Task, Trajectory
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.envs.single_turn import SingleTurn
from asyncrl.ports import EngineInfo, GenerateRequest, Observer, StepMetrics
from asyncrl.runtime.env_manager import EnvManager, EpisodeLimits, EpisodePlayer, EpisodePlayers
from asyncrl.runtime.env_source import LocalEnvs
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.task_source import TaskSource
from asyncrl.runtime.user_code import FailureWindow

IN_FLIGHT = 64
PROMPT = list(range(100, 164))
BUDGET = 1.5


class Case(NamedTuple):
    """``interval`` 0 means no streaming."""

    tokens: int
    interval: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, " + (f"a line every {self.interval}" if self.interval else "no stream")


CASES = [Case(1024, 64), Case(1024, 0), Case(16, 64)]
BUDGETED = CASES[0]
BASE = "bare aiohttp + msgspec"

Play = Callable[[int], Awaitable[int]]
"""Plays request number i; returns how many tokens it brought."""


# --- the clients


class BareMeta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, str | None]]


class BareReply(msgspec.Struct):
    output_ids: list[int]
    meta_info: BareMeta


@asynccontextmanager
async def bare(url: str, case: Case) -> AsyncIterator[Play]:
    """The least that gets ids and logprobs out of a server: no retries, no deadlines, no checks, no cookies."""
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(BareReply).decode
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Content-Type": "application/json"},
        skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding"],
    ) as session:

        async def play(i: int) -> int:
            sampling = {"max_new_tokens": case.tokens, "temperature": 1.0, "stream_interval": case.interval}
            body = {
                "input_ids": PROMPT,
                "rid": f"bare-{i:08d}",
                "sampling_params": sampling,
                "return_logprob": True,
                "stream": case.interval > 0,
            }
            ids: list[int] = []
            logprobs: list[float] = []

            def take(raw: bytes) -> None:
                reply = decode(raw)
                ids.extend(reply.output_ids)
                logprobs.extend([row[0] for row in reply.meta_info.output_token_logprobs])

            async with session.post(f"{url}/generate", data=encode(body)) as response:
                if case.interval:
                    rest = b""
                    async for data in response.content.iter_any():
                        *lines, rest = (rest + data).split(b"\n\n")
                        for line in lines:
                            if line != b"data: [DONE]":
                                take(line[6:])
                else:
                    take(await response.read())
            assert len(logprobs) == len(ids)
            return len(ids)

        yield play


@asynccontextmanager
async def engine_client(url: str, case: Case) -> AsyncIterator[Play]:
    """asyncrl's Engine port, as the LLMProxy uses it."""
    engine = SGLangEngine(url, "mock", EngineConfig(stream_interval=case.interval), rng=random.Random(0))

    async def play(i: int) -> int:
        ids, logprobs, versions = array("i"), array("f"), array("i")
        request = GenerateRequest(rid=f"{i:012x}", input_ids=array("i", PROMPT), max_new_tokens=case.tokens)
        async for chunk in engine.generate(request):
            ids += chunk.output_ids
            logprobs += chunk.logprobs
            versions += chunk.versions
        assert len(logprobs) == len(versions) == len(ids)
        return len(ids)

    yield play
    await engine.close()


class Silent(Observer):
    """Hears everything and keeps nothing; what the Recorder costs is measured in tests/observe's own terms."""

    def step(self, metrics: StepMetrics) -> None: ...
    def trajectory(self, trajectory: Trajectory, state: str) -> None: ...
    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None: ...
    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = {}) -> None: ...
    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = {}) -> None: ...
    def counter(self, name: str, at: float, value: float) -> None: ...
    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = {}) -> None: ...


class Ids:
    """A tokenizer for a prompt that is given; decoding text is the user's wish and is not counted."""

    eos_ids = (1,)
    chat_template = ""

    def encode(self, text: str) -> list[int]:
        return PROMPT

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        return ""


@asynccontextmanager
async def runtime(url: str, case: Case) -> AsyncIterator[Play]:
    """A single-turn episode whole: lease, ledger, EpisodePlayer, LLMProxy, engine client, trajectory, put."""
    engine = SGLangEngine(url, "mock", EngineConfig(stream_interval=case.interval), rng=random.Random(0))
    info = EngineInfo(
        name="mock", version=3, max_running_requests=4096, max_total_tokens=1 << 30, context_length=1 << 20
    )
    proxy = LLMProxy(route=ROUTING["least_loaded"], observer=Silent(), context_length=1 << 20, stop_token_ids=(1,))
    proxy.add(engine, info)
    buffer = SampleBuffer(
        control=InflightCap(batch=1 << 20, alpha=0, step=3),
        tasks=TaskSource([Task(id="t", data={"prompt": "p"})], seed=0),
        group_size=8,
        observer=Silent(),
        version=3,
    )
    limits = EpisodeLimits(
        max_turns=1, max_new_tokens=case.tokens, max_tokens=4096, reset_timeout_s=60, step_timeout_s=60
    )
    player = EpisodePlayer(envs=LocalEnvs(SingleTurn), scorer=None, proxy=proxy, tokenizer=Ids(), limits=limits)
    manager = EnvManager(
        name="env",
        buffer=buffer,
        player=EpisodePlayers({"": player}),
        failures={"": FailureWindow(size=64, max_rate=0.5)},
        observer=Silent(),
        episode_timeout_s=600,
        temperature=1.0,
        top_p=1.0,
    )

    async def play(i: int) -> int:
        before = proxy.generated
        await manager.episode(await buffer.lease())
        return case.tokens if proxy.generated > before else 0

    yield play
    counts = buffer.ledger.counts()
    assert counts["scored"] + counts["occupied"] == counts["reserved_ever"] - counts["reserved"]
    buffer.close("bench over")
    buffer.ledger.check_balanced()
    await engine.close()


CLIENTS: dict[str, Callable[[str, Case], AbstractAsyncContextManager[Play]]] = {
    BASE: bare,
    "SGLangEngine": engine_client,
    "whole controller": runtime,
}


# --- the mock server


def reply(start: int, end: int, total: int, interval: int) -> bytes:
    """What SGLang says of tokens ``start`` to ``end`` of ``total``, with its usual fields."""
    rng = random.Random(start)
    ids = [rng.randrange(150_000) for _ in range(start, end)]
    message = {
        "text": "x" * (3 * len(ids)),
        "output_ids": ids,
        "meta_info": {
            "id": "0123456789ab#0#",
            "finish_reason": {"type": "length", "length": total} if end == total else None,
            "prompt_tokens": len(PROMPT),
            "completion_tokens": end,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "weight_version": "3",
            "weight_versions": [{"version": "3", "start": 0, "end": end}],
            "num_retractions": 0,
            "e2e_latency": 1.25,
            "input_token_logprobs": [],
            "output_token_logprobs": [[rng.uniform(-9, 0), token, None] for token in ids],
            "output_token_logprobs_length": len(ids),
        },
    }
    raw = json.dumps(message, separators=(",", ":")).encode()
    return b"data: " + raw + b"\n\n" if interval else raw


class MockProtocol(asyncio.Protocol):
    """HTTP/1.1 with kept connections, just enough for POST /generate."""

    def __init__(self, pieces: list[bytes], gap_s: float) -> None:
        self.pieces = pieces
        self.gap_s = gap_s
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if found and len(body) >= length:
            self.received = body[length:]
            self.send(0)

    def send(self, i: int) -> None:
        """Piece ``i``, and the rest later: a client must not get several lines for the price of one."""
        if self.transport.is_closing():
            return
        self.transport.write(self.pieces[i])
        if i + 1 < len(self.pieces):
            asyncio.get_running_loop().call_later(self.gap_s, self.send, i + 1)


def serve(case: Case, gap_s: float, ready: Connection) -> None:
    """The server's process: announces its port, and ends when the other end of ``ready`` closes."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    step = case.interval or case.tokens
    lines = [
        reply(start, min(start + step, case.tokens), case.tokens, case.interval)
        for start in range(0, case.tokens, step)
    ]
    if case.interval:
        lines.append(b"data: [DONE]\n\n")
    pieces = [head, *(b"%x\r\n%b\r\n" % (len(line), line) for line in lines)]
    pieces[-1] += b"0\r\n\r\n"

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: MockProtocol(pieces, gap_s), "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        ended = asyncio.Event()
        loop.add_reader(ready.fileno(), ended.set)
        await ended.wait()

    uvloop.run(run())


# --- measurement


async def cpu_per_request(play: Play, case: Case, requests: int) -> float:
    """CPU seconds of this process for each request, ``IN_FLIGHT`` of them at a time."""
    numbers = iter(range(requests))

    async def worker() -> None:
        for i in numbers:
            tokens = await play(i)
            assert tokens == case.tokens

    before = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(worker())
    return (time.process_time() - before) / requests


async def measure(case: Case, port: int, requests: int, rounds: int) -> dict[str, float]:
    """Median CPU microseconds of a request, by client."""
    seconds: dict[str, list[float]] = {name: [] for name in CLIENTS}
    for number in range(rounds + 1):
        for name, client in CLIENTS.items():
            async with client(f"http://127.0.0.1:{port}", case) as play:
                taken = await cpu_per_request(play, case, requests)
            if number:  # the first round warms up
                seconds[name].append(taken)
    return {name: statistics.median(taken) * 1e6 for name, taken in seconds.items()}


def run_case(case: Case, *, quick: bool) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(case, 0.002, theirs), daemon=True)
    server.start()
    theirs.close()
    try:
        requests = (256 if quick else 1024) * (1 if case.tokens > 100 else 4)
        return uvloop.run(measure(case, ours.recv(), requests, rounds=3 if quick else 7))
    finally:
        ours.close()
        server.join(10)
        if server.is_alive():
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of one generation request on the controller's side.")
    parser.add_argument("--quick", action="store_true", help="fewer requests and rounds")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    results = []
    print(f"{'':34}{'client':28}{'µs/request':>12}{'ratio':>8}")
    for case in CASES:
        figures = run_case(case, quick=args.quick)
        base = figures[BASE]
        for name, microseconds in figures.items():
            print(f"{case.name:34}{name:28}{microseconds:12.0f}{microseconds / base:8.2f}")
            results.append(
                {**case._asdict(), "client": name, "us_per_request": microseconds, "ratio": microseconds / base}
            )
    ours = [row for row in results if row["client"] != BASE and (row["tokens"], row["interval"]) == BUDGETED]
    worst = max(row["ratio"] for row in ours)
    print(f"budget at {BUDGETED.name}: {worst:.2f} of at most {BUDGET}: {'met' if worst <= BUDGET else 'MISSED'}")
    if args.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        versions = {name: version(name) for name in ("aiohttp", "msgspec", "uvloop")}
        args.json.write_text(json.dumps({"results": results, "machine": machine, "versions": versions}, indent=2))


if __name__ == "__main__":
    main()
