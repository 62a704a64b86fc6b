from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from asyncrl.config import Recipe, RolloutConfig, StalenessConfig
from asyncrl.core.observed import Observed, expected_staleness
from asyncrl.core.theory.staleness import measured_tailness
from asyncrl.core.types import Batch, Group, Task, Trajectory
from asyncrl.observe.tally import RECENT_GROUPS, RECENT_STEPS, Tally
from asyncrl.ports import StepMetrics

from .synthetic import START, Clock, make_step, make_trajectory

ROLLOUT = RolloutConfig(batch_groups=4, group_size=4, num_envs=10)


def make_tally(clock: Clock, **rollout: Any) -> Tally:
    settings = msgspec.structs.replace(ROLLOUT, **rollout)
    return Tally(Recipe(rollout=settings, staleness=StalenessConfig(control="queue_drop", queue=2.0)), clock)


def grouped(step: int, groups: list[list[Trajectory]], at: float, **changes: float) -> StepMetrics:
    flat = [t for group in groups for t in group]
    made = tuple(
        Group(id=i, task=Task(id="t", data={}), v_traj=step, trajectories=tuple(group))
        for i, group in enumerate(groups)
    )
    return msgspec.structs.replace(make_step(step, flat, at, **changes), batch=Batch(step=step, groups=made))


def one_step(tally: Tally, clock: Clock, step: int, *, busy: float = 6.0, episodes: int = 10, tail: int = 30) -> None:
    """Eight seconds: a server is busy for ``busy`` of them, ``episodes`` take all of them; 16 responses, 160 tokens
    but for the longest of each group, which has ``tail``."""
    began = clock.now
    tally.server("server 0", began, 4, step)
    tally.server("server 0", began + busy, 0, step)
    clock.now += 8.0
    for i in range(episodes):
        tally.span(f"env {i}", "episode", began, clock.now)
    groups = [[make_trajectory(length=n, v_traj=step) for n in (10, 10, 10, tail)] for _ in range(4)]
    tally.step(grouped(step, groups, clock.now, tokens=1200 * (step + 1), train_s=3.0, update_s=1.0))


def test_the_prediction_follows_from_what_was_counted():
    clock = Clock()
    tally = make_tally(clock)
    for step in range(3):
        one_step(tally, clock, step)
    m = tally.metrics
    assert m["response/tailness"] == pytest.approx(30 / 15)
    assert m["rollout/episodes"] == pytest.approx(10.0)
    assert m["rollout/longest_s"] == pytest.approx(8.0)
    # 1,200 tokens in 6 busy seconds of 8; 240 tokens trained in 4 seconds of train step and update.
    seen = Observed(episodes=10.0, tailness=2.0, v_r=1200 / 6, v_t=240 / 4)
    queue = {"control": "queue_drop", "bound": 1.0, "queue": 2.0}
    assert m["predicted/staleness"] == pytest.approx(expected_staleness(seen, batch=16, slots=10, **queue))


def test_filtered_trajectories_are_told_apart():
    clock = Clock()
    tally = make_tally(clock)
    for i in range(40):
        tally.trajectory(make_trajectory(i), "consumed" if i % 4 else "filtered")
    one_step(tally, clock, 0)
    seen = Observed(episodes=10.0, tailness=2.0, v_r=1200 / 6, v_t=240 / 4, kept=0.75)
    queue = {"control": "queue_drop", "bound": 1.0, "queue": 2.0}
    assert tally.metrics["predicted/staleness"] == pytest.approx(expected_staleness(seen, batch=16, slots=10, **queue))


def test_without_episodes_nothing_is_predicted():
    clock = Clock()
    tally = make_tally(clock)
    one_step(tally, clock, 0, episodes=0)
    assert tally.metrics["response/tailness"] == pytest.approx(2.0)
    assert not {"predicted/staleness", "rollout/episodes", "rollout/longest_s"} & set(tally.metrics)


def test_one_episode_of_a_whole_group_counts_as_its_trajectories():
    clock = Clock()
    tally = make_tally(clock, expand_num_return_sequences=False)
    one_step(tally, clock, 0, episodes=5)
    assert tally.metrics["rollout/episodes"] == pytest.approx(20.0)


def test_what_a_run_was_like_long_ago_is_forgotten():
    clock, fresh_clock = Clock(), Clock()
    tally, fresh = make_tally(clock), make_tally(fresh_clock)
    for step in range(20):
        one_step(tally, clock, step, busy=1.0, episodes=2, tail=500)
    many = max(RECENT_STEPS, math.ceil(RECENT_GROUPS / 4))
    for step in range(many):
        one_step(tally, clock, 20 + step)
        one_step(fresh, fresh_clock, step)
    for key in ("response/tailness", "predicted/staleness", "rollout/episodes", "rollout/longest_s"):
        assert tally.metrics[key] == pytest.approx(fresh.metrics[key])
    assert clock.now > START


def test_the_tail_is_that_of_recent_groups_and_notices_a_change():
    clock = Clock()
    tally = make_tally(clock)
    lengths = [[1.0, 3.0, 5.0, 7.0], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 40.0]]
    clock.now += 8.0
    groups = [[make_trajectory(length=int(n)) for n in group] for group in lengths]
    tally.step(grouped(0, groups, clock.now))
    assert tally.metrics["response/tailness"] == pytest.approx(measured_tailness(lengths))


def test_what_is_kept_does_not_grow_with_the_run():
    clock = Clock()
    tally = make_tally(clock)
    for step in range(200):
        one_step(tally, clock, step)
    assert len(tally._groups) == RECENT_GROUPS
    assert len(tally._recent) == RECENT_STEPS + 1


def test_the_longest_episode_is_that_of_the_newest_step():
    clock = Clock()
    tally = make_tally(clock)
    tally.span("env 0", "episode", clock.now - 90.0, clock.now)
    tally.span("env 0", "generate", clock.now - 500.0, clock.now)
    one_step(tally, clock, 0)
    assert tally.metrics["rollout/longest_s"] == pytest.approx(90.0)
    one_step(tally, clock, 1)
    assert tally.metrics["rollout/longest_s"] == pytest.approx(8.0)


def test_each_of_several_sources_has_its_own_numbers():
    step = make_step(0, [], 5.0)
    groups = tuple(
        Group(
            id=i,
            task=Task(id=f"{source}/{i}", data={}, source=source),
            v_traj=0,
            trajectories=(make_trajectory(i, reward=reward, length=length),),
        )
        for i, (source, reward, length) in enumerate([("maths", 1.0, 4), ("games", 0.5, 10), ("maths", 0.0, 6)])
    )
    clock = Clock()
    tally = make_tally(clock)
    tally.step(msgspec.structs.replace(step, batch=Batch(step=0, groups=groups)))
    seen = {key: value for key, value in tally.metrics.items() if key.startswith("source/")}
    assert seen == {
        "source/games/share": 1 / 3,
        "source/games/reward": 0.5,
        "source/games/response": 10,
        "source/maths/share": 2 / 3,
        "source/maths/reward": 0.5,
        "source/maths/response": 5,
    }
