"""reasoning-gym's data sets: rows that keep their entry exactly, and scorers behind a guard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import EnvConfig
from asyncrl.env import Action, Task
from asyncrl.loading import load_environment, load_tasks

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'asyncrl[reasoning-gym]'")

from asyncrl.envs.adapters.reasoning_gym import reward, rows, score

JUNK = ("", "~", "yes", "-", "{}", "[[1,2],[3", "nan", "1/0", "é漢字🙂", "\x00", "inf", "nan+nanj", "a" * 20_000)
PICKED = ["chain_sum", "complex_arithmetic", "prime_factorization", "game_of_life", "boxnet", "knights_knaves", "rearc"]


def said(row: dict[str, Any], text: str, **kwargs: bool) -> float:
    row = json.loads(json.dumps(row))  # as it comes out of a file
    return reward(Task(id="t", data=row), Action(text=text, token_ids=[], finish_reason="stop"), **kwargs)


@pytest.mark.parametrize("dataset", PICKED)
def test_right_answers_score_and_junk_does_not(dataset: str) -> None:
    for row in rows(dataset, size=2, seed=3):
        if isinstance(row["answer"], str) and dataset != "boxnet":  # whose answers are no solutions
            assert said(row, f"<think>…</think>So <answer>\n{row['answer']}\n</answer>") == 1.0
            assert said(row, row["answer"]) == 0.0, "not between the tags"
            assert said(row, row["answer"], tags=False) == 1.0
        for junk in JUNK:
            assert said(row, f"<answer>{junk}</answer>") <= 0.05, (dataset, junk)


def test_the_last_answer_outside_of_thoughts_counts() -> None:
    [row] = rows("chain_sum", size=1, seed=1)
    right = f"<answer>{row['answer']}</answer>"
    assert said(row, f"<answer>no</answer> {right}") == 1.0
    assert said(row, f"{right} <answer>no</answer>") == 0.0
    assert said(row, f"<think>{right}</think> I forgot.") == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "much", 7.0, -3.0])
def test_whatever_a_scorer_gives_is_within_0_and_1(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scorer:
        def score_answer(self, answer: str, entry: object) -> object:
            return value

    monkeypatch.setattr("asyncrl.envs.adapters.reasoning_gym._scorer", lambda dataset: Scorer())
    assert score("any", "{}", "x") == (1.0 if value == 7.0 else 0.0)


def test_entries_that_anything_passes_are_left_out() -> None:
    kept = [*rows("game_of_life_halting", size=8, seed=3)]
    assert len(kept) < 8 and all(said(row, "<answer>~</answer>") == 0.0 for row in kept)


def test_the_command_makes_rows_that_the_recipe_reads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.envs.adapters.reasoning_gym", "chain_sum", "knights_knaves"]
    made = subprocess.run([*command, "--size", "3", "--seed", "5"], capture_output=True, text=True, check=True).stdout
    file = tmp_path / "train.jsonl"
    file.write_text(made)
    loaded = load_environment(EnvConfig(target="asyncrl.envs.adapters.reasoning_gym:reward"))
    tasks = load_tasks(str(file), "task.train", loaded.required)
    assert len(tasks) == 6 and {task.data["dataset"] for task in tasks} == {"chain_sum", "knights_knaves"}
    assert all("<answer>" in task.data["prompt"] for task in tasks)
    wrong = subprocess.run([*command, "no_such"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "reasoning_gym: no_such: Dataset 'no_such' not registered\n"
    wrong = subprocess.run([*command[:-1], "--config", '{"x": 1}'], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "unexpected keyword argument 'x'" in wrong.stderr
