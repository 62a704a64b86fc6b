"""KV that goes from one server to another: what comes out is the same, and nothing is computed twice.

Two real servers of one model, ``a`` and ``b``; a request begins on ``a`` and goes on at ``b``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.serve import kv_transfer, loop
from asyncrl.wire import KvReq

from .harness import Client, logprobs, prompt, reference, serving

PROMPT = prompt(3, 200)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eleven tokens, which have 512 bytes each."""
    monkeypatch.setattr(kv_transfer, "BLOCK_BYTES", 6000)


@pytest.fixture
async def a(folder: Path) -> AsyncIterator[Client]:
    async with serving(folder, kv_reuse=True) as client:
        yield client


@pytest.fixture
async def b(folder: Path) -> AsyncIterator[Client]:
    async with serving(folder, kv_reuse=True, seed=5) as client:
        yield client


async def begin(a: Client, length: int = 30) -> list[int]:
    """A request that ``a`` has begun with, and its tokens so far."""
    reply = await a.generate(PROMPT, max_new_tokens=length, temperature=0.0)
    return [*PROMPT, *reply["output_ids"]]


async def counts(client: Client) -> dict[str, int]:
    """What is not 0."""
    return {name: count for name, count in (await client.info())["kv_transfers"].items() if count}


async def prefilled(client: Client) -> int:
    number: int = (await client.info())["prefilled_tokens"]
    return number


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_request_goes_on_elsewhere_as_if_prefilled_there(
    folder: Path, temperature: float, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature}
    async with serving(folder, kv_reuse=True, dtype=dtype) as a:
        ids = await begin(a)
        async with serving(folder, dtype=dtype, seed=5) as plain:
            expected = await plain.generate(ids, **options)
            assert await prefilled(plain) == len(ids) - 1
        async with serving(folder, kv_reuse=True, dtype=dtype, seed=5) as b:
            reply = await b.generate(ids, kv_from=a.url, **options)
            assert await prefilled(b) == 0
            assert await counts(b) == {"taken": 1, "taken_tokens": len(ids) - 1}
            assert await counts(a) == {"given": 1, "given_tokens": len(ids) - 1}
    assert reply["meta_info"]["cached_tokens"] == len(ids) - 1
    if dtype == torch.float32:
        assert reply["output_ids"] == expected["output_ids"]
        assert logprobs(reply) == pytest.approx(logprobs(expected), abs=1e-4)
    else:  # what a decode step and a prefill write differs by bfloat16's rounding
        assert logprobs(reply)[0] == pytest.approx(logprobs(expected)[0], abs=0.1)


async def test_a_running_request_is_cut_and_goes_on(a: Client, b: Client) -> None:
    whole = await b.generate(PROMPT, max_new_tokens=300, temperature=0.0)
    begun: list[dict[str, Any]] = []

    async def run() -> None:
        begun.append(await a.generate(PROMPT, rid="x", max_new_tokens=1500, temperature=0.0))

    async with asyncio.TaskGroup() as group:
        group.create_task(run())
        await a.until_running(1)
        while a.server.engine.load.used_tokens < len(PROMPT) + 40:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await a.post("/abort_request", {"rid": "x"})
    first = begun[0]["output_ids"][:250]
    await b.post("/flush_cache")
    before = await prefilled(b)
    second = await b.generate([*PROMPT, *first], kv_from=a.url, max_new_tokens=300 - len(first), temperature=0.0)
    assert first + second["output_ids"] == whole["output_ids"]
    assert await prefilled(b) == before


async def test_the_longer_prefix_is_taken_and_no_other(a: Client, b: Client) -> None:
    ids = await begin(a)
    await b.generate(ids[:150], max_new_tokens=1)
    before = await prefilled(b)
    await b.generate([*ids, 7, 8, 9], kv_from=a.url, max_new_tokens=1)  # the next turn of a dialogue
    assert await prefilled(b) == before + 3
    await b.generate([*ids, 7, 8, 9], kv_from=a.url, max_new_tokens=1)
    assert await counts(b) == {"taken": 1, "taken_tokens": len(ids) - 1, "absent": 1}


async def test_rows_of_a_running_request_are_given_too(a: Client, b: Client) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(a.generate(PROMPT, rid="x", max_new_tokens=1500, temperature=0.0))
        await a.until_running(1)
        reply = await b.generate([*PROMPT, 5], kv_from=a.url, max_new_tokens=1)
        await a.post("/abort_request", {"rid": "x"})
        await task
    assert reply["meta_info"]["cached_tokens"] == len(PROMPT)


async def test_several_replies_of_one_prompt_share_what_came(a: Client, b: Client) -> None:
    await begin(a)
    replies = await b.generate(PROMPT, kv_from=a.url, n=3, max_new_tokens=5)
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [len(PROMPT) - 1] * 3
    assert (await counts(b))["taken"] == 1


async def test_other_weights_another_version_and_another_dtype_are_prefilled(
    folder: Path, other_folder: Path, other_model: Any, a: Client, b: Client
) -> None:
    ids = await begin(a)
    async with serving(other_folder, kv_reuse=True) as other:  # the same number, other weights
        reply = await other.generate(ids, kv_from=a.url, max_new_tokens=5)
        assert reply["meta_info"]["cached_tokens"] == 0
        assert logprobs(reply) == pytest.approx(reference(other_model, ids, reply["output_ids"]), abs=1e-4)
        assert await counts(other) == {"refused": 1}
    async with serving(folder, kv_reuse=True, dtype=torch.bfloat16) as narrow:
        await narrow.generate(ids, kv_from=a.url, max_new_tokens=5)
        assert await counts(narrow) == {"refused": 1}
    await b.post("/update_weight_version", {"new_version": "7"})  # the same weights, another number
    await b.generate(ids, kv_from=a.url, max_new_tokens=5)
    assert await counts(b) == {"refused": 1}
    assert await prefilled(b) == len(ids) - 1


async def test_a_server_that_takes_new_weights_still_gives_rows_of_the_old(
    a: Client, b: Client, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await begin(a)
    await a.post("/pause_generation", {"mode": "abort"})
    await a.post("/update_weights_from_disk", {"model_path": str(other_folder), "weight_version": "1"})
    await a.post("/continue_generation")
    await a.generate(prompt(9), max_new_tokens=3)  # serves by the new ones meanwhile
    reply = await b.generate(ids, kv_from=a.url, max_new_tokens=5, temperature=0.0)
    assert reply["meta_info"]["cached_tokens"] == len(ids) - 1
    # And forgets them after a while.
    monkeypatch.setattr(loop, "PAST_S", 0.0)
    await a.post("/update_weights_from_disk", {"model_path": str(other_folder), "weight_version": "2"})
    while a.server.engine._past is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def test_weights_that_change_while_rows_come_make_them_worthless(
    a: Client, b: Client, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await begin(a)
    receive = kv_transfer._receive

    async def slowly(*args: Any) -> torch.Tensor:
        rows = await receive(*args)
        await b.post("/update_weights_from_disk", {"model_path": str(other_folder), "weight_version": "1"})
        return rows

    monkeypatch.setattr(kv_transfer, "_receive", slowly)
    reply = await b.generate(ids, kv_from=a.url, max_new_tokens=5, temperature=0.0)
    async with serving(other_folder) as plain:
        expected = await plain.generate(ids, max_new_tokens=5, temperature=0.0)
    assert reply["output_ids"] == expected["output_ids"]
    assert await counts(b) == {"late": 1}


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """A server that answers /kv_cache by ``handler``."""
    app = web.Application()
    app.router.add_post("/kv_cache", handler)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


def headers(tokens: object, block: object) -> dict[str, str]:
    return {"KV-Tokens": str(tokens), "KV-Block": str(block)}


WRONG: dict[str, Callable[[int], web.Response]] = {
    "an error": lambda n: web.Response(status=500),
    "a way elsewhere": lambda n: web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}),
    "no headers": lambda n: web.Response(body=b"x" * 100),
    "words for numbers": lambda n: web.Response(body=b"x" * 100, headers=headers("many", 4)),
    "more than was asked for": lambda n: web.Response(body=b"", headers=headers(10**9, 10)),
    "blocks without an end": lambda n: web.Response(body=b"", headers=headers(n - 1, 10**9)),
    "blocks of nothing": lambda n: web.Response(body=b"", headers=headers(n - 1, 0)),
    "too few bytes": lambda n: web.Response(body=b"x" * 100, headers=headers(n - 1, 10)),
    "corrupt bytes": lambda n: web.Response(
        body=b"x" * (512 * (n - 1) + 8 * -(-(n - 1) // 10)), headers=headers(n - 1, 10)
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_nonsense_is_not_taken(b: Client, wrong: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        msgspec.json.decode(await request.read(), type=KvReq)
        return WRONG[wrong](len(PROMPT))

    async with answering(answer) as url:
        reply = await b.generate(PROMPT, kv_from=url, max_new_tokens=3)
    assert (len(reply["output_ids"]), reply["meta_info"]["cached_tokens"]) == (3, 0)
    assert await counts(b) == {"failed": 1}


async def test_a_broken_connection_and_a_dead_or_misspelt_server(b: Client) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers(len(PROMPT) - 1, 10))
        response.content_length = 512 * (len(PROMPT) - 1) + 8 * 20
        await response.prepare(request)
        await response.write(b"x" * 1000)
        assert request.transport is not None
        request.transport.close()
        return response

    async with answering(answer) as url:
        await b.generate(PROMPT, kv_from=url, max_new_tokens=3)
    for wrong in (url, "nowhere", "ftp://127.0.0.1:1", "http://127.0.0.1:1/../x"):  # the first has gone by now
        await b.post("/flush_cache")
        reply = await b.generate(PROMPT, kv_from=wrong, max_new_tokens=3)
        assert reply["meta_info"]["cached_tokens"] == 0
    assert await counts(b) == {"failed": 5}


async def test_a_silent_server_is_given_up_and_an_abort_does_not_wait_for_it(
    b: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.set()
        await over.wait()
        return web.Response(status=204)

    async with answering(answer) as url, asyncio.TaskGroup() as group:
        task = group.create_task(b.generate(PROMPT, rid="x", kv_from=url, max_new_tokens=3))
        await asked.wait()
        await b.until_waiting(1)
        await b.post("/abort_request", {"rid": "x"})
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        # One whose client goes away is forgotten as well, and others are served meanwhile.
        asked.clear()
        task = group.create_task(b.generate(PROMPT, kv_from=url, max_new_tokens=3))
        await asked.wait()
        task.cancel()
        assert len((await b.generate(prompt(8), max_new_tokens=3))["output_ids"]) == 3
        await b.until_waiting(0)
        monkeypatch.setattr(kv_transfer, "TOTAL_S", 0.05)
        assert len((await b.generate(PROMPT, kv_from=url, max_new_tokens=3))["output_ids"]) == 3
        over.set()
    assert await counts(b) == {"failed": 1}


async def test_room_for_what_is_on_its_way_is_bounded(folder: Path, a: Client) -> None:
    ids = await begin(a)
    async with serving(folder, kv_reuse=True, max_tokens=400) as b:
        assert b.server._kv is not None
        b.server._kv._coming = 300
        await b.generate(ids, kv_from=a.url, max_new_tokens=3)
        assert await counts(b) == {"failed": 1}


async def test_a_reader_that_stops_reading_does_not_keep_its_place(a: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = await begin(a)
    request = await a.server.engine.kv_wanted(ids)
    body = msgspec.json.encode(msgspec.structs.replace(request, beyond=0))
    monkeypatch.setattr(kv_transfer, "TOTAL_S", 0.05)
    monkeypatch.setattr(web.StreamResponse, "write", lambda self, data: asyncio.sleep(60))
    with pytest.raises(aiohttp.ClientError):
        async with a.session.post(a.url + "/kv_cache", data=body) as response:
            await response.read()
    assert a.server._kv is not None
    assert not a.server._kv._places.locked()


async def test_only_servers_of_the_run_are_given_kv(folder: Path) -> None:
    secret = "0123456789abcdef"
    async with serving(folder, kv_reuse=True, token=secret) as a:
        ids = await begin(a)
        async with aiohttp.ClientSession() as stranger, stranger.post(a.url + "/kv_cache", data=b"{}") as response:
            assert response.status == 401
        async with serving(folder, kv_reuse=True, token=secret) as b:
            await b.generate(ids, kv_from=a.url, max_new_tokens=3)
            assert (await counts(b))["taken"] == 1


async def test_it_is_off_unless_asked_for(client: Client, a: Client) -> None:
    ids = await begin(a)
    reply = await client.generate(ids, kv_from=a.url, max_new_tokens=3)
    assert reply["meta_info"]["cached_tokens"] == 0
    await client.post("/kv_cache", status=404)
    info = await client.info()
    assert (info["kv_reuse"], info["kv_transfers"]) == (False, {})
    assert (await a.info())["kv_reuse"] is True


async def test_what_no_server_would_ask_for_is_refused(a: Client) -> None:
    key = msgspec.to_builtins((await a.server.engine.kv_wanted(PROMPT)).key)
    for ids in ("none", [2**40], [-1], [1.5]):
        await a.post("/kv_cache", {"input_ids": ids, "key": key}, status=400)
    await a.post("/kv_cache", {"input_ids": [], "key": key}, status=204)
    assert len((await a.generate(PROMPT, max_new_tokens=3))["output_ids"]) == 3
