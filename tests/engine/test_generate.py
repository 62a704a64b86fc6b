"""SGLangEngine.generate against a server that does everything wrong: what comes out is right, or an EngineError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from asyncrl.engine import sglang
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.ports import EngineError, EngineRejected

from .scripted import (
    DONE,
    LENGTH,
    Answer,
    Exchange,
    Server,
    ask,
    collect,
    finished,
    hangs,
    hangs_up,
    line,
    lines,
    make_engine,
    refuses,
    reply,
    sends,
)

Make = Callable[..., SGLangEngine]


# --- right answers


@pytest.mark.parametrize("cumulative", [False, True])
async def test_a_stream_gives_new_tokens_only(server: Server, engine: SGLangEngine, cumulative: bool) -> None:
    server.answers = [sends(*lines(10, cumulative=cumulative, version="3"))]
    chunks = await collect(engine)
    assert [list(chunk.output_ids) for chunk in chunks] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [x for chunk in chunks for x in chunk.logprobs] == [-i / 8 for i in range(1, 11)]
    assert {version for chunk in chunks for version in chunk.versions} == {3}
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert chunks[0].cached_tokens == 2


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_it_does_not_matter_where_the_network_cuts_a_stream(
    server: Server, engine: SGLangEngine, size: int
) -> None:
    raw = b": hello\n\n" + b"".join(lines(10))

    async def answer(exchange: Exchange) -> web.StreamResponse:
        response = await exchange.stream()
        for start in range(0, len(raw), size):
            await response.write(raw[start : start + size])
            if size > 1 or start % 50 == 0:
                await asyncio.sleep(0)
        return response

    server.answers = [answer]
    assert [token for chunk in await collect(engine) for token in chunk.output_ids] == list(range(1, 11))


async def test_the_request_says_what_was_asked(server: Server, make: Make) -> None:
    await collect(make(stream_interval=16), ask(rid="abc"))
    [body] = server.asked("/generate")
    assert body["input_ids"] == [1, 2, 3]
    assert body["stream"] and body["return_logprob"]
    assert body["rid"].startswith("abc")
    assert body["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": None,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "stream_interval": 16,
    }


async def test_without_a_stream_interval_the_reply_comes_whole(server: Server, make: Make) -> None:
    engine = make(stream_interval=0)
    [chunk] = await collect(engine)
    assert (list(chunk.output_ids), chunk.finish_reason) == (list(range(1, 9)), "length")
    assert "stream" not in server.asked("/generate")[0]
    server.answers = [refuses(200, [reply([1], 1, LENGTH), reply([2, 3], 2, LENGTH)])]
    chunks = await collect(engine, ask("r2", n=2))
    assert [(chunk.index, list(chunk.output_ids)) for chunk in chunks] == [(0, [1]), (1, [2, 3])]


async def test_replies_of_one_stream_are_told_apart(server: Server, engine: SGLangEngine) -> None:
    server.answers = [
        sends(
            line(reply([1], 1, index=1)),
            line(reply([5, 6], 2, index=0)),
            line(reply([2], 2, LENGTH, index=1)),
            line(reply([], 2, LENGTH, index=0)),
            DONE,
        )
    ]
    chunks = await collect(engine, ask(n=2))
    assert [(c.index, list(c.output_ids), c.finish_reason) for c in chunks] == [
        (1, [1], None),
        (0, [5, 6], None),
        (1, [2], "length"),
        (0, [], "length"),
    ]


async def test_versions_that_are_no_integers_are_the_version_at_the_start(server: Server, make: Make) -> None:
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    server.answers = [sends(line(reply([1, 2, 3], 3, LENGTH, meta={"weight_versions": spans})), DONE)]
    [chunk] = await collect(make(version=4))
    assert list(chunk.versions) == [4, 4, 5]


async def test_what_breaks_after_the_last_token_does_no_harm(server: Server, engine: SGLangEngine) -> None:
    server.answers = [hangs_up(*lines(8)[:-1])]
    assert [chunk.finish_reason for chunk in await collect(engine)] == [None, "length"]


async def test_connections_are_kept(server: Server, engine: SGLangEngine) -> None:
    for i in range(5):
        await collect(engine, ask(f"r{i}"))
    assert len({exchange.peer for exchange in server.exchanges}) == 1


async def test_no_id_is_the_beginning_of_another(server: Server, engine: SGLangEngine) -> None:
    server.answers = [refuses(503), finished(4)]
    for rid in ("1", "12", "1.0", "10", "2"):
        await collect(engine, ask(rid))
    sent = [body["rid"] for body in server.asked("/generate")]
    assert len(sent) == 6
    assert not any(a != b and b.startswith(a) for a in sent for b in sent)
    assert len(set(sent)) == 6


async def test_an_id_that_is_running_is_refused(server: Server, engine: SGLangEngine) -> None:
    server.answers = [hangs(*lines(8)[:1]), finished(8)]
    async with aclosing(engine.generate(ask())) as chunks:
        await anext(chunks)
        with pytest.raises(EngineRejected, match="r1"):
            await collect(engine)


# --- wrong answers


STREAM_HEAD = lines(8)[0]

WRONG: dict[str, Answer] = {
    "a web page": sends(b"<!DOCTYPE html>\n<html><body>It works!</body></html>\n\n"),
    "a truncated line": sends(STREAM_HEAD, b'data: {"output_ids": [5, 6', b"\n\n"),
    "a line without its end": sends(STREAM_HEAD, lines(8)[1][:-30]),
    "the wrong type": sends(line({"output_ids": "none", "meta_info": {}})),
    "a token id that is text": sends(line(reply([1], 1, LENGTH, rows=[[-1.0, "1", None]]))),
    "a logprob that is null": sends(line(reply([1], 1, LENGTH, rows=[[None, 1, None]]))),
    "a logprob that is NaN": sends(line(reply([1], 1, LENGTH, rows=[[float("nan"), 1, None]]))),
    "a logprob that is infinite": sends(line(reply([1], 1, LENGTH, rows=[[float("-inf"), 1, None]]))),
    "a logprob beyond all numbers": sends(line(reply([1], 1, LENGTH)).replace(b"-0.125", b"-1e999")),
    "a logprob beyond float32": sends(line(reply([1], 1, LENGTH, rows=[[-1e300, 1, None]]))),
    "a logprob above 0": sends(line(reply([1], 1, LENGTH, rows=[[0.5, 1, None]]))),
    "a token below all": sends(line(reply([-1], 1, LENGTH))),
    "a token that the model does not know": sends(line(reply([64], 1, LENGTH))),
    "fewer logprobs than tokens": sends(line(reply([1, 2], 2, LENGTH, rows=[[-1.0, 1, None]]))),
    "no logprobs": sends(line(reply([1, 2], 2, LENGTH, rows=None))),
    "no end": sends(STREAM_HEAD, DONE),
    "nothing at all": sends(),
    "a death in the middle": hangs_up(STREAM_HEAD),
    "an internal error": refuses(500, "Internal Server Error"),
    "an internal error in the stream": sends(line({"error": {"message": "broke", "code": 500}}), DONE),
    "an abort by an internal error": sends(
        line(reply([], 0, {"type": "abort", "message": "broke", "status_code": 500})), DONE
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_answer_is_an_error_that_names_the_server(
    server: Server, engine: SGLangEngine, case: str
) -> None:
    server.answers = [WRONG[case]]
    received = []
    with pytest.raises(EngineError) as failure:
        async for chunk in engine.generate(ask()):
            received += chunk.output_ids
    text = str(failure.value)
    assert text.startswith(f"engine s0 ({server.url}): ")
    assert "\n" not in text
    assert not isinstance(failure.value, EngineRejected)
    # What came before stays valid, and a request that brought tokens is never repeated here.
    assert received == ([1, 2, 3, 4] if received else [])
    assert len(server.asked("/generate")) == 1


@pytest.mark.parametrize(
    "answer",
    [
        refuses(400, {"error": {"message": "too long"}}),
        refuses(400, {"error": "too long"}),
        refuses(422, {"object": "error", "message": "too long"}),
        refuses(404, {"detail": "too long"}),
        refuses(400, "too long"),
        sends(line({"error": {"message": "too long", "code": 400}}), DONE),
        sends(line(reply([], 0, {"type": "abort", "message": "too long", "status_code": 400})), DONE),
    ],
)
async def test_a_refusal_is_final_and_says_why(server: Server, engine: SGLangEngine, answer: Answer) -> None:
    server.answers = [answer]
    with pytest.raises(EngineRejected, match="too long"):
        await collect(engine)
    assert len(server.asked("/generate")) == 1


# --- retries


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_server_is_asked_again(server: Server, engine: SGLangEngine, status: int) -> None:
    server.answers = [refuses(status), refuses(status), finished(4)]
    assert [list(chunk.output_ids) for chunk in await collect(engine)] == [[1, 2, 3, 4]]
    assert len(server.asked("/generate")) == 3


@pytest.mark.parametrize("status", [429, 503])
async def test_retries_are_bounded(server: Server, engine: SGLangEngine, status: int) -> None:
    server.answers = [refuses(status)]
    with pytest.raises(EngineError, match=str(status)) as failure:
        await collect(engine)
    assert not isinstance(failure.value, EngineRejected)  # another server may have room
    assert len(server.asked("/generate")) == 3


async def test_a_server_that_is_not_there_is_an_error_at_once() -> None:
    engine = make_engine("http://127.0.0.1:9")
    async with asyncio.timeout(3):
        with pytest.raises(EngineError, match=r"s0 .*is the server running"):
            await collect(engine)
    await engine.close()


async def test_a_connection_that_was_just_dropped_does_not_count_as_a_failure(server: Server, make: Make) -> None:
    engine = make(retries=0)
    server.answers = [finished(4), hangs_up(), finished(4)]
    await collect(engine, ask("r1"))
    assert [list(chunk.output_ids) for chunk in await collect(engine, ask("r2"))] == [[1, 2, 3, 4]]
    peers = [exchange.peer for exchange in server.exchanges]
    assert peers[0] == peers[1] != peers[2]


async def test_a_server_that_drops_fresh_connections_is_given_up(server: Server, engine: SGLangEngine) -> None:
    server.answers = [hangs_up()]
    with pytest.raises(EngineError, match="connection broke"):
        await collect(engine)
    assert len(server.asked("/generate")) == 1 + 1 + 2  # itself, once for a stale connection, engine.retries


async def test_a_server_that_dies_after_its_headers_is_asked_again(server: Server, engine: SGLangEngine) -> None:
    async def headers_only(exchange: Exchange) -> web.StreamResponse:
        response = await exchange.stream()
        exchange.hang_up()
        return response

    server.answers = [headers_only, finished(4)]
    assert [list(chunk.output_ids) for chunk in await collect(engine)] == [[1, 2, 3, 4]]


# --- deadlines


@pytest.mark.parametrize("answer", [hangs(headers=False), hangs(), hangs(STREAM_HEAD)])
async def test_silence_ends_at_the_idle_timeout(server: Server, make: Make, answer: Answer) -> None:
    engine = make(idle_timeout_s=0.15)
    server.answers = [answer]
    async with asyncio.timeout(3):
        with pytest.raises(EngineError, match=r"idle_timeout_s"):
            await collect(engine)
        await server.until(lambda: server.open == 0)


@pytest.mark.parametrize("stream_interval", [0, 4])
async def test_a_request_ends_at_the_request_timeout(server: Server, make: Make, stream_interval: int) -> None:
    async def trickle(exchange: Exchange) -> web.StreamResponse:
        response = await exchange.stream()
        for i in range(1, 1000):
            if stream_interval:
                await response.write(line(reply([i], i)))
            await asyncio.sleep(0.03)
        return response

    engine = make(request_timeout_s=0.3, idle_timeout_s=0.2, stream_interval=stream_interval)
    server.answers = [trickle]
    async with asyncio.timeout(3):
        with pytest.raises(EngineError, match=r"request_timeout_s"):
            await collect(engine)
        await server.until(lambda: server.open == 0)


# --- a consumer that leaves


async def test_closing_the_iterator_aborts_the_request(server: Server, engine: SGLangEngine) -> None:
    server.answers = [hangs(STREAM_HEAD)]
    async with aclosing(engine.generate(ask())) as chunks:
        await anext(chunks)
    assert server.asked("/abort_request") == [{"rid": server.asked("/generate")[0]["rid"]}]
    await server.until(lambda: server.open == 0)


STAGES: dict[str, tuple[list[Answer], int]] = {
    "before the headers": ([hangs(headers=False)], 1),
    "before the first token": ([hangs()], 1),
    "between tokens": ([hangs(STREAM_HEAD)], 1),
    "after a refusal": ([refuses(503), hangs(headers=False)], 2),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelling_aborts_the_request(server: Server, engine: SGLangEngine, stage: str) -> None:
    server.answers, asked = STAGES[stage][0][:], STAGES[stage][1]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: len(server.asked("/generate")) == asked)
        await asyncio.sleep(0.02)
        task.cancel()
    assert task.cancelled()
    assert server.asked("/abort_request") == [{"rid": server.asked("/generate")[-1]["rid"]}]
    await server.until(lambda: server.open == 0)
    assert "0 requests" in repr(engine)


async def test_cancelling_at_any_moment_leaves_nothing_behind(server: Server, engine: SGLangEngine) -> None:
    """Cancels after k turns of the loop, for every k until the request is over."""
    server.answers = [finished(8)]
    turns, ended = 0, False
    while not ended:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(engine, ask(f"k{turns}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            ended = task.done()
            task.cancel()
        assert task.cancelled() or [c.finish_reason for c in task.result()][-1] == "length"
        await server.until(lambda: server.open == 0)
        assert "0 requests" in repr(engine)
        turns += 1 if turns < 30 else 10
    assert turns > 5


async def test_a_second_cancellation_does_not_stop_the_abort(server: Server, engine: SGLangEngine) -> None:
    reached, released = asyncio.Event(), asyncio.Event()

    async def slow_abort(exchange: Exchange) -> web.StreamResponse:
        reached.set()
        await released.wait()
        return web.Response()

    server.answers = [hangs(STREAM_HEAD)]
    server.on_control["/abort_request"] = slow_abort
    async with asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        await asyncio.sleep(0.02)
        task.cancel()
        await reached.wait()
        task.cancel()
        await asyncio.sleep(0.1)  # time for the server to notice a client that left
        assert not task.done()
        released.set()
    assert task.cancelled()
    aborting = server.exchanges[-1]
    assert aborting.path == "/abort_request"
    await server.until(lambda: server.open == 0)
    assert aborting in server.answered


async def test_a_server_that_does_not_answer_the_abort_holds_nobody_up(
    server: Server, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "ABORT_TIMEOUT_S", 0.1)
    server.answers = [hangs(STREAM_HEAD)]
    server.on_control["/abort_request"] = hangs(headers=False)
    async with asyncio.timeout(2):
        async with aclosing(engine.generate(ask())) as chunks:
            await anext(chunks)
    await server.until(lambda: server.open == 0)


# --- abort()


def aborted(ids: list[int], total: int) -> bytes:
    return line(reply(ids, total, {"type": "abort", "message": "Aborted"}))


class Abortable:
    """Runs one request until ``slow_s`` after its abort; forgets the first ``deaf`` aborts, and speaks first if
    ``begins``."""

    def __init__(self, server: Server, *, deaf: int = 0, begins: bool = False, slow_s: float = 0.0) -> None:
        self.deaf = deaf
        self.slow_s = slow_s
        self.begins = begins
        self.heard = asyncio.Event()
        self.first = asyncio.Event()
        """Set it to let the first token come."""
        if begins:
            self.first.set()
        server.answers = [self.answer]
        server.on_control["/abort_request"] = self.abort

    async def abort(self, exchange: Exchange) -> web.StreamResponse:
        if self.deaf:
            self.deaf -= 1
        else:
            self.heard.set()
            self.first.set()
        return web.Response()

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        await self.first.wait()
        response = await exchange.stream(STREAM_HEAD)
        await self.heard.wait()
        await asyncio.sleep(self.slow_s)
        await response.write(aborted([5], 5) + DONE)
        return response


async def test_abort_of_a_running_request_returns_at_once_and_keeps_its_tokens(
    server: Server, engine: SGLangEngine
) -> None:
    Abortable(server, begins=True)
    chunks = []
    async for chunk in engine.generate(ask()):
        chunks.append(chunk)
        if len(chunks) == 1:
            await engine.abort("r1")
    assert [list(chunk.output_ids) for chunk in chunks] == [[1, 2, 3, 4], [5]]
    assert chunks[-1].finish_reason == "abort"
    assert len(server.asked("/abort_request")) == 1


async def test_an_abort_that_overtook_its_request_is_repeated_when_it_begins(
    server: Server, engine: SGLangEngine
) -> None:
    script = Abortable(server, deaf=1)
    async with asyncio.timeout(3), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        aborting = group.create_task(engine.abort("r1"))
        await server.until(lambda: bool(server.asked("/abort_request")))
        assert not aborting.done()
        script.first.set()
    assert task.result()[-1].finish_reason == "abort"
    assert len(server.asked("/abort_request")) == 2


async def test_a_silent_request_is_given_up_when_its_abort_has_no_effect(
    server: Server, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "ABORT_GRACE_S", 0.1)
    server.answers = [hangs()]
    async with asyncio.timeout(3), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        await engine.abort("r1")
    assert [(list(c.output_ids), c.finish_reason) for c in task.result()] == [([], "abort")]
    await server.until(lambda: server.open == 0)


async def test_abort_between_two_attempts_ends_the_request(
    server: Server, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "ABORT_GRACE_S", 0.01)
    monkeypatch.setattr("asyncrl.engine.http.BACKOFF_S", 60.0)
    monkeypatch.setattr("asyncrl.engine.http.BACKOFF_MAX_S", 60.0)
    server.answers = [refuses(503)]
    async with asyncio.timeout(3), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 0 and bool(server.asked("/generate")))
        await asyncio.sleep(0.02)
        await engine.abort("r1")
    assert task.result()[-1].finish_reason == "abort"


async def test_abort_of_several_replies_ends_those_that_run(server: Server, engine: SGLangEngine) -> None:
    server.answers = [hangs(line(reply([1], 1, LENGTH, index=1)), line(reply([1, 2], 2, index=0)))]
    ends: dict[int, Any] = {}
    async with asyncio.timeout(2):
        async for chunk in engine.generate(ask(n=2)):
            ends[chunk.index] = chunk.finish_reason
            await engine.abort("r1")
    assert ends == {0: "abort", 1: "length"}
    await server.until(lambda: server.open == 0)


async def test_abort_of_an_unknown_request_asks_nobody(server: Server, engine: SGLangEngine) -> None:
    await engine.abort("nobody")
    assert server.exchanges == []
