"""Guess a number: the environment of the tutorial."""

import asyncrl


class Guess(asyncrl.Env):
    """A secret from 1 to 9; every guess but the right one is answered by ``higher`` or ``lower``."""

    example_actions = ("5", "3", "7", "nonsense")

    def __init__(self, guesses: int = 3) -> None:
        self.guesses = guesses

    async def reset(self, task: asyncrl.Task) -> str:
        self.secret = int(task.data["secret"])
        return "guess"

    async def step(self, action: asyncrl.Action) -> asyncrl.Step:
        text = action.text.strip()
        guess = int(text) if text.isdecimal() else 0
        right = guess == self.secret
        return asyncrl.Step(
            observation="" if right else "nonsense" if not guess else "higher" if guess < self.secret else "lower",
            reward=float(right),
            done=right or action.turn + 1 == self.guesses,
            metrics={"guesses": action.turn + 1},
        )
