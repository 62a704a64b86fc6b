"""A blocking environment that does what its task and its actions say."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl import Action, Cost, EnvDown, Observation, Step, Task


class Panic(BaseException):
    """As that of a Rust extension."""


class Mute(Exception):
    """It cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Engine(asyncrl.SyncEnv):
    """``reset`` gives its process, object and episode numbers; an action is a command."""

    def __init__(self, marks: str = "") -> None:
        self.marks = marks
        self.episodes = 0

    def reset(self, task: Task) -> Observation | str:
        self.episodes += 1
        if (command := task.data.get("command")) is not None:
            self.step(Action(text=command, token_ids=(), finish_reason="stop"))
        return f"{os.getpid()} {id(self)} {self.episodes}"

    def step(self, action: Action) -> Any:
        command, _, argument = action.text.partition(" ")
        match command:
            case "sleep":
                time.sleep(float(argument))
            case "stubborn":
                ends = time.monotonic() + float(argument)
                while time.monotonic() < ends:
                    try:
                        time.sleep(0.01)
                    except BaseException:
                        continue
            case "raise":
                raise ValueError(argument)
            case "panic":
                raise Panic(argument)
            case "mute":
                raise Mute
            case "half":
                raise ValueError("half of a pair: \ud83d")
            case "down":
                raise EnvDown(argument)
            case "exit":
                os._exit(int(argument))
            case "crash":
                ctypes.string_at(0)
            case "child":
                return Step(observation=str(subprocess.Popen(["sleep", "60"]).pid))
            case "file":
                file, path = tempfile.mkstemp()
                os.close(file)
                return Step(observation=path)
            case "odd":
                return {"reward": 1}
            case "ids":
                return Step(observation=str(list(action.token_ids)), done=True)
            case "calls":
                return Step(observation=str([(c.id, c.name, c.arguments, c.error) for c in action.tool_calls]))
            case "print":
                print(argument, flush=True)
        return Step(observation=f"did {action.text}", reward=0.5, metrics={"turn": action.turn})

    def close(self) -> None:
        if self.marks:
            with Path(self.marks).open("a") as file:
                file.write(f"closed after {self.episodes}\n")


class Shared(Engine):
    cost = Cost(per_process=4, memory_mb=10)


class Reused(Shared):
    reusable = True


class Chaotic(Engine):
    """The first episode of a task breaks in the way the task says."""

    cost = Cost(per_process=2)

    def reset(self, task: Task) -> str:
        mark = Path(self.marks) / f"{task.id}.begun"
        self.fault = str(task.data["fault"])
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            self.fault = ""
        return "ab"

    def step(self, action: Action) -> Any:
        if self.fault:
            Engine.step(self, Action(text=self.fault, token_ids=(), finish_reason="stop"))
        return Step(observation="cd", reward=1.0, done=action.turn == 1)

    def close(self) -> None:
        return


class Alone(Chaotic):
    cost = Cost()
