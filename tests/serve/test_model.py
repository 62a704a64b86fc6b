from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asyncrl.serve import model as model_module

from .harness import KINDS, Client, logprobs, make_model, prompt, reference, save, serving


async def batch(
    client: Client, lengths: list[int], **sampling: object
) -> list[tuple[list[int], list[int], list[float]]]:
    """Generate from prompts of these lengths at the same time: (prompt, output, logprobs) each."""
    prompts = [prompt(i, length) for i, length in enumerate(lengths)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.generate(p, **sampling)) for p in prompts]
    return [(p, t.result()["output_ids"], logprobs(t.result())) for p, t in zip(prompts, tasks, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_equal_transformers_forward(kind: str, tmp_path: Path) -> None:
    """Over several length classes at once: 3 … 200 prompt tokens, and rows that grow from one class into the next."""
    model = make_model(kind)
    async with serving(save(model, tmp_path)) as client:
        for ids, output, got in await batch(
            client, [3, 17, 60, 63, 64, 65, 126, 200], max_new_tokens=20, temperature=0.7
        ):
            assert got == pytest.approx(reference(model, ids, output, 0.7), abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2", "llama3-rope"])
async def test_greedy_ids_equal_transformers_generate(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    async with serving(save(model, tmp_path)) as client:
        for ids, output, _ in await batch(client, [5, 40, 70], max_new_tokens=30, temperature=0.0):
            with torch.inference_mode():
                whole = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None)
            assert output == whole[0, len(ids) :].tolist()


async def test_prefill_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_module, "PREFILL_CHUNK", 48)
    model = make_model()
    async with serving(save(model, tmp_path)) as client:
        for ids, output, got in await batch(client, [1, 30, 47, 48, 49, 190, 250], max_new_tokens=4):
            assert got == pytest.approx(reference(model, ids, output), abs=1e-4)


async def test_a_request_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    """Others join and leave all the while, and are moved about in the cache."""
    model = make_model()
    ids = prompt(99, 50)
    async with serving(save(model, tmp_path), max_running=6) as client:
        alone = await client.generate(ids, max_new_tokens=120, temperature=0.0)
        async with asyncio.TaskGroup() as group:
            watched = group.create_task(client.generate(ids, max_new_tokens=120, temperature=0.0))
            for i in range(30):
                group.create_task(client.generate(prompt(i, 1 + 9 * i % 130), max_new_tokens=1 + 7 * i % 40))
        among = watched.result()
    assert among["output_ids"] == alone["output_ids"]
    assert logprobs(among) == pytest.approx(logprobs(alone), abs=1e-5)


async def test_requests_put_back_for_lack_of_room_go_on_exactly(tmp_path: Path) -> None:
    """The token budget holds about two of six requests: they are retracted, recomputed, and still exact."""
    model = make_model()
    async with serving(save(model, tmp_path), max_tokens=260) as client:
        prompts = [prompt(i, 20) for i in range(6)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.generate(p, max_new_tokens=150)) for p in prompts]
    replies = [t.result() for t in tasks]
    assert sum(r["meta_info"]["num_retractions"] for r in replies) > 0
    for ids, reply in zip(prompts, replies, strict=True):
        assert len(reply["output_ids"]) == 150
        assert logprobs(reply) == pytest.approx(reference(model, ids, reply["output_ids"]), abs=1e-4)


async def test_bfloat16_stays_close_to_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = make_model(initializer_range=0.05)
    async with serving(save(model, tmp_path), dtype=torch.bfloat16) as client:
        results = await batch(client, [10, 80], max_new_tokens=20)
    model = model.to(torch.bfloat16)
    for ids, output, got in results:
        assert got == pytest.approx(reference(model, ids, output), abs=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_equal_transformers_forward_on_cuda(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    async with serving(save(model, tmp_path), device="cuda") as client:
        for ids, output, got in await batch(client, [3, 17, 64, 65, 126, 200], max_new_tokens=20, temperature=0.7):
            assert got == pytest.approx(reference(model, ids, output, 0.7), abs=1e-4)
