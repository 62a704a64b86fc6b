"""The tool_math recipe: its data, the tokenizer, its model's way through the real environment, and its overlay."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl import Action, Observation, Task
from asyncrl.config import load
from asyncrl.envs.maths import parse_row
from asyncrl.loading import load_environment

RECIPE = Path(__file__).parents[2] / "recipes" / "tool_math"


def test_rows_are_right_different_and_seeded(setup: ModuleType) -> None:
    rows = setup.make_rows(random.Random(1), 300)
    for row in rows:
        a, b, c = map(int, re.findall(r"\d+", row["question"]))
        assert int(parse_row(row)["answer"]) == a * b + (c if "+" in row["question"] else -c)
    assert len({row["question"] for row in rows}) == 300
    assert rows == setup.make_rows(random.Random(1), 300)


def test_what_is_said_survives_the_tokenizer(setup: ModuleType) -> None:
    tokenizer = setup.make_tokenizer()
    texts = [text for n in range(50) for turn in setup.demonstrate(random.Random(n)) for text in turn]
    texts.append('\n```output\nTraceback (most recent call last):\n  File "<stdin>"\n[exit code 1]\n```\n')
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("482*73+911=")) == 11 and len(tokenizer.encode("#### 36097")) == 6


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_careful_demonstration_is_rewarded(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "SLIP", 0.0)
    monkeypatch.setattr(setup, "GUESS", 0.0)
    (question, program), (output, answer) = setup.demonstrate(random.Random(3))
    make = load_environment(load(RECIPE).env).make
    assert make is not None
    env = make()
    try:
        said = await env.reset(Task(id="1", data=parse_row({"question": question, "answer": answer})))
        assert isinstance(said, Observation) and said.text == question
        step = await env.step(Action(text=program, token_ids=[], finish_reason="stop"))
        assert isinstance(step.observation, Observation) and step.observation.text == output
        step = await env.step(Action(text=answer, token_ids=[], finish_reason="stop", turn=1))
        assert step.done and step.reward == 1.0 and step.metrics["tool_calls"] == 1.0
    finally:
        await env.close()


def test_setup_in_miniature(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE / "setup.py"), "--out", str(tmp_path / "out"), "--train", "4"]
    command += ["--heldout", "2", "--max-steps", "2"]
    done = subprocess.run([*command, "--target", "0"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    assert len(lines) == 4 and parse_row(json.loads(lines[0]))["answer"].isdigit()
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    done = subprocess.run([*command, "--target", "0.9"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert re.fullmatch(r"setup: the warm start reached an accuracy of 0\.\d+ in 2 steps, not 0\.9\n", done.stderr)


def test_the_recipes_for_a_cluster_load() -> None:
    tools = load(RECIPE, files=[RECIPE / "qwen3.toml"])
    assert tools.engine.kind == "sglang" and tools.env.kwargs["protocol"] == "tools"
    for recipe in (tools, load(RECIPE / "plain.toml")):
        assert load_environment(recipe.env).parse_row is parse_row
