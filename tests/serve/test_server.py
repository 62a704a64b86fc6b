"""The HTTP API in one process: what the client relies on, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from asyncrl import wire

from .harness import CONTEXT, VOCAB, Client, logprobs, prompt, reference, request, serving

LONG = 1800
"""Tokens of a request that is cut before it ends."""
WHOLE = 400
"""Tokens of a request that is disturbed, and goes on to its end."""


async def collect(client: Client, ids: list[int], **body: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in client.stream(ids, **body)]


async def test_chunks_are_incremental_and_join_to_the_whole(client: Client) -> None:
    chunks = await collect(client, prompt(1), max_new_tokens=20, temperature=0.0, stream_interval=8)
    whole = await client.generate(prompt(1), max_new_tokens=20, temperature=0.0)
    assert [len(c["output_ids"]) for c in chunks] == [8, 8, 4]
    assert [c["meta_info"]["completion_tokens"] for c in chunks] == [8, 16, 20]
    assert [t for c in chunks for t in c["output_ids"]] == whole["output_ids"]
    assert [lp for c in chunks for lp in logprobs(c)] == pytest.approx(logprobs(whole), abs=1e-5)
    assert [c["meta_info"]["finish_reason"] for c in chunks] == [None, None, {"type": "length", "length": 20}]
    assert all(c["meta_info"]["weight_version"] == "default" for c in chunks)
    assert "weight_versions" not in chunks[0]["meta_info"]
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]


async def test_replies_decode_as_wire_messages(client: Client) -> None:
    reply = msgspec.convert(await client.generate(prompt(1), rid="abc", max_new_tokens=4), wire.GenerateReply)
    assert (reply.meta_info.id, reply.meta_info.prompt_tokens, reply.meta_info.completion_tokens) == ("abc", 8, 4)
    info = msgspec.convert(await client.get("/server_info"), wire.ServerInfo)
    assert (info.incremental_streaming_output, info.context_length, info.max_total_num_tokens) == (True, CONTEXT, 8192)
    assert msgspec.convert(await client.get("/model_info"), wire.ModelInfo).model_type == "qwen3"
    assert msgspec.convert(await client.get("/v1/loads"), wire.LoadsReply).loads[0].num_running_reqs == 0
    assert (await client.get("/v1/models"))["data"][0]["max_model_len"] == CONTEXT


async def test_stop_tokens_end_a_reply_and_stay_in_it(client: Client) -> None:
    free = await client.generate(prompt(2), max_new_tokens=30, temperature=0.0)
    stop = free["output_ids"][10]
    end = free["output_ids"].index(stop) + 1
    reply = await client.generate(
        prompt(2), max_new_tokens=30, temperature=0.0, ignore_eos=False, stop_token_ids=[stop]
    )
    assert reply["output_ids"] == free["output_ids"][:end]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_the_models_own_eos_ends_a_reply(model: Any, tmp_path: Path) -> None:
    async with serving(_with_eos(model, tmp_path, list(range(VOCAB)))) as client:
        reply = await client.generate(prompt(1), max_new_tokens=9, ignore_eos=False)
        assert len(reply["output_ids"]) == 1
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": reply["output_ids"][0]}
        assert len((await client.generate(prompt(1), max_new_tokens=9, ignore_eos=True))["output_ids"]) == 9


def _with_eos(model: Any, folder: Path, eos: list[int]) -> Path:
    model.save_pretrained(folder)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode({**config, "eos_token_id": eos}))
    return folder


async def test_n_replies_differ_and_are_told_apart(client: Client) -> None:
    replies = await client.generate(prompt(3), n=3, rid="many", max_new_tokens=12)
    assert [r["index"] for r in replies] == [0, 1, 2]
    assert len({tuple(r["output_ids"]) for r in replies}) == 3
    chunks = await collect(client, prompt(3), n=3, max_new_tokens=12, stream_interval=5)
    for index in range(3):
        mine = [c for c in chunks if c["index"] == index]
        assert sum(len(c["output_ids"]) for c in mine) == 12
        assert [c["meta_info"]["finish_reason"] is None for c in mine] == [True] * (len(mine) - 1) + [False]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [5, VOCAB]}, f"{VOCAB}, outside the vocabulary"),
        ({"input_ids": [-1]}, "-1, outside the vocabulary"),
        ({"input_ids": [5] * CONTEXT}, f"context length of {CONTEXT}"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": CONTEXT}}, f"context length of {CONTEXT}"),
        ({"input_ids": [5] * 120, "sampling_params": {"max_new_tokens": 100}}, "KV cache of 200"),
        ({"input_ids": [5], "sampling_params": {"bogus": 1}}, "unknown field `bogus`"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 6}}, "min_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [5], "sampling_params": {"n": 0}}, "n must be"),
        ({"input_ids": [5], "sampling_params": {"stream_interval": 0}}, "stream_interval"),
        ({"input_ids": [5], "sampling_params": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
        ({"input_ids": "5"}, "array"),
        ({"text": "hello"}, "input_ids"),
        ([], "object"),
    ],
)
async def test_a_bad_request_is_refused_by_name(folder: Path, body: object, words: str) -> None:
    async with serving(folder, max_tokens=200) as client:
        assert words in (await client.post("/generate", body, status=400))["error"]["message"]


async def test_wrong_json_is_refused(client: Client) -> None:
    for path in ("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weight_version"):
        async with client.session.post(client.url + path, data=b"{") as response:
            assert response.status == 400, path
            assert "message" in (await response.json())["error"]
    for path in ("/update_weights_from_disk", "/begin_weight_update", "/init_weights_update_group"):
        async with client.session.post(client.url + path, data=b"{") as response:
            assert response.status == 400, path
            assert (await response.json())["success"] is False


async def test_a_live_rid_is_refused_and_free_again_after(client: Client) -> None:
    await client.post("/pause_generation", {"mode": "in_place"})
    async with asyncio.TaskGroup() as group:
        first = group.create_task(client.generate(prompt(1), rid="same", max_new_tokens=2))
        await client.until_waiting(1)
        error = await client.generate(prompt(1), rid="same", max_new_tokens=2, status=400)
        assert "Duplicate request ID detected: same" in error["error"]["message"]
        await client.post("/continue_generation")
    assert len(first.result()["output_ids"]) == 2
    for _ in range(3):
        await collect(client, prompt(1), rid="same", max_new_tokens=1)


# --- Abort ------------------------------------------------------------------------------------------------------------


async def test_abort_of_a_running_request_keeps_what_it_has(client: Client, model: Any) -> None:
    got: list[dict[str, Any]] = []
    async for chunk in client.stream(prompt(4), rid="r", max_new_tokens=LONG, stream_interval=16):
        got.append(chunk)
        if len(got) == 1:
            await client.post("/abort_request", {"rid": "r"})
    assert got[-1]["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
    ids = [t for c in got for t in c["output_ids"]]
    assert 16 <= len(ids) == got[-1]["meta_info"]["completion_tokens"] < LONG
    values = [lp for c in got for lp in logprobs(c)]
    assert values == pytest.approx(reference(model, prompt(4), ids), abs=1e-4)
    assert (await client.load())["num_used_tokens"] == 0


async def test_abort_of_a_waiting_request_is_an_empty_reply(folder: Path) -> None:
    async with serving(folder, max_running=1) as client, asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(prompt(1), rid="first", max_new_tokens=LONG))
        await client.until_running(1)
        waiting = group.create_task(client.generate(prompt(2), rid="second", max_new_tokens=LONG))
        await client.until_waiting(1)
        await client.post("/abort_request", {"rid": "second"})
        reply = await waiting
        assert reply["output_ids"] == []
        assert reply["meta_info"]["completion_tokens"] == 0
        assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert not running.done()
        await client.post("/abort_request", {"abort_all": True})


async def test_abort_matches_live_rids_by_prefix(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = {
            rid: group.create_task(client.generate(prompt(1), rid=rid, max_new_tokens=LONG))
            for rid in ("job-1", "job-12", "other")
        }
        await client.until_running(3)
        await client.post("/abort_request", {"rid": "job"})  # not itself live
        await client.post("/abort_request", {"rid": ""})
        assert (await client.load())["num_running_reqs"] == 3
        await client.post("/abort_request", {"rid": "job-1"})
        for rid in ("job-1", "job-12"):
            assert (await tasks[rid])["meta_info"]["finish_reason"]["type"] == "abort"
        assert not tasks["other"].done()
        await client.post("/abort_request", {"rid": "other"})


async def test_abort_reaches_all_n_replies(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(prompt(1), rid="many", n=4, max_new_tokens=LONG))
        await client.until_running(4)
        await client.post("/abort_request", {"rid": "many"})
    assert [r["meta_info"]["finish_reason"]["type"] for r in task.result()] == ["abort"] * 4


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(client: Client, stream: bool) -> None:
    body = request(prompt(1), rid="gone", stream=stream, max_new_tokens=LONG)

    async def listen() -> None:
        async with aiohttp.ClientSession() as session, session.post(client.url + "/generate", json=body) as response:
            await response.read()

    async with asyncio.TaskGroup() as group:
        listener = group.create_task(listen())
        await client.until_running(1)
        (sequence,) = client.server.engine.scheduler.running
        listener.cancel()
    await client.until_running(0)
    assert sequence.finish is not None
    assert (sequence.finish.type, len(sequence.output) < LONG) == ("abort", True)
    assert len((await client.generate(prompt(1), rid="gone", max_new_tokens=1))["output_ids"]) == 1


# --- Pause ------------------------------------------------------------------------------------------------------------


async def test_pause_abort_answers_all_and_holds_new_requests(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(prompt(1), max_new_tokens=LONG))
        await client.until_running(1)
        await client.post("/pause_generation", {})
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        await client.get("/ready", status=503)
        await client.get("/health")
        held = group.create_task(client.generate(prompt(2), max_new_tokens=3))
        await asyncio.sleep(0.05)
        assert not held.done()
        assert (await client.load())["num_waiting_reqs"] == 1
        await client.post("/continue_generation")
    assert len(held.result()["output_ids"]) == 3
    await client.get("/ready")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_exactly(client: Client, model: Any, mode: str) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(prompt(5, 100), max_new_tokens=WHOLE))
        await client.until_running(1)
        await client.post("/pause_generation", {"mode": mode})
        used = (await client.load())["num_used_tokens"]
        assert (used == 0) == (mode == "retract")
        await client.post("/flush_cache", status=200 if mode == "retract" else 400)
        assert (await client.load())["num_used_tokens"] == used, "nothing advances"
        await client.post("/continue_generation", {"torch_empty_cache": True})
    reply = task.result()
    assert reply["meta_info"]["num_retractions"] == (mode == "retract")
    assert len(reply["output_ids"]) == WHOLE
    assert logprobs(reply) == pytest.approx(reference(model, prompt(5, 100), reply["output_ids"]), abs=1e-4)


async def test_a_paused_request_can_be_aborted_with_its_tokens(client: Client) -> None:
    for mode in ("retract", "in_place"):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(client, prompt(1), rid=mode, max_new_tokens=LONG, stream_interval=1))
            await client.until_running(1)
            await client.post("/pause_generation", {"mode": mode})
            await client.post("/abort_request", {"rid": mode})
        last = task.result()[-1]["meta_info"]
        assert last["finish_reason"]["type"] == "abort"
        assert last["completion_tokens"] > 0
        await client.post("/continue_generation")


async def test_continue_without_pause_and_unknown_modes(client: Client) -> None:
    await client.post("/continue_generation")
    error = await client.post("/pause_generation", {"mode": "later"}, status=400)
    assert "pause mode 'later'" in error["error"]["message"]
    assert len((await client.generate(prompt(1), max_new_tokens=1))["output_ids"]) == 1


async def test_flush_waits_until_idle(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(prompt(1), max_new_tokens=WHOLE))
        await client.until_running(1)
        await client.post("/flush_cache", status=400)
        await client.post("/flush_cache?timeout=0.01", status=400)
        await client.post("/flush_cache?timeout=30")
        assert (await client.load())["num_running_reqs"] == 0
        await task
    await client.post("/flush_cache?timeout=soon", status=400)


async def test_update_weight_version_aborts_by_default(client: Client) -> None:
    for abort in (True, False):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.generate(prompt(1), max_new_tokens=WHOLE))
            await client.until_running(1)
            body = {"new_version": f"v{abort}", "abort_all_requests": abort}
            assert (await client.post("/update_weight_version", body))["new_version"] == f"v{abort}"
            reply = await task
        assert (reply["meta_info"]["finish_reason"]["type"] == "abort") == abort
        assert (await client.get("/model_info"))["weight_version"] == f"v{abort}"
    spans = reply["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == ["vTrue", "vFalse"]
    assert spans[0]["end"] == spans[1]["start"]
