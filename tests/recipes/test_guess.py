"""The tutorial: its environment keeps its word, and its commands are ones that work."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import Action, Task
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.loading import load_environment

RECIPE = Path(__file__).parents[2] / "recipes" / "guess"


@pytest.mark.parametrize(
    ("guesses", "answers", "reward"),
    [
        (["5", "7"], ["higher", ""], 1.0),
        (["9", "nonsense", "1"], ["lower", "nonsense", "higher"], 0.0),
        (["7"], [""], 1.0),
    ],
)
async def test_the_environment_answers_as_the_tutorial_says(
    guesses: list[str], answers: list[str], reward: float
) -> None:
    make = load_environment(load(RECIPE).env).make
    assert make is not None
    env = make()
    assert await env.reset(Task(id="t", data={"secret": 7})) == "guess"
    steps = [
        await env.step(Action(text=guess, token_ids=[], finish_reason="length", turn=turn))
        for turn, guess in enumerate(guesses)
    ]
    assert [step.observation for step in steps] == answers
    assert [step.done for step in steps] == [False] * (len(guesses) - 1) + [True]
    assert sum(step.reward for step in steps) == reward


def test_setup_makes_what_the_recipe_names(tmp_path: Path) -> None:
    out = tmp_path / "build"
    command = [sys.executable, str(RECIPE / "setup.py"), "--out", str(out), "--seed", "3"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert {row["secret"] for row in rows} == set(range(1, 10))
    assert (out / "heldout.jsonl").is_file() and (out / "model" / "config.json").is_file()


def test_the_commands_that_need_no_model_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"secret": 4}\n{"secret": 9}\n')
    text = (RECIPE / "README.md").read_text()
    [check] = re.findall(r"^asyncrl (env check .*)$", text, re.MULTILINE)
    arguments = shlex.split(check.replace("recipes/guess/env.py", str(RECIPE / "env.py")))
    arguments[arguments.index("--tasks") + 1] = str(rows)
    assert main([*arguments, "--episodes", "5"]) == 0
    assert "all well" in capsys.readouterr().out
    assert main(["plan", str(RECIPE)]) == 0
    assert main(["sim", str(RECIPE), "--set", "run.steps=2", "--run-dir", str(tmp_path / "run")]) == 0
    assert "finished" in capsys.readouterr().out
