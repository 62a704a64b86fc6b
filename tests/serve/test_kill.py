"""kill -9 of a server in mid-generation: what it costs is what it had not streamed, and nothing is generated twice
that had arrived (Laminar §3.1, the partial response pool)."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from array import array
from contextlib import ExitStack
from pathlib import Path

import pytest
from contract.tiny_model import greedy, make_model

from asyncrl.config import EngineConfig
from asyncrl.core.policy.routing import least_loaded
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.runtime.generation import Completion, Prompt
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.trajectory_server import Start
from asyncrl.sim.trace import TraceRecorder

from .test_process import free_port, until_healthy

COUNTED = """
import os, sys, time
from asyncrl.serve import __main__, sampler
file = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sample = sampler.Sampler.sample
def counted(self, logits, sequences):
    result = sample(self, logits, sequences)
    os.write(file, b"." * len(sequences))
    time.sleep(0.005)
    return result
sampler.Sampler.sample = counted
sys.exit(__main__.main(sys.argv[1:]))
"""
LENGTH = 240
REQUESTS = 4
"""Two on each of two servers."""


async def generated(ports: list[int], interval: int, victim: subprocess.Popen[bytes]) -> list[Completion]:
    """The victim is killed when about a third has come."""
    config = EngineConfig(stream_interval=interval, retries=0)
    engines = [
        SGLangEngine(f"http://127.0.0.1:{port}", f"server {i}", config, rng=random.Random(i))
        for i, port in enumerate(ports)
    ]
    proxy = LLMProxy(route=least_loaded, observer=TraceRecorder(), context_length=2000)
    for engine in engines:
        proxy.add(engine, await engine.connect())
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                proxy.generate(
                    Prompt(ids=array("i", [65 + i] * 5), start=Start(0), max_new_tokens=LENGTH, temperature=0.0)
                )
            )
            for i in range(REQUESTS)
        ]
        while proxy.instances[0].generated < 2 * LENGTH // 3:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.005)
        victim.kill()
    assert not proxy.instances[0].up
    for engine in engines:
        await engine.close()
    return [task.result()[0] for task in tasks]


@pytest.mark.parametrize("interval", [4, 32])
def test_a_killed_server_costs_at_most_what_it_had_not_streamed(tmp_path: Path, interval: int) -> None:
    folder = make_model(tmp_path / "model", 0)
    counts, ports = [tmp_path / "0", tmp_path / "1"], [free_port(), free_port()]
    with ExitStack() as stack:
        servers = []
        for count, port in zip(counts, ports, strict=True):
            command = [sys.executable, "-c", COUNTED, str(count), str(folder), "--port", str(port), "--device", "cpu"]
            server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            servers.append(server)
            stack.callback(server.wait)
            stack.callback(server.kill)
        for port in ports:
            until_healthy(port)
        completions = asyncio.run(generated(ports, interval, servers[0]))
    for i, completion in enumerate(completions):
        assert completion.output_ids.tolist() == greedy(folder, (65 + i,) * 5, LENGTH)
        assert completion.versions.tolist() == [0] * LENGTH
    assert {completion.server for completion in completions} == {"server 1"}
    sampled = sum(count.stat().st_size for count in counts)
    lost = sampled - REQUESTS * LENGTH
    assert 0 <= lost <= REQUESTS // 2 * 2 * interval, "a chunk in the making, and perhaps one on its way"
