"""Whole runs under a coordinator: staleness buffers, pulls of one server at a time, migration (StaleFlow §4, §5).

``ASYNCRL_SEEDS=1000 pytest tests/runtime/test_coordination.py`` plays as many random runs with faults.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.runtime.llm_proxy import LLMProxy

from .test_faults import SHORT
from .world import check_laws, coordinated_recipe, play, recipe, started

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


@pytest.mark.parametrize("seed", range(SEEDS))
def test_laws_hold_for_any_settings_and_any_faults(seed: int) -> None:
    settings = coordinated_recipe(seed, engine=SHORT, sim=FAULTS)
    check_laws(settings, play(settings))
