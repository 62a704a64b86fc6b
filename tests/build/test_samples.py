"""Empirical distributions from files: numbers, or the trajectories that a run wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from asyncrl.build.samples import read_samples
from asyncrl.config import Recipe, RecipeError, load
from asyncrl.core.distributions import Empirical, LogNormal

TRAJECTORIES = [
    {"id": 0, "task": "a", "versions": [[-1, 40], [0, 100], [1, 20], [-1, 7], [1, 30]], "turns": 2, "text": ["…"]},
    {"id": 1, "task": "b", "versions": [[-1, 50], [3, 15]], "turns": 1},
]
KEYS = {
    "sim.lengths": (120, 30, 15),
    "sim.prompt_tokens": (40, 50),
    "sim.env.observation_tokens": (7,),
    "sim.env.turns": (2, 1),
}


def recipe_of(folder: Path, *keys: str, file: str = "samples") -> Recipe:
    """A recipe whose keys are empirical from a file beside it."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text("".join(f'{key} = {{ kind = "empirical", file = "{file}" }}\n' for key in keys))
    return load(folder)


def values_of(recipe: Recipe, key: str) -> tuple[float, ...]:
    value = recipe
    for name in key.split("."):
        value = getattr(value, name)
    assert isinstance(value, Empirical) and not value.file
    return value.values


@pytest.mark.parametrize("key", [*KEYS, "sim.env.reset", "sim.env.step"])
def test_numbers_one_a_line_serve_every_key(tmp_path: Path, key: str) -> None:
    (tmp_path / "samples").write_text("3\n1.5\n\n2e1\n")
    assert values_of(read_samples(recipe_of(tmp_path, key)), key) == (1.5, 3.0, 20.0)


def test_a_runs_trajectories_tell_lengths_prompts_observations_and_turns(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("".join(json.dumps(line) + "\n" for line in TRAJECTORIES))
    recipe = read_samples(recipe_of(tmp_path, *KEYS))
    for key, expected in KEYS.items():
        assert values_of(recipe, key) == tuple(sorted(expected))


def test_a_file_is_looked_for_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lengths.txt").write_text("7\n")
    recipe = recipe_of(tmp_path / "recipe", "sim.lengths", file="../data/lengths.txt")
    monkeypatch.chdir("/")
    assert values_of(read_samples(recipe), "sim.lengths") == (7.0,)


def test_other_distributions_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("7\n")
    recipe = recipe_of(tmp_path, "sim.env.step")
    kept = msgspec.structs.replace(recipe.sim, lengths=Empirical(values=(5.0, 4.0)), prompt_tokens=LogNormal(mean=3.0))
    sim = read_samples(msgspec.structs.replace(recipe, sim=kept)).sim
    assert (sim.lengths, sim.prompt_tokens) == (kept.lengths, kept.prompt_tokens)
    assert sim.env.step.sample(random.Random(0)) == 7.0
    plain = Recipe()
    assert read_samples(plain) == plain


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("sim.lengths", "", r"sim\.lengths\.file: .*samples has no values"),
        ("sim.lengths", "12\nx\n", r"sim\.lengths\.file: .*samples:2: neither a number nor a line of trajectories"),
        ("sim.lengths", '{"turns": 1}\n', r"samples:1: neither a number .*versions"),
        ("sim.lengths", "5\n-1\n", r"samples:2: -1 is no length or latency"),
        ("sim.env.step", '{"turns": 1, "versions": [[0, 5]]}\n', r"a trajectory does not tell sim\.env\.step"),
    ],
)
def test_a_bad_file_is_refused_with_one_line(tmp_path: Path, key: str, content: str, message: str) -> None:
    (tmp_path / "samples").write_text(content)
    with pytest.raises(RecipeError, match=message) as caught:
        read_samples(recipe_of(tmp_path, key))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"sim\.env\.step\.file: .*samples: No such file or directory"):
        read_samples(recipe_of(tmp_path, "sim.env.step"))
