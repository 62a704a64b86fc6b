"""The reward of runsum: 1 if every running sum is right and the model ended its answer itself, else 0."""

from __future__ import annotations

from asyncrl import Response, Task


def reward(task: Task, response: Response) -> float:
    """``task.data["answer"]`` is the one right text; ``response.text`` comes without the end-of-turn token."""
    return float(response.finish_reason == "stop" and response.text == task.data["answer"])
