"""Whole runs in which requests take their KV along to other servers (DORA §4.4), and where the proxy says it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.policy.routing import RequestView
from asyncrl.ports import EngineInfo
from asyncrl.runtime.instance import Instance, kv_source, to_prefill

from .test_faults import SHORT
from .test_laminar import FAULTS, tailed
from .world import check_laws, coordinated_recipe, dora_recipe, laminar_recipe, play, sim_engine


def instance(name: str, version: int = 3, kv_url: str = "there") -> Instance:
    info = EngineInfo(
        name=name,
        version=version,
        max_running_requests=8,
        max_total_tokens=1000,
        context_length=1000,
        kv_url=kv_url and f"{kv_url}/{name}",
    )
    return Instance(sim_engine(name), info)


def view(**fields: Any) -> RequestView:
    return RequestView(**{"v_traj": 0, "tokens": 100, "home": "a", "prefix": 90, "after": 3, **fields})


def test_kv_is_taken_from_home_by_servers_of_the_same_version() -> None:
    a, b, old, off = instance("a"), instance("b"), instance("c", version=2), instance("d", kv_url="")
    fleet = [a, b, old, off]
    assert [kv_source(view(), i, fleet) for i in fleet] == ["", "there/a", "", ""]
    assert [to_prefill(view(), i, fleet) for i in fleet] == [10, 10, 100, 100]
    assert [kv_source(view(home=home), b, fleet) for home in (None, "gone", "d")] == ["", "", ""]
    a.version = 4  # it still has what it held, for a while
    assert kv_source(view(), b, fleet) == "there/a"
    a.up = False
    assert kv_source(view(), b, fleet) == ""


def prefilled(simulation: Simulation) -> int:
    return sum(engine.server.prefilled for engine in simulation.engines)


def test_repacked_trajectories_are_not_prefilled_again() -> None:
    reuse, without = (play(tailed(engine={"kv_reuse": on})) for on in (True, False))
    check_laws(tailed(), reuse)
    taken = sum(engine._arrivals.taken for engine in reuse.engines)
    assert taken > 0
    tokens = sum(len(t.tokens) for batch in without.trace.batches for t in batch.trajectories)
    assert prefilled(reuse) < 0.8 * prefilled(without) < tokens


@pytest.mark.parametrize("make", [laminar_recipe, dora_recipe, coordinated_recipe])
@pytest.mark.parametrize("seed", range(8))
def test_laws_hold_for_any_settings_and_any_faults(make: Callable[..., Recipe], seed: int) -> None:
    settings = make(seed, engine={**SHORT, "kv_reuse": True}, sim=FAULTS)
    check_laws(settings, play(settings))


def test_a_run_gives_the_same_trace_again() -> None:
    settings = laminar_recipe(5, engine={**SHORT, "kv_reuse": True}, sim={"random_faults": 30, "random_within_s": 60.0})
    events = play(settings).trace.events
    assert play(settings).trace.events == events
