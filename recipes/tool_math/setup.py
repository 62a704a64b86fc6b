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
import json
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

GUESS = 0.5
"""How often the teacher answers without the tool."""
SLIP = 0.04
"""How often he writes a digit at random."""
TARGET = 0.2
"""The warm start ends at this share of right answers, sampled at temperature 1."""
BATCH = 64
MAX_STEPS = 600
CHECK_EVERY = 25
IGNORE = -100
PIECES = ["```python\nprint(", ")\n```", "\n```output\n", "\n```\n", "#### "]
CALL = re.compile(r"```python\nprint\((\d{3}\*\d\d[+-]\d{3})\)\n```")

Turn = tuple[str, str]
"""What was said to the model, and what it has to write."""


class SetupError(Exception):
    """The warm start did not reach what the recipe needs; one line."""


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


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,  # about 1/sqrt(hidden): with the usual 0.02 so small a model learns several times slower
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def demonstrations(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Tensor, Tensor]:
    """A batch of the careless teacher's work: ids and next-token labels [rows, tokens]."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(BATCH):
        ids: list[int] = []
        labels: list[int] = []
        for said, reply in demonstrate(rng):
            seen, written = tokenizer.encode(said), [*tokenizer.encode(reply), int(tokenizer.eos_token_id)]
            ids += seen + written
            labels += [IGNORE] * len(seen) + written
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [int(tokenizer.pad_token_id)] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORE] * (width - len(row)) for _, row in rows])
    return ids[:, :-1], labels[:, 1:]


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[str]:
    """A turn after each text, all of the same number of tokens, at temperature 1."""
    inputs = tokenizer(texts, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=16)
    return [tokenizer.decode(ids).partition("<eos>")[0] for ids in out[:, inputs["input_ids"].shape[1] :]]


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> float:
    """Share of rows solved by a right program and its output; a lucky guess does not count."""
    first = sample(model, tokenizer, [row["question"] for row in rows])
    dialogues = [
        (f"{row['question']}{reply}<eos>{output_of(call[1])}", row["answer"])
        for row, reply in zip(rows, first, strict=True)
        if (call := CALL.fullmatch(reply)) and f"{call[1]}=" == row["question"]
    ]
    if not dialogues:
        return 0.0
    second = sample(model, tokenizer, [text for text, _ in dialogues])
    return sum(reply == answer for reply, (_, answer) in zip(second, dialogues, strict=True)) / len(rows)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    heldout: list[dict[str, str]],
    *,
    max_steps: int,
    target: float,
) -> float:
    """Train until ``target``; the accuracy reached. Raises ``SetupError``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    reached = 0.0
    for step in range(1, max_steps + 1):
        ids, labels = demonstrations(tokenizer, rng)
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
