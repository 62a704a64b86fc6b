"""Whole runs of several versions side by side: each trajectory one version's, none abandoned, a bound (DORA §4).

``ASYNCRL_SEEDS=1000 pytest tests/runtime/test_dora.py`` plays as many random runs with faults.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.policy.streaming import NewestFirst
from asyncrl.core.staleness.base import StalenessViolation

from .test_coordination import spans, versions
from .test_faults import SHORT
from .test_laminar import TAILED
from .world import cancelled_at, check_laws, dora_recipe, play, recipe, started

SEEDS = int(os.environ.get("ASYNCRL_SEEDS", "60"))
FAULTS = {"random_faults": 12, "random_within_s": 60.0, "stall_s": 2e4}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_laws_hold_for_any_settings_and_any_faults(seed: int) -> None:
    settings = dora_recipe(seed, engine=SHORT, sim=FAULTS)
    simulation = play(settings)
    check_laws(settings, simulation)
    if settings.staleness.control == "window":
        assert not simulation.run.buffer.ledger.counts()["surplus"]


def test_a_run_gives_the_same_trace_again() -> None:
    settings = dora_recipe(5, engine=SHORT, sim={"random_faults": 30, "random_within_s": 60.0})
    events = play(settings).trace.events
    assert play(settings).trace.events == events


def tailed(**tables: Any) -> Recipe:
    """Long tails on four servers with room for a dozen each."""
    engine = {"count": 4, "max_running_requests": 12, "max_total_tokens": 6000, "rebalance_s": 0.5}
    changed = {"preset": "dora", "engine": {**engine, **tables.pop("engine", {})}}
    return recipe(**{**TAILED, **changed, **{k: {**TAILED[k], **v} if k in TAILED else v for k, v in tables.items()}})


def alive(simulation: Simulation) -> int:
    """The most versions that generated at a time."""
    began = [(start, end, args["version"]) for _, start, end, args in spans(simulation, "generate")]
    return max(len({v for a, b, v in began if a <= at < b}) for at, _, _ in began)


def test_versions_generate_side_by_side_and_servers_take_weights_with_nothing_on_them() -> None:
    simulation = play(tailed(staleness={"bound": 3}))
    check_laws(tailed(staleness={"bound": 3}), simulation)
    updates = spans(simulation, "update")
    assert updates and all(args["interrupted"] == 0 for *_, args in updates)
    assert alive(simulation) >= 3
    assert max(len(set(held.values())) for _, held in versions(simulation)) >= 3
    assert not simulation.run.buffer.ledger.counts()["surplus"]


def test_repartition_frees_servers_for_the_newest_version() -> None:
    with_it, without = (play(tailed(engine={"migration": name})) for name in ("repartition", "none"))
    check_laws(tailed(), with_it)
    moved = sum(args["requests"] for *_, args in spans(with_it, "migrate"))
    assert moved > 0 and not spans(without, "migrate")
    assert len(spans(with_it, "update")) > len(spans(without, "update"))


def test_turns_come_back_to_their_version() -> None:
    waits = {"step": {"kind": "constant", "value": 30}}
    settings = tailed(env={"max_turns": 3}, sim={"env": waits})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert any(t.turns == 3 for b in simulation.trace.batches for t in b.trajectories)
    assert any(len(set(held.values())) >= 2 for _, held in versions(simulation))


def test_the_law_of_one_version_can_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By routing that looks at V_traj only."""

    def choose(self: NewestFirst, request: Any) -> Any:
        servers = [load for loads in self._servers.values() for load in loads]
        may = [load for load in servers if self._admission.routable(request, load.version)]
        return min(may, key=lambda load: load.running, default=None)

    monkeypatch.setattr(NewestFirst, "choose", choose)
    with pytest.raises(ExceptionGroup) as broken:
        for seed in range(30):
            play(tailed(seed=seed, env={"max_turns": 3}, engine={"count": 2, **SHORT}, sim=FAULTS))
    assert broken.group_contains(StalenessViolation, match="several versions generated it")


def test_what_only_a_server_that_is_gone_could_go_on_with_is_begun_anew() -> None:
    settings = tailed(engine={"count": 2, "migration": "none", "patience_s": 20.0}, env={"retries": 2})

    async def kill(simulation: Simulation) -> None:
        """The only server of an older version, while it generates."""
        while True:
            await asyncio.sleep(0.1)
            older, newer = sorted(simulation.run.proxy.instances, key=lambda instance: instance.version)
            if older.version < newer.version and older.running:
                [engine] = [engine for engine in simulation.engines if engine.name == older.name]
                return engine.kill()

    simulation = play(settings, kill)
    check_laws(settings, simulation)
    assert simulation.run.buffer.snapshot().failed_infra > 0


def test_an_evaluation_beside_training_cuts_nothing() -> None:
    settings = tailed(run={"steps": 8, "eval_every": 2}, sim={"heldout": 6})
    simulation = play(settings)
    check_laws(settings, simulation)
    evaluated = [e[1] for e in simulation.trace.events if e[0] == "eval"]
    assert evaluated[0] == 0 and evaluated[-1] == 8 and len(evaluated) > 2


def test_cancelled_at_any_moment_the_run_leaves_nothing_behind() -> None:
    settings = tailed(run={"steps": 3}, engine={"count": 2})
    for turn in range(1, 6000, 61):
        simulations: list[Simulation] = []
        hit = cancelled_at(turn, started(settings, simulations))
        if simulations:
            simulations[0].run.buffer.ledger.check_balanced()
            simulations[0].checked.check_end()
        if not hit:
            break
    assert turn > 200
