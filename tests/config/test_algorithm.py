"""The ``[algorithm]`` table: names, ranges and combinations, each refused with one line that names the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RecipeError, load, load_table
from asyncrl.config.algorithm import ADVANTAGES, LOSSES


def refused(algorithm: dict[str, Any], **tables: Any) -> str:
    with pytest.raises(RecipeError) as error:
        load_table({"algorithm": algorithm, **tables})
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mini_batches", 0),
        ("epochs", 0),
        ("clip_low", 0.0),
        ("clip_low", 1.5),
        ("clip_high", 0.0),
        ("importance_cap", float("inf")),
        ("dual_clip", 1.0),
        ("dual_clip", -2.0),
        ("max_ratio", 1.0),
        ("max_ratio", -1.0),
        ("max_ratio", float("nan")),
        ("positive_weight", -1.0),
        ("negative_weight", float("nan")),
        ("reject_low", 0.0),
        ("reject_high", 0.5),
        ("reject_high", float("inf")),
        ("entropy_coef", -0.1),
        ("kl_coef", -0.1),
        ("gamma", 1.1),
        ("baseline_decay", 1.0),
        ("gae_lambda", -0.1),
        ("critic_learning_rate", -1e-5),
        ("value_coef", float("inf")),
        ("value_clip", -0.2),
        ("overlong_limit", -1),
        ("overlong_buffer", 5),
        ("overlong_penalty", -1.0),
    ],
)
def test_an_impossible_value_is_named(key: str, value: Any) -> None:
    assert refused({key: value}).startswith(f"algorithm.{key} = {value}: ")


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_accepted(name: str) -> None:
    assert load_table({"algorithm": {"loss": name}}).algorithm.loss == name


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_is_accepted(name: str) -> None:
    assert load_table({"algorithm": {"advantage": name, "credit": "token"}}).algorithm.advantage == name


def test_a_critic_needs_steps_and_something_to_learn() -> None:
    gae = {"advantage": "gae", "credit": "token"}
    assert refused({"advantage": "gae"}) == (
        'algorithm.credit = trajectory: gae needs steps within a trajectory; set algorithm.credit = "token" or "turn"'
    )
    assert refused(gae | {"value_coef": 0.0}).startswith("algorithm.value_coef = 0.0: must be more than 0")
    assert refused(gae | {"critic": "head"}) == "algorithm.critic: unknown 'head'; known are value_head, model"
    assert load_table({"algorithm": gae}).algorithm.uses_critic
    assert not load_table({}).algorithm.uses_critic


def test_an_unknown_name_gets_a_suggestion() -> None:
    assert refused({"loss": "topper"}).startswith("algorithm.loss: unknown 'topper'; did you mean 'topr'?")
    assert "known are group_norm, group_mean, rloo, reinforce" in refused({"advantage": "zzz"})
    assert refused({"loss": "mine.py:"}) == (
        "algorithm.loss = 'mine.py:': write package.module:function or file.py:function"
    )


def test_only_comparisons_need_a_group_of_two() -> None:
    one = {"group_size": 1}
    assert refused({"advantage": "rloo"}, rollout=one).startswith("rollout.group_size = 1: must be at least 2: rloo")
    load_table({"algorithm": {"advantage": "reinforce"}, "rollout": one})
    load_table({"algorithm": {"advantage": "gae", "credit": "turn"}, "rollout": one})
    load_table({"algorithm": {"advantage": "mine.py:advantage"}, "rollout": one})


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"advantage": "reinforce"}, 'baseline = "batch"'),
        ({"advantage": "reinforce", "baseline": "running"}, 'baseline = "running"'),
        ({"advantage": "mine.py:judge"}, 'advantage = "mine.py:judge"'),
        ({"reward_norm": "batch"}, 'reward_norm = "batch"'),
        ({"overlong_filter": True}, "overlong_filter = true"),
    ],
)
def test_advantages_that_need_the_whole_batch_cannot_be_streamed(algorithm: dict[str, Any], named: str) -> None:
    assert refused(algorithm, trainer={"stream": True}).startswith(
        f"trainer.stream = true: needs advantages that each group has by itself, but algorithm.{named} looks at the"
    )
    load_table({"algorithm": algorithm})


def test_what_can_be_streamed_are_whole_groups_of_the_first_mini_batch() -> None:
    def streamed(**algorithm: Any) -> int:
        return load_table(
            {"trainer": {"stream": True}, "rollout": {"batch_groups": 8}, "algorithm": algorithm}
        ).streamed_groups

    assert load_table({"preset": "roll-flash"}).streamed_groups == 0
    assert [streamed(advantage=a) for a in ("group_norm", "group_mean", "rloo")] == [8, 8, 8]
    assert streamed(advantage="reinforce", baseline="none", mini_batches=3) == 2
    assert refused({"mini_batches": 9}, trainer={"stream": True}, rollout={"batch_groups": 8}) == (
        "trainer.stream = true: the first of algorithm.mini_batches = 9 holds no whole group of "
        "rollout.batch_groups = 8; lower it"
    )


def test_keys_that_would_do_nothing_are_refused() -> None:
    assert refused({"gamma": 0.9}) == 'algorithm.gamma = 0.9: discounts nothing; set algorithm.credit = "turn"'
    load_table({"algorithm": {"gamma": 0.9, "credit": "turn"}})
    for keys in ({}, {"advantage": "gae", "credit": "turn"}):
        says = r"critic: is not used; set algorithm.advantage = \"gae\" and algorithm.critic = \"model\""
        assert re.search(f"algorithm.critic_path = .*{says}", refused({"critic_path": "/critic", **keys}))
    load_table({"algorithm": {"critic_path": "critic", "critic": "model", "advantage": "gae", "credit": "turn"}})
    says = "algorithm.proximal = interpolate: has no meaning for the loss ppo; use decoupled_ppo"
    assert refused({"proximal": "interpolate"}) == says
    load_table({"algorithm": {"proximal": "interpolate", "loss": "decoupled_ppo"}})


def test_the_overlong_buffer_lies_within_the_limit() -> None:
    for limit, buffer in ((100, 0), (100, 101)):
        assert "algorithm.overlong_limit = 100" in refused({"overlong_limit": limit, "overlong_buffer": buffer})
    load_table({"algorithm": {"overlong_limit": 100, "overlong_buffer": 100}})


def test_files_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        '[algorithm]\nloss = "own.py:loss"\nadvantage = "package.own:advantage"\nreference = "base"\n'
    )
    algorithm = load(tmp_path).algorithm
    assert algorithm.loss == f"{tmp_path / 'own.py'}:loss"
    assert algorithm.advantage == "package.own:advantage"
    assert algorithm.reference == str(tmp_path / "base")
    (tmp_path / "recipe.toml").write_text(
        '[algorithm]\nadvantage = "gae"\ncredit = "turn"\ncritic = "model"\ncritic_path = "values"\n'
    )
    assert load(tmp_path).algorithm.critic_path == str(tmp_path / "values")
