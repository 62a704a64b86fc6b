"""Fitting the cost model to live servers: ``asyncrl plan RECIPE --fit`` (StaleFlow appendix B).

``measure`` puts loads on servers through the Engine port and takes times from a given clock, so it also runs against
simulated servers on virtual time. ``fit`` starts the recipe's servers (or takes those that run), measures, regresses
(``core/fitting.py``) and writes the profile.

What is measured, and which of the many times is taken:

* A decode step: n equal requests at once; the time of a step is that between chunks of a stream, from when all n have
  their first tokens until the first of them ends. Within a load the median over its streams is taken, of each the mean
  over its steps, so what an engine does only now and then counts.
* Prefill: n requests of one token each; the time until the last has it.
* All servers of the recipe get the same load at the same time, so what they share in a run (cores, a bus) they share
  here. Over rounds and servers the median is taken: a machine that others use as well does not show, except when they
  do so all the time. Rounds go through all loads in turn, so that a slow minute does not hit one point only.

Every load is bounded by the engine's deadlines, and no load begins after the time that was given to the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import string
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from asyncrl.build.profile import Profile, write_profile
from asyncrl.build.setup import checked_token, set_up
from asyncrl.config import Recipe, RecipeError
from asyncrl.core.fitting import FitError, Load, PrefillPoint, Quality, StepPoint, fit_cost, new_tokens, plan_loads
from asyncrl.core.types import Record
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.loading import check_model
from asyncrl.ports import Engine, GenerateRequest
from asyncrl.servers import LocalServers
from asyncrl.tokenizer import HuggingFaceTokenizer

Note = Callable[[str], None]
P = TypeVar("P", bound="StepPoint | PrefillPoint")

CHUNKS = 8
"""Chunks of a decode load's stream: enough for a steady middle, few enough not to become a load themselves."""

SETTLE_S = 0.05
"""Between two loads: what a server does behind the last token (log, free, answer) is not the next load's."""


class Effort(Record, frozen=True, kw_only=True):
    """How long to measure: at most ``rounds`` through all loads, and no new load after ``budget_s``."""

    rounds: int
    budget_s: float
    quick: bool = False


FULL = Effort(rounds=9, budget_s=900.0)
QUICK = Effort(rounds=3, budget_s=90.0, quick=True)


class Stream(Record, frozen=True, kw_only=True):
    """One request as its client saw it: ``arrivals`` are (seconds, tokens so far) of each chunk."""

    sent: float
    arrivals: tuple[tuple[float, int], ...]
    cached: int


class Measured(Record, frozen=True, kw_only=True):
    decode: tuple[StepPoint, ...]
    prefill: tuple[PrefillPoint, ...]


class Client:
    """Puts loads on one server. ``alphabet`` are ids of plain text, which prompts are drawn from: all different, so
    that no prefix cache helps. ``clock`` gives the seconds of arrivals."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float],
        alphabet: Sequence[int],
        rng: random.Random,
        temperature: float,
        top_p: float,
    ) -> None:
        self.engine = engine
        self._clock = clock
        self._alphabet = alphabet
        self._rng = rng
        self._temperature = temperature
        self._top_p = top_p
        self._prefix = f"fit-{rng.getrandbits(32):08x}"
        self._requests = 0

    async def check_idle(self) -> None:
        """Raises ``FitError`` if someone else uses the server."""
        load = await self.engine.load()
        if load.running or load.waiting:
            raise FitError(
                f"{self.engine.name} has {load.running + load.waiting} requests already; a fit needs it alone"
            )

    async def run(self, load: Load) -> list[Stream]:
        """All requests of a load, at once. Raises ``EngineError``, or ``FitError`` for a server that does not generate
        as many tokens as it was told."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._request(load)) for _ in range(load.n)]
        return [task.result() for task in tasks]

    async def _request(self, load: Load) -> Stream:
        self._requests += 1
        request = GenerateRequest(
            rid=f"{self._prefix}-{self._requests:08d}",
            input_ids=array("i", self._rng.choices(self._alphabet, k=load.prompt)),
            max_new_tokens=load.new,
            temperature=self._temperature,
            top_p=self._top_p,
            ignore_eos=True,
        )
        sent, tokens, cached, finish = self._clock(), 0, 0, None
        arrivals: list[tuple[float, int]] = []
        async for chunk in self.engine.generate(request):
            tokens += len(chunk.output_ids)
            cached = max(cached, chunk.cached_tokens)
            finish = chunk.finish_reason
            if chunk.output_ids:  # the last one may only say that it is the last
                arrivals.append((self._clock(), tokens))
        if finish != "length" or tokens != load.new:
            raise FitError(
                f"{self.engine.name} ended a request of {load.new} tokens after {tokens} ({finish}); was it paused?"
            )
        return Stream(sent=sent, arrivals=tuple(arrivals), cached=cached)


def steady_step(load: Load, streams: Sequence[Stream]) -> StepPoint | None:
    """The mean decode step while all of a load's requests decode; None if they never did so long enough: then the
    server did not let them all in at once."""
    begin = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    steps, kv = [], 0.0
    for stream in streams:
        inside = [arrival for arrival in stream.arrivals if begin <= arrival[0] <= end]
        if len(inside) < 2:
            return None
        (since, first), (until, last) = inside[0], inside[-1]
        steps.append((until - since) / (last - first))
        # The steps from token ``first`` to ``last`` read prompt + first … prompt + last - 1 tokens of this request.
        kv += load.prompt + (first + last - 1) / 2
    return StepPoint(load=load, n=load.n, kv=kv, seconds=median(steps))


def first_token(load: Load, streams: Sequence[Stream]) -> PrefillPoint:
    """The time until all requests of a load had their first token."""
    return PrefillPoint(
        load=load,
        n=load.n,
        tokens=sum(load.prompt - stream.cached for stream in streams),
        kv=load.n * load.prompt,
        seconds=max(s.arrivals[0][0] for s in streams) - min(s.sent for s in streams),
    )


async def measure(
    clients: Sequence[Client], decode: Sequence[Load], prefill: Sequence[Load], effort: Effort, note: Note
) -> Measured:
    """Times of all loads on servers that are connected and otherwise idle. Raises ``EngineError`` or ``FitError``."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + effort.budget_s
    for client in clients:
        await client.check_idle()
    loads = [*decode, *prefill]
    note(f"warming up, then {effort.rounds} rounds of {len(loads)} loads, {effort.budget_s:g} s at most")
    await _on_all(clients, decode[-1])
    steps: dict[Load, list[StepPoint]] = {load: [] for load in decode}
    firsts: dict[Load, list[PrefillPoint]] = {load: [] for load in prefill}
    for number in range(1, effort.rounds + 1):
        began = clock()
        for load in loads:
            if clock() > deadline:
                note(f"{effort.budget_s:g} s are over in round {number} of {effort.rounds}")
                break
            for streams in await _on_all(clients, load):
                if load in firsts:
                    firsts[load].append(first_token(load, streams))
                elif (step := steady_step(load, streams)) is not None:
                    steps[load].append(step)
            if number == 1:
                note(_seen(load, [*steps.get(load, ()), *firsts.get(load, ())]))
        else:
            note(f"round {number} of {effort.rounds}: {clock() - began:.1f} s")
            continue
        break
    return Measured(
        decode=tuple(_middle(points) for points in steps.values() if points),
        prefill=tuple(_middle(points) for points in firsts.values() if points),
    )


async def _on_all(clients: Sequence[Client], load: Load) -> list[list[Stream]]:
    await asyncio.sleep(SETTLE_S)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.run(load)) for client in clients]
    return [task.result() for task in tasks]


def _middle(points: Sequence[P]) -> P:
    """The point whose time is the median; of two, the shorter."""
    return sorted(points, key=lambda p: p.seconds)[(len(points) - 1) // 2]


def _seen(load: Load, points: Sequence[StepPoint | PrefillPoint]) -> str:
    what = f"n = {load.n}, prompt {load.prompt}"
    if not points:
        return f"{what}: the server did not run them all at once"
    return f"{what}: {1000 * _middle(points).seconds:.3g} ms {'a step' if load.new > 1 else 'to the first token'}"


async def fit(
    recipe: Recipe, out: Path, *, urls: Sequence[str] = (), effort: Effort = FULL, note: Note = print
) -> Profile:
    """Measure the servers of ``recipe``, or those at ``urls``, and write the profile to ``out``.

    Servers are started (and stopped) as for a run, unless ``urls`` or ``engine.urls`` name running ones; the setup
    script runs first, if it has to. k5 is for prompts of ``sim.prompt_tokens``. Raises ``RecipeError``,
    ``EngineError``, ``ChildError`` or ``FitError``.
    """
    if urls:
        recipe = msgspec.structs.replace(recipe, engine=msgspec.structs.replace(recipe.engine, urls=list(urls)))
    token = checked_token(recipe)
    await set_up(recipe, sys.stdout)
    model_type, vocabulary = check_model(recipe.model.path)
    tokenizer = HuggingFaceTokenizer(Path(recipe.model.path))
    alphabet = sorted(set(tokenizer.encode(string.ascii_letters + string.digits)))
    context = recipe.rollout.max_tokens
    interval = max(1, new_tokens(context, quick=effort.quick) // CHUNKS)
    config = msgspec.structs.replace(recipe.engine, stream_interval=interval)
    logs = Path(tempfile.mkdtemp(prefix="asyncrl-fit-"))
    servers = LocalServers(recipe, logs=logs, note=note, token=token)
    engines = [
        SGLangEngine(
            url,
            f"server {i}",
            config,
            rng=random.Random(f"{recipe.seed}/{i}"),
            model_type=model_type,
            vocabulary=vocabulary,
            token=token,
        )
        for i, url in enumerate(servers.urls)
    ]
    sampling = recipe.rollout

    async def run() -> Profile:
        infos = [await engine.connect() for engine in engines]
        if context > (longest := min(info.context_length for info in infos)):
            raise RecipeError(f"rollout.max_tokens = {context}: the servers take at most {longest}; lower it")
        max_running = min(info.max_running_requests for info in infos)
        max_kv = min(info.max_total_tokens for info in infos)
        loads = plan_loads(max_running=max_running, max_kv=max_kv, context_length=context, quick=effort.quick)
        clients = [
            Client(
                engine,
                clock=time.perf_counter,  # uvloop's own has milliseconds, which is a whole step of a small model
                alphabet=alphabet,
                rng=random.Random(f"{recipe.seed}/fit/{i}"),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
            )
            for i, engine in enumerate(engines)
        ]
        measured = await measure(clients, *loads, effort, note)
        about: dict[str, str | int] = {
            "recipe": recipe.name,
            "engine": recipe.engine.kind,
            "servers": len(engines),
            "model_type": model_type,
            "dtype": recipe.model.dtype,
            "max_running_requests": max_running,
            "max_total_tokens": max_kv,
            "max_tokens": context,
            "machine": "that of a server which ran already" if recipe.engine.urls else machine(),
            "rounds": effort.rounds,
            "asyncrl": package_version("asyncrl"),
        }
        return Profile(
            about=about,
            fit=fit_cost(measured.decode, measured.prefill, prompt_tokens=max(1.0, recipe.sim.prompt_tokens.expected)),
            decode=measured.decode,
            prefill=measured.prefill,
        )

    try:
        await servers.start()
        profile = await servers.until_death(run())
        write_profile(out, profile)
    finally:
        for close in (*(engine.close for engine in engines), servers.stop):
            await close()
        with contextlib.suppress(OSError):
            logs.rmdir()  # unless there is one in it: an error names it
    shutil.rmtree(logs, ignore_errors=True)
    return profile


def machine() -> str:
    """What this computes on, in words: processor, cores and GPUs, as far as Linux tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    found = [f"{os.cpu_count()} cores of {model}"]
    for gpu in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        name = next((line for line in gpu.read_text().splitlines() if line.startswith("Model:")), "")
        found.append(name.removeprefix("Model:").strip())
    return ", ".join(found)


def describe(profile: Profile) -> list[str]:
    """Lines for a terminal: coefficients, errors, and every point."""
    fit, cost = profile.fit, profile.fit.cost
    lines = [
        f"k1 {cost.k1:.3g} s a token of KV, k2 {cost.k2:.3g} s a step, k3 {cost.k3:.3g} s a sequence, "
        f"k4 {cost.k4:.3g} s a step, k5 {cost.k5:.3g} s a prefilled token",
        *fit.notes,
        f"latency of a load beside the work on it: {1000 * fit.latency_s:.3g} ms",
    ]
    lines += _table("a step", profile.decode, fit.decode)
    lines += _table("to the first token", profile.prefill, fit.prefill)
    return lines


def _table(what: str, points: Sequence[StepPoint | PrefillPoint], quality: Quality) -> list[str]:
    return [
        f"{'n':>6} {'prompt':>8} {'ms ' + what:>22} {'error':>8}",
        *(
            f"{p.n:>6} {p.load.prompt:>8} {1000 * p.seconds:>22.3f} {100 * error:>7.1f}%"
            for p, error in zip(points, quality.points, strict=True)
        ),
        f"error {100 * quality.mean:.1f} % in the mean, {100 * quality.max:.1f} % at most, R² {quality.r2:.4f}",
    ]
