"""The alfworld recipe: its setup script in miniature, its tokenizer, and the overlay for Qwen3-8B."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import load
from asyncrl.tokenizer import HuggingFaceTokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "alfworld"


def run_setup(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE / "setup.py"), "--out", str(out), "--games", "6", "1", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_setup_makes_games_and_a_model_whose_words_cover_them(tmp_path: Path) -> None:
    pytest.importorskip("fast_downward", reason="needs ALFWorld: pip install 'asyncrl[alfworld]'")
    from asyncrl import Action, Task
    from asyncrl.envs.alfworld import ALFWorld, renamed

    ended = run_setup(tmp_path / "out", "--steps", "2", "--max-loss", "99")
    assert ended.returncode == 0, ended.stderr
    out = tmp_path / "out"
    rows = {
        name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    games = {row["game"] for row in rows["train"]}
    assert (len(games), len(rows["train"]), len(rows["heldout"])) == (6, 24, 2)
    assert len({row["task_type"] for row in rows["train"]}) == 3
    assert len({json.dumps(row["names"]) for row in rows["train"]}) > 18
    assert not any("names" in row for row in rows["heldout"])
    tokenizer = HuggingFaceTokenizer(out / "model")
    unknown = tokenizer.encode("<unk>")
    env = ALFWorld(data=str(out / "games"), cache=str(out / "games" / "cache"))
    for row in rows["train"]:
        said = env.reset(Task(id="t", data=row))
        done = False
        for original in json.loads((out / "games" / row["game"]).read_text())["walkthrough"]:
            assert isinstance(said, str) and not set(tokenizer.encode(said)) & set(unknown)
            command = renamed(original, row["names"])
            assert tokenizer.decode(tokenizer.encode(command)) == command
            assert len(tokenizer.encode(command)) <= load(RECIPE).rollout.max_new_tokens - 1
            step = env.step(Action(text=command, token_ids=[], finish_reason="stop"))
            said, done = step.observation, step.done
        assert done, row
    env.close()


def test_the_overlay_holds_the_paper_s_settings() -> None:
    recipe = load(RECIPE, files=[RECIPE / "qwen3-8b.toml"])
    rollout = recipe.rollout
    assert (rollout.batch_groups, rollout.group_size) == (8, 16)
    redundant = (rollout.batch_groups + rollout.max_additional_running_prompts) * (
        rollout.group_size + rollout.group_size_redundancy
    )
    assert rollout.num_envs == redundant == 9 * 17
    assert (recipe.env.max_turns, rollout.max_new_tokens) == (30, 4096)
    assert recipe.env.kwargs["style"] == "chat"
    assert recipe.env.kwargs["data"] == str(RECIPE / "data")
