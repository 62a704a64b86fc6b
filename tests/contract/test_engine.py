"""What the runtime relies on in every engine: one suite for the simulated, the embedded and the real one."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from safetensors import numpy
from weights.relays import world

from asyncrl.ports import Chunk, Engine, EngineError, EngineLoad, EngineRejected, GenerateRequest
from asyncrl.weights.sender import UpdateGroup

from .rigs import MAX_RUNNING, MAX_TOKENS, PROMPT, STREAM_INTERVAL, Models, Rig
from .tiny_model import CONTEXT, EOS, greedy, logprobs, weights

LONG = 1800
"""Tokens of a request that must still run while something else happens: seconds, also on an idle machine."""

TOLERANCE = 1e-4

_names = (f"request-{i:06d}" for i in itertools.count())


class Reply:
    """A whole reply, put together from its chunks."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.cached = 0
        self.finish: str | None = None
        self.begun = asyncio.Event()
        """Set at the first chunk."""

    def add(self, chunk: Chunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert len(chunk.output_ids) == len(chunk.logprobs) == len(chunk.versions)
        self.ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.cached = chunk.cached_tokens
        self.finish = chunk.finish_reason
        self.begun.set()


def ask(prompt: Sequence[int] = PROMPT, tokens: int = 16, rid: str = "", **kwargs: object) -> GenerateRequest:
    """A greedy request; its length is ``tokens`` unless it stops before."""
    fields = {"rid": rid or next(_names), "input_ids": array("i", prompt), "max_new_tokens": tokens, "temperature": 0.0}
    return GenerateRequest(**{**fields, **kwargs})


async def play(engine: Engine, request: GenerateRequest, reply: Reply) -> Reply:
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            reply.add(chunk)
    return reply


async def generate(engine: Engine, request: GenerateRequest | None = None) -> Reply:
    return await play(engine, request or ask(), Reply())


@asynccontextmanager
async def running(engine: Engine, *requests: GenerateRequest) -> AsyncIterator[list[Reply]]:
    """Requests that have all begun; leaving waits until they have ended."""
    replies = [Reply() for _ in requests]
    async with asyncio.TaskGroup() as group:
        for request, reply in zip(requests, replies, strict=True):
            group.create_task(play(engine, request, reply))
        for reply in replies:
            await reply.begun.wait()
        yield replies


@asynccontextmanager
async def restored(engine: Engine, models: Models) -> AsyncIterator[None]:
    """Puts the first weights back in the end."""
    try:
        yield
    finally:
        await engine.pause()
        await engine.load_from_disk(str(models.first), 0)
        await engine.resume()


async def load_becomes(engine: Engine, running: int, waiting: int) -> EngineLoad:
    """Returns when so many requests run and wait. The server's account may lag behind, and can only be asked for."""
    async with asyncio.timeout(30):
        while ((load := await engine.load()).running, load.waiting) != (running, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return load


def close_to(expected: Sequence[float]) -> object:
    return pytest.approx(expected, abs=TOLERANCE)


# --- what a server is


async def test_connect_describes_the_server(engine: Engine) -> None:
    info = await engine.connect()
    assert (info.name, info.version) == (engine.name, 0)
    assert (info.max_running_requests, info.max_total_tokens) == (MAX_RUNNING, MAX_TOKENS)
    # SGLang needs a few tokens of the context for itself.
    assert CONTEXT - 6 <= info.context_length <= CONTEXT


async def test_healthy_also_while_paused(engine: Engine) -> None:
    assert await engine.health()
    await engine.pause()
    assert await engine.health()


async def test_load_counts_running_and_waiting_requests(engine: Engine) -> None:
    requests = [ask(tokens=LONG) for _ in range(MAX_RUNNING)]
    async with running(engine, *requests):
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(generate(engine, extra := ask(tokens=LONG)))
            load = await load_becomes(engine, MAX_RUNNING, 1)
            assert load.used_tokens > len(PROMPT)  # a shared prefix may count once
            await engine.abort(extra.rid)
        await engine.pause()
    await load_becomes(engine, 0, 0)


# --- tokens, logprobs and ends


@pytest.mark.needs("reference")
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(engine: Engine, models: Models) -> None:
    reply = await generate(engine, ask(tokens=40))
    assert reply.ids == greedy(models.first, PROMPT, 40)
    assert reply.logprobs == close_to(logprobs(models.first, PROMPT, reply.ids))
    assert set(reply.versions) == {0}


@pytest.mark.needs("reference")
@pytest.mark.parametrize("temperature", [0.5, 1.0])
async def test_logprobs_are_after_temperature(engine: Engine, models: Models, temperature: float) -> None:
    reply = await generate(engine, ask(tokens=40, temperature=temperature))
    assert reply.logprobs == close_to(logprobs(models.first, PROMPT, reply.ids, temperature))


@pytest.mark.needs("reference")
async def test_logprobs_are_before_top_p(engine: Engine, models: Models) -> None:
    reply = await generate(engine, ask(tokens=40, temperature=1.0, top_p=0.3))
    assert reply.logprobs == close_to(logprobs(models.first, PROMPT, reply.ids))


@pytest.mark.needs("http")
async def test_one_reply_at_the_end_equals_a_stream(engine: Engine, rig: Rig) -> None:
    streamed = await generate(engine, request := ask(tokens=40))
    whole = rig.engine(stream_interval=0)
    try:
        chunks = [chunk async for chunk in whole.generate(request)]
    finally:
        await whole.close()
    assert [list(chunk.output_ids) for chunk in chunks] == [streamed.ids]
    assert list(chunks[0].logprobs) == close_to(streamed.logprobs)
    assert chunks[0].finish_reason == "length"


async def test_a_request_ends_at_its_length_limit(engine: Engine) -> None:
    for tokens in (1, 2, 3 * STREAM_INTERVAL):
        reply = await generate(engine, ask(tokens=tokens))
        assert (len(reply.ids), reply.finish) == (tokens, "length")


async def test_tokens_come_while_they_are_generated(engine: Engine) -> None:
    chunks = [chunk async for chunk in engine.generate(ask(tokens=10 * STREAM_INTERVAL))]
    assert len(chunks) >= 5
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.needs("reference")
async def test_a_stop_token_ends_the_reply_and_is_part_of_it(engine: Engine, models: Models) -> None:
    path = greedy(models.first, PROMPT, 40)
    stop = path[12]
    reply = await generate(engine, ask(tokens=40, stop_token_ids=[stop]))
    assert reply.ids == path[: path.index(stop) + 1]
    assert reply.finish == "stop"
    assert reply.logprobs == close_to(logprobs(models.first, PROMPT, reply.ids))


@pytest.mark.needs("reference")
async def test_the_end_of_text_ends_the_reply_and_is_part_of_it(engine: Engine, models: Models) -> None:
    async with restored(engine, models):
        await engine.pause()
        await engine.load_from_disk(str(models.stops), 1)
        await engine.resume()
        reply = await generate(engine, ask(tokens=100))
    assert reply.ids == greedy(models.stops, PROMPT, 100)
    assert (reply.ids[-1], reply.finish) == (EOS, "stop")
    assert len(reply.ids) < 100


async def test_n_replies_of_one_prompt_each_end(engine: Engine) -> None:
    replies = [Reply() for _ in range(3)]
    async for chunk in engine.generate(ask(tokens=20, n=3)):
        replies[chunk.index].add(chunk)
    assert [(len(r.ids), r.finish) for r in replies] == [(20, "length")] * 3


@pytest.mark.needs("reference")
async def test_n_replies_are_drawn_independently(engine: Engine, models: Models) -> None:
    replies = [Reply() for _ in range(3)]
    async for chunk in engine.generate(ask(tokens=20, n=3, temperature=1.0)):
        replies[chunk.index].add(chunk)
    assert len({tuple(r.ids) for r in replies}) == 3
    for reply in replies:
        assert reply.logprobs == close_to(logprobs(models.first, PROMPT, reply.ids))


async def test_more_requests_than_fit_all_end(engine: Engine) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(engine, ask(tokens=10 + i))) for i in range(2 * MAX_RUNNING)]
    assert [len(task.result().ids) for task in tasks] == [10 + i for i in range(2 * MAX_RUNNING)]


@pytest.mark.needs("reference")
async def test_replies_of_a_full_batch_do_not_mix(engine: Engine, models: Models) -> None:
    prompts = [tuple(range(30 + i, 40 + 3 * i)) for i in range(MAX_RUNNING)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(engine, ask(prompt, 24))) for prompt in prompts]
    assert [task.result().ids for task in tasks] == [greedy(models.first, prompt, 24) for prompt in prompts]


# --- interruption


async def test_abort_keeps_what_was_generated(engine: Engine) -> None:
    async with running(engine, request := ask(tokens=LONG)) as [reply]:
        await engine.abort(request.rid)
    assert reply.finish == "abort"
    assert 0 < len(reply.ids) < LONG
    uninterrupted = await generate(engine, ask(tokens=len(reply.ids)))
    assert reply.logprobs == close_to(uninterrupted.logprobs)


@pytest.mark.needs("http")
async def test_abort_keeps_what_was_generated_without_a_stream(engine: Engine, rig: Rig) -> None:
    whole = rig.engine(stream_interval=0)
    request, reply = ask(tokens=LONG), Reply()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(play(whole, request, reply))
            await load_becomes(engine, 1, 0)
            await whole.abort(request.rid)
    finally:
        await whole.close()
    assert reply.finish == "abort"
    assert 0 < len(reply.ids) < LONG


async def test_abort_leaves_others_alone_even_if_its_id_begins_theirs(engine: Engine) -> None:
    short, longer = ask(tokens=LONG, rid="job-1"), ask(tokens=60, rid="job-12")
    async with running(engine, short, longer) as [first, second]:
        await engine.abort("job-1")
    assert (first.finish, second.finish) == ("abort", "length")
    assert len(second.ids) == 60


async def test_abort_of_a_waiting_request_ends_it_without_tokens(engine: Engine) -> None:
    async with running(engine, *(ask(tokens=LONG) for _ in range(MAX_RUNNING))):
        waiting = Reply()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(play(engine, request := ask(tokens=LONG), waiting))
            await load_becomes(engine, MAX_RUNNING, 1)
            await engine.abort(request.rid)
        assert (waiting.ids, waiting.finish) == ([], "abort")
        await engine.pause()


async def test_abort_that_comes_with_its_request_is_not_lost(engine: Engine) -> None:
    for _ in range(5):
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(play(engine, request := ask(tokens=LONG), reply := Reply()))
            await asyncio.sleep(0)
            await engine.abort(request.rid)
        assert reply.finish == "abort"
        assert len(reply.ids) < LONG


async def test_abort_of_a_request_that_has_ended_is_harmless(engine: Engine) -> None:
    await generate(engine, request := ask())
    await engine.abort(request.rid)
    await engine.abort("never-seen")
    assert (await generate(engine)).finish == "length"


async def test_an_id_can_be_used_again_after_an_abort(engine: Engine) -> None:
    request = ask(tokens=LONG)
    async with running(engine, request) as [reply]:
        await engine.abort(request.rid)
    again = await generate(engine, ask(tokens=8, rid=request.rid))
    assert (reply.finish, again.finish) == ("abort", "length")


async def test_abort_ends_all_n_replies(engine: Engine) -> None:
    replies = [Reply() for _ in range(2)]
    request = ask(tokens=LONG, n=2)
    async with asyncio.timeout(10):
        async for chunk in engine.generate(request):
            replies[chunk.index].add(chunk)
            if chunk.finish_reason is None:
                await engine.abort(request.rid)
    assert [reply.finish for reply in replies] == ["abort", "abort"]
    await load_becomes(engine, 0, 0)


async def test_pause_interrupts_all_and_holds_new_requests_until_resume(engine: Engine) -> None:
    async with running(engine, *(ask(tokens=LONG) for _ in range(3))) as replies:
        await engine.pause()
    assert [reply.finish for reply in replies] == ["abort"] * 3
    assert all(0 < len(reply.ids) < LONG for reply in replies)
    async with asyncio.TaskGroup() as group:
        held = group.create_task(generate(engine))
        await asyncio.sleep(0.3)
        assert not held.done()
        await engine.resume()
    assert held.result().finish == "length"


async def test_abort_of_a_request_that_a_pause_holds(engine: Engine) -> None:
    await engine.pause()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(play(engine, request := ask(tokens=LONG), reply := Reply()))
        await asyncio.sleep(0.1)
        await engine.abort(request.rid)
    assert (reply.ids, reply.finish) == ([], "abort")
    await engine.resume()
    await load_becomes(engine, 0, 0)


async def test_pause_of_an_idle_server_and_resume_of_a_running_one_are_harmless(engine: Engine) -> None:
    await engine.pause()
    await engine.pause()
    await engine.resume()
    await engine.resume()
    assert (await generate(engine)).finish == "length"


async def test_an_interrupted_request_goes_on_exactly_where_it_was(engine: Engine) -> None:
    async with running(engine, ask(tokens=LONG)) as [reply]:
        await engine.pause()
    assert reply.finish == "abort"
    await engine.resume()
    rest = await generate(engine, ask([*PROMPT, *reply.ids], 30))
    whole = await generate(engine, ask(tokens=len(reply.ids) + 30))
    assert reply.ids + rest.ids == whole.ids
    assert reply.logprobs + rest.logprobs == close_to(whole.logprobs)


async def test_a_prompt_that_was_seen_is_computed_for_its_last_token_alone(engine: Engine) -> None:
    ids = PROMPT[::-1]
    first, again = await generate(engine, ask(ids)), await generate(engine, ask(ids))
    assert (first.cached, again.cached) == (0, len(ids) - 1)
    assert again.ids == first.ids
    assert again.logprobs == close_to(first.logprobs)


@pytest.mark.parametrize("end", ["close", "cancel"])
async def test_a_request_that_nobody_waits_for_frees_its_slot(engine: Engine, end: str) -> None:
    if end == "close":
        async with aclosing(engine.generate(ask(tokens=LONG))) as chunks:
            await anext(chunks)
    else:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(play(engine, ask(tokens=LONG), reply := Reply()))
            await reply.begun.wait()
            task.cancel()
    await load_becomes(engine, 0, 0)


# --- refusals and failures


@pytest.mark.parametrize(("prompt", "tokens"), [(CONTEXT + 1, 1), (CONTEXT - 100, 101)])
async def test_a_request_beyond_the_context_is_refused_and_the_server_lives(
    engine: Engine, prompt: int, tokens: int
) -> None:
    with pytest.raises(EngineRejected, match=engine.name):
        await generate(engine, ask([65] * prompt, tokens))
    assert (await generate(engine)).finish == "length"


@pytest.mark.parametrize("tokens", [1, 2, 100])
async def test_a_request_as_long_as_the_context_is_served_whole(engine: Engine, tokens: int) -> None:
    context_length = (await engine.connect()).context_length
    reply = await generate(engine, ask([65] * (context_length - tokens), tokens))
    assert (len(reply.ids), reply.finish) == (tokens, "length")


async def test_a_server_that_dies_breaks_its_requests_off_and_keeps_their_tokens(doomed: Rig) -> None:
    engine = doomed.engine()
    try:
        await engine.connect()
        reply = Reply()
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match=doomed.kind) as failure:
                async with aclosing(engine.generate(ask(tokens=LONG))) as chunks:
                    reply.add(await anext(chunks))
                    doomed.kill()
                    async for chunk in chunks:
                        reply.add(chunk)
            assert not isinstance(failure.value, EngineRejected)
            assert 0 < len(reply.ids) < LONG
            assert not await engine.health()
            with pytest.raises(EngineError, match=doomed.kind):
                await generate(engine)
            with pytest.raises(EngineError, match=doomed.kind):
                await engine.pause()
    finally:
        await engine.close()


# --- weights


async def test_tokens_after_an_update_have_its_version(engine: Engine, models: Models) -> None:
    async with restored(engine, models):
        async with running(engine, ask(tokens=LONG)) as [reply]:
            await engine.pause()
        await engine.load_from_disk(str(models.second), 3)
        await engine.resume()
        rest = await generate(engine, ask([*PROMPT, *reply.ids], 30))
        assert (await engine.connect()).version == 3
    assert (set(reply.versions), set(rest.versions)) == ({0}, {3})


@pytest.mark.needs("reference")
async def test_weights_from_disk_are_served_whole_and_nothing_of_the_old_ones(engine: Engine, models: Models) -> None:
    await generate(engine)  # leaves the old weights' KV for PROMPT in a prefix cache
    async with restored(engine, models):
        await engine.pause()
        await engine.load_from_disk(str(models.second), 1)
        await engine.resume()
        reply = await generate(engine, ask(tokens=24))
    assert reply.ids == greedy(models.second, PROMPT, 24)
    assert reply.logprobs == close_to(logprobs(models.second, PROMPT, reply.ids))


@pytest.mark.needs("reference")
async def test_what_came_down_a_chain_of_relays_is_served(engine: Engine, models: Models, tmp_path: Path) -> None:
    """From the folder in its host's memory: the safetensors file and the manifest, no configuration, no tokenizer."""
    weights = numpy.load_file(models.second / "model.safetensors")
    async with world(tmp_path, 2, megabytes=0, weights=lambda version: weights) as relays:
        relays.transport.place(engine.name, relays.urls[1])
        await relays.transport.prepare(1)
        await relays.transport.arrive([engine], 1)
        async with restored(engine, models):
            await engine.pause()
            await relays.transport.deliver([engine], 1)
            await engine.resume()
            reply = await generate(engine, ask(tokens=24))
    assert reply.ids == greedy(models.second, PROMPT, 24)
    assert reply.logprobs == close_to(logprobs(models.second, PROMPT, reply.ids))


@pytest.mark.needs("reference")
async def test_an_update_from_a_missing_folder_fails_and_changes_nothing(engine: Engine, models: Models) -> None:
    await engine.pause()
    with pytest.raises(EngineError, match=engine.name):
        await engine.load_from_disk(str(models.first / "missing"), 9)
    await engine.resume()
    reply = await generate(engine, ask(tokens=24))
    assert reply.ids == greedy(models.first, PROMPT, 24)
    assert set(reply.versions) == {0}


@pytest.mark.needs("group")
async def test_weights_from_a_group_are_served_whole(engine: Engine, models: Models) -> None:
    name = f"g{time.monotonic_ns()}"
    async with restored(engine, models):
        sender = UpdateGroup("127.0.0.1", 1 + engine.ranks, name, "gloo")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(sender.join))
            await engine.join_group("127.0.0.1", sender.port, 1, 1 + engine.ranks, name, "gloo")
        try:
            for version, folder in ((4, models.second), (5, models.first), (6, models.second)):
                tensors = weights(folder)
                await engine.pause()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(asyncio.to_thread(sender.broadcast, list(tensors.values())))
                    await engine.load_from_group(
                        list(tensors),
                        [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
                        [list(t.shape) for t in tensors.values()],
                        name,
                        version,
                    )
                await engine.resume()
                reply = await generate(engine, ask(tokens=24))
                assert reply.ids == greedy(folder, PROMPT, 24)
                assert reply.logprobs == close_to(logprobs(folder, PROMPT, reply.ids))
                assert set(reply.versions) == {version}
        finally:
            sender.close()
