"""What a recipe's environments may be played with."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.build.sources import load_environments
from asyncrl.config import RecipeError, load_table

ENVS = """
import asyncrl

class Light(asyncrl.Env):
    async def reset(self, task):
        return "a"
    async def step(self, action):
        return asyncrl.Step(observation="", reward=0.0, done=True)

class Heavy(Light):
    cost = asyncrl.Cost(memory_mb=100)

class Sync(asyncrl.SyncEnv):
    def reset(self, task):
        return "a"
    def step(self, action):
        return asyncrl.Step(observation="", reward=0.0, done=True)
"""


@pytest.mark.parametrize(
    ("name", "memory_mb", "refused"),
    [("Light", 400, False), ("Heavy", 0, False), ("Heavy", 400, True), ("Sync", 0, True)],
)
def test_members_that_would_wait_for_each_others_places_are_refused_where_a_group_is_one_request(
    tmp_path: Path, name: str, memory_mb: int, refused: bool
) -> None:
    (tmp_path / "env.py").write_text(ENVS)
    env = {"target": f"{tmp_path / 'env.py'}:{name}", "memory_mb": memory_mb}
    load_environments(load_table({"env": env}))
    one_request = load_table({"env": env, "rollout": {"expand_num_return_sequences": False}})
    if refused:
        with pytest.raises(RecipeError, match="would wait for each other's places"):
            load_environments(one_request)
    else:
        load_environments(one_request)
