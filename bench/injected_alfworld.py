"""ALFWorld on its real engine, played by chance: what the model said is ignored, a random admissible command is taken.
An injected hang really hangs its worker process, an injected crash really kills it. ``injected.py`` has the draws."""

from __future__ import annotations

import os
import random
import time

from asyncrl.env import Action, Observation, Step, Task
from asyncrl.envs.alfworld import ALFWorld


class RandomALFWorld(ALFWorld):
    def reset(self, task: Task) -> Observation | str:
        self._rng = random.Random(task.data["seed"])
        self._hang_at, self._crash_at = task.data["hang_at"], task.data["crash_at"]
        return super().reset(task)

    def step(self, action: Action) -> Step:
        if action.turn == self._hang_at:
            time.sleep(1e6)
        if action.turn == self._crash_at:
            os._exit(1)
        command = self._rng.choice(self._engine.admissible_commands)
        return super().step(Action(text=command, token_ids=(), finish_reason="stop", turn=action.turn))
