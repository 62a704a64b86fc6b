"""Measuring servers: simulated ones give their coefficients back, a real one gives a profile that can be used."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from contract.tiny_model import make_model

from asyncrl.build.fit import Client, Effort, Stream, describe, first_token, fit, measure, steady_step
from asyncrl.build.profile import Profile, load_profile, write_profile
from asyncrl.config import Recipe, RecipeError, load, load_table
from asyncrl.core.cost_model import CostModel
from asyncrl.core.fitting import Fit, FitError, Load, fit_cost, new_tokens, plan_loads
from asyncrl.ports import Chunk, EngineError, EngineLoad, GenerateRequest
from asyncrl.processes import ChildError
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.loop import run

COST = CostModel(k1=2e-6, k2=4e-3, k3=5e-4, k4=1.5e-3, k5=3e-5)
ONE_ROUND = Effort(rounds=1, budget_s=1e6)
CONTEXT = 512


def server(name: str = "server 0", cost: CostModel = COST, interval: int = 8, **settings: Any) -> SimEngine:
    return SimEngine(
        name,
        rng=random.Random(0),
        lengths=lambda rng, ids: 5,  # a measurement goes on all the same
        cost=cost,
        max_running=settings.pop("max_running", 32),
        max_tokens=settings.pop("max_tokens", 60_000),
        context_length=CONTEXT,
        stream_interval=interval,
        **settings,
    )


def client(engine: Any) -> Client:
    clock = asyncio.get_running_loop().time
    return Client(engine, clock=clock, alphabet=range(48, 58), rng=random.Random(1), temperature=1.0, top_p=1.0)


def cause(error: BaseException) -> BaseException:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def fitted(*engines: SimEngine, effort: Effort = ONE_ROUND, max_running: int = 32) -> tuple[Fit, list[str]]:
    notes: list[str] = []

    async def main() -> Fit:
        for engine in engines:
            await engine.connect()
        loads = plan_loads(max_running=max_running, max_kv=60_000, context_length=CONTEXT, quick=effort.quick)
        measured = await measure([client(e) for e in engines], *loads, effort, notes.append)
        return fit_cost(measured.decode, measured.prefill, prompt_tokens=64)

    return run(main()), notes


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_simulated_server_gives_its_coefficients_back(prefix_cache: bool) -> None:
    result, _ = fitted(server(prefix_cache=prefix_cache))
    for name in CostModel.__struct_fields__:
        assert getattr(result.cost, name) == pytest.approx(getattr(COST, name), rel=1e-6), name
    assert result.latency_s == pytest.approx(0.0, abs=1e-9) and result.request_s == pytest.approx(0.0, abs=1e-9)
    assert result.decode.max < 1e-6 and result.prefill.max < 1e-6


def test_the_default_cost_model_comes_back_as_well() -> None:
    result, _ = fitted(server(cost=CostModel()))
    for name in CostModel.__struct_fields__:
        assert getattr(result.cost, name) == pytest.approx(getattr(CostModel(), name), rel=1e-4), name


def test_of_several_servers_the_median_counts() -> None:
    slow = msgspec.structs.replace(COST, k1=9e-6, k2=9e-3, k3=9e-4, k4=9e-3)
    result, _ = fitted(server("a"), server("b", cost=slow), server("c"))
    assert result.cost.k3 == pytest.approx(COST.k3, rel=1e-6)


def test_a_slow_moment_does_not_show_in_three_rounds() -> None:
    engine = server()

    async def main() -> tuple[Fit, list[float]]:
        await engine.connect()
        loads = plan_loads(max_running=32, max_kv=60_000, context_length=CONTEXT)
        loop = asyncio.get_running_loop()
        rounds: list[float] = []

        def note(line: str) -> None:
            if line.startswith("round"):
                rounds.append(loop.time())
            if len(rounds) == 1:  # the second round begins
                loop.call_later(3.0, engine.slow, 5.0)
                loop.call_later(6.0, engine.slow, 1.0)

        measured = await measure([client(engine)], *loads, Effort(rounds=3, budget_s=1e6), note)
        return fit_cost(measured.decode, measured.prefill, prompt_tokens=64), rounds

    result, (first, second, third) = run(main())
    assert second - first > 1.0 + (third - second), "the second round was slower"
    assert result.decode.max < 1e-6 and result.cost.k5 == pytest.approx(COST.k5, rel=1e-6)


def test_no_load_begins_after_the_time_that_was_given() -> None:
    async def main() -> tuple[int, float]:
        engine = server()
        await engine.connect()
        decode, prefill = plan_loads(max_running=32, max_kv=60_000, context_length=CONTEXT)
        measured = await measure([client(engine)], decode, prefill, Effort(rounds=9, budget_s=10.0), notes.append)
        return len(measured.decode), asyncio.get_running_loop().time()

    notes: list[str] = []
    points, seconds = run(main())
    longest = 128 * COST.step(32, 32 * CONTEXT) + 32 * CONTEXT * COST.k5
    assert 0 < points < 18 and 10.0 < seconds < 10.0 + longest
    assert notes[-1] == "10 s are over in round 1 of 9"


def test_a_load_that_the_server_does_not_let_in_at_once_is_left_out() -> None:
    result, notes = fitted(server(max_running=8), max_running=32)
    assert any(note.startswith("n = 32") and "all at once" in note for note in notes)
    assert result.cost.k1 == pytest.approx(COST.k1, rel=1e-6)


def test_a_server_that_others_use_is_refused() -> None:
    async def main() -> None:
        engine = server()
        await engine.connect()
        async with asyncio.TaskGroup() as group:
            other = group.create_task(client(engine).run(Load(n=2, prompt=10, new=400)))
            await asyncio.sleep(0.5)
            with pytest.raises(FitError, match="server 0 has 2 requests already"):
                await measure([client(engine)], *plan_loads(max_running=4, max_kv=9999, context_length=64),
                              ONE_ROUND, lambda line: None)  # fmt: skip
            other.cancel()

    run(main())


def test_a_server_that_dies_ends_the_measurement_with_its_error() -> None:
    async def main() -> None:
        engine = server()
        await engine.connect()
        asyncio.get_running_loop().call_later(1.0, engine.kill)
        with pytest.raises(ExceptionGroup) as caught:
            await measure([client(engine)], *plan_loads(max_running=8, max_kv=9999, context_length=64),
                          Effort(rounds=1000, budget_s=1e6), lambda line: None)  # fmt: skip
        assert isinstance(cause(caught.value), EngineError)

    run(main())


class Scripted:
    """A server that ends every request after ``count`` tokens with ``reason``."""

    name = "scripted"

    def __init__(self, count: int, reason: str) -> None:
        self.count = count
        self.reason = reason

    async def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, used_tokens=0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        assert request.ignore_eos
        await asyncio.sleep(0.1)
        yield Chunk(
            output_ids=array("i", [1]) * self.count,
            logprobs=array("f", [0.0]) * self.count,
            versions=array("i", [0]) * self.count,
            finish_reason=self.reason,
        )


@pytest.mark.parametrize(("count", "reason"), [(5, "stop"), (5, "abort"), (5, "length"), (9, "stop")])
def test_a_server_that_does_not_generate_what_it_was_told_is_refused(count: int, reason: str) -> None:
    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await client(Scripted(count, reason)).run(Load(n=1, prompt=4, new=9))
        assert isinstance(cause(caught.value), FitError)

    run(main())


def test_a_last_chunk_without_tokens_is_no_arrival() -> None:
    class Polite(Scripted):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            async for chunk in super().generate(request):
                yield msgspec.structs.replace(chunk, finish_reason=None)
            await asyncio.sleep(1.0)
            yield msgspec.structs.replace(chunk, output_ids=array("i"), finish_reason="length")

    async def main() -> list[Stream]:
        return await client(Polite(9, "length")).run(Load(n=1, prompt=4, new=9))

    [stream] = run(main())
    assert stream.arrivals == ((pytest.approx(0.1), 9),)


# --- what is read from streams ----------------------------------------------------------------------------------------


def test_only_steps_while_all_decode_count() -> None:
    load = Load(n=2, prompt=10, new=4)
    late = Stream(sent=0.0, arrivals=((5.0, 1), (6.0, 2), (8.0, 3), (10.0, 4)), cached=0)
    early = Stream(sent=0.0, arrivals=((1.0, 1), (4.0, 2), (6.0, 3), (8.0, 4)), cached=0)
    point = steady_step(load, [late, early])
    assert point is not None
    # From 5 to 8 s: two steps of 1.5 s in one stream, one of 2 s in the other.
    assert point.seconds == pytest.approx(1.75)
    assert point.kv == pytest.approx((10 + 1.5) + (10 + 3))
    assert steady_step(load, [late, Stream(sent=0.0, arrivals=((1.0, 1), (4.0, 4)), cached=0)]) is None


def test_the_first_token_is_that_of_the_last_and_cached_tokens_are_no_prefill() -> None:
    load = Load(n=2, prompt=10, new=1)
    streams = [Stream(sent=1.0, arrivals=((2.0, 1),), cached=4), Stream(sent=1.5, arrivals=((4.0, 1),), cached=0)]
    point = first_token(load, streams)
    assert (point.tokens, point.kv, point.seconds) == (16, 20, 3.0)


# --- a real server ----------------------------------------------------------------------------------------------------


def recipe(model: Path, **engine: Any) -> Recipe:
    table = {
        "model": {"path": str(model)},
        "rollout": {"max_tokens": 1024, "max_new_tokens": 32},
        "engine": {"count": 1, "max_running_requests": 4, "max_total_tokens": 8192, "device": "cpu", **engine},
    }
    return load_table(table)


async def test_the_embedded_engine_gives_a_profile_that_a_simulation_can_use(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 0)
    out = tmp_path / "new" / "profile.json"
    notes: list[str] = []
    profile = await fit(recipe(model), out, effort=Effort(rounds=3, budget_s=60.0, quick=True), note=notes.append)
    assert {p.n for p in profile.decode} == {1, 4} and {p.n for p in profile.prefill} == {1, 4}
    cost = load_profile(out)
    assert cost == profile.fit.cost
    assert 1e-5 < cost.step(1, 32) < 1.0, "a step of a tiny model takes between 10 µs and a second"
    assert profile.fit.decode.max < 1.0
    text = out.read_text()
    assert json.loads(text)["about"]["model_type"] == "qwen3" and str(tmp_path) not in text
    assert len(describe(profile)) > len(profile.decode) + len(profile.prefill)
    assert sum(note.startswith("round") for note in notes) == 3


async def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 0)
    with pytest.raises(ExceptionGroup) as caught:
        await fit(recipe(model, args=["--no-such-flag"]), tmp_path / "p.json", note=lambda line: None)
    error = cause(caught.value)
    assert isinstance(error, ChildError) and "\n" not in str(error)
    assert not (tmp_path / "p.json").exists()


async def test_an_unreachable_server_is_named_with_the_setting_that_bounds_the_wait(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 0)
    with pytest.raises(ExceptionGroup) as caught:
        await fit(
            recipe(model, connect_timeout_s=0.5),
            tmp_path / "p.json",
            urls=["http://127.0.0.1:9"],
            note=lambda line: None,
        )
    error = cause(caught.value)
    assert isinstance(error, EngineError)
    assert "http://127.0.0.1:9" in str(error) and "connect_timeout_s" in str(error)


# --- the profile ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    async def main() -> Profile:
        engine = server()
        await engine.connect()
        loads = plan_loads(max_running=8, max_kv=60_000, context_length=CONTEXT, quick=True)
        measured = await measure([client(engine)], *loads, ONE_ROUND, lambda line: None)
        return Profile(
            about={"engine": "simulated"},
            fit=fit_cost(measured.decode, measured.prefill, prompt_tokens=64),
            decode=measured.decode,
            prefill=measured.prefill,
        )

    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(path, run(main()))
    return path


def test_a_profile_comes_back_as_it_was_written(profile_file: Path) -> None:
    assert load_profile(profile_file).k1 == pytest.approx(COST.k1, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k1": -1e-9}, "k1 = -1e-09 is not 0 or more"),
        ({"k3": None}, "no profile"),
        ({"k2": 0.0, "k3": 0.0, "k4": 0.0}, "steps take no time"),
    ],
)
def test_a_broken_profile_is_refused_in_one_line(
    profile_file: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    table = json.loads(profile_file.read_text())
    table["fit"]["cost"] |= change
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(table))
    with pytest.raises(RecipeError) as error:
        load_profile(broken)
    assert complaint in str(error.value) and str(broken) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_no_profile_or_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{'k1': 3}")
    for name, complaint in (("text.json", "no profile"), ("nowhere.json", "No such file")):
        with pytest.raises(RecipeError, match=complaint) as error:
            load_profile(tmp_path / name)
        assert "asyncrl plan --fit" in str(error.value)


def test_a_profile_that_cannot_be_written_says_so(profile_file: Path) -> None:
    profile = msgspec.json.decode(profile_file.read_bytes(), type=Profile)
    with pytest.raises(RecipeError, match="cannot write the profile"):
        write_profile(profile_file / "below-a-file.json", profile)


def test_chunks_are_fine_enough_for_a_steady_middle() -> None:
    assert new_tokens(80) == 40 and new_tokens(40_000) == 128 and new_tokens(40_000, quick=True) == 64


def test_the_quickstart_recipe_brings_a_profile_for_its_simulation() -> None:
    folder = Path(__file__).parents[2] / "recipes" / "runsum"
    settings = load(folder, files=[folder / "sim.toml"])
    profile = msgspec.json.decode(Path(settings.sim.instance.profile).read_bytes(), type=Profile)
    assert load_profile(Path(settings.sim.instance.profile)) == profile.fit.cost
    assert profile.about["max_running_requests"] == settings.engine.max_running_requests
    assert profile.fit.prompt_tokens == settings.sim.prompt_tokens.expected
