"""Whole runs of servers that generate batches of their own: one version a trajectory, repack (Laminar §3, §5, §6).

``ASYNCRL_SEEDS=1000 pytest tests/runtime/test_laminar.py`` plays as many random runs with faults.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.policy.own_batch import OwnBatch
from asyncrl.core.staleness.base import StalenessViolation
from asyncrl.sim.engine import SimEngine

from .test_coordination import spans, versions
from .test_faults import SHORT
from .world import cancelled_at, check_laws, laminar_recipe, play, recipe, started

HELD = (149, 435)
"""Found by more: 149, an evaluation gave newer weights to a server that still had turns to generate; 435, a turn waited
for a server to pull its version, which pulled a newer one."""
SEEDS = int(os.environ.get("ASYNCRL_SEEDS", "60"))
FAULTS = {"random_faults": 12, "random_within_s": 60.0, "stall_s": 2e4}


@pytest.mark.parametrize("seed", sorted({*range(SEEDS), *HELD}))
def test_laws_hold_for_any_settings_and_any_faults(seed: int) -> None:
    settings = laminar_recipe(seed, engine=SHORT, sim=FAULTS)
    check_laws(settings, play(settings))


def test_a_run_gives_the_same_trace_again() -> None:
    settings = laminar_recipe(5, engine=SHORT, sim={"random_faults": 30, "random_within_s": 60.0})
    events = play(settings).trace.events
    assert play(settings).trace.events == events


TAILED: dict[str, Any] = {
    "preset": "laminar",
    "env": {"max_turns": 1},
    "rollout": {"batch_groups": 6, "num_envs": 48, "max_new_tokens": 400, "max_tokens": 450},
    "engine": {
        "count": 4,
        "max_running_requests": 12,
        "max_total_tokens": 6000,
        "rebalance_s": 0.5,
        "roofline_batch": 12,
    },
    "run": {"steps": 8},
    "sim": {"lengths": {"kind": "lognormal", "mean": 90, "tailness": 77}, "tasks": 200},
}
"""Batches of a dozen on each of four servers, with long tails."""


def tailed(**tables: Any) -> Recipe:
    merged = {
        name: {**value, **tables.pop(name, {})} if isinstance(value, dict) else value for name, value in TAILED.items()
    }
    return recipe(**merged, **tables)


def test_servers_take_new_weights_one_by_one_with_nothing_on_them() -> None:
    simulation = play(tailed())
    check_laws(tailed(), simulation)
    updates = spans(simulation, "update")
    assert updates and all(args["interrupted"] == 0 for *_, args in updates)
    assert max(len(set(held.values())) for _, held in versions(simulation)) >= 2
    assert len({staleness for b in simulation.trace.batches for staleness in b.staleness}) >= 2


def test_repack_moves_trajectories_with_their_tokens_and_servers_begin_anew_sooner() -> None:
    """The check of sim/invariants.py counts the tokens of each response."""
    with_it, without = (play(tailed(engine={"migration": name})) for name in ("repack", "none"))
    check_laws(tailed(), with_it)
    moved = sum(args["requests"] for *_, args in spans(with_it, "migrate"))
    assert moved > 0 and not spans(without, "migrate")
    assert len(spans(with_it, "update")) > len(spans(without, "update"))


def test_the_turns_of_a_trajectory_are_one_version_s_though_all_are_with_their_environments() -> None:
    settings = tailed(env={"max_turns": 3}, sim={**TAILED["sim"], "env": {"step": {"kind": "constant", "value": 30}}})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert any(t.turns == 3 for b in simulation.trace.batches for t in b.trajectories)
    assert any(len(set(held.values())) >= 2 for _, held in versions(simulation))


def test_the_law_of_one_version_can_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By routing that looks at V_traj only."""
    monkeypatch.setattr(OwnBatch, "_may", lambda self, request, load: self._admission.routable(request, load.version))
    with pytest.raises(ExceptionGroup) as broken:
        for seed in range(30):
            settings = tailed(
                seed=seed, env={"max_turns": 3}, engine={"count": 2, **SHORT}, sim={**TAILED["sim"], **FAULTS}
            )
            play(settings)
    assert broken.group_contains(StalenessViolation, match="several versions generated it")


async def kill_the_older(simulation: Simulation) -> SimEngine:
    """One of two servers dies, with weights that are not its first ones, after the other has taken newer ones."""
    one, other = simulation.engines
    for _ in range(10_000):
        if one.version != other.version and one.version and other.version:
            break
        await asyncio.sleep(0.1)
    older = one if one.version < other.version else other
    older.kill()
    return older


def test_what_only_a_server_that_lost_its_weights_could_go_on_with_is_begun_anew() -> None:
    settings = tailed(engine={"count": 2, "migration": "none"}, env={"retries": 2})

    async def kill(simulation: Simulation) -> None:
        older = await kill_the_older(simulation)
        await asyncio.sleep(5.0)
        older.restart()

    simulation = play(settings, kill)
    check_laws(settings, simulation)
    assert simulation.run.buffer.snapshot().failed_infra > 0


@pytest.mark.parametrize("replicate", [True, False])
def test_a_request_that_is_refused_costs_its_episode_also_where_a_group_is_one_request(replicate: bool) -> None:
    engine = {"count": 2, "patience_s": 20.0, "probe_s": 1.0}
    settings = tailed(engine=engine, rollout={"expand_num_return_sequences": replicate}, env={"retries": 0})

    async def kill(simulation: Simulation) -> None:
        await kill_the_older(simulation)

    reasons = play(settings, kill).run.buffer.ledger.reasons()["failed"]
    assert any("the servers that had begun it have failed" in reason for reason in reasons)


def test_a_server_that_is_gone_for_too_long_is_not_waited_for() -> None:
    settings = tailed(engine={"count": 2, "migration": "none", "patience_s": 20.0}, env={"retries": 2})

    async def kill(simulation: Simulation) -> None:
        await kill_the_older(simulation)

    simulation = play(settings, kill)
    check_laws(settings, simulation)
    assert simulation.run.buffer.snapshot().failed_infra > 0
    assert not simulation.run.buffer.snapshot().initial


def test_an_evaluation_beside_training_cuts_nothing() -> None:
    settings = tailed(run={"steps": 8, "eval_every": 2}, sim={**TAILED["sim"], "heldout": 6})
    simulation = play(settings)
    check_laws(settings, simulation)
    evaluated = [e[1] for e in simulation.trace.events if e[0] == "eval"]
    assert evaluated[0] == 0 and evaluated[-1] == 8 and len(evaluated) > 2


def test_a_buffer_that_is_full_holds_up_what_would_start() -> None:
    settings = tailed(staleness={"queue": 1.0}, sim={**TAILED["sim"], "trainer": {"fixed_s": 60.0}})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert max(s for b in simulation.trace.batches for s in b.staleness) <= 9


def test_cancelled_at_any_moment_the_run_leaves_nothing_behind() -> None:
    settings = tailed(run={"steps": 3}, engine={"count": 2})
    for turn in range(1, 6000, 37):
        simulations: list[Simulation] = []
        hit = cancelled_at(turn, started(settings, simulations))
        if simulations:
            simulations[0].run.buffer.ledger.check_balanced()
            simulations[0].checked.check_end()
        if not hit:
            break
    assert turn > 200
