"""Each component hangs in its turn: the report names exactly that one, and the run goes on, or ends with one line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.build.errors import leaves
from asyncrl.build.virtual import Simulation, simulated
from asyncrl.config import Recipe
from asyncrl.env import Action, Env, Step, Task
from asyncrl.runtime.stall import RunStalled
from asyncrl.runtime.status import Books
from asyncrl.sim.loop import run

from .world import check_laws, recipe

STALL_S = 40.0
LONG = 5000.0
"""Deadlines of the tests: long enough that the watchdog is first."""


class Played:
    """A run that something hangs in: what was said of it, and how it ended."""

    simulation: Simulation
    said: list[str]
    error: BaseException | None = None


class Hanging(Env):
    """Around another environment: ``hangs`` says in which call it never returns."""

    def __init__(self, env: Env, hangs: dict[str, int]) -> None:
        self._env, self._hangs = env, hangs

    async def _perhaps(self, call: str) -> None:
        if self._hangs.get(call, 0):
            self._hangs[call] -= 1
            await asyncio.get_running_loop().create_future()

    async def reset(self, task: Task) -> Any:
        await self._perhaps("reset")
        return await self._env.reset(task)

    async def step(self, action: Action) -> Step:
        await self._perhaps("step")
        return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()


def settings(**tables: Any) -> Recipe:
    slow = dict.fromkeys(("reset_timeout_s", "step_timeout_s", "reward_timeout_s"), LONG)
    engine = dict.fromkeys(("request_timeout_s", "idle_timeout_s", "control_timeout_s", "patience_s"), LONG)
    return recipe(
        **{
            **tables,
            "env": {**slow, "episode_timeout_s": 4 * LONG, **tables.get("env", {})},
            "engine": {**engine, **tables.get("engine", {})},
            "trainer": {"restarts": 3, **tables.get("trainer", {})},
            "run": {"steps": 6, "stall_s": STALL_S, **tables.get("run", {})},
        }
    )


def play(chosen: Recipe, hang: Any = None, **calls: int) -> Played:
    """The run, with ``hang`` beside it, and environments that hang in so many of these calls."""
    played = Played()

    async def main() -> None:
        async def disturb() -> None:
            if hang is not None:
                await hang(played.simulation)

        played.simulation = await simulated(
            chosen, services=[disturb], wrap_env=lambda env: Hanging(env, calls) if calls else env
        )
        await played.simulation.play()

    try:
        run(main(), limit=1e6)
    except Exception as error:
        played.error = error
    events = played.simulation.trace.events
    played.said = [dict(e[4])["says"] for e in events if e[0] == "instant" and e[2] == "watchdog"]
    return played


def the_end(played: Played) -> str:
    """The one line of a run that the watchdog ended."""
    assert played.error is not None
    [cause] = leaves(played.error)
    assert isinstance(cause, RunStalled)
    assert "\n" not in str(cause)
    return str(cause)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0.1)


async def after_two_steps(world: Simulation) -> None:
    await until(lambda: world.trainer.version == 2)


def test_a_run_that_gets_on_says_nothing() -> None:
    chosen = settings()
    played = play(chosen)
    assert played.said == [] and played.error is None
    check_laws(chosen, played.simulation)


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_environment_that_never_returns_is_named_and_its_episode_begun_anew(call: str) -> None:
    chosen = settings()
    played = play(chosen, **{call: 1})
    assert played.error is None
    check_laws(chosen, played.simulation)
    report, holder, cut = played.said
    assert report.startswith("no progress for") and "waits for its batch" in report
    assert "group " in holder and f"env {call}" in holder and f"deadline {LONG:g} s (env.{call}_timeout_s)" in holder
    assert cut == f"cut: {holder.strip()}"
    reasons = played.simulation.run.buffer.ledger.reasons()["failed"]
    assert [reason for reason in reasons if "made no progress" in reason]


def test_a_trainer_that_hangs_is_named_and_started_again() -> None:
    chosen = settings(
        sim={"faults": [{"kind": "trainer_crash", "at_s": 1e5}]}
    )  # so it is one that can be started again

    async def hang(world: Simulation) -> None:
        await after_two_steps(world)
        world.trainer.hang()

    played = play(chosen, hang)
    assert played.error is None
    check_laws(chosen, played.simulation)
    assert "waits for the trainer" in played.said[0]
    assert played.said[1].strip().startswith("trainer, ")
    assert played.simulation.trainer.version == 6


def test_a_trainer_that_hangs_ends_a_run_that_may_not_start_it_again() -> None:
    async def hang(world: Simulation) -> None:
        await after_two_steps(world)
        world.trainer.hang()

    played = play(settings(run={"on_stall": "end"}), hang)
    line = the_end(played)
    assert line.startswith("no progress for") and "waits for the trainer" in line and "trainer, " in line
    played.simulation.run.buffer.ledger.check_balanced()


def test_a_server_that_hangs_before_it_takes_weights_is_named() -> None:
    chosen = settings(engine={"control_timeout_s": 3 * STALL_S})

    async def hang(world: Simulation) -> None:
        await after_two_steps(world)
        world.engines[1].hang(True)

    played = play(chosen, hang)
    assert played.error is None
    check_laws(chosen, played.simulation)
    first = played.said[1]
    assert "server 1" in first and "does not answer" in first
    assert not any("server 0" in line for line in played.said)


def test_a_server_that_hangs_while_it_generates_is_named_and_its_requests_go_elsewhere() -> None:
    chosen = settings()

    async def hang(world: Simulation) -> None:
        await until(lambda: world.run.proxy.instances[1].generated > 10)
        world.engines[1].hang(True)

    played = play(chosen, hang)
    assert played.error is None
    check_laws(chosen, played.simulation)
    holders = [line for line in played.said if "tokens from" in line]
    assert holders and all("tokens from server 1" in line and "does not answer" in line for line in holders)


def test_weights_that_do_not_arrive_are_named_and_their_server_started_anew() -> None:
    """A server that hangs while it loads."""
    slow = {"instance": {"load_s": 20.0, "start_s": 0.5}}
    chosen = settings(engine={"control_timeout_s": 3 * STALL_S}, sim=slow)

    async def hang(world: Simulation) -> None:
        await until(lambda: any(i.asked and "load" in i.asked[0] for i in world.run.proxy.instances))
        world.engines[0].hang(True)

    played = play(chosen, hang)
    assert played.error is None
    check_laws(chosen, played.simulation)
    assert any(
        "server 0, asked to load version 1" in line and "engine.control_timeout_s" in line for line in played.said
    )
    assert any(line.startswith("cut: server 0, asked to load version 1") for line in played.said)


def test_a_server_that_hangs_as_it_pulls_is_named_while_others_go_on() -> None:
    """Under a coordinator: of two servers one is left, so the run gets on, and says nothing until both hang."""
    staleflow = {
        "preset": "staleflow",
        "staleness": {"control": "buffers", "bound": 1},
        "update": {"running": "interrupt", "overlap": True},
    }
    chosen = settings(**staleflow, engine={"control_timeout_s": 3 * STALL_S})

    async def hang(world: Simulation) -> None:
        await after_two_steps(world)
        for engine in world.engines:
            engine.hang(True)
        await asyncio.sleep(2 * STALL_S)
        for engine in world.engines:
            engine.hang(False)

    played = play(chosen, hang)
    assert played.error is None
    check_laws(chosen, played.simulation)
    assert played.said[0].startswith("no progress for")
    assert all("server " in line for line in played.said if "does not answer" in line)
    assert any("does not answer" in line for line in played.said)


def test_a_checkpoint_is_left_to_its_own_deadline() -> None:
    async def hang(world: Simulation) -> None:
        await until(lambda: any("checkpoint" in s.what for s in world.run.books._trainer.stages))
        world.trainer.hang()
        await asyncio.sleep(5 * STALL_S)
        world.trainer.crash()

    chosen = settings(run={"checkpoint_every": 2}, sim={"trainer": {"fixed_s": 1.0, "save_s": 3.0}})
    played = play(chosen, hang)
    assert not any(line.startswith("cut: trainer, the checkpoint") for line in played.said)


def test_an_evaluation_that_hangs_is_named_and_its_episode_counts_as_failed() -> None:
    chosen = settings(sim={"heldout": 3}, env={"failure_window": 1000, "max_failure_rate": 1.0, "max_turns": 2})
    played = play(chosen, step=1)
    assert played.error is None
    assert "an evaluation" in played.said[0]
    assert "evaluation of version 0, task" in played.said[1] and "env step 1" in played.said[1]


def test_a_reward_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.runtime.env_manager import EpisodePlayer
    from asyncrl.runtime.reward import Scorer
    from asyncrl.sim.blocking import SimBlocking

    hangs = 1

    async def reward(task: Task, action: Action) -> float:
        nonlocal hangs
        if hangs:
            hangs -= 1
            await asyncio.get_running_loop().create_future()
        return 1.0

    make = EpisodePlayer.__init__

    def scored(self: EpisodePlayer, **parts: Any) -> None:
        import random

        scorer = Scorer(reward, blocking=SimBlocking(rng=random.Random(0)), timeout_s=LONG)
        make(self, **{**parts, "scorer": scorer})

    monkeypatch.setattr(EpisodePlayer, "__init__", scored)
    played = play(settings())
    assert played.error is None
    assert "its reward" in played.said[1] and "env.reward_timeout_s" in played.said[1]


def test_only_reporting_leaves_the_wait_to_its_deadline() -> None:
    chosen = settings(env={"step_timeout_s": 5 * STALL_S}, run={"on_stall": "report"})
    played = play(chosen, step=1)
    assert played.error is None
    check_laws(chosen, played.simulation)
    assert len([line for line in played.said if line.startswith("no progress")]) >= 2
    assert not any(line.startswith("cut") for line in played.said)


def test_what_does_not_help_is_tried_once() -> None:
    """Every reset hangs: the episodes that are begun anew hang too."""
    played = play(settings(env={"retries": 1000}), reset=10**9)
    assert "env reset" in the_end(played)
    assert len([line for line in played.said if line.startswith("no progress")]) == 2


def test_admission_that_is_stuck_ends_the_run_and_says_what_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.core.staleness.inflight_cap import InflightCap

    rooms = iter(range(8))
    monkeypatch.setattr(InflightCap, "room", lambda self, version: int(next(rooms, None) is not None))
    line = the_end(play(settings()))
    assert "none may start" in line and "places are taken" in line


def test_capacity_that_nobody_holds_is_named() -> None:
    """A slot that is never given back."""

    async def leak(world: Simulation) -> None:
        await after_two_steps(world)
        world.run.proxy.instances[0].running += 1

    played = play(settings(run={"steps": 120}), leak)
    assert any("server 0: 1 slots and 0 tokens are taken, but no request has them" in line for line in played.said)


def test_a_request_that_others_pass_is_named() -> None:
    async def starve(world: Simulation) -> None:
        """One request is hidden from routing."""
        await after_two_steps(world)
        waiting = world.run.proxy.waiting
        await until(waiting.first)
        request = waiting.first()
        assert request is not None
        waiting.remove(request)

    played = play(settings(run={"steps": 300, "on_stall": "report"}, staleness={"bound": 200}), starve)
    assert any("for a server while others were served" in line for line in played.said)


def status_lines(chosen: Recipe, at_s: float, **calls: int) -> list[str]:
    lines: list[str] = []

    async def look(world: Simulation) -> None:
        await asyncio.sleep(at_s)
        lines.extend(world.run.books.status(await world.run.books.doing()).lines())

    play(chosen, look, **calls)
    return lines


def test_the_status_says_who_holds_the_gate_at_any_moment() -> None:
    chosen = settings(run={"steps": 8})
    for at_s in (0.5, 1.5, 3.0, 4.5, 6.0):
        gate, *holders = status_lines(chosen, at_s)
        assert gate.startswith("step ") and " s" in gate
        assert all(any(c.isdigit() for c in line) for line in holders)


def test_books_cost_no_more_than_the_live_episodes() -> None:
    """Reading changes nothing: a run that is read all the time leaves the same trace."""
    chosen = settings()

    async def read(world: Simulation) -> None:
        books: Books = world.run.books
        while True:
            books.status()
            books.progress()
            books.faults()
            await asyncio.sleep(0.25)

    quiet, watched = play(chosen), play(chosen, read)
    assert quiet.simulation.trace.events == watched.simulation.trace.events
