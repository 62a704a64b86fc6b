"""Held-out tasks beside training: one version each, on a part of the fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe, RecipeError
from asyncrl.runtime.instance import Instance

from .world import check_laws, play, recipe


def evaluated(**tables: Any) -> Recipe:
    run = {"steps": 9, "eval_every": 4, "eval_share": 0.5} | tables.pop("run", {})
    return recipe(run=run, sim={"heldout": 6, **tables.pop("sim", {})}, **tables)


def evaluations(simulation: Simulation) -> list[tuple[int, int]]:
    """(version, episodes) in the order of their ends."""
    return [(e[1], e[3]) for e in simulation.trace.events if e[0] == "eval"]


def spans(simulation: Simulation, track: str, name: str) -> list[tuple[float, float, dict[str, Any]]]:
    return [(e[3], e[4], dict(e[5])) for e in simulation.trace.events if e[:3] == ("span", track, name)]


def test_each_is_of_one_version_while_training_goes_on() -> None:
    settings = evaluated()
    simulation = play(settings)
    check_laws(settings, simulation)
    assert evaluations(simulation) == [(0, 6), (4, 6), (8, 6), (9, 6)]
    beside = [s for s in spans(simulation, "controller", "evaluate") if s[2]["version"] in (4, 8)]
    for start, end, about in beside:
        steps = [s for s in spans(simulation, "trainer", "train") if start < s[1] < end]
        assert steps, "training waited for the evaluation"
        updates = [u for i in range(2) for u in spans(simulation, f"server {i}", "update") if start < u[1] <= end]
        assert {u[2]["version"] for u in updates} > {about["version"] + 1} or len(updates) == 1
    assert {i.version for i in simulation.run.proxy.instances} == {9}
    assert not simulation.run.proxy.has_pinned


def test_a_single_server_keeps_its_version_until_the_end_of_the_evaluation() -> None:
    settings = evaluated(engine={"count": 1})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert evaluations(simulation) == [(0, 6), (4, 6), (8, 6), (9, 6)]
    for start, end, _ in spans(simulation, "controller", "evaluate"):
        assert not [u for u in spans(simulation, "server 0", "update") if start < u[1] < end]


@pytest.mark.parametrize("running", ["interrupt", "drain"])
@pytest.mark.parametrize("transport", ["disk", "collective", "relay"])
def test_servers_catch_up_by_every_transport(running: str, transport: str) -> None:
    settings = evaluated(update={"running": running}, sim={"weights": {"transport": transport, "gigabytes": 2.0}})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert evaluations(simulation)[-1] == (9, 6)
    assert {i.version for i in simulation.run.proxy.instances} == {9}


def test_what_runs_where_an_evaluation_ends_is_not_cut_where_updates_let_it_end() -> None:
    """Long tails, and evaluations that outlast an update: a server that catches up runs training requests, too."""
    settings = recipe(
        preset="one-step",
        seed=2,
        env={"max_turns": 1},
        rollout={"batch_groups": 8, "group_size": 4, "num_envs": 64, "max_new_tokens": 16_000, "max_tokens": 16_400},
        engine={"count": 2, "max_running_requests": 64, "max_total_tokens": 400_000},
        run={"steps": 60, "eval_every": 1, "eval_share": 0.5},
        sim={
            "lengths": {"kind": "lognormal", "mean": 400, "tailness": 450},
            "weights": {"gigabytes": 0.2},
            "trainer": {"tokens_per_s": 1e7, "fixed_s": 0.1},
            "tasks": 2000,
            "heldout": 30,
        },
    )
    simulation = play(settings)
    assert len(spans(simulation, "controller", "evaluate")) > 2
    trained = [t for batch in simulation.trace.batches for t in batch.trajectories]
    assert all(len({v for v in t.versions if v >= 0}) == 1 for t in trained)


def test_several_samples_give_pass_at_k() -> None:
    simulation = play(evaluated(run={"eval_samples": 4}))
    assert {n for _, n in evaluations(simulation)} == {24}


@pytest.mark.parametrize("seed", range(10))
def test_an_evaluation_whose_servers_fail_is_given_up(seed: int) -> None:
    settings = evaluated(seed=seed)

    async def kill_the_pinned(simulation: Simulation) -> None:
        pin, pinned = simulation.run.proxy.pin, asyncio.Event()

        def noticed(version: int, share: float) -> list[Instance]:
            pinned.set()
            return pin(version, share)

        simulation.run.proxy.pin = noticed  # type: ignore[method-assign]
        await pinned.wait()
        await asyncio.sleep(0.3)
        for engine, instance in zip(simulation.engines, simulation.run.proxy.instances, strict=True):
            if instance.pinned:
                engine.kill()
                await asyncio.sleep(5)
                engine.restart()

    simulation = play(settings, kill_the_pinned)
    check_laws(settings, simulation)
    given_up = [e for e in simulation.trace.events if e[:3] == ("instant", "controller", "evaluation given up")]
    assert len(given_up) == 1
    assert [version for version, _ in evaluations(simulation)] == [0, 8, 9]
    assert {i.version for i in simulation.run.proxy.instances} == {9}


def test_an_evaluation_needs_rows_and_a_share() -> None:
    with pytest.raises(RecipeError, match=r"run\.eval_every = 2: needs held-out rows"):
        recipe(run={"eval_every": 2})
    with pytest.raises(RecipeError, match=r"run\.eval_share = 0"):
        recipe(run={"eval_share": 0})
