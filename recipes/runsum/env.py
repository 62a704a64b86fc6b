"""The runsum task: letters and '=' in, each letter with the running sum out. Graded by exact match.

A letter is worth its place in the alphabet, upper or lower case (a = 1 … z = 26). The answer repeats every letter, each
followed by the sum so far modulo 10, then '#' and the last sum: ``BdC=`` is answered by ``B2d6C9#9``.
"""

from __future__ import annotations

from asyncrl import Response, Task


def reward(task: Task, response: Response) -> float:
    """1.0 if the whole derivation is right and the model ended it by itself, else 0.0."""
    return float(response.finish_reason == "stop" and response.text == task.data["answer"])
