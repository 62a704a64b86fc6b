"""The SWE recipe: its files load, its one-line task is right, and its setup's parts do what they say."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl import Action, Task
from asyncrl.config import load
from asyncrl.envs.swe import SWE, parse_row
from asyncrl.envs.swe.mutation import bug_patch, mutations
from asyncrl.loading import load_environment

RECIPE = Path(__file__).parents[2] / "recipes" / "swe"

GOOD = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
ROW = {
    "instance_id": "calc.add",
    "repo": "calc",
    "tree": "trees/calc",
    "patch": bug_patch("calc.py", GOOD.encode(), GOOD.replace("a + b", "a - b").encode()),
    "FAIL_TO_PASS": ["test_calc.py::test_add"],
    "PASS_TO_PASS": [],
    "problem_statement": "add does not add.",
}


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the recipe; they import each other as neighbours."""
    monkeypatch.syspath_prepend(RECIPE)
    for neighbour in ("env", "model"):
        monkeypatch.delitem(sys.modules, neighbour, raising=False)
    spec = importlib.util.spec_from_file_location(f"swe_{name}", RECIPE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_both_recipes_load() -> None:
    small = load(RECIPE)
    assert load_environment(small.env).make().__class__.__name__ == "OneLine"
    assert Path(small.env.kwargs["root"]) == RECIPE / "build"
    assert load(RECIPE, files=[RECIPE / "sim.toml"]).sim.heldout == 4
    large = load(RECIPE, files=[RECIPE / "qwen3.toml"])
    assert type(load_environment(large.env).make()) is SWE
    assert large.env.kwargs["turns"] == large.env.max_turns
    mini = load(RECIPE, files=[RECIPE / "qwen3.toml", RECIPE / "mini.toml"])
    assert load_environment(mini.env).rollout is not None
    assert mini.env.kwargs["step_limit"] == mini.env.max_turns
    assert mini.env.kwargs["memory_mb"] == large.env.kwargs["memory_mb"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize(("answer", "reward"), [("return a + b", 1.0), ("return a - b", 0.0), ("return (", 0.0)])
async def test_a_line_is_repaired_and_judged_by_the_tests(tmp_path: Path, answer: str, reward: float) -> None:
    tree = tmp_path / "trees" / "calc"
    tree.mkdir(parents=True)
    (tree / "calc.py").write_text(GOOD)
    (tree / "test_calc.py").write_text("import calc\ndef test_add():\n    assert calc.add(1, 2) == 3\n")
    (tmp_path / "venv").symlink_to(sys.prefix)
    recipe = load(RECIPE, overrides=[f'env.kwargs.root="{tmp_path}"'])
    env = load_environment(recipe.env).make()
    try:
        opening = await env.reset(Task(id="t", data=ROW))
        assert not isinstance(opening, str) and opening.text == "return a - b\n"
        step = await env.step(Action(text=answer, token_ids=[], finish_reason="stop"))
    finally:
        await env.close()
    assert step.done and step.reward == reward


def test_places_for_bugs_are_seeded_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = module("setup", monkeypatch)
    (tmp_path / "calc.py").write_text(GOOD)
    package = setup.Package("1", "calc.py", "test_*.py")
    first = setup.candidates(tmp_path, package, random.Random(0))
    assert first == setup.candidates(tmp_path, package, random.Random(0))
    assert {m.function for _, m in first[:2]} == {"add", "double"}, "every function has its turn first"
    assert sorted(m.start for _, m in first) == [m.start for m in mutations(GOOD.encode())]


def test_the_scripted_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = module("prove", monkeypatch)
    [call] = prove.gold(parse_row(ROW))
    assert GOOD.replace("a + b", "a - b").count(call.arguments["old_str"]) == 1
    assert GOOD.replace("a + b", "a - b").replace(call.arguments["old_str"], call.arguments["new_str"]) == GOOD
    assert all(c.name in ("bash", "edit") for c in prove.at_random(parse_row(ROW), random.Random(1)))


def test_a_bug_of_several_lines_is_not_for_the_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    env = module("env", monkeypatch)
    assert env.broken_line(parse_row(ROW)) == ("calc.py", "    return a - b", "    return a + b")
    old, new = b"a\nb\nc\n", b"a\nB\nC\n"
    with pytest.raises(ValueError, match="is not one line"):
        env.broken_line(parse_row({**ROW, "patch": bug_patch("f", old, new)}))


def test_the_warm_start_leaves_a_model_that_hesitates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    from asyncrl.tiny import WarmStartError

    model = module("model", monkeypatch)
    monkeypatch.setattr(model, "MAX_STEPS", 25)
    with pytest.raises(WarmStartError, match="in 25 steps, not 2"):
        model.warm_start(tmp_path / "m", [("a < b", "a <= b")], seed=0, target=2.0)
    assert model.warm_start(tmp_path / "m", [("a < b", "a <= b")], seed=0, target=0.0) >= 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m" / "model")
    assert tokenizer.decode(tokenizer.encode("if x:  # ok\n")) == "if x:  # ok\n"
