"""Gymnasium's text environments, and any with its five-tuple ``step`` (GEM's, TextArena's wrappers), as they are.

    [env]
    target = "asyncrl.envs.adapters.gymnasium:GymEnv"
    kwargs = { id = "FrozenLake-v1", options = { map_name = "4x4" }, actions = ["left", "down", "right", "up"] }

A row is an episode's ``seed``, or nothing (``seed_of``). The reward is the environment's. Metrics: ``success`` (a last
reward above 0), ``steps``, ``invalid`` actions.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from asyncrl.env import Action, Cost, Observation, Step, SyncEnv, Task
from asyncrl.envs.adapters import seed_of
from asyncrl.envs.dialogue import Dialogue, Style

COLOURED = re.compile(r"\x1b\[(?P<ground>[34])(?P<colour>\d)(;1)?m(?P<text>.*?)\x1b\[0m", re.DOTALL)
NUMBER = re.compile(r"-?[0-9]{1,18}")
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "gray", "", "")


class GymEnv(SyncEnv):
    """``id`` is one of Gymnasium's registry, made with ``options``; ``target`` is a callable of your own in its place
    (``package.module:function``), which describes and wraps as it likes.

    An observation is shown as it is if it is text, else as the ``ansi`` rendering, else as ``str`` has it.
    ``actions`` names the values of a discrete action space, from 0; a number is understood as well. What is none of
    them is answered with what there is, and nothing is played. A space that is not discrete gets the whole reply.
    ``instructions`` stand before the first observation; ``style`` as in ``Dialogue``.
    """

    cost = Cost(per_process=16, startup_s=30.0)
    reusable = True

    def __init__(
        self,
        id: str = "",
        target: str = "",
        options: dict[str, Any] | None = None,
        actions: Sequence[str] = (),
        instructions: str = "",
        style: Style = "plain",
    ) -> None:
        if bool(id) == bool(target):
            raise ValueError("env.kwargs: give either id (of Gymnasium's registry) or target (module:callable)")
        self._dialogue = Dialogue(style)
        self._env: Any = _by_target(target, options or {}) if target else _by_id(id, options or {})
        self._renders = getattr(self._env, "render_mode", None) == "ansi"
        space = getattr(self._env, "action_space", None)
        start = int(getattr(space, "start", 0))
        self._values = range(start, start + _size(space, actions))
        if actions and len(actions) != len(self._values):
            raise ValueError(f"env.kwargs.actions: {len(actions)} names for the {len(self._values)} values of {space}")
        self._names = [*actions] or [str(value) for value in self._values]
        self._instructions = instructions
        self._steps = self._invalid = 0

    def reset(self, task: Task) -> Observation | str:
        self._steps = self._invalid = 0
        observation, _ = self._env.reset(seed=seed_of(task))
        shown = self._shown(observation)
        return self._dialogue.say(f"{self._instructions}\n\n{shown}" if self._instructions else shown, first=True)

    def step(self, action: Action) -> Step:
        self._steps += 1
        value = self._read(action.text)
        if value is None:
            self._invalid += 1
            said = f"That is no action here. Actions: {', '.join(self._names)}."
            return Step(observation=self._dialogue.say(said), metrics=self._metrics(0.0))
        observation, reward, terminated, truncated, _ = self._env.step(value)
        return Step(
            observation=self._dialogue.say(self._shown(observation)),
            reward=float(reward),
            done=bool(terminated or truncated),
            metrics=self._metrics(float(reward) if terminated else 0.0),
        )

    def close(self) -> None:
        close = getattr(self._env, "close", None)  # GEM's have none
        if close is not None:
            close()

    def _metrics(self, last_reward: float) -> dict[str, float]:
        return {"success": float(last_reward > 0), "steps": float(self._steps), "invalid": float(self._invalid)}

    def _read(self, reply: str) -> Any:
        """The value of the action space; None if the reply holds none."""
        if not self._values:
            return reply
        command = self._dialogue.read(reply).casefold()
        names = [name.casefold() for name in self._names]
        if command in names:
            return self._values[names.index(command)]
        number = int(command) if NUMBER.fullmatch(command) else None
        return number if number in self._values else None

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        text = str(self._env.render()) if self._renders else str(observation)
        return COLOURED.sub(_mark, text).strip("\n")


def _mark(found: re.Match[str]) -> str:
    """A terminal's colour in words: ``[x]`` where the ground is coloured, which is the player's place, else
    ``x(blue)``."""
    text = found["text"]
    return f"[{text}]" if found["ground"] == "4" else f"{text}({COLOURS[int(found['colour'])]})"


def _size(space: Any, names: Sequence[str]) -> int:
    """How many values a discrete space has; 0 if it is another. One without a space is discrete if it has names."""
    return len(names) if space is None else int(getattr(space, "n", 0))


def _by_id(id: str, options: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise ImportError("Gymnasium is not installed; pip install 'asyncrl[gymnasium]'") from None
    env = gymnasium.make(id, **options)
    if "render_mode" not in options and "ansi" in env.metadata.get("render_modes", ()):
        env.close()
        env = gymnasium.make(id, render_mode="ansi", **options)
    return env


def _by_target(target: str, options: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(f"env.kwargs.target = {target!r}: write package.module:callable")
    return getattr(importlib.import_module(module), name)(**options)
