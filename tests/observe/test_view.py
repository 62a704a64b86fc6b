"""``asyncrl view``: what a person sees of a run's episodes."""

from __future__ import annotations

import io
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from asyncrl.core import journal
from asyncrl.core.types import OBSERVED_VERSION, Task, Trajectory, Turn
from asyncrl.observe.recorder import Recorder, trajectory_line
from asyncrl.observe.run_dir import TRAJECTORIES, RunDirError
from asyncrl.observe.store import SEGMENTS, Store
from asyncrl.observe.view import list_episodes, show_episode
from asyncrl.sim.blocking import SimBlocking

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
    with pytest.raises(RunDirError, match="it has no episode 99; asyncrl view"):
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


def turn(prompt: list[int], output: list[int], finish_reason: str = "stop") -> Turn:
    return Turn(
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
        logprobs=array("f", [-0.5] * len(output)),
        versions=array("i", [3] * len(output)),
        finish_reason=finish_reason,
    )


@pytest.fixture
def going_on(run_dir: Path) -> Iterator[Store]:
    """Of group 5, episode 20 is in its second turn, 21 has ended and 22 has failed; group 6 has not started."""

    def no_task(source: str, name: str) -> Task:
        raise KeyError(name)

    with closing(Store(run_dir, blocking=SimBlocking(rng=random.Random(0)), find_task=no_task)) as store:
        store.put(journal.GroupOpened(group=5, task=Task(id="t5", data={}), tasks_done=5, trajectories=(20, 21, 22)))
        store.put(journal.GroupStarted(group=5, v_traj=3, deadline=4))
        store.put(journal.GroupOpened(group=6, task=Task(id="t6", data={}), tasks_done=6, trajectories=(23,)))
        store.put(journal.TurnPiece(trajectory=20, number=0, turn=turn([0, 1], [2])))
        store.put(journal.TurnPiece(trajectory=20, number=1, piece=0, turn=turn([4], [5], "abort")))
        store.put(journal.TurnPiece(trajectory=20, number=1, piece=1, turn=turn([], [6], "abort")))
        store.put(journal.Scored(trajectory=msgspec.structs.replace(TWO_TURNS, id=21, group_id=5, task_id="t5")))
        store.put(journal.Ended(trajectory=22, state="failed", reason="step: no"))
        store.write()
        yield store


def test_episodes_that_have_not_ended_are_listed_as_such(run_dir: Path, going_on: Store) -> None:
    def rows(**kwargs: object) -> list[list[str]]:
        return [line.split() for line in shown(list_episodes, run_dir, **kwargs).splitlines()[1:]]

    assert [row[0] for row in rows()] == ["0", "1", "2", "17", "20", "21", "23"]
    assert rows(task="t5", last=5) == [
        ["20", "5", "t5", "running", "–", "2", "3", "3", "–", "not", "yet"],
        ["21", "5", "t5", "scored", "1.5", "2", "4", "3–4", "8.5", "s", "not", "yet"],
    ]
    assert rows(state="reserved") == [["23", "6", "t6", "reserved", "–", "0", "0", "–", "–", "not", "yet"]]
    assert " ".join(rows(last=1)[-1]) == "2 more have not ended; --last N shows more"


def test_an_episode_that_has_not_ended_is_told_as_far_as_it_is(run_dir: Path, going_on: Store) -> None:
    def decode(ids: Sequence[int]) -> str:
        return " ".join(WORDS[i] for i in ids)

    heading, *said = [line.strip() for line in shown(show_episode, run_dir, 20, decode=decode).splitlines() if line]
    assert heading.startswith("episode 20  group 5  task t5  running  2 turns  3 of 6 tokens generated  versions 3")
    assert said[-8:] == [
        "environment: 2 tokens",
        "look you see a lamp",
        "turn 1: 1 tokens of version 3, mean logprob -0.50",
        "take",
        "environment: 1 tokens",
        "done",
        "turn 2: 2 tokens of version 3, mean logprob -0.50",
        "use it",
    ]
    assert "waits for its batch" in " ".join(shown(show_episode, run_dir, 21, decode=decode).split())
    assert "has not ended" in shown(show_episode, run_dir, 23)


def test_an_episode_that_ends_while_it_is_looked_for_is_found(run_dir: Path, going_on: Store) -> None:
    """Its tokens leave the store when its line is in the file."""
    for segment in (run_dir / SEGMENTS).iterdir():
        segment.unlink()
    assert [line.split()[0] for line in shown(list_episodes, run_dir).splitlines()[-2:]] == ["17", "23"]
    with pytest.raises(RunDirError, match="segment-1: cannot be read"):
        shown(show_episode, run_dir, 21)
    line = msgspec.json.encode(trajectory_line(msgspec.structs.replace(TWO_TURNS, id=21), "consumed", 9.0, None))
    with (run_dir / TRAJECTORIES).open("ab") as file:
        file.write(line + b"\n")
    assert "consumed" in shown(show_episode, run_dir, 21)
