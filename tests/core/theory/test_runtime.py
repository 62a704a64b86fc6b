"""Staleness and period under the in-flight cap, and the no-bubble bound, against runs of the cap itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.distributions import LogNormal
from asyncrl.core.theory import runtime
from asyncrl.core.theory.staleness import mean_staleness, tailness_multiplier

from .queue_world import Outcome, simulate

GROUP, GROUPS = 8, 16
BATCH = GROUP * GROUPS


class World:
    """One workload under the cap; periods are in those of a run that nothing holds up."""

    def __init__(self, slots: int, tailness: float, rho: float) -> None:
        self.lengths = LogNormal(mean=1000.0, tailness=tailness, cap=8080.0)
        self.slots = slots
        self.train_s = rho * BATCH * self.lengths.expected / slots
        self.period = max(1.0, rho) * BATCH * self.lengths.expected / slots
        self.load_inputs = {
            "concurrency": slots,
            "batch": BATCH,
            "batch_tailness": tailness_multiplier(self.lengths, BATCH),
            "rho": rho,
        }
        self.inputs = {**self.load_inputs, "tailness": tailness_multiplier(self.lengths, GROUP)}

    def run(self, alpha: float, steps: int = 300) -> Outcome:
        return simulate(
            lengths=self.lengths,
            slots=self.slots,
            group_size=GROUP,
            groups=GROUPS,
            train_s=self.train_s,
            steps=steps,
            alpha=alpha,
            seed=5,
        )


WORLDS = [
    World(slots, tailness, rho)
    for slots, tailness, rho in (
        (64, 30, 0.3),
        (64, 70, 0.9),
        (64, 30, 1.3),
        (256, 30, 0.6),
        (256, 70, 0.3),
        (256, 70, 2.0),
    )
]
each_world = pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w.slots}-{w.inputs['rho']}")


@each_world
@pytest.mark.parametrize("alpha", [0, 0.5, 1, 4, 8])
def test_staleness_is_the_number_of_live_groups_at_the_switches(world: World, alpha: float) -> None:
    outcome = world.run(alpha, steps=120)
    # Equation 1 of the module, exact: what is live at the end has been live at as many switches as it is old.
    assert outcome.live_at_switches == outcome.staleness_sum + outcome.untrained_age_sum
    assert outcome.live_at_switches <= alpha * GROUPS * 120
    assert outcome.staleness <= alpha


@each_world
@pytest.mark.parametrize("alpha", [0, 1, 2, 3, 4, 6, 8, 16, 30])
def test_expected_staleness_against_the_cap_itself(world: World, alpha: float) -> None:
    outcome = world.run(alpha)
    expected = runtime.inflight_cap_staleness(alpha=alpha, **world.inputs)
    slack = 0.1 + 0.06 * expected.low
    assert expected.low - slack <= outcome.staleness <= expected.high + slack
    load = runtime.straggler_load(alpha=alpha, **world.load_inputs)
    assert (expected.low == expected.high) or 0.5 < load < 1.0


@each_world
@pytest.mark.parametrize("alpha", [0, 1, 2, 3, 4, 6, 8])
def test_stragglers_force_the_period_that_is_predicted(world: World, alpha: float) -> None:
    period = world.run(alpha).period / world.period
    load = runtime.straggler_load(alpha=alpha, **world.load_inputs)
    if load >= 1.0:
        assert 0.95 * load <= period <= 1.3 * load
    elif load <= 0.5 and alpha >= runtime.natural_staleness(
        **{k: v for k, v in world.inputs.items() if k != "batch_tailness"}
    ):
        assert period == pytest.approx(1.0, abs=0.02)


@each_world
def test_needed_alpha_hardly_slows_a_run_and_half_of_it_does(world: World) -> None:
    needed = runtime.needed_alpha(**world.inputs)
    assert world.run(needed).period <= 1.05 * world.period
    assert world.run(needed // 2).period > 1.05 * world.period


def test_natural_staleness_is_the_papers_without_a_queue_that_drops() -> None:
    for rho in (0.2, 0.7, 0.999):
        inputs = {"concurrency": 240.0, "batch": 120.0, "tailness": 1.42, "rho": rho}
        assert runtime.natural_staleness(**inputs) == pytest.approx(mean_staleness(**inputs, q=3.0).total)


@given(
    alpha=st.floats(0, 20),
    c=st.floats(1, 1000),
    b=st.floats(1, 1000),
    m=st.floats(1, 5),
    more=st.floats(1, 5),
    rho=st.floats(0.1, 5),
)
def test_expected_staleness_never_exceeds_the_proved_bound(
    alpha: float, c: float, b: float, m: float, more: float, rho: float
) -> None:
    expected = runtime.inflight_cap_staleness(
        alpha=alpha, concurrency=c, batch=b, tailness=m, batch_tailness=m * more, rho=rho
    )
    assert 0.0 <= expected.low <= expected.high <= alpha


# --- the no-bubble bound ----------------------------------------------------------------------------------------------


def test_no_bubble_period_by_hand() -> None:
    tokens = {"batch_tokens": 1e6, "v_r": 1e5}
    assert runtime.no_bubble_period(**tokens, v_t=2e5) == 10.0  # rollout-bound
    assert runtime.no_bubble_period(**tokens, v_t=2e5, fixed_s=3.0) == 10.0
    assert runtime.no_bubble_period(**tokens, v_t=2e5, fixed_s=7.0) == 12.0  # train-bound by its fixed part
    assert runtime.no_bubble_period(**tokens, v_t=5e4, fixed_s=1.0, update_s=2.0) == 23.0
    assert runtime.bubble(period=10.3, shortest=10.0) == pytest.approx(0.03)
    assert runtime.bubble(period=9.0, shortest=10.0) == pytest.approx(-0.1)


@each_world
def test_no_run_is_faster_than_the_no_bubble_period_and_a_free_one_reaches_it(world: World) -> None:
    batch_tokens = BATCH * world.lengths.expected
    shortest = runtime.no_bubble_period(
        batch_tokens=batch_tokens, v_r=world.slots, v_t=1e9, fixed_s=world.train_s - batch_tokens / 1e9
    )
    assert shortest == pytest.approx(world.period, rel=1e-9)
    for alpha in (0, 1, 30):
        # 2 %: the lengths drawn have a mean of their own.
        assert runtime.bubble(period=world.run(alpha).period, shortest=shortest) > -0.02
    assert runtime.bubble(period=world.run(30).period, shortest=shortest) < 0.02


def test_nonsense_is_refused() -> None:
    cap = {"concurrency": 8.0, "batch": 8.0, "tailness": 1.0, "batch_tailness": 1.0, "rho": 0.5}
    for nonsense in (
        lambda: runtime.inflight_cap_staleness(alpha=-0.1, **cap),
        lambda: runtime.inflight_cap_staleness(alpha=math.inf, **cap),
        lambda: runtime.inflight_cap_staleness(alpha=1.0, **{**cap, "rho": 0.0}),
        lambda: runtime.no_bubble_period(batch_tokens=0, v_r=1, v_t=1),
        lambda: runtime.no_bubble_period(batch_tokens=1, v_r=1, v_t=1, fixed_s=-1),
        lambda: runtime.no_bubble_period(batch_tokens=1, v_r=1, v_t=1, update_s=math.nan),
        lambda: runtime.bubble(period=0, shortest=1),
    ):
        with pytest.raises(ValueError):
            nonsense()
