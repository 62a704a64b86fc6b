"""The recipe's small model: a character tokenizer and a Qwen3 of 0.4M parameters that has seen how bugs are repaired.

The warm start is a short supervised run on the work of a timid teacher, who leaves a broken line as it is every second
time. So the model knows the repairs of the training tasks, but makes them only some of the time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging

from asyncrl import tiny

TIMID = 0.5
"""How often the teacher repairs nothing."""
TARGET = 0.35
MAX_STEPS = 600
BATCH = 32

Pair = tuple[str, str]
"""The broken line and the right one, without indent."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character; all others are ``<unk>``."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def warm_start(out: Path, pairs: Sequence[Pair], *, seed: int, target: float = TARGET) -> float:
    """Train until ``target`` of the pairs are repaired, sampled at temperature 1; the share reached. Writes
    ``out/model``. Raises ``tiny.WarmStartError``."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    rng = random.Random(seed)
    tokenizer = make_tokenizer()
    longest = max(len(bad) + max(len(bad), len(good)) for bad, good in pairs) + 2
    model = tiny.qwen3(tokenizer, max_tokens=max(512, 2 * longest), intermediate=384)
    reached = tiny.warm_start(
        model,
        lambda: demonstrations(tokenizer, pairs, rng),
        lambda: share_repaired(model, tokenizer, pairs),
        max_steps=MAX_STEPS,
        target=target,
    )
    tiny.save(out, model, tokenizer, {})
    return reached


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """A batch of the teacher's work, as ``tiny.batch`` has it."""
    rows = []
    for bad, good in rng.choices(pairs, k=BATCH):
        rows.append(tiny.dialogue(tokenizer, [(f"{bad}\n", bad if rng.random() < TIMID else good)]))
    return tiny.batch(rows, int(tokenizer.pad_token_id))


def share_repaired(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> float:
    """Of two samples a pair."""
    right = 0
    for bad, good in pairs:
        right += sum(reply == good for reply in tiny.sample(model, tokenizer, [f"{bad}\n"] * 2, len(good) + 2))
    return right / (2 * len(pairs))
