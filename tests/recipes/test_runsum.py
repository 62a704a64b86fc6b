"""The runsum recipe: data from an independent oracle, the tokenizer, the reward, and its setup script in miniature."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl import Action, Task
from asyncrl.config import load
from asyncrl.loading import load_environment

RECIPE = Path(__file__).parents[2] / "recipes" / "runsum"


def oracle(prompt: str) -> str:
    """The right answer, worked out from the prompt's text alone."""
    digits = [int(c) for c in prompt.rstrip("=").rstrip(".")]
    return "".join(str(sum(digits[: i + 1]) % 10) for i in range(len(digits)))


def test_rows_are_right_different_and_seeded(setup: ModuleType) -> None:
    rows = setup.make_rows(random.Random(1), 500)
    assert all(row["answer"] == oracle(row["prompt"]) for row in rows)
    assert len({row["prompt"] for row in rows}) == 500
    assert {len(row["prompt"]) for row in rows} == {setup.WIDTH + 1}
    assert rows == setup.make_rows(random.Random(1), 500)
    assert rows != setup.make_rows(random.Random(2), 500)


def test_answers_have_a_long_tail(setup: ModuleType) -> None:
    lengths = sorted(len(row["answer"]) for row in setup.make_rows(random.Random(0), 4000))
    assert lengths[0] == 2 and lengths[-1] == setup.WIDTH
    assert 7 <= lengths[2000] <= 9
    assert lengths[3800] > 2.5 * lengths[2000]


def test_the_careless_teacher_goes_on_from_his_slips(setup: ModuleType) -> None:
    digits = [1] * 12
    assert setup.running_sums(digits) == [int(c) for c in oracle("1" * 12)]
    slipped = setup.running_sums(digits, 0.3, random.Random(4))
    assert slipped != setup.running_sums(digits)
    kept = sum((b - a) % 10 == 1 for a, b in zip([0, *slipped[:-1]], slipped, strict=True))
    assert 6 <= kept < 12


def test_the_tokenizer_has_one_token_a_character(setup: ModuleType) -> None:
    tokenizer = setup.make_tokenizer()
    row = setup.make_rows(random.Random(0), 1)[0]
    for text in row.values():
        ids = tokenizer.encode(text)
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [("376", "stop", 1.0), ("375", "stop", 0.0), ("37", "stop", 0.0), ("3760", "stop", 0.0), ("376", "length", 0.0)],
)
def test_only_the_whole_right_answer_is_rewarded(text: str, finish_reason: str, reward: float) -> None:
    function = load_environment(load(RECIPE).env).reward
    assert function is not None
    task = Task(id="t", data={"prompt": "349".ljust(32, ".") + "=", "answer": "376"})
    assert function(task, Action(text=text, token_ids=[], finish_reason=finish_reason)) == reward


def run_setup(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(RECIPE / "setup.py"),
        "--out",
        str(out),
        "--train",
        "40",
        "--heldout",
        "8",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_warm_start_that_falls_short_fails_with_one_line(tmp_path: Path) -> None:
    ended = run_setup(tmp_path / "out", "--max-steps", "2")
    assert ended.returncode == 1
    assert ended.stderr.strip() == "setup: the warm start reached an accuracy of 0.000 in 2 steps, not 0.2"
    assert not (tmp_path / "out").exists()


def test_setup_leaves_a_model_and_disjoint_splits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = run_setup(tmp_path / "out", "--max-steps", "2", "--target", "0")
    assert ended.returncode == 0, ended.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.config.model_type == "qwen3" and 200_000 < model.num_parameters() < 2_000_000
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").encode("12=") == [3, 4, 13]
    rows = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    assert (len(rows["train"]), len(rows["heldout"])) == (40, 8)
    assert not {r["prompt"] for r in rows["train"]} & {r["prompt"] for r in rows["heldout"]}
