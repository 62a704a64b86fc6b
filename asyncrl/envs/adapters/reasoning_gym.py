"""reasoning-gym's procedural data sets: rows made by a command, judged by each data set's own scorer.

    python -m asyncrl.envs.adapters.reasoning_gym chain_sum leg_counting --size 1000 --seed 0 > train.jsonl

    [env]
    target = "asyncrl.envs.adapters.reasoning_gym:reward"

A row has ``prompt``, ``answer``, ``dataset``, ``index`` and ``entry``, which is what the scorer takes: some data sets
give other entries in another process, so that an entry cannot be made again from seed and index.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from asyncrl.env import Response, Task

if find_spec("reasoning_gym") is None:  # importing it takes a second, and is for those who score
    raise ImportError("reasoning-gym is not installed; pip install 'asyncrl[reasoning-gym]'")

INSTRUCTION = "Think first, then give only the final answer between <answer> and </answer>."
NONSENSE = "~"
"""An answer to no question; a scorer that takes it for right takes anything."""
MAX_ANSWER = 10_000
"""Characters; some scorers are slow on long answers, which are right in no data set."""


def reward(task: Task, response: Response, *, tags: bool = True) -> float:
    """0 to 1, by the data set's ``score_answer``. What it cannot read is wrong. ``tags``: the answer is what stands
    between the last ``<answer>`` and ``</answer>``; else the whole response without thoughts."""
    text = response.text.rpartition("</think>")[2]
    if tags:
        begin = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
        text = text[begin + len("<answer>") : text.find("</answer>", begin)] if begin >= 0 else ""
    return score(task.data["dataset"], task.data["entry"], text.strip())


def score(dataset: str, entry: str, answer: str) -> float:
    """What the scorer says, within 0 and 1; 0 where it raises, and for an answer that is no finite number where it
    would have to be compared with one."""
    scorer, facts = _scorer(dataset), _entry(entry)
    if not answer or len(answer) > MAX_ANSWER or _not_finite(answer):
        return 0.0
    try:
        value = float(scorer.score_answer(answer, facts))
    except Exception:
        return 0.0
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def rows(
    dataset: str, *, size: int, seed: int, instruction: str = INSTRUCTION, **config: Any
) -> Iterator[dict[str, Any]]:
    """Entries as rows for the recipe, without those for which the scorer takes nonsense. Raises ``ValueError`` for a
    data set or configuration that there is not."""
    import reasoning_gym

    try:
        entries = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{dataset}: {error}") from None
    for index, entry in enumerate(entries):
        kept = repr(_plain(entry))
        if score(dataset, kept, NONSENSE) > 0.5:
            continue
        prompt = "\n\n".join(filter(None, (entry["question"], instruction)))
        answer = None if entry["answer"] is None else str(entry["answer"])
        yield {"prompt": prompt, "answer": answer, "dataset": dataset, "index": index, "entry": kept}


@lru_cache(maxsize=256)
def _scorer(dataset: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, size=1, seed=0)


@lru_cache(maxsize=1024)
def _entry(text: str) -> dict[str, Any]:
    """A Python literal and not JSON: scorers compare tuples with tuples, and look up by numbers."""
    entry: dict[str, Any] = ast.literal_eval(text)
    return entry


def _plain(value: Any) -> Any:
    """Without NumPy's scalars."""
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value.item() if hasattr(value, "item") else value


def _not_finite(answer: str) -> bool:
    try:
        number = complex(answer.replace(" ", ""))
    except ValueError:
        return False
    return not (math.isfinite(number.real) and math.isfinite(number.imag))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.envs.adapters.reasoning_gym", description="Make tasks as JSONL rows."
    )
    parser.add_argument("datasets", nargs="+", metavar="DATASET")
    parser.add_argument("--size", type=int, default=500, help="of each data set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON", help="for each data set")
    parser.add_argument("--no-instruction", action="store_true", help="only the question (env.kwargs.tags = false)")
    args = parser.parse_args()
    instruction = "" if args.no_instruction else INSTRUCTION
    made: list[dict[str, Any]] = []
    for dataset in args.datasets:
        try:
            new = [*rows(dataset, size=args.size, seed=args.seed, instruction=instruction, **args.config)]
        except ValueError as error:
            print(f"reasoning_gym: {error}", file=sys.stderr)
            return 1
        if len(new) < args.size:
            left = args.size - len(new)
            print(f"reasoning_gym: {dataset}: {left} of {args.size} left out, as any answer passes", file=sys.stderr)
        made += new
    random.Random(args.seed).shuffle(made)
    for row in made:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
