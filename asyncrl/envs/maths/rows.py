r"""Rows of the usual maths data sets, recognised by their fields in upper or lower case, as one record.

| data set | told by |
|---|---|
| DAPO-Math-17k (and others in verl's format) | ``prompt``, ``reward_model`` with ``ground_truth`` |
| GSM8K | ``question``, ``answer`` that ends with ``#### N`` |
| MATH-500, AIME | ``problem``, ``answer`` |
| MATH | ``problem``, ``solution`` with its answer in ``\boxed{}`` |
| any other | ``prompt`` (text or chat messages), ``answer`` |

Some copies repeat their rows (DAPO-Math-17k about 100 times, one of AIME 2024 32 times); rows that give the same
record are taken once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.envs.maths.grading import final_answer

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."


def parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """``prompt`` (chat messages, or text as it is in the row), ``problem`` (text) and ``answer`` (text). Raises
    ``ValueError``, in one line."""
    fields = {str(key).lower(): value for key, value in row.items()}
    prompt: str | list[dict[str, str]]
    if "prompt" in fields:
        prompt, problem = _prompt(fields["prompt"])
        model = fields.get("reward_model")
        answer = model.get("ground_truth") if isinstance(model, Mapping) else fields.get("answer")
    elif isinstance(asked := fields.get("problem", fields.get("question")), str) and asked.strip():
        problem = asked.strip()
        prompt = [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}]
        answer = fields.get("answer")
        if answer is None and isinstance(fields.get("solution"), str):
            answer = final_answer(fields["solution"])
        elif isinstance(answer, str) and "####" in answer:
            answer = answer.rpartition("####")[2].strip().replace(",", "")
    else:
        known = "DAPO-Math-17k, GSM8K, MATH, AIME"
        raise ValueError(f"its fields are not those of {known}, or prompt and answer (it has {', '.join(row)})")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"it has no final answer (in {', '.join(row)})")
    return {"prompt": prompt, "problem": problem.strip(), "answer": str(answer).strip()}


def _prompt(value: Any) -> tuple[str | list[dict[str, str]], str]:
    """As the model gets it, and what the user says last."""
    if isinstance(value, str) and value.strip():
        return value, value
    try:
        messages = [{"role": str(m["role"]), "content": m["content"]} for m in value]
        if messages and all(isinstance(m["content"], str) for m in messages):
            return messages, messages[-1]["content"]
    except (TypeError, KeyError):
        pass
    raise ValueError("its prompt is neither text nor chat messages with role and content")
