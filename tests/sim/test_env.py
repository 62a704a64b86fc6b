"""Simulated environments: every key of [sim.env], and episodes that nothing else has a part in."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from statistics import fmean

import pytest

from asyncrl.config import EnvModel, SimConfig
from asyncrl.core.distributions import Constant, Empirical, Normal
from asyncrl.core.types import Task
from asyncrl.env import Action
from asyncrl.sim.env import SimEnvs
from asyncrl.sim.loop import run
from asyncrl.sim.tasks import SimTasks

Played = tuple[float, list[float], list[str], float]
"""Seconds of reset and of each step, observations, reward."""


def envs_of(seed: int = 0, max_turns: int = 3, **settings: object) -> SimEnvs:
    model = EnvModel(**settings)  # type: ignore[arg-type]
    return SimEnvs(model, SimTasks(SimConfig(env=model), seed=seed), seed=seed, max_turns=max_turns)


async def episode(envs: SimEnvs, name: str) -> Played:
    loop = asyncio.get_running_loop()
    env = envs.make()
    started = loop.time()
    prompt = await env.reset(Task(id=name, data={}))
    assert isinstance(prompt, str) and prompt.startswith(f"{name} ")
    reset, steps, observations, reward = loop.time() - started, [], [], 0.0
    for turn in range(100):
        started = loop.time()
        step = await env.step(Action(text="", token_ids=array("i"), finish_reason="stop", turn=turn))
        steps.append(loop.time() - started)
        observations.append(str(step.observation))
        reward += step.reward
        if step.done:
            break
    await env.close()
    return reset, steps, observations, reward


def episodes(envs: SimEnvs, names: Sequence[str]) -> list[Played]:
    async def main() -> list[Played]:
        return [await episode(envs, name) for name in names]

    return run(main())


def test_reset_step_turns_and_observations_follow_their_distributions() -> None:
    envs = envs_of(
        reset=Constant(value=2.0),
        step=Normal(mean=10, std=1),
        turns=Empirical(values=(2, 9)),
        observation_tokens=Normal(mean=20, std=4),
        max_turns=4,
    )
    played = episodes(envs, [f"task {i}" for i in range(300)])
    assert all(reset == pytest.approx(2.0) for reset, *_ in played)
    assert {len(steps) for _, steps, *_ in played} == {2, 4}
    assert fmean(s for _, steps, *_ in played for s in steps) == pytest.approx(10, abs=0.2)
    seen = [len(o) for _, _, observations, _ in played for o in observations[:-1]]
    assert fmean(seen) == pytest.approx(20, abs=1) and len(set(seen)) > 5
    assert all(observations[-1] == "" for _, _, observations, _ in played)


def test_without_a_distribution_of_turns_all_have_the_most() -> None:
    assert {len(steps) for _, steps, *_ in episodes(envs_of(max_turns=3), ["task 1"] * 20)} == {3}


def test_an_observation_has_at_least_a_token() -> None:
    [(_, _, observations, _)] = episodes(envs_of(observation_tokens=Constant(value=0)), ["task 1"])
    assert observations == [".", ".", ""]


@pytest.mark.parametrize(("spread", "mixed"), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)])
def test_spread_decides_how_many_groups_have_zero_variance(spread: float, mixed: float) -> None:
    """Rewards of 12 episodes of each task: all tasks alike, tasks that differ, tasks that are always the same."""
    names = [f"task {i}" for i in range(300) for _ in range(12)]
    rewards = [reward for *_, reward in episodes(envs_of(success=0.5, spread=spread, max_turns=1), names)]
    groups = [rewards[i : i + 12] for i in range(0, len(rewards), 12)]
    assert fmean(rewards) == pytest.approx(0.5, abs=0.06)
    share = fmean(len(set(g)) == 2 for g in groups)
    # Beta(½, ½): P(12 alike) = 2·Γ(12.5)/(√π·12!) = 0.322.
    assert share == pytest.approx({1.0: 1.0, 0.5: 0.678, 0.0: 0.0}[mixed], abs=0.08)


def test_an_episode_is_a_function_of_seed_task_and_number() -> None:
    settings = {"step": Normal(mean=5, std=3), "turns": Empirical(values=(1, 2, 3)), "spread": 0.5}
    names = [f"task {i % 4}" for i in range(40)]
    shuffled = names[:]
    random.Random(1).shuffle(shuffled)

    def by_task(order: list[str], seed: int = 0) -> dict[str, list[Played]]:
        found: dict[str, list[Played]] = {}
        for name, (reset, steps, *rest) in zip(order, episodes(envs_of(seed, **settings), order), strict=True):
            found.setdefault(name, []).append((reset, [round(s, 6) for s in steps], *rest))
        return found

    assert by_task(names) == by_task(shuffled)
    assert by_task(names) != by_task(names, seed=1)
    assert len({str(e) for e in by_task(names)["task 1"]}) > 5


def test_a_share_of_steps_raises() -> None:
    async def main() -> int:
        envs, crashed = envs_of(crash=0.2, max_turns=1), 0
        for i in range(500):
            try:
                await episode(envs, f"task {i}")
            except RuntimeError as error:
                assert "simulated crash" in str(error)
                crashed += 1
        return crashed

    assert 70 < run(main()) < 130


def test_a_share_of_steps_never_answers() -> None:
    async def main() -> int:
        envs, hung = envs_of(hang=0.2, max_turns=1), 0
        for i in range(500):
            try:
                async with asyncio.timeout(1000):
                    await episode(envs, f"task {i}")
            except TimeoutError:
                hung += 1
        return hung

    assert 70 < run(main()) < 130


def test_a_share_of_steps_is_slow() -> None:
    envs = envs_of(step=Constant(value=1.0), slow=0.2, slow_factor=7.0, max_turns=2)
    steps = [round(s, 6) for _, steps, *_ in episodes(envs, [f"task {i}" for i in range(300)]) for s in steps]
    assert set(steps) == {1.0, 7.0}
    assert steps.count(7.0) / len(steps) == pytest.approx(0.2, abs=0.06)


def test_a_storm_stretches_what_begins_in_it() -> None:
    envs = envs_of(reset=Constant(value=1.0), step=Constant(value=2.0), max_turns=1)

    async def main() -> list[Played]:
        before = await episode(envs, "task 0")
        envs.storm = 5.0
        during = await episode(envs, "task 0")
        envs.storm = 1.0
        return [before, during, await episode(envs, "task 0")]

    assert [(reset, *steps) for reset, steps, *_ in run(main())] == [(1, 2), (5, 10), (1, 2)]


def test_open_environments_are_counted() -> None:
    async def main() -> list[int]:
        envs = envs_of()
        made = [envs.make() for _ in range(3)]
        counts = [envs.open]
        for env in made:
            await env.close()
            counts.append(envs.open)
        return counts

    assert run(main()) == [3, 2, 1, 0]
