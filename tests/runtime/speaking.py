"""A server that says what a test tells it to, over a real tokenizer, for tests of the way between text and tokens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

from asyncrl.core.policy.routing import least_loaded
from asyncrl.ports import Chunk, EngineInfo, GenerateRequest
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.sim.trace import TraceRecorder

from .families import Counting, bytewise

Answer = Callable[[str], str]
"""The prompt as text, without special tokens, to the answer."""


class Speaker:
    """``Engine.generate`` and ``connect``. Answers are sampled in another tokenisation than encoding would give."""

    name = "speaker"

    def __init__(self, tokenizer: Counting, answer: Answer, *, seconds: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self.seconds = seconds
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.asked = asyncio.Event()
        self.sampled: list[list[int]] = []
        self.running = 0

    async def connect(self, within_s: float | None = None) -> EngineInfo:
        return EngineInfo(
            name=self.name, version=0, max_running_requests=64, max_total_tokens=10**6, context_length=10**6
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.asked.set()
        self.running += 1
        try:
            await asyncio.sleep(self.seconds)
            text = self._answer(self._tokenizer.decode(list(request.input_ids)))
            ids = [*bytewise(self._tokenizer, text), *self._tokenizer.eos_ids]
            reason = "stop" if len(ids) <= request.max_new_tokens else "length"
            ids = ids[: request.max_new_tokens]
            self.sampled.append(ids)
            n = len(ids)
            yield Chunk(
                output_ids=array("i", ids),
                logprobs=array("f", [-0.25] * n),
                versions=array("i", [self.version] * n),
                finish_reason=reason,
            )
        finally:
            self.running -= 1


async def proxy_of(speaker: Speaker) -> LLMProxy:
    proxy = LLMProxy(observer=TraceRecorder(), context_length=10**6, route=least_loaded)
    engine: Any = speaker
    proxy.add(engine, await speaker.connect())
    return proxy
