"""Makes what the recipe starts from: the data, a tokenizer, and a small Qwen3 that is warm but careless.

The task is arithmetic beyond so small a model (``482*73+911=``), for which it has a Python tool:

    482*73+911=            the problem
    ```python
    print(482*73+911)
    ```                    first turn: a program
    ```output
    36097
    ```                    what it printed
    #### 36097             second turn: the answer

The warm start is a short supervised run on demonstrations of a careless teacher, who guesses as often as not, and
copies a digit wrong now and then. So the model knows both ways, and has to learn from the reward alone that only the
tool's answer is right, and only of the right program.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging

from asyncrl import tiny

GUESS = 0.5
"""How often the teacher answers without the tool."""
SLIP = 0.04
"""How often he writes a digit at random."""
TARGET = 0.2
"""The warm start ends at this share of right answers, sampled at temperature 1."""
BATCH = 64
MAX_STEPS = 600
MAX_NEW_TOKENS = 16
PIECES = ["```python\nprint(", ")\n```", "\n```output\n", "\n```\n", "#### "]
CALL = re.compile(r"```python\nprint\((\d{3}\*\d\d[+-]\d{3})\)\n```")

Turn = tuple[str, str]
"""What was said to the model, and what it has to write."""


def draw_problem(rng: random.Random) -> tuple[str, int]:
    """An expression whose value has five digits."""
    while True:
        a, b, c, sign = rng.randrange(100, 1000), rng.randrange(10, 100), rng.randrange(100, 1000), rng.choice("+-")
        value = a * b + (c if sign == "+" else -c)
        if 10_000 <= value < 100_000:
            return f"{a}*{b}{sign}{c}", value


def make_rows(rng: random.Random, count: int) -> list[dict[str, str]]:
    """``count`` different problems, with the fields of GSM8K."""
    problems: dict[str, int] = {}
    while len(problems) < count:
        expression, value = draw_problem(rng)
        problems[expression] = value
    return [{"question": f"{expression}=", "answer": f"#### {value}"} for expression, value in problems.items()]


def output_of(expression: str) -> str:
    """The tool's answer to the right form of program."""
    a, b, sign, c = re.fullmatch(r"(\d+)\*(\d+)([+-])(\d+)", expression).groups()  # type: ignore[union-attr]
    value = int(a) * int(b) + (int(c) if sign == "+" else -int(c))
    return f"\n```output\n{value}\n```\n"


def careless(text: str, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") if ch.isdigit() and rng.random() < SLIP else ch for ch in text)


def demonstrate(rng: random.Random) -> list[Turn]:
    expression, _ = draw_problem(rng)
    if rng.random() < GUESS:
        return [(f"{expression}=", f"#### {rng.randrange(10_000, 100_000)}")]
    program = careless(expression, rng)
    output = output_of(program)
    answer = careless(re.sub(r"\D", "", output), rng)
    return [(f"{expression}=", f"```python\nprint({program})\n```"), (output, f"#### {answer}")]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each of the joints of a dialogue."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *PIECES, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    joints = "|".join(
        re.escape(piece).replace("\\\n", "\n").replace("\\`", "`").replace("\\ ", " ") for piece in PIECES
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{joints}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def demonstrations(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Tensor, Tensor]:
    """A batch of the careless teacher's work, as ``tiny.batch`` has it."""
    return tiny.batch([tiny.dialogue(tokenizer, demonstrate(rng)) for _ in range(BATCH)], int(tokenizer.pad_token_id))


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> float:
    """Share of rows solved by a right program and its output; a lucky guess does not count."""
    first = tiny.sample(model, tokenizer, [row["question"] for row in rows], MAX_NEW_TOKENS)
    dialogues = [
        (f"{row['question']}{reply}<eos>{output_of(call[1])}", row["answer"])
        for row, reply in zip(rows, first, strict=True)
        if (call := CALL.fullmatch(reply or "")) and f"{call[1]}=" == row["question"]
    ]
    if not dialogues:
        return 0.0
    second = tiny.sample(model, tokenizer, [text for text, _ in dialogues], MAX_NEW_TOKENS)
    return sum(reply == answer for reply, (_, answer) in zip(second, dialogues, strict=True)) / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the data and the warm-started model of tool_math.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4096, help="rows")
    parser.add_argument("--heldout", type=int, default=128, help="rows")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS, help="of the warm start")
    parser.add_argument("--target", type=float, default=TARGET, help="accuracy at which the warm start ends")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same floats on every machine; and two threads on a busy machine are slower than one
    torch.manual_seed(args.seed)
    logging.disable_progress_bar()
    rng = random.Random(args.seed)
    rows = make_rows(rng, args.train + args.heldout)
    train, heldout = rows[: args.train], rows[args.train :]
    tokenizer = make_tokenizer()
    model = tiny.qwen3(tokenizer, max_tokens=512)
    try:
        tiny.warm_start(
            model,
            lambda: demonstrations(tokenizer, rng),
            lambda: accuracy(model, tokenizer, heldout),
            max_steps=args.max_steps,
            target=args.target,
        )
    except tiny.WarmStartError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    tiny.save(args.out, model, tokenizer, {"train": train, "heldout": heldout})
    return 0


if __name__ == "__main__":
    sys.exit(main())
