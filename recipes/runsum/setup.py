"""Makes what the recipe starts from: the data, the tokenizer and a small Qwen3 that is warm but careless.

The warm start is a short supervised run on demonstrations of a careless teacher, who copies the letters well but mostly
gets the sum wrong when it passes ten. So the model has the form of an answer and is right now and then, which is what
reinforcement learning needs to begin; what it must still learn, it can only learn from the reward.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

LETTERS = string.ascii_letters
VALUE = {letter: string.ascii_lowercase.index(letter.lower()) + 1 for letter in LETTERS}
MIN_LETTERS, MAX_LETTERS = 3, 48
MAX_NEW_TOKENS = 2 * MAX_LETTERS + 3

TASK_LENGTHS = (5.0, 0.9)
"""Median and sigma of the tasks' lognormal lengths."""
LESSON_LENGTHS = (12.0, 0.3)
"""Those of most demonstrations. On short prompts a model learns to find its place by counting, which does not carry
over to long ones; twelve letters make it look for the letter that it copied last."""
TASK_SHARE = 0.3
"""Share of demonstrations that are as long as the tasks."""
SLIP = 0.8
"""How often the careless teacher is one short when a sum passes ten."""
TOKENS_PER_BATCH = 1536
IGNORE = -100

Row = dict[str, str]


class SetupError(Exception):
    """The warm start did not reach what the recipe needs; one line."""


def answer(letters: str, slip: float = 0.0, rng: random.Random | None = None) -> str:
    """The derivation for ``letters``; with ``slip``, that of the careless teacher, who goes on from his wrong sums."""
    total, out = 0, []
    for letter in letters:
        total += VALUE[letter] % 10
        if total >= 10 and rng is not None and rng.random() < slip:
            total -= 1
        total %= 10
        out.append(f"{letter}{total}")
    return "".join(out) + f"#{total}"


def draw_length(rng: random.Random, median: float, sigma: float) -> int:
    """A lognormal number of letters: most prompts are short, a few are very long."""
    return min(MAX_LETTERS, max(MIN_LETTERS, round(median * math.exp(rng.gauss(0.0, sigma)))))


def draw_letters(rng: random.Random, length: int) -> str:
    """Distinct letters, so that the last one copied tells where in the prompt the answer has got to."""
    return "".join(rng.sample(LETTERS, length))


def make_rows(rng: random.Random, count: int) -> list[Row]:
    """``count`` rows with different prompts."""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[draw_letters(rng, draw_length(rng, *TASK_LENGTHS))] = None
    return [{"prompt": f"{letters}=", "answer": answer(letters)} for letters in prompts]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS, *string.digits, "=", "#"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=256
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,  # about 1/sqrt(hidden); with the usual 0.02 so small a model learns four times slower
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def collate(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [rows, tokens] and labels (``IGNORE`` but on the answer and its end)."""
    encoded = [(tokenizer.encode(r["prompt"]), [*tokenizer.encode(r["answer"]), tokenizer.eos_token_id]) for r in rows]
    width = max(len(p) + len(a) for p, a in encoded)
    ids = torch.full((len(rows), width), int(tokenizer.pad_token_id))
    labels = torch.full((len(rows), width), IGNORE)
    for i, (prompt, reply) in enumerate(encoded):
        ids[i, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[i, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    return ids, labels


def demonstrations(rng: random.Random, hidden: set[str]) -> list[list[Row]]:
    """Batches of the careless teacher's work, rows of like length together. Prompts in ``hidden`` are never shown."""
    rows: list[Row] = []
    while len(rows) < 1024:
        letters = draw_letters(rng, draw_length(rng, *(TASK_LENGTHS if rng.random() < TASK_SHARE else LESSON_LENGTHS)))
        if f"{letters}=" not in hidden:
            rows.append({"prompt": f"{letters}=", "answer": answer(letters, SLIP, rng)})
    rows.sort(key=lambda row: len(row["prompt"]))
    batches: list[list[Row]] = []
    while rows:
        size = max(1, TOKENS_PER_BATCH // (3 * len(rows[-1]["prompt"])))
        batches.append(rows[-size:])
        del rows[-size:]
    rng.shuffle(batches)
    return batches


@torch.no_grad()
def copied(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Share of rows of which the model, shown the right answer, would write every letter and the end."""
    ids, labels = collate(tokenizer, rows)
    guess, target = model(ids[:, :-1]).logits.argmax(-1), labels[:, 1:]
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list(string.digits)))
    right = (guess == target) | (target == IGNORE) | torch.isin(target, digits)
    return right.all(-1).float().mean().item()


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Share of rows answered exactly right and ended, sampled at temperature 1."""
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
    replies = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
    ends = tokenizer.eos_token
    return sum(reply.startswith(row["answer"] + ends) for reply, row in zip(replies, rows, strict=True)) / len(rows)


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, hidden: set[str], rng: random.Random, steps: int
) -> None:
    """Supervised training on demonstrations; the learning rate falls to 0 over the second half."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, 2.0 - 2.0 * done / steps))
        for optimizer in optimizers
    ]
    batches: list[list[Row]] = []
    for step in range(1, steps + 1):
        batches = batches or demonstrations(rng, hidden)
        ids, labels = collate(tokenizer, batches.pop())
        logits = model(ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            print(f"warm start: step {step} of {steps}, loss {loss.item():.2f}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the runsum recipe's model and data.")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4096, help="training tasks")
    parser.add_argument("--heldout", type=int, default=512, help="held-out tasks")
    parser.add_argument("--steps", type=int, default=600, help="steps of the warm start")
    parser.add_argument("--copies", type=float, default=0.85, help="fail if it copies fewer of the held-out prompts")
    parser.add_argument("--accuracy", type=float, default=0.12, help="fail if its held-out accuracy is lower")
    args = parser.parse_args(argv)

    disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    rows = make_rows(rng, args.train + args.heldout)
    heldout = rows[args.train :]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in ("train", rows[: args.train]), ("heldout", heldout):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {args.train} training and {args.heldout} held-out tasks", flush=True)
    warm_start(model, tokenizer, {row["prompt"] for row in heldout}, rng, args.steps)
    model.eval()
    copies, right = copied(model, tokenizer, heldout), accuracy(model, tokenizer, heldout[:256])
    print(f"held-out prompts: {copies:.0%} copied, accuracy {right:.2f} at temperature 1", flush=True)
    if copies < args.copies or right < args.accuracy:
        raise SetupError(
            f"the warm start must copy {args.copies:.0%} of the held-out prompts and reach an accuracy of "
            f"{args.accuracy}; try another --seed or more --steps"
        )
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup.py: {error}")
