"""Figures 7 to 11: their scripts import, their worlds are what their texts say, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.build.plan import kept_share
from asyncrl.config import load_table


def small(agentic: Any, turns: dict[str, Any] | None = None) -> Any:
    """Two steps of four trajectories with four turns at most, each of one response of 1 token."""
    env = {"step": agentic.gaussian(10, 5), "turns": turns, "reset": agentic.gaussian(3, 1)}
    lengths = {"kind": "constant", "value": 1}
    table = agentic.world(prompts=2, group_size=2, turns=4, tokens=lengths, env=env)
    return load_table({**table, "run": {"steps": 2}})


def test_in_lock_step_a_turn_lasts_as_long_as_its_slowest_environment(script: Any, monkeypatch: Any) -> None:
    agentic = script("agentic")
    slowest: dict[int, list[float]] = {}

    class Timed(agentic.LockStep):  # type: ignore[misc, name-defined]
        async def step(self, action: Any) -> Any:
            model = self._inner._model.step
            state = self._inner._rng.getstate()
            slowest.setdefault(action.turn, []).append(model.sample(self._inner._rng))
            self._inner._rng.setstate(state)
            return await super().step(action)

    monkeypatch.setattr(agentic, "LockStep", Timed)
    result = agentic.in_lock_step(small(agentic))
    waits = [line["time/wait"] for line in result.steps]
    for step, wait in enumerate(waits):
        turns = [max(draws[4 * step : 4 * step + 4]) for draws in slowest.values()]
        assert len(turns) == 4
        assert sum(turns) < wait < sum(turns) + 10, "the rest is the slowest reset, and a few tokens"


def test_lock_step_waits_no_more_for_trajectories_that_have_ended(script: Any) -> None:
    agentic, common = script("agentic"), script("common")
    recipe = small(agentic, turns={"kind": "empirical", "values": [1, 2, 4]})
    locked, free = agentic.in_lock_step(recipe), common.simulated(recipe)
    assert len(locked.steps) == 2
    for a, b in zip(locked.steps, free.steps, strict=True):
        assert a["time/wait"] > b["time/wait"]
        assert a["tokens/batch"] == b["tokens/batch"], "both play the same episodes"


def test_figure_7_drops_the_share_of_groups_that_it_says(script: Any) -> None:
    fig7 = script("fig7")
    recipe = load_table(fig7.table(8, "Base", True, 16, steps=1))
    dropped = 1.0 - kept_share(recipe.sim.env.success, recipe.sim.env.spread, recipe.rollout.group_size)
    assert dropped == pytest.approx(0.39, abs=0.005)
    assert "39 %" in fig7.__doc__


def test_figure_10_trains_32_groups_of_8_whatever_runs_beside(script: Any) -> None:
    fig10 = script("fig10")
    result = script("common").simulated(load_table(fig10.table(34, 10, steps=2)))
    ledger = result.summary.ledger
    assert ledger["consumed"] == 2 * 32 * 8
    assert ledger["surplus"] >= 2 * 2 * 10, "a whole group ran beside, and two members of each"
