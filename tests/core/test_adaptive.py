"""A staleness budget: which lever moves, and that the mean stays on target while the lengths drift."""

from __future__ import annotations

import heapq
import random

import pytest

from asyncrl.core.observed import Observed
from asyncrl.core.staleness.adaptive import Budget, Setting, propose
from asyncrl.core.staleness.buffers import StalenessBuffers
from asyncrl.core.staleness.inflight_cap import InflightCap

BATCH, SLOTS = 32, 96


def budget(whole: bool, target: float = 1.5) -> Budget:
    return Budget(
        target=target, bound_min=1, bound_max=4, envs_min=8, envs_max=SLOTS, whole=whole, batch=BATCH, episodes_a_slot=1
    )


def drifting_run(control: InflightCap | StalenessBuffers, budget: Budget | None, *, steps: int, every: int) -> float:
    """Mean staleness of all but the first steps. Groups of one sample, a token a second, lognormal; over the run their
    mean goes from 1 to 2½ and back, and their tail grows. A trainer step takes as long as 64 slots need for its batch
    at first."""
    rng = random.Random(0)
    now, trained_until, version, next_id = 0.0, 0.0, 0, 0
    begun: dict[int, tuple[int, float]] = {}
    running: list[tuple[float, int]] = []
    waiting = False
    setting = Setting(bound=4, num_envs=SLOTS)
    all_staleness: list[int] = []
    window: list[int] = []
    since = busy_s = tokens = trained_tokens = trained_s = 0.0
    while version < steps:
        while len(running) < setting.num_envs and control.admits(version):
            at = version / steps
            mean, sigma = 1 + 3 * min(at, 1 - at), 0.4 + 0.8 * at
            length = min(mean * rng.lognormvariate(-sigma * sigma / 2, sigma), 12)
            control.reserve(next_id, version)
            begun[next_id] = version, length
            heapq.heappush(running, (now + length * (1 if version else rng.random()), next_id))
            next_id += 1
        if not waiting and now >= trained_until and (consumed := control.consume()) is not None:
            staleness = [version - begun[i][0] for i in consumed[0]]
            window += staleness
            if version > steps // 5:
                all_staleness += staleness
            trained_tokens += sum(begun[i][1] for i in consumed[0])
            trained_until, waiting = now + BATCH / 64, True
            trained_s += BATCH / 64
            continue
        end = min(running[0][0] if running else trained_until, trained_until if waiting else float("inf"))
        busy_s += len(running) * (end - now)
        now = end
        if waiting and now >= trained_until:
            waiting, version = False, version + 1
            if budget is not None and version % every == 0:
                seen = Observed(
                    episodes=busy_s / (now - since),
                    tailness=1,
                    v_r=tokens / (now - since),
                    v_t=trained_tokens / trained_s,
                )
                setting = propose(budget, seen, sum(window) / len(window), setting)
                control.set_bound(setting.bound)
                window.clear()
                since, busy_s, tokens, trained_tokens, trained_s = now, 0.0, 0.0, 0.0, 0.0
            continue
        _, group = heapq.heappop(running)
        tokens += begun[group][1]
        control.occupy(group)
    return sum(all_staleness) / len(all_staleness)


@pytest.mark.parametrize("target", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("whole", [False, True], ids=["alpha", "eta"])
def test_the_mean_is_on_target_while_the_lengths_drift(whole: bool, target: float) -> None:
    def control() -> InflightCap | StalenessBuffers:
        return StalenessBuffers(batch=BATCH, bound=4) if whole else InflightCap(batch=BATCH, alpha=4)

    tolerance = (
        0.25 if whole else 0.1
    )  # η is coarse, and where the trainer is the slower side slots move the mean in jumps
    assert drifting_run(control(), budget(whole, target), steps=300, every=10) == pytest.approx(target, abs=tolerance)
    assert drifting_run(control(), None, steps=300, every=10) > target + 0.3, "without it the mean is far off"


def seen(episodes: float, rho: float = 1.2) -> Observed:
    return Observed(episodes=episodes, tailness=1.5, v_r=rho * 100, v_t=100)


@pytest.mark.parametrize(
    ("whole", "staleness", "episodes", "bound", "num_envs", "expected", "reason"),
    [
        (False, 1.53, 90, 2, 96, (2, 96), "mean staleness 1.53, target 1.5: held"),
        (False, 2.0, 60, 2, 96, (1.5, 96), "bound 2 → 1.5"),
        (False, 2.0, 96, 3, 96, (1.5, 96), "bound 3 → 1.5"),
        (False, 1.0, 60, 1, 96, (1.5, 96), "admission leaves slots empty"),
        (False, 1.0, 48, 4, 48, (4, 61), "slots 48 → 61"),
        (False, 1.0, 96, 4, 96, (4, 96), "no lever left, for rollout.num_envs is reached"),
        (False, 1.0, 60, 4, 96, (4, 96), "no lever left, for bound_max is reached"),
        (True, 2.0, 60, 3, 96, (2, 96), "bound 3 → 2"),
        (True, 2.0, 60, 2, 96, (2, 47), "slots 96 → 47"),
        (True, 4.0, 60, 2, 96, (2, 30), "slots 96 → 30"),
        (True, 2.0, 8, 2, 8, (1, 8), "bound 2 → 1"),
        (True, 1.0, 60, 1, 96, (2, 96), "bound 1 → 2"),
        (True, 2.0, 8, 1, 8, (1, 8), "no lever left, for bound_min and the least num_envs is reached"),
    ],
)
def test_which_lever_moves(
    whole: bool,
    staleness: float,
    episodes: float,
    bound: float,
    num_envs: int,
    expected: tuple[float, int],
    reason: str,
) -> None:
    moved = propose(budget(whole), seen(episodes), staleness, Setting(bound=bound, num_envs=num_envs))
    assert reason in moved.reason
    assert (moved.bound, moved.num_envs) == expected
