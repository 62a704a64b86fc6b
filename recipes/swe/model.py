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
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

TIMID = 0.5
"""How often the teacher repairs nothing."""
TARGET = 0.35
MAX_STEPS = 600
CHECK_EVERY = 25
BATCH = 32
IGNORE = -100

Pair = tuple[str, str]
"""The broken line and the right one, without indent."""


class ModelError(Exception):
    """One line."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character; all others are ``<unk>``."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_tokens,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_start(out: Path, pairs: Sequence[Pair], *, seed: int, target: float = TARGET) -> float:
    """Train until ``target`` of the pairs are repaired, sampled at temperature 1; the share reached. Writes ``out``."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    rng = random.Random(seed)
    tokenizer = make_tokenizer()
    longest = max(len(bad) + max(len(bad), len(good)) for bad, good in pairs) + 2
    model = make_model(tokenizer, max(512, 2 * longest))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    reached = 0.0
    for step in range(1, MAX_STEPS + 1):
        rows = []
        for bad, good in rng.choices(pairs, k=BATCH):
            answer = bad if rng.random() < TIMID else good
            rows.append((tokenizer.encode(f"{bad}\n"), [*tokenizer.encode(answer), tokenizer.eos_token_id]))
        ids = torch.full((BATCH, longest), int(tokenizer.pad_token_id))
        labels = torch.full((BATCH, longest), IGNORE)
        for i, (prompt, answer) in enumerate(rows):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        loss = functional.cross_entropy(
            model(ids[:, :-1]).logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % CHECK_EVERY == 0:
            reached = share_repaired(model, tokenizer, pairs)
            print(f"setup: warm start, step {step}: loss {loss.item():.3f}, repaired {reached:.2f}", flush=True)
            if reached >= target:
                break
    if reached < target:
        raise ModelError(f"the warm start repaired {reached:.2f} of the lines in {MAX_STEPS} steps, not {target}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return reached


@torch.no_grad()
def share_repaired(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> float:
    """Of two samples a pair."""
    right = 0
    for bad, good in pairs:
        inputs = tokenizer([f"{bad}\n"] * 2, return_tensors="pt", return_token_type_ids=False)
        room = len(good) + 2
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=room)
        for ids in out[:, inputs["input_ids"].shape[1] :]:
            text, end, _ = tokenizer.decode(ids).partition("<eos>")
            right += bool(end) and text == good
    return right / (2 * len(pairs))
