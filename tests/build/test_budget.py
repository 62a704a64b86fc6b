"""A simulated run whose lengths drift, with a budget for its mean staleness and without."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from asyncrl.build.budget import BudgetKeeper
from asyncrl.build.virtual import simulated
from asyncrl.config import Recipe, RecipeError, load_table
from asyncrl.observe.tally import Tally
from asyncrl.sim.loop import run

STEPS = 120


def recipe_of(control: str, **adaptive: Any) -> Recipe:
    """Responses grow from 100 to 300 tokens on average, and their tail with them."""
    return load_table(
        {
            "env": {"max_turns": 1},
            "rollout": {"batch_groups": 8, "group_size": 2, "num_envs": 64, "max_new_tokens": 1500, "max_tokens": 1600},
            "engine": {"count": 2, "max_running_requests": 32, "max_total_tokens": 60_000},
            "staleness": {"control": control, "bound": 3, "adaptive": adaptive},
            "run": {"steps": STEPS},
            "sim": {
                "lengths": {"kind": "lognormal", "mean": 100, "tailness": 40},
                "lengths_end": {"kind": "lognormal", "mean": 300, "tailness": 80},
                "trainer": {"fixed_s": 1.0},
                "tasks": 400,
            },
        }
    )


def played(recipe: Recipe) -> tuple[list[float], Tally]:
    """Mean staleness of each step, and what the display would read."""
    means: list[float] = []

    class Means(Tally):
        def step(self, metrics: Any) -> None:
            super().step(metrics)
            means.append(self.metrics["staleness/mean"])

    async def main() -> Tally:
        tally = Means(recipe, asyncio.get_running_loop().time)
        simulation = await simulated(recipe, observer=tally)
        await simulation.play()
        return tally

    tally = run(main(), limit=1e7)
    return means, tally


@pytest.mark.parametrize("control", ["inflight_cap", "buffers"])
def test_the_budget_is_held_while_the_lengths_drift(control: str) -> None:
    target = 1.4
    means, tally = played(recipe_of(control, target=target, bound_min=1, bound_max=4, every_steps=6))
    assert len(means) == STEPS
    late = means[STEPS // 5 :]
    assert sum(late) / len(late) == pytest.approx(target, abs=0.25)
    assert tally.budget.startswith("mean staleness ")
    assert tally.metrics["staleness/bound"] == tally.gauges["staleness/bound"]
    assert 1 <= tally.gauges["rollout/slots"] <= 64
    without, tally = played(recipe_of(control))
    late = without[STEPS // 5 :]
    assert sum(late) / len(late) > target + 0.5, "without it the mean is elsewhere"
    assert not tally.budget


@pytest.mark.parametrize(
    ("control", "adaptive", "message"),
    [
        ("queue_drop", {"target": 1.0}, "set staleness.control to inflight_cap or buffers"),
        ("inflight_cap", {"target": -1}, "staleness.adaptive.target"),
        ("inflight_cap", {"target": 1.0, "every_steps": 0}, "staleness.adaptive.every_steps"),
        ("inflight_cap", {"target": 1.0, "bound_min": 3, "bound_max": 2}, "staleness.adaptive.bound_min"),
        ("inflight_cap", {"target": 1.0, "bound_max": 2}, "staleness.bound"),
        ("inflight_cap", {"target": 1.0, "bound_max": math.inf}, "staleness.adaptive.bound_max"),
    ],
)
def test_an_impossible_budget_is_refused(control: str, adaptive: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(control, **adaptive)


@pytest.mark.parametrize(("saved", "begins"), [(4.0, 3.5), (2.5, 2.5), (0.0, 1.0)])
def test_a_run_that_goes_on_keeps_its_bound_within_what_is_allowed_now(saved: float, begins: float) -> None:
    recipe = recipe_of("inflight_cap", target=1.0, bound_min=1, bound_max=3.5)
    bounds: list[float] = []
    keeper = BudgetKeeper(
        recipe, inner=Tally(recipe, lambda: 0.0), clock=lambda: 0.0, set_bound=bounds.append, notes={"bound": saved}
    )
    keeper.begin(lambda slots: None)
    assert (keeper.setting.bound, bounds) == (begins, [begins])


def test_the_limit_of_a_run_is_that_of_the_highest_bound() -> None:
    assert recipe_of("inflight_cap", target=1.0, bound_max=3.5).staleness.limit == 4
    assert recipe_of("inflight_cap", bound_max=9).staleness.limit == 3
