"""Simulated tasks: traits by (seed, task), lengths by (seed, task, i), difficulty as the recipe spreads it."""

from __future__ import annotations

import random
from array import array
from statistics import fmean, pvariance

import pytest

from asyncrl.config import EnvModel, SimConfig
from asyncrl.core.distributions import Constant, LogNormal, Normal
from asyncrl.sim.engine import GENERATED
from asyncrl.sim.tasks import SimTasks, TaskLengths, beta, name_of
from asyncrl.sim.tokenizer import SimTokenizer

RNG = random.Random(0)


def ids(tasks: SimTasks, name: str) -> array[int]:
    return array("i", SimTokenizer().encode(tasks.traits(name).prompt))


def lengths_of(sim: SimConfig, order: list[str], seed: int = 3) -> list[int]:
    tasks = SimTasks(sim, seed=seed)
    lengths = TaskLengths(sim, tasks, seed=seed)
    return [lengths(RNG, ids(tasks, name)) for name in order]


def test_a_task_is_recognised_from_any_prompt_that_begins_with_it() -> None:
    tasks = SimTasks(SimConfig(tasks=2000, prompt_tokens=Constant(value=0)), seed=0)
    for name in ("task 0", "task 1999", "heldout 12"):
        assert name_of(ids(tasks, name)) == name
        assert name_of([*ids(tasks, name), GENERATED + 5, GENERATED, ord(" ")]) == name


def test_prompts_have_the_drawn_number_of_tokens_and_hold_at_least_the_name() -> None:
    sim = SimConfig(prompt_tokens=Normal(mean=50, std=20))
    prompts = [len(SimTasks(sim, seed=1).traits(f"task {i}").prompt) for i in range(500)]
    assert fmean(prompts) == pytest.approx(50, abs=3)
    assert 15 < pvariance(prompts) ** 0.5 < 25
    assert SimTasks(SimConfig(prompt_tokens=Constant(value=2)), seed=1).traits("task 3").prompt == "task 3 "


def test_traits_depend_on_seed_and_task_and_not_on_the_order_of_asking() -> None:
    sim = SimConfig(prompt_tokens=Normal(mean=50, std=20), env=EnvModel(success=0.4, spread=0.5))
    names = [f"task {i}" for i in range(20)]
    there, back, other = SimTasks(sim, seed=1), SimTasks(sim, seed=1), SimTasks(sim, seed=2)
    expected = [there.traits(name) for name in names]
    assert [back.traits(name) for name in reversed(names)] == expected[::-1]
    assert [other.traits(name) for name in names] != expected


def test_the_recipe_says_how_many_tasks_there_are() -> None:
    tasks = SimTasks(SimConfig(tasks=3, heldout=2), seed=0)
    assert [t.id for t in tasks.train] == ["task 0", "task 1", "task 2"]
    assert [t.id for t in tasks.heldout] == ["heldout 0", "heldout 1"]


def test_the_i_th_response_of_a_task_is_as_long_in_whatever_order_tasks_are_asked() -> None:
    sim = SimConfig(lengths=LogNormal(mean=100, tailness=80), task_share=0.3)
    names = [f"task {i % 5}" for i in range(50)]
    shuffled = names[:]
    random.Random(4).shuffle(shuffled)

    def by_task(order: list[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, length in zip(order, lengths_of(sim, order), strict=True):
            found.setdefault(name, []).append(length)
        return found

    assert by_task(names) == by_task(shuffled)
    assert lengths_of(sim, names) != lengths_of(sim, names, seed=4)


def test_lengths_follow_the_distribution_and_are_whole_tokens() -> None:
    sim = SimConfig(lengths=LogNormal(mean=400, tailness=50))
    lengths = lengths_of(sim, [f"task {i}" for i in range(4000)])
    assert all(isinstance(n, int) and n >= 1 for n in lengths)
    assert fmean(lengths) == pytest.approx(400, rel=0.05)
    assert lengths_of(SimConfig(lengths=Constant(value=0)), ["task 1"]) == [1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_task_share_is_the_part_of_the_variance_between_tasks(share: float) -> None:
    sim = SimConfig(lengths=Normal(mean=10_000, std=1000), task_share=share)
    groups, size = 600, 8
    lengths = lengths_of(sim, [f"task {i}" for i in range(groups) for _ in range(size)])
    tasks = [lengths[i * size : (i + 1) * size] for i in range(groups)]
    within = fmean(pvariance(t) * size / (size - 1) for t in tasks)
    assert within / 1000**2 == pytest.approx(1 - share, abs=0.06)


@pytest.mark.parametrize("mean", [0.1, 0.5])
@pytest.mark.parametrize("spread", [0.001, 0.05, 0.5, 0.95, 0.9999])
def test_difficulty_has_the_mean_and_the_variance_between_tasks_that_it_should(mean: float, spread: float) -> None:
    rng = random.Random(1)
    draws = [beta(rng, mean, spread) for _ in range(20_000)]
    assert all(0 <= p <= 1 for p in draws)
    assert fmean(draws) == pytest.approx(mean, abs=0.011)
    assert pvariance(draws) == pytest.approx(spread * mean * (1 - mean), rel=0.06)


def test_difficulty_at_its_ends_is_a_constant_and_a_coin() -> None:
    rng = random.Random(1)
    assert {beta(rng, 0.3, 0.0) for _ in range(100)} == {0.3}
    coins = [beta(rng, 0.3, 1.0) for _ in range(5000)]
    assert set(coins) == {0.0, 1.0}
    assert fmean(coins) == pytest.approx(0.3, abs=0.03)
    assert [beta(rng, m, 0.7) for m in (0.0, 1.0)] == [0.0, 1.0]


def test_the_tokenizer_knows_text_from_what_was_generated() -> None:
    tokenizer = SimTokenizer()
    assert tokenizer.decode(array("i", tokenizer.encode("é 7"))) == "é 7"
    assert tokenizer.decode(array("i", [GENERATED + 1, GENERATED])) == ""
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([ord("a"), GENERATED + 1, ord("b")]) == "ab"
