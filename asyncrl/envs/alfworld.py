"""ALFWorld: household tasks in text, on the real TextWorld engine and ALFWorld's own rules and games.

A task's row names a game file of ALFWorld's data layout, the official data set or what ``alfworld_games`` made:

    python -m asyncrl.envs.alfworld DATA --split train > train.jsonl     # DATA holds json_2.1.1/

A row's ``names`` say what goes by another name in its episodes, one to one: ``{"mug": "plate", "shelf 2": "desk 1"}``.
Few games are then many, and cannot be learned by heart.

The reward is 1 in the step that solves the task. Metrics: ``success``, ``steps``, and ``success/TYPE`` of the task.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.env import Action, Cost, Observation, Step, SyncEnv, Task
from asyncrl.envs.alfworld_games import SPLITS, TASK_TYPES
from asyncrl.envs.dialogue import Dialogue, Style

try:
    from asyncrl.envs.alfworld_engine import AlfredEngine
except ModuleNotFoundError as error:
    raise ImportError(f"ALFWorld is not installed ({error}); pip install 'asyncrl[alfworld]'") from None

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
NAME = re.compile(r"\b(?P<kind>[a-z]+)(?P<number> \d+)?\b")
INSTRUCTIONS = (
    "You act in a household described in text. Each turn, think about what to do next, and then end your reply with "
    "one line of the form\nAction: <command>\n"
    "Commands: look; inventory; go to (receptacle); open (receptacle); close (receptacle); take (object) from "
    "(receptacle); move (object) to (receptacle); examine (something); use (object); heat (object) with (receptacle); "
    "clean (object) with (receptacle); cool (object) with (receptacle); slice (object) with (object). Names carry "
    "their number, as in: take mug 1 from shelf 2."
)


class ALFWorld(SyncEnv):
    """``data`` is the folder that the rows' ``game`` is relative to, ``cache`` one for translated games (a game is then
    translated once in all, not once a process). ``style`` as in ``Dialogue``; ``chat`` begins with instructions.
    ``admissible``: list the commands that have an effect.

    The longest episode is the recipe's ``env.max_turns``.
    """

    cost = Cost(per_process=64, memory_mb=3, startup_s=30.0)
    reusable = True
    deterministic = True

    def __init__(
        self,
        data: str = "",
        cache: str = "",
        style: Style = "plain",
        admissible: bool = False,
    ) -> None:
        self._dialogue = Dialogue(style)
        self._data = Path(data)
        self._admissible = admissible
        self._engine = AlfredEngine(Path(cache) if cache else None)
        self._task_type = ""
        self._names: Mapping[str, str] = {}
        self._steps = 0

    def reset(self, task: Task) -> Observation | str:
        self._task_type, self._steps = task.data.get("task_type", ""), 0
        self._names = task.data.get("names", {})
        intro = self._engine.load(self._data / task.data["game"]).replace(WELCOME, "").strip()
        if self._dialogue.is_chat:
            intro = f"{INSTRUCTIONS}\n\n{intro}"
        return self._observation(intro, first=True)

    def step(self, action: Action) -> Step:
        self._steps += 1
        own = {new: old for old, new in self._names.items()}
        answer, won = self._engine.step(renamed(self._dialogue.read(action.text), own))
        metrics = {"success": float(won), "steps": float(self._steps)}
        if self._task_type:
            metrics[f"success/{self._task_type}"] = float(won)
        return Step(observation=self._observation(answer, first=False), reward=float(won), done=won, metrics=metrics)

    def close(self) -> None:
        self._engine.close()

    def _observation(self, text: str, *, first: bool) -> Observation | str:
        if self._admissible:
            text += f"\nAdmissible commands: {', '.join(self._engine.admissible_commands)}."
        return self._dialogue.say(renamed(text, self._names), first=first)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names for things (``mug 1``) or for all things of a kind (``mug``)."""
    if not names:
        return text
    return NAME.sub(lambda m: names.get(m[0]) or names.get(m["kind"], m["kind"]) + (m["number"] or ""), text)


def rows(data: Path, split: str, task_types: tuple[str, ...] = TASK_TYPES) -> Iterator[dict[str, Any]]:
    """The solvable games of a split, by task type and name, as ``AlfredTWEnv`` selects them. Raises ``ValueError`` for
    a folder without the data set."""
    folder = data / "json_2.1.1" / split
    if not folder.is_dir():
        raise ValueError(f"no {folder}; give the folder that alfworld-download or alfworld_games filled")
    for task_type in task_types:
        for file in sorted(folder.glob(f"{task_type}-*/*/game.tw-pddl")):
            if "movable" in str(file) or "Sliced" in str(file) or not json.loads(file.read_bytes()).get("solvable"):
                continue
            yield {"game": str(file.relative_to(data)), "task_type": task_type}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.envs.alfworld", description="List games as JSONL rows.")
    parser.add_argument("data", type=Path, help="folder with json_2.1.1/")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--task-type", choices=TASK_TYPES, action="append", help="only this one; may be repeated")
    args = parser.parse_args()
    try:
        for row in rows(args.data, args.split, tuple(args.task_type or TASK_TYPES)):
            print(json.dumps(row))
    except ValueError as error:
        print(f"alfworld: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
