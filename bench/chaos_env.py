"""The environment of chaos.py: any recipe's prompts, played in worker processes."""

from __future__ import annotations

import asyncrl


class Digits(asyncrl.SyncEnv):
    """Two turns; the more zeros the better, so that any policy gets some reward and no two quite the same."""

    cost = asyncrl.Cost(per_process=16)

    def reset(self, task: asyncrl.Task) -> str:
        self.turn = 0
        return str(task.data["prompt"])

    def step(self, action: asyncrl.Action) -> asyncrl.Step:
        self.turn += 1
        reward = action.text.count("0") / 12 + len(action.token_ids) / 1000
        return asyncrl.Step(observation="1=", reward=reward, done=self.turn == 2)
