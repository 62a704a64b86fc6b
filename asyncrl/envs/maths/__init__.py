"""Maths with answers that can be checked (RLVR): single turns, judged by math-verify.

    [task]
    train = "dapo-math-17k.parquet"          # or GSM8K, MATH-500, AIME (see ``rows``); jsonl too
    [env]
    target = "asyncrl.envs.maths:reward"

The reward is 1 if the final answer is right, else 0. An answer cut off at a length limit is judged as it is; the
recipe's ``algorithm.overlong_*`` say what length costs beside.
"""

from __future__ import annotations

from asyncrl.env import Response, Task, rows_by
from asyncrl.envs.maths.grading import final_answer, is_right, score
from asyncrl.envs.maths.rows import parse_row

__all__ = ["final_answer", "is_right", "parse_row", "reward", "score"]


@rows_by(parse_row)
async def reward(task: Task, response: Response) -> float:
    """``task.data["answer"]`` is the right one."""
    return await score(response.text, task.data["answer"])
