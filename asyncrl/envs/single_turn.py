"""The simple case of an environment: one prompt, one response, and a reward function that judges it (RLVR).

``data["prompt"]`` is text, or chat messages. The reward is not given here: the runtime's Scorer calls the recipe's
reward function, off the loop.
"""

from __future__ import annotations

from asyncrl.env import Action, Env, Observation, Step, Task


class SingleTurn(Env):
    async def reset(self, task: Task) -> Observation:
        prompt = task.data["prompt"]
        return Observation(text=prompt) if isinstance(prompt, str) else Observation(messages=prompt)

    async def step(self, action: Action) -> Step:
        return Step(done=True)
