"""Makes what the recipe starts from: the data, a character tokenizer, and a small Qwen3 that is warm but careless.

The task: a prompt holds 2 to 32 digits in a field of fixed width (``3492............................=``), and the
answer is the running sum modulo 10 after each digit (``3768``). Lengths are lognormal, so a few answers are very long.

The warm start is a short supervised run on demonstrations of a careless teacher, who now and then writes any digit and
goes on from it. So the model knows the form and much of the arithmetic, is exactly right one time in five when it
samples, and has to learn care from the reward: the longer the answer, the more of it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

WIDTH = 32
"""Digits that fit into a prompt; shorter ones are filled up with dots."""
SLIP = 0.15
"""How often the teacher writes a digit at random."""
TARGET = 0.2
"""The warm start ends at this exact-match accuracy, sampled at temperature 1."""
BATCH = 64
MAX_STEPS = 400
CHECK_EVERY = 25
IGNORE = -100

Row = dict[str, str]


class SetupError(Exception):
    """The warm start did not reach what the recipe needs; one line."""


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


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.1,  # about 1/sqrt(hidden): with the usual 0.02 so small a model learns several times slower
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def demonstrations(tokenizer: PreTrainedTokenizerFast, rng: random.Random, hidden: set[str]) -> tuple[Tensor, Tensor]:
    """A batch of the careless teacher's work: ids and next-token labels [rows, tokens]. No held-out prompt is shown."""
    texts: list[tuple[list[int], list[int]]] = []
    while len(texts) < BATCH:
        digits = draw_digits(rng)
        row = make_row(digits, running_sums(digits, SLIP, rng))
        if row["prompt"] not in hidden:
            texts.append((tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids = torch.full((BATCH, width), int(tokenizer.pad_token_id))
    labels = torch.full((BATCH, width), IGNORE)
    for i, (prompt, answer) in enumerate(texts):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids[:, :-1], labels[:, 1:]


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Share of rows answered exactly right, sampled at temperature 1."""
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=WIDTH + 1)
    replies = [tokenizer.decode(ids).partition("<eos>") for ids in out[:, inputs["input_ids"].shape[1] :]]
    return sum(bool(end) and text == row["answer"] for row, (text, end, _) in zip(rows, replies, strict=True)) / len(
        rows
    )


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    heldout: list[Row],
    *,
    max_steps: int,
    target: float,
) -> float:
    """Train until ``target``; the accuracy reached. Raises ``SetupError``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    hidden = {row["prompt"] for row in heldout}
    reached = 0.0
    for step in range(1, max_steps + 1):
        ids, labels = demonstrations(tokenizer, rng, hidden)
        logits = model(ids).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % CHECK_EVERY == 0 or step == max_steps:
            reached = accuracy(model, tokenizer, heldout)
            print(f"setup: warm start, step {step}: loss {loss.item():.3f}, accuracy {reached:.3f}", flush=True)
            if reached >= target:
                return reached
    raise SetupError(f"the warm start reached an accuracy of {reached:.3f} in {max_steps} steps, not {target}")


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
    model = make_model(tokenizer)
    try:
        warm_start(model, tokenizer, rng, heldout, max_steps=args.max_steps, target=args.target)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("heldout", heldout)):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
