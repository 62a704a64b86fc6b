"""Tokens a second of the embedded engine over HTTP, against transformers' ``generate`` on the same work.

    python bench/engine.py [--quick] [--dtype float32|bfloat16] [--in-flight 1 16 64 256] [--json PATH]
    python bench/engine.py --reuse [--quick] [--json PATH]
    python bench/engine.py --migrate [--quick] [--json PATH]

A random Qwen3 of about a million parameters; prompts of about 64 tokens; output lengths lognormal with mean 128, at
most 1,024. The engine runs in a process of its own and streams to a client here that keeps so many requests in flight;
``generate`` runs in a process of its own on static batches of the same requests, each until its longest is done (that
is what a static batch costs; at 256 in flight it takes minutes). Only the tokens that were asked for count. Both use
one thread. Tokens a CPU second are of that process, start and warm-up excluded: on a shared machine they are the
steadier figure.

``--reuse`` measures the engine with its prefix cache against itself without (``--disable-radix-cache``): 64 dialogues
at once of 8 turns, each 64 new tokens and a reply of 32 behind a first prompt of 256; and groups of 8 replies of 32
tokens to one prompt of 512, 8 groups at once.

``--migrate`` measures what a request that goes on at another server costs there, with its KV taken along
(``--kv-reuse``) and without, in turn, over a prompt of so many tokens: from the request to its first token there, and
CPU seconds of both servers together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

VOCAB, CONTEXT, CAP = 512, 2048, 1024
SIGMA = 1.0
MEAN = 128


def requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt ids, output length) each."""
    rng = random.Random(seed)
    mu = math.log(MEAN) - SIGMA**2 / 2
    made = []
    for _ in range(count):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(48, 80))]
        made.append((prompt, max(1, min(CAP, round(rng.lognormvariate(mu, SIGMA))))))
    return made


def build_model(folder: Path) -> int:
    """Write the model; its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate(tokens: int, wall: float, cpu: float) -> dict[str, float]:
    return {
        "tokens": tokens,
        "wall_s": wall,
        "cpu_s": cpu,
        "tokens_per_cpu_s": tokens / cpu,
        "tokens_per_s": tokens / wall,
    }


# --- The engine -------------------------------------------------------------------------------------------------------


async def drive(url: str, work: list[tuple[list[int], int]], in_flight: int) -> int:
    """Generate all of ``work``, so many at once; the number of tokens that came."""
    todo, tokens = iter(work), 0

    async def one_after_another(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for ids, length in todo:
            sampling = {"max_new_tokens": length, "ignore_eos": True, "stream_interval": 64}
            body = {"input_ids": ids, "sampling_params": sampling, "stream": True, "return_logprob": True}
            async with session.post(url + "/generate", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        tokens += len(json.loads(line[6:])["output_ids"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(one_after_another(session))
    return tokens


@asynccontextmanager
async def serving(folder: Path, dtype: str, *options: str) -> AsyncIterator[tuple[str, int]]:
    """The engine's URL and process id, warmed up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asyncrl.serve", str(folder), "--port", str(port), "--dtype", dtype]
    command += ["--device", "cpu", "--max-running-requests", "256", "--max-total-tokens", str(256 * 1152)]
    command += options
    environment = {**os.environ, "ASYNCRL_PARENT_PID": str(os.getpid())}
    server = await asyncio.create_subprocess_exec(*command, "--log-level", "warning", env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        await until_ready(url, server)
        await drive(url, requests(4, seed=1), 4)
        yield url, server.pid
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 10)


async def bench_engine(folder: Path, plan: dict[int, int], dtype: str) -> dict[int, dict[str, float]]:
    results = {}
    async with serving(folder, dtype) as (url, pid):
        for in_flight, count in plan.items():
            work = requests(count, seed=in_flight)
            cpu, wall = cpu_seconds(pid), time.perf_counter()
            tokens = await drive(url, work, in_flight)
            results[in_flight] = rate(tokens, time.perf_counter() - wall, cpu_seconds(pid) - cpu)
            assert tokens == sum(length for _, length in work)
    return results


async def dialogues(url: str, quick: bool) -> tuple[int, int]:
    """Every dialogue on its own, turn after turn: generated tokens, and cached ones of the prompts."""
    rng = random.Random(0)
    reply, new, first = 32, 64, 256
    generated = cached = 0

    async def talk(session: aiohttp.ClientSession, turns: list[list[int]]) -> None:
        nonlocal generated, cached
        ids: list[int] = []
        for observation in turns:
            ids = ids + observation
            [answer] = await ask(session, url, ids, reply)
            ids = ids + answer["output_ids"]
            generated += reply
            cached += answer["meta_info"]["cached_tokens"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(16 if quick else 64):
            lengths = [first, *[new] * 7]
            group.create_task(talk(session, [[rng.randrange(2, VOCAB) for _ in range(n)] for n in lengths]))
    return generated, cached


async def groups(url: str, quick: bool) -> tuple[int, int]:
    """Prompts with eight replies each: generated tokens, and cached ones of the prompts."""
    rng = random.Random(0)
    length, prompt, members, at_once = 32, 512, 8, 8
    work = iter([[rng.randrange(2, VOCAB) for _ in range(prompt)] for _ in range(at_once * (1 if quick else 4))])
    generated = cached = 0

    async def one_after_another(session: aiohttp.ClientSession) -> None:
        nonlocal generated, cached
        for ids in work:
            answers = await ask(session, url, ids, length, members)
            generated += length * members
            cached += sum(answer["meta_info"]["cached_tokens"] for answer in answers)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one_after_another(session))
    return generated, cached


async def ask(
    session: aiohttp.ClientSession, url: str, ids: list[int], length: int, n: int = 1, **more: str
) -> list[dict[str, Any]]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "n": n}
    body = {"input_ids": ids, "sampling_params": sampling, **more}
    async with session.post(url + "/generate", json=body) as response:
        response.raise_for_status()
        reply = await response.json()
    return reply if n > 1 else [reply]


async def bench_reuse(folder: Path, dtype: str, quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    """By work, then ``with`` or ``without`` the prefix cache."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, options in (("without", ["--disable-radix-cache"]), ("with", [])):
        async with serving(folder, dtype, *options) as (url, pid):
            for work in (dialogues, groups):
                cpu, wall = cpu_seconds(pid), time.perf_counter()
                tokens, cached = await work(url, quick)
                figures = rate(tokens, time.perf_counter() - wall, cpu_seconds(pid) - cpu)
                results.setdefault(work.__name__, {})[name] = {**figures, "cached_tokens": cached}
    return results


async def bench_migrate(folder: Path, dtype: str, quick: bool) -> dict[int, dict[str, dict[str, float]]]:
    """By the tokens of a request that moves, then ``with`` or ``without`` its KV: mean seconds, CPU seconds and tokens
    prefilled a move."""
    rng = random.Random(0)
    moves = 8 if quick else 32
    results: dict[int, dict[str, dict[str, float]]] = {}
    async with (
        serving(folder, dtype, "--kv-reuse") as (a, a_pid),
        serving(folder, dtype, "--kv-reuse") as (b, b_pid),
        aiohttp.ClientSession() as session,
    ):

        async def prefilled() -> int:
            async with session.get(b + "/server_info") as response:
                return int((await response.json())["prefilled_tokens"])

        for length in (256, 1024, CONTEXT - 64):
            begun = []
            for _ in range(2 * moves):
                ids = [rng.randrange(2, VOCAB) for _ in range(length - 8)]
                begun.append(ids + (await ask(session, a, ids, 8))[0]["output_ids"])
            results[length] = {}
            for name, more, work in (("with", {"kv_from": a}, begun[::2]), ("without", {}, begun[1::2])):
                before, wall = await prefilled(), time.perf_counter()
                cpu = cpu_seconds(a_pid) + cpu_seconds(b_pid)
                for ids in work:
                    await ask(session, b, ids, 1, **more)
                results[length][name] = {
                    "seconds": (time.perf_counter() - wall) / moves,
                    "cpu_s": (cpu_seconds(a_pid) + cpu_seconds(b_pid) - cpu) / moves,
                    "prefilled_tokens": (await prefilled() - before) / moves,
                }
    return results


async def until_ready(url: str, server: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + 60
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and server.returncode is None:
            try:
                async with session.get(url + "/health") as response:
                    response.raise_for_status()
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
    raise SystemExit("bench/engine.py: the embedded engine did not start; see its message above")


# --- transformers -----------------------------------------------------------------------------------------------------


def bench_transformers(folder: Path, plan: dict[int, int], dtype: str) -> dict[int, dict[str, float]]:
    """Runs in a child process (see ``main``)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(work: list[tuple[list[int], int]]) -> None:
        longest, steps = max(len(ids) for ids, _ in work), max(length for _, length in work)
        ids = torch.zeros((len(work), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(work):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, do_sample=True, max_new_tokens=steps, min_new_tokens=steps, pad_token_id=0
            )

    generate(requests(2, seed=1))
    results = {}
    for in_flight, count in plan.items():
        work = requests(count, seed=in_flight)
        usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for start in range(0, count, in_flight):
            generate(work[start : start + in_flight])
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpu = now.ru_utime + now.ru_stime - usage.ru_utime - usage.ru_stime
        results[in_flight] = rate(sum(length for _, length in work), time.perf_counter() - wall, cpu)
    return results


# --- Both -------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, at most 64 in flight")
    parser.add_argument("--in-flight", type=int, nargs="+", default=None)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--engine-only", action="store_true", help="leave transformers out")
    parser.add_argument("--reuse", action="store_true", help="the engine with its prefix cache, against it without")
    parser.add_argument("--migrate", action="store_true", help="requests that move, with their KV and without")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here as well")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    in_flight = args.in_flight or ([1, 16, 64] if args.quick else [1, 16, 64, 256])
    plan = {n: max(2 if args.quick else 8, n if args.quick else 2 * n) for n in in_flight}
    if args.child:
        folder, out = map(Path, args.child)
        out.write_text(json.dumps(bench_transformers(folder, plan, args.dtype)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        parameters = build_model(folder)
        if args.reuse:
            reuse = asyncio.run(bench_reuse(folder, args.dtype, args.quick))
            report_reuse(parameters, args.dtype, reuse)
            if args.json:
                args.json.write_text(json.dumps({"parameters": parameters, "dtype": args.dtype, **reuse}, indent=2))
            return
        if args.migrate:
            moved = asyncio.run(bench_migrate(folder, args.dtype, args.quick))
            report_migrate(parameters, args.dtype, moved)
            if args.json:
                args.json.write_text(json.dumps({"parameters": parameters, "dtype": args.dtype, **moved}, indent=2))
            return
        engine = asyncio.run(bench_engine(folder, plan, args.dtype))
        static: dict[int, dict[str, float]] = {}
        if not args.engine_only:
            out = Path(scratch) / "transformers.json"
            subprocess.run([sys.executable, *sys.argv, "--child", str(folder), str(out)], check=True)
            static = {int(k): v for k, v in json.loads(out.read_text()).items()}
    report(parameters, args.dtype, engine, static)
    if args.json:
        result: dict[str, Any] = {
            "parameters": parameters,
            "dtype": args.dtype,
            "engine": engine,
            "transformers": static,
        }
        args.json.write_text(json.dumps(result, indent=2))


def report(
    parameters: int, dtype: str, engine: dict[int, dict[str, float]], static: dict[int, dict[str, float]]
) -> None:
    print(f"\n{parameters / 1e6:.2f}M parameters, {dtype}, one thread each; tokens per CPU second (per wall second)")
    print(f"{'in flight':>9} {'tokens':>8} {'embedded engine':>20} {'transformers generate':>24} {'ratio':>7}")
    for n, ours in engine.items():
        row = f"{n:>9} {ours['tokens']:>8} {ours['tokens_per_cpu_s']:>11,.0f} ({ours['tokens_per_s']:>6,.0f})"
        if n in static:
            theirs = static[n]
            row += f" {theirs['tokens_per_cpu_s']:>15,.0f} ({theirs['tokens_per_s']:>6,.0f})"
            row += f" {ours['tokens_per_cpu_s'] / theirs['tokens_per_cpu_s']:>6.1f}x"
        print(row)


def report_reuse(parameters: int, dtype: str, results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(
        f"\n{parameters / 1e6:.2f}M parameters, {dtype}, one thread; generated tokens per CPU second (per wall second)"
    )
    print(f"{'':>9} {'tokens':>8} {'prefix cache':>20} {'without':>20} {'ratio':>7}")
    for work, figures in results.items():
        ours, plain = figures["with"], figures["without"]
        row = f"{work:>9} {ours['tokens']:>8}"
        for side in (ours, plain):
            row += f" {side['tokens_per_cpu_s']:>11,.0f} ({side['tokens_per_s']:>6,.0f})"
        print(f"{row} {ours['tokens_per_cpu_s'] / plain['tokens_per_cpu_s']:>6.1f}x")


def report_migrate(parameters: int, dtype: str, results: dict[int, dict[str, dict[str, float]]]) -> None:
    print(f"\n{parameters / 1e6:.2f}M parameters, {dtype}, one thread; a request that moves, with its KV and without")
    print(f"{'tokens':>7} {'prefilled':>15} {'ms':>17} {'ratio':>6} {'CPU ms':>17} {'ratio':>6}")
    for tokens, sides in results.items():
        ours, plain = sides["with"], sides["without"]
        row = f"{tokens:>7} {ours['prefilled_tokens']:>6.0f} / {plain['prefilled_tokens']:>6.0f}"
        for key in ("seconds", "cpu_s"):
            row += f" {1e3 * ours[key]:>7.1f} / {1e3 * plain[key]:>7.1f} {plain[key] / ours[key]:>5.1f}x"
        print(row)


if __name__ == "__main__":
    main()
