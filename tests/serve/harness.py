"""Tiny Hugging Face models, their transformers forward pass as the reference, and a server of them in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp.test_utils import TestServer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.access import header
from asyncrl.serve.server import Limits, Server
from asyncrl.serve.spec import read_spec
from asyncrl.serve.weights import load_model

torch.set_num_threads(1)

VOCAB = 96
CONTEXT = 2048
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.4,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12, "attention_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 1}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LINEAR, "attention_bias": True,
                                                     "mlp_bias": True}),
}  # fmt: skip


def make_model(kind: str = "qwen3-tied", seed: int = 0, **changes: Any) -> Any:
    """A random transformers model; biases and norms are random too, so that leaving one out shows."""
    config_class, model_class, own = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_COMMON, **own, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def reference(model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of ``output`` after ``prompt`` by transformers' own forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@lru_cache
def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def prompt(seed: int, length: int = 8) -> list[int]:
    return list(_prompt(seed, length))


class Client:
    """One server's API, as thin as it can be."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, url: str) -> None:
        self.server = server
        self.session = session
        self.url = url

    async def post(self, path: str, body: object = None, status: int = 200) -> Any:
        async with self.session.post(self.url + path, json={} if body is None else body) as response:
            text = await response.text()
            assert response.status == status, f"{path}: {response.status} {text}"
            return json.loads(text) if response.content_type == "application/json" else text

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == status, await response.text()
            return await response.json() if response.content_type == "application/json" else None

    async def generate(self, ids: Sequence[int], status: int = 200, **body: Any) -> Any:
        """POST /generate; keys that are no sampling parameters: rid, stream, kv_from."""
        return await self.post("/generate", request(ids, **body), status)

    async def stream(self, ids: Sequence[int], **body: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream, up to [DONE]."""
        async with self.session.post(self.url + "/generate", json=request(ids, stream=True, **body)) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.strip():
                    yield json.loads(line.removeprefix(b"data: "))
            raise AssertionError("the stream ended without [DONE]")

    async def info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self.get("/server_info")
        return info

    async def load(self) -> dict[str, Any]:
        return (await self.get("/v1/loads"))["loads"][0]

    async def until_running(self, count: int) -> None:
        """Return when so many sequences are running (bounded by the test's timeout)."""
        await self._until("num_running_reqs", count)

    async def until_waiting(self, count: int) -> None:
        await self._until("num_waiting_reqs", count)

    async def _until(self, field: str, count: int) -> None:
        while (await self.load())[field] != count:  # noqa: ASYNC110 (only the server knows, and it cannot call back)
            await asyncio.sleep(0.002)


def request(
    ids: Sequence[int], *, rid: str | None = None, stream: bool = False, kv_from: str | None = None, **sampling: Any
) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True, "stream": stream}
    if rid is not None:
        body["rid"] = rid
    if kv_from is not None:
        body["kv_from"] = kv_from
    return {**body, "sampling_params": {"ignore_eos": True, **sampling}}


def logprobs(reply: dict[str, Any]) -> list[float]:
    rows = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in rows] == reply["output_ids"]
    return [logprob for logprob, _, _ in rows]


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_running: int = 16,
    max_tokens: int = 8192,
    seed: int = 0,
    token: str = "",
    **more: Any,
) -> AsyncIterator[Client]:
    """A server on a free port of this process; fails the test if its engine broke. ``more`` are its other limits."""
    crashes: list[BaseException] = []
    model = load_model(folder, read_spec(folder), context_length=CONTEXT, dtype=dtype, device=torch.device(device))
    limits = Limits(
        context_length=CONTEXT,
        max_running_requests=max_running,
        max_total_tokens=max_tokens,
        **more,
    )
    server = Server(
        model, limits, model_path=folder, served_name="tiny", seed=seed, on_crash=crashes.append, token=token
    )
    server.engine.start()
    http = TestServer(server.app())
    await http.start_server()
    try:
        async with aiohttp.ClientSession(headers=header(token)) as session:
            yield Client(server, session, str(http.make_url("")).rstrip("/"))
    finally:
        await http.close()
        assert server.engine.stop(10.0)
        assert not crashes, crashes
