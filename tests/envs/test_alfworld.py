"""ALFWorld for real: generated games against ALFWorld's own engine, played by the expert, by chance, and in a pool."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import Action, Observation, Task

pytest.importorskip("fast_downward", reason="needs ALFWorld: pip install 'asyncrl[alfworld]'")
pytest.importorskip("alfworld", reason="needs ALFWorld: pip install 'asyncrl[alfworld]'")

from asyncrl.envs import alfworld_games as games
from asyncrl.envs.alfworld import ALFWorld, renamed, rows
from asyncrl.envs.alfworld_engine import AlfredEngine
from asyncrl.envs.alfworld_expert import Expert, read_goal
from asyncrl.envs.dialogue import read_action

SPLITS = {"train": 6, "valid_unseen": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small games of the seen rooms, one of each type, and four of the unseen."""
    folder = tmp_path_factory.mktemp("alfworld")
    engine = AlfredEngine(folder / "cache")
    games.generate(engine, folder, "train", range(6), seed=1, max_steps=20, max_receptacles=13)
    games.generate(engine, folder, "valid_unseen", range(4), seed=1, max_steps=30)
    engine.close()
    return folder


def make_env(data: Path, **options: object) -> ALFWorld:
    return ALFWorld(data=str(data), cache=str(data / "cache"), **options)  # type: ignore[arg-type]


def tasks(data: Path, split: str) -> list[Task]:
    return [Task(id=row["game"], data=row) for row in rows(data, split)]


def act(text: str) -> Action:
    return Action(text=text, token_ids=[], finish_reason="stop")


def walkthrough(data: Path, task: Task) -> list[str]:
    commands: list[str] = json.loads((data / task.data["game"]).read_text())["walkthrough"]
    return commands


def test_games_are_those_of_the_seed_in_the_rooms_of_their_split(data: Path, tmp_path: Path) -> None:
    found = {split: [task.data for task in tasks(data, split)] for split in SPLITS}
    assert {row["task_type"] for row in found["train"]} == set(games.TASK_TYPES)
    assert {split: len(rows) for split, rows in found.items()} == SPLITS
    rooms = {split: {int(Path(r["game"]).parts[2].rpartition("-")[2]) for r in rows} for split, rows in found.items()}
    assert rooms["valid_unseen"] <= set(games.UNSEEN_SCENES)
    assert not rooms["train"] & set(games.UNSEEN_SCENES)
    engine = AlfredEngine(data / "cache")
    again = games.generate(engine, tmp_path, "train", range(2), seed=1, max_steps=20, max_receptacles=13)
    engine.close()
    for file in again:
        assert file.read_bytes() == (data / file.relative_to(tmp_path)).read_bytes()


def test_the_engine_says_what_the_stock_engine_says(data: Path) -> None:
    """Right commands, wrong ones and looks about, on two games; and ``AlfredTWEnv`` finds every game."""
    rng, script, ours = random.Random(5), [], []
    engine = AlfredEngine(data / "cache")
    train = tasks(data, "train")
    for task in train[:2]:
        file = data / task.data["game"]
        said: list[list[object]] = [[engine.load(file), engine.admissible_commands, False]]
        commands = []
        for right in walkthrough(data, task):
            aside = rng.choice([c for c in engine.admissible_commands if c.startswith(("examine", "help"))])
            for command in ["xyzzy", "look", "inventory", aside, right]:
                answer, won = engine.step(command)
                commands.append(command)
                said.append([answer, engine.admissible_commands, won])
        script.append([str(file), commands])
        ours.append(said)
    engine.close()
    stock = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "stock_alfworld.py"), str(data / "json_2.1.1" / "train")],
        input=json.dumps(script),
        env={**os.environ, "ALFWORLD_DATA": str(data)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert stock.returncode == 0, stock.stderr
    answer = json.loads(stock.stdout.splitlines()[-1])
    assert answer["found"] == sorted(str(data / task.data["game"]) for task in train)
    assert answer["played"] == ours
    assert [said[-1][2] for said in ours] == [True, True]


def test_one_object_plays_game_after_game(data: Path) -> None:
    env = make_env(data)
    everything = tasks(data, "train") + tasks(data, "valid_unseen")
    for task in everything:
        opening = env.reset(task)
        assert isinstance(opening, str) and opening.startswith("You are in the middle of a room.")
        assert opening.endswith("\n>")
        steps = [env.step(act(command)) for command in walkthrough(data, task)]
        assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
        assert steps[-1].done and not any(step.done for step in steps[:-1])
        kind = task.data["task_type"]
        assert steps[-1].metrics == {"success": 1.0, "steps": float(len(steps)), f"success/{kind}": 1.0}
    again = env.reset(everything[0])
    assert again == make_env(data).reset(everything[0])
    env.close()


PLAY = """
import json, sys
from asyncrl import Action, Task
from asyncrl.envs.alfworld import ALFWorld

data, row, commands = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
env = ALFWorld(data=data, cache=data + "/cache")
print(env.reset(Task(id="", data=row)))
for command in commands:
    print(env.step(Action(text=command, token_ids=[], finish_reason="stop")))
"""


def test_a_game_goes_the_same_way_in_another_process(data: Path) -> None:
    """It is declared ``deterministic``, though its engine holds sets of strings."""
    task = tasks(data, "train")[0]
    commands = ["look", *walkthrough(data, task)]
    command = [sys.executable, "-c", PLAY, str(data), json.dumps(task.data), json.dumps(commands)]
    said = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert said[0] == said[1]
    assert "done=True" in said[0]


def test_a_game_under_other_names_is_the_same_game(data: Path) -> None:
    env = make_env(data)
    task = tasks(data, "train")[0]
    plain = [env.reset(task), *(env.step(act(command)).observation for command in walkthrough(data, task))]
    kinds = sorted({word.split()[0] for said in plain for word in re.findall(r"\w+ \d", str(said))})
    names = dict(zip(kinds, kinds[1:] + kinds[:1], strict=True))
    kind = kinds[0]
    names |= {f"{kind} 1": f"{names[kind]} 2", f"{kind} 2": f"{names[kind]} 1"}
    back = {new: old for old, new in names.items()}
    other = Task(id="t", data={**task.data, "names": names})
    said = [env.reset(other)]
    for command in walkthrough(data, task):
        assert env.step(act(f"examine {kinds[0]} 9")).observation == "\nNothing happens.\n>"
        step = env.step(act(renamed(command, names)))
        said.append(step.observation)
    assert step.done
    assert said != plain and [renamed(str(text), back) for text in said] == plain
    assert env.reset(task) == plain[0], "the next game has its own names again"
    env.close()


def test_a_player_by_chance_gets_nothing_and_nonsense_nothing_happens(data: Path) -> None:
    env, rng = make_env(data), random.Random(0)
    env.reset(tasks(data, "valid_unseen")[3])
    assert env.step(act("Nonsense!")).observation == "\nNothing happens.\n>"
    for _ in range(20):
        step = env.step(act(rng.choice(env._engine.admissible_commands)))
        assert not step.done and step.reward == 0.0
    env.close()


def test_chat_gives_messages_and_reads_the_last_action(data: Path) -> None:
    env = make_env(data, style="chat", admissible=True)
    task = tasks(data, "train")[0]
    opening = env.reset(task)
    assert isinstance(opening, Observation)
    [message] = opening.messages
    assert message["role"] == "user" and "Action: <command>" in message["content"]
    assert "Your task is to: " in message["content"] and "Admissible commands: " in message["content"]
    commands = walkthrough(data, task)
    for command in commands:
        step = env.step(act(f"I think so.\nAction: look\nNo:\n**Action:** {command}."))
    assert step.done and step.reward == 1.0
    assert isinstance(step.observation, Observation)
    env.close()
    assert read_action("<think>Action: look</think>\naction:  go to bed 1  ") == "go to bed 1"
    assert read_action("go to bed 1") == ""
    assert read_action("**Action:** `look`.\nAction:\n- go to bed 1\n\n") == "go to bed 1"


def test_a_file_that_is_no_game_is_named(tmp_path: Path) -> None:
    (tmp_path / "game.tw-pddl").write_text('{"pddl_domain": "(define"}')
    with pytest.raises(ValueError, match=r"game\.tw-pddl is not an ALFWorld game: .*missing"):
        make_env(tmp_path).reset(Task(id="t", data={"game": "game.tw-pddl"}))
    with pytest.raises(ValueError, match="alfworld-download"):
        next(rows(tmp_path, "train"))


@pytest.mark.parametrize("task_type", games.TASK_TYPES)
def test_the_expert_reads_every_sentence_of_the_goal_library(task_type: str) -> None:
    for template in games._gen("goal_library").gdict[task_type]["templates"]:
        sentence = template.format(obj="mug", recep="desk", toggle="desk", mrecep="")
        goal = read_goal(f"You see.\n\nYour task is to: {sentence}.")
        assert (goal.object, goal.place) == ("mug", "desk")
        assert goal.kind in task_type or (goal.kind, task_type) == ("put", "pick_and_place_simple")
    with pytest.raises(ValueError, match="no goal that the expert reads"):
        Expert("Your task is to: be happy.", random.Random(0), games.plausible)
