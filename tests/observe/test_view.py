"""``asyncrl view``: what a person sees of a run's episodes."""

from __future__ import annotations

import io
from array import array
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from asyncrl.core.types import OBSERVED_VERSION, Trajectory
from asyncrl.observe.recorder import Recorder, trajectory_line
from asyncrl.observe.run_dir import TRAJECTORIES, RunDirError
from asyncrl.observe.view import list_episodes, show_episode

from .synthetic import Clock, make_recipe, make_trajectory

WORDS = ["look", "you see a lamp", "take", "lamp", "done", "use", "it"]
TWO_TURNS = Trajectory(
    id=17,
    group_id=4,
    index=1,
    task_id="alfworld/valid/pick_heat_then_place_in_recep-Apple-None-Fridge-10",
    v_traj=3,
    tokens=array("i", range(7)),
    loss_mask=array("b", [0, 0, 1, 1, 0, 1, 1]),
    logprobs=array("f", [0, 0, -0.5, -3.0, 0, -0.1, -0.2]),
    versions=array("i", [OBSERVED_VERSION] * 2 + [3, 4] + [OBSERVED_VERSION] + [4, 4]),
    turns=2,
    reward=1.5,
    finish_reason="stop",
    metrics={"success": 1.0},
    turn_ends=(4, 7),
    turn_rewards=(0.5, 1.0),
    turn_seconds=((0.25, 1.0, 2.0), (0.0, 0.5, 0.75)),
    reset_s=4.0,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path, make_recipe(), Clock(), decode=lambda ids: " ".join(WORDS[i] for i in ids))
    for i in range(3):
        recorder.trajectory(make_trajectory(i, reward=float(i)), "consumed" if i else "surplus")
    recorder.trajectory(TWO_TURNS, "consumed")
    recorder.close()
    return tmp_path


def shown(show, *args, **kwargs) -> str:
    out = io.StringIO()
    show(*args, Console(file=out, width=120), **kwargs)
    return out.getvalue()


def test_what_a_model_writes_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, make_recipe(), Clock(), decode=lambda ids: "\x1b]0;title\x07\x9b2J\ta\nb")
    recorder.trajectory(TWO_TURNS, "consumed")
    recorder.close()
    told = shown(show_episode, tmp_path, 17)
    assert not any(code in told for code in "\x1b\x07\x9b") and "␛]0;title␇␡2J" in told


def test_an_episode_is_told_turn_by_turn(run_dir: Path):
    lines = [line.strip() for line in shown(show_episode, run_dir, 17).splitlines() if line.strip()]
    assert "episode 17" in lines[0] and "reward 1.5" in lines[0] and "4 of 7 tokens generated" in " ".join(lines[:2])
    said = lines[lines.index("success 1") + 1 :]
    assert said == [
        "environment: 2 tokens, 4.00 s",
        "look you see a lamp",
        "turn 1: 2 tokens of version 3–4, mean logprob -1.75; "
        "waited 0.25 s, generated 1.00 s, environment 2.00 s; "
        "reward 0.5",
        "take lamp",
        "environment: 1 tokens",
        "done",
        "turn 2: 2 tokens of version 4, mean logprob -0.15; "
        "waited 0.00 s, generated 0.50 s, environment 0.75 s; reward 1",
        "use it",
    ]


def test_a_new_segment_is_marked_where_it_begins(tmp_path: Path):
    recorder = Recorder(tmp_path, make_recipe(), Clock(), decode=lambda ids: " ".join(WORDS[i] for i in ids))
    recorder.trajectory(msgspec.structs.replace(TWO_TURNS, segment_ends=(4, 7)), "consumed")
    recorder.close()
    lines = [line.strip() for line in shown(show_episode, tmp_path, 17).splitlines()]
    assert lines.count("new segment") == 1
    assert lines.index("take lamp") < lines.index("new segment") < lines.index("environment: 1 tokens")


def test_tokens_are_shown_one_by_one(run_dir: Path):
    text = shown(show_episode, run_dir, 17, tokens=True)
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert rows == [["2", "-0.5000", "3"], ["3", "-3.0000", "4"], ["5", "-0.1000", "4"], ["6", "-0.2000", "4"]]


def test_two_generations_in_a_row_are_two_pieces():
    silent = msgspec.structs.replace(TWO_TURNS, loss_mask=array("b", [0, 0, 1, 1, 1, 1, 1]))
    line = trajectory_line(silent, "consumed", 0.0, lambda ids: str(list(ids)))
    assert [(p["by"], p["text"]) for p in line["text"]] == [
        ("env", "[0, 1]"),
        ("policy", "[2, 3]"),
        ("policy", "[4, 5, 6]"),
    ]


def test_episodes_are_listed_and_chosen(run_dir: Path):
    def ids(**kwargs: object) -> list[int]:
        return [int(line.split()[0]) for line in shown(list_episodes, run_dir, **kwargs).splitlines()[1:]]

    assert ids() == [0, 1, 2, 17]
    assert ids(last=2) == [2, 17]
    assert ids(state="surplus") == [0]
    assert ids(task="Fridge") == [17]


def test_what_cannot_be_shown_is_said_in_one_line(run_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with pytest.raises(RunDirError, match="no episode 99 has ended"):
        shown(show_episode, run_dir, 99)
    with pytest.raises(RunDirError, match="no such episode; its episodes are consumed, surplus"):
        shown(list_episodes, run_dir, state="failed")
    with pytest.raises(RunDirError, match="no such file; give the directory of a run"):
        shown(list_episodes, tmp_path_factory.mktemp("empty"))
    (run_dir / TRAJECTORIES).write_text('{"id": 1}\n')
    with pytest.raises(RunDirError, match=r"trajectories.jsonl:1: not an episode"):
        shown(list_episodes, run_dir)


def test_an_episode_without_tokens_has_its_numbers(tmp_path: Path):
    recorder = Recorder(tmp_path, make_recipe(), Clock(), tokens=False)
    recorder.trajectory(TWO_TURNS, "consumed")
    recorder.close()
    text = shown(show_episode, tmp_path, 17, tokens=True)
    assert "its tokens were not recorded" in text
    assert "turn 2: 2 tokens of version 4; waited" in text
