"""Whole runs under a coordinator: staleness buffers, pulls of one server at a time, migration (StaleFlow §4, §5).

``ASYNCRL_SEEDS=1000 pytest tests/runtime/test_coordination.py`` plays as many random runs with faults.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.core.commands import Route
from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.routing import RequestView
from asyncrl.runtime.coordination import Coordination
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.trajectory_server import Request, Start, TrajectoryServer
from asyncrl.sim.invariants import InvariantViolation
from asyncrl.sim.loop import run

from .test_faults import SHORT
from .world import cancelled_at, check_laws, coordinated_recipe, play, recipe, started

SEEDS = int(os.environ.get("ASYNCRL_SEEDS", "100"))
FAULTS = {"random_faults": 12, "random_within_s": 60.0, "stall_s": 2e4}


def spans(simulation: Simulation, name: str) -> list[tuple[str, float, float, dict[str, Any]]]:
    """Track, start, end, args."""
    return [(e[1], e[3], e[4], dict(e[5])) for e in simulation.trace.events if e[0] == "span" and e[2] == name]


def versions(simulation: Simulation) -> list[tuple[float, dict[str, int]]]:
    """What the servers held, each time that it changed."""
    held: dict[str, int] = {}
    seen = []
    for e in simulation.trace.events:
        if e[0] == "server" and held.get(e[1]) != e[4]:
            held[e[1]] = e[4]
            seen.append((e[2], dict(held)))
    return seen


HELD = (697,)
"""Found by more: 697, two servers sent each other a waiting request for ever, in no time."""


@pytest.mark.parametrize("seed", sorted({*range(SEEDS), *HELD}))
def test_laws_hold_for_any_settings_and_any_faults(seed: int) -> None:
    settings = coordinated_recipe(seed, engine=SHORT, sim=FAULTS)
    check_laws(settings, play(settings))


@pytest.mark.parametrize("seed", [3, 17])
def test_a_run_gives_the_same_trace_again(seed: int) -> None:
    settings = coordinated_recipe(seed, engine=SHORT, sim={"random_faults": 30, "random_within_s": 60.0})
    events = play(settings).trace.events
    assert play(settings).trace.events == events


BUSY = {
    "preset": "staleflow",
    "env": {"max_turns": 1},
    "rollout": {"batch_groups": 3, "num_envs": 24},
    "engine": {"count": 3, "max_running_requests": 6},
    "run": {"steps": 8},
}
"""Servers of which each would lose by a pull what the others do not."""


def busy(**tables: Any) -> Any:
    merged = {
        name: {**value, **tables.pop(name, {})} if isinstance(value, dict) else value for name, value in BUSY.items()
    }
    return recipe(**merged, **tables)


def test_servers_hold_several_versions_at_once_and_pull_one_by_one() -> None:
    settings = busy(staleness={"bound": 3}, sim={"lengths": {"kind": "lognormal", "mean": 300, "tailness": 77}})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert max(len(set(held.values())) for _, held in versions(simulation)) >= 2
    assert {track for track, *_ in spans(simulation, "update")} == {"server 0", "server 1", "server 2"}
    assert Counter(v for b in simulation.trace.batches for v in b.staleness).keys() <= {0, 1, 2, 3}


def test_the_trainer_may_be_more_than_one_version_ahead_of_every_server() -> None:
    """With η = 3 what was begun on version 0 is trained up to step 3; nothing needs newer weights before."""
    settings = busy(staleness={"bound": 3}, engine={"count": 1, "max_running_requests": 24, "max_total_tokens": 10**5})
    ahead = 0

    async def watch(simulation: Simulation) -> None:
        nonlocal ahead
        while True:
            ahead = max(ahead, simulation.run.parameters.version - simulation.engines[0].version)
            await asyncio.sleep(0.05)

    simulation = play(settings, watch)
    check_laws(settings, simulation)
    assert ahead >= 2


def test_a_pull_that_fails_takes_one_server_out_and_the_others_go_on() -> None:
    settings = busy(engine={"count": 2})

    async def spoil(simulation: Simulation) -> None:
        simulation.engines[0].corrupt_weights()

    simulation = play(settings, spoil)
    check_laws(settings, simulation)
    downs = [(e[1], dict(e[4])["error"]) for e in simulation.trace.events if e[0] == "instant" and e[2] == "down"]
    assert [name for name, _ in downs] == ["server 0"]
    assert "did not pull version" in downs[0][1] and "checksums" in downs[0][1]
    assert simulation.engines[0].version == settings.run.steps, "it came back and caught up"


def test_a_server_that_becomes_slower_gets_less_work() -> None:
    """By requests alone both would have as many at a time, whatever they take."""
    settings = busy(
        engine={"count": 2, "max_running_requests": 24, "max_total_tokens": 10**5, "stream_interval": 4},
        rollout={"max_new_tokens": 600, "max_tokens": 1_000},
        sim={"lengths": {"kind": "lognormal", "mean": 300, "tailness": 30}},
    )

    async def slow(simulation: Simulation) -> None:
        simulation.engines[0].slow(4.0)

    has: Counter[str] = Counter()
    simulation = play(settings, slow)
    check_laws(settings, simulation)
    for track, begin, end, *_ in spans(simulation, "generate"):
        has[track] += end - begin
    assert has["server 0"] < 0.7 * has["server 1"]


def test_requests_migrate_with_their_tokens_and_the_trace_shows_it() -> None:
    """The check of sim/invariants.py counts the tokens of each response."""
    settings = busy(
        engine={"phi_wait": 0, "phi_throughput": 1.1, "mu": 0.05, "max_running_requests": 12, "max_total_tokens": 4000},
        staleness={"bound": 3},
        sim={"lengths": {"kind": "lognormal", "mean": 300, "tailness": 77}, "instance": {"cost": {"k1": 1e-4}}},
    )
    simulation = play(settings)
    check_laws(settings, simulation)
    assert sum(args["requests"] for *_, args in spans(simulation, "migrate")) > 9
    cut = [e for e in simulation.trace.events if e[0] == "trajectory"]
    assert cut


@pytest.mark.parametrize("count", [1, 3])
def test_an_evaluation_beside_training_is_of_one_version_and_the_last_of_the_last(count: int) -> None:
    settings = busy(engine={"count": count}, run={"eval_every": 2}, sim={"heldout": 6})
    simulation = play(settings)
    check_laws(settings, simulation)
    evaluated = [e[1] for e in simulation.trace.events if e[0] == "eval"]
    assert evaluated[0] == 0 and evaluated[-1] == settings.run.steps
    assert len(evaluated) > 2


def test_at_the_end_every_server_has_the_last_version() -> None:
    simulation = play(busy())
    assert {engine.version for engine in simulation.engines} == {8}


SPREAD = {
    "staleness": {"bound": 3},
    "rollout": {"batch_groups": 4, "group_size": 6, "num_envs": 96},
    "engine": {"count": 4, "max_running_requests": 24, "max_total_tokens": 10**5},
}


def test_a_group_has_the_oldest_version_that_its_members_go_to_whatever_the_order_of_commands() -> None:
    old, new = (
        SimpleNamespace(name=f"v{v}", version=v, pulling=False, tokens=0, max_tokens=1, up=False) for v in (3, 4)
    )
    waiting, given = TrajectoryServer(), []
    start = Start(group_id=7, v_traj=None)

    def assign(group: int, version: int) -> bool:
        start.v_traj = version
        return True

    proxy: Any = SimpleNamespace(
        instances=[old, new],
        waiting=waiting,
        snapshot=lambda newest, pace: None,
        hand=lambda request, instance: given.append((request.view.id, instance.name)),
        on_free=lambda instance: None,
    )
    routes = [Route(instance="v4", requests=(1,)), Route(instance="v3", requests=(2,))]
    anything: Any = SimpleNamespace(
        version=4,
        room=None,
        assign=assign,
        plays=lambda group: True,
        plan=lambda snapshot, room: routes,
        rests=None,
    )
    coordination = Coordination(
        coordinator=anything,
        proxy=proxy,
        parameters=anything,
        buffer=anything,
        control=anything,
        observer=anything,
        stream_interval=0,
    )

    async def rounds() -> None:
        for number in (1, 2):
            view = RequestView(id=number, group=7, v_traj=None, tokens=1, sequence=number)
            waiting.put(Request(view, start, asyncio.get_running_loop().create_future()))
        async with asyncio.TaskGroup() as group:
            coordination._round(group)

    run(rounds())
    assert given == [(2, "v3"), (1, "v4")]
    assert start.v_traj == 3


def test_the_books_show_a_running_request_as_it_would_come_back() -> None:
    settings, seen = busy(**SPREAD), 0

    async def watch(simulation: Simulation) -> None:
        nonlocal seen
        while True:
            for instance in simulation.run.proxy.instances:
                views = instance.requests.values()
                assert sum(view.tokens for view in views) == instance.tokens
                if not instance.pulling:
                    assert all(view.after == view.oldest == instance.version for view in views)
                seen += len(views)
            await asyncio.sleep(0.05)

    check_laws(settings, play(settings, watch))
    assert seen


def test_a_server_that_pulls_is_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law that the simulation checks can be broken: without the proxy's care it is."""

    def careless(self: LLMProxy, request: Any, instance: Any) -> None:
        self._give(instance, request)

    monkeypatch.setattr(LLMProxy, "hand", careless)
    with pytest.raises(InvariantViolation, match="was given a request while it takes weights"):
        play(busy())


def test_cancelled_at_any_moment_the_run_leaves_nothing_behind() -> None:
    settings = busy(run={"steps": 3}, engine={"count": 2})
    for turn in range(1, 4000, 7):
        simulations: list[Simulation] = []
        hit = cancelled_at(turn, started(settings, simulations))
        if simulations:
            simulations[0].run.buffer.ledger.check_balanced()
            simulations[0].checked.check_end()
        if not hit:
            break
    assert turn > 200


def test_the_cost_model_follows_the_servers_and_says_how_far_off_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with servers three times as slow as they are."""
    slow = CostModel(k1=2e-7, k2=4e-3, k3=3e-4, k4=3e-2, k5=4e-5)
    monkeypatch.setattr("asyncrl.build.assemble.cost_of", lambda instance: slow)
    settings = busy(
        staleness={"bound": 3},
        rollout={"max_new_tokens": 300, "max_tokens": 600},
        engine={"count": 2, "max_running_requests": 16, "max_total_tokens": 10**5},
        run={"steps": 12},
        sim={"lengths": {"kind": "lognormal", "mean": 250, "tailness": 77}},
    )
    events = play(settings).trace.events
    errors = [e[3] for e in events if e[:2] == ("counter", "coordinator/cost_error")]
    assert errors[0] > 0.5 and errors[-1] < 0.2


def test_the_cost_model_stays_as_it_is_if_the_recipe_says_so() -> None:
    events = play(busy(engine={"fit_cost": False}, run={"steps": 2})).trace.events
    assert not [e for e in events if e[:2] == ("counter", "coordinator/cost_error")]
