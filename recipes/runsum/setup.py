"""Makes what the recipe starts from: the data, a character tokenizer, and a small Qwen3 that is warm but careless.

The task: a prompt holds 2 to 32 digits in a field of fixed width (``3492............................=``), and the
answer is the running sum modulo 10 after each digit (``3768``). Lengths are lognormal, so a few answers are very long.

The warm start is a short supervised run on demonstrations of a careless teacher, who now and then writes any digit and
goes on from it. So the model knows the form and much of the arithmetic, is exactly right one time in five when it
samples, and has to learn care from the reward: the longer the answer, the more of it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging

from asyncrl import tiny

WIDTH = 32
"""Digits that fit into a prompt; shorter ones are filled up with dots."""
SLIP = 0.15
"""How often the teacher writes a digit at random."""
TARGET = 0.2
"""The warm start ends at this exact-match accuracy, sampled at temperature 1."""
BATCH = 64
MAX_STEPS = 400

Row = dict[str, str]


def draw_digits(rng: random.Random) -> list[int]:
    """A lognormal number of digits (median 8), each uniform."""
    count = min(WIDTH, max(2, round(8 * math.exp(rng.gauss(0.0, 0.7)))))
    return [rng.randrange(10) for _ in range(count)]


def running_sums(digits: list[int], slip: float = 0.0, rng: random.Random | None = None) -> list[int]:
    """The sum modulo 10 after each digit; with ``slip``, that of the careless teacher."""
    sums, total = [], 0
    for digit in digits:
        total = (total + digit) % 10
        if rng is not None and rng.random() < slip:
            total = rng.randrange(10)
        sums.append(total)
    return sums


def make_row(digits: list[int], sums: list[int]) -> Row:
    return {"prompt": "".join(map(str, digits)).ljust(WIDTH, ".") + "=", "answer": "".join(map(str, sums))}


def make_rows(rng: random.Random, count: int) -> list[Row]:
    """``count`` rows with different prompts and right answers."""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        digits = draw_digits(rng)
        row = make_row(digits, running_sums(digits))
        rows[row["prompt"]] = row
    return list(rows.values())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789", ".", "="])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def demonstrations(tokenizer: PreTrainedTokenizerFast, rng: random.Random, hidden: set[str]) -> tuple[Tensor, Tensor]:
    """A batch of the careless teacher's work, as ``tiny.batch`` has it. No held-out prompt is shown."""
    rows: list[tuple[list[int], list[int]]] = []
    while len(rows) < BATCH:
        digits = draw_digits(rng)
        row = make_row(digits, running_sums(digits, SLIP, rng))
        if row["prompt"] not in hidden:
            rows.append(tiny.dialogue(tokenizer, [(row["prompt"], row["answer"])]))
    return tiny.batch(rows, int(tokenizer.pad_token_id))


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Share of rows answered exactly right, sampled at temperature 1."""
    replies = tiny.sample(model, tokenizer, [row["prompt"] for row in rows], WIDTH + 1)
    return sum(reply == row["answer"] for reply, row in zip(replies, rows, strict=True)) / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the data and the warm-started model of runsum.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=8192, help="rows")
    parser.add_argument("--heldout", type=int, default=256, help="rows")
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
    model = tiny.qwen3(tokenizer, max_tokens=128)
    hidden = {row["prompt"] for row in heldout}
    try:
        tiny.warm_start(
            model,
            lambda: demonstrations(tokenizer, rng, hidden),
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
