"""What ROLL Flash's agentic figures (9, 10, 11) share: multi-turn worlds, and the baseline that steps in lock-step.

The baseline of §5.2.1 generates for all trajectories of a batch, then lets all their environments step, and so on turn
by turn: each phase lasts as long as its slowest member. ``in_lock_step`` puts that barrier around the simulated
environments; the runtime knows nothing of it.

    Rounds.meet()    waits for: all that still play    woken by: the last to come, or to leave
"""

from __future__ import annotations

import asyncio
from typing import Any

from common import Result, merge, simulated
from roll_flash import world as single_turn_world

from asyncrl.config import Recipe
from asyncrl.env import Action, Env, Observation, Step, Task

SERVERS = TRAINING_GPUS = 32
"""Appendix A.2: 32 GPUs generate, 32 train."""
SEQUENCE_TOKENS = 32768
ASSUMPTION = f"Qwen3-8B on {SERVERS} H20, one a server, by core/hardware.py"


def world(
    *, prompts: int, group_size: int, turns: int, tokens: dict[str, Any], env: dict[str, Any], model: str = "qwen3-8b"
) -> dict[str, Any]:
    """Synchronous training on ``prompts`` × ``group_size`` trajectories of at most ``turns`` turns. ``tokens``: lengths
    of a turn's response; ``env``: ``[sim.env]``. A later turn goes to the server that holds its prefix."""
    never = 1e6  # seconds
    table = single_turn_world(servers=SERVERS, training_gpus=TRAINING_GPUS, model=model)
    table["sim"] |= {"lengths": tokens, "env": env, "tasks": 10_000}
    return merge(
        table,
        {
            "preset": "sync",
            "env": {
                "max_turns": turns,
                **dict.fromkeys(("step_timeout_s", "reset_timeout_s", "reward_timeout_s"), never),
                "episode_timeout_s": 3 * never,
            },
            "rollout": {
                "batch_groups": prompts,
                "group_size": group_size,
                "num_envs": prompts * group_size,
                "max_new_tokens": SEQUENCE_TOKENS // 4,
                "max_tokens": SEQUENCE_TOKENS,
            },
            "engine": {"routing": "prefix_affine"},
        },
    )


def gaussian(mean: float, std: float) -> dict[str, Any]:
    """Seconds; negative draws are 0."""
    return {"kind": "normal", "mean": mean, "std": std} if std else {"kind": "constant", "value": mean}


class Rounds:
    """Where the trajectories of a batch meet. ``size`` of them begin together; who has left is waited for no more."""

    def __init__(self, size: int) -> None:
        self._size = self._playing = size
        self._here = 0
        self._next = asyncio.Event()

    async def meet(self) -> None:
        round_over = self._next
        self._here += 1
        self._let_go()
        await round_over.wait()

    def leave(self) -> None:
        self._playing -= 1
        self._let_go()

    def _let_go(self) -> None:
        if self._here == self._playing:
            self._playing = self._playing or self._size  # all have left: the next batch
            self._here = 0
            self._next.set()
            self._next = asyncio.Event()


class LockStep(Env):
    """Steps when all responses of this turn are there, and answers when all environments have stepped."""

    def __init__(self, inner: Env, rounds: Rounds) -> None:
        self._inner = inner
        self._rounds = rounds

    async def reset(self, task: Task) -> Observation | str:
        observation = await self._inner.reset(task)
        await self._rounds.meet()
        return observation

    async def step(self, action: Action) -> Step:
        await self._rounds.meet()
        step = await self._inner.step(action)
        await self._rounds.meet()
        return step

    async def close(self) -> None:
        self._rounds.leave()
        await self._inner.close()


def in_lock_step(recipe: Recipe) -> Result:
    """``simulated``, all environments of a batch turn by turn. No episode may fail or be surplus."""
    rounds = Rounds(recipe.batch_trajectories)
    return simulated(recipe, lambda env: LockStep(env, rounds))
