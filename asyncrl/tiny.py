"""Small models for two CPU cores: what the shipped recipes start from, and yours may while it is tried out.

A Qwen3 of a few hundred thousand parameters, and a short supervised run after which it does the task some of the time:
what is never right has nothing to learn from its reward. One seed gives the same floats on every machine with
``torch.set_num_threads(1)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IGNORE = -100
"""The label of a token that is read and not learned."""
CHECK_EVERY = 25


class WarmStartError(Exception):
    """The warm start did not reach what the recipe needs; one line."""


def qwen3(
    tokenizer: PreTrainedTokenizerFast, *, max_tokens: int, layers: int = 2, intermediate: int = 256
) -> Qwen3ForCausalLM:
    """Random weights, hidden size 128, a row of embeddings each token of ``tokenizer``."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_tokens,
        initializer_range=0.1,  # about 1/sqrt(hidden): with the usual 0.02 so small a model learns several times slower
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def dialogue(tokenizer: PreTrainedTokenizerFast, turns: Iterable[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and labels of turns (what was said, the reply): of the labels only the replies, each with its end."""
    ids: list[int] = []
    labels: list[int] = []
    for said, reply in turns:
        seen, written = tokenizer.encode(said), [*tokenizer.encode(reply), int(tokenizer.eos_token_id)]
        ids += seen + written
        labels += [IGNORE] * len(seen) + written
    return ids, labels


def batch(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and next-token labels [rows, tokens of the longest − 1] of rows of ids and labels."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORE] * (width - len(row)) for _, row in rows])
    return ids[:, :-1], labels[:, 1:]


def warm_start(
    model: Qwen3ForCausalLM,
    batches: Callable[[], tuple[Tensor, Tensor]],
    measure: Callable[[], float],
    *,
    max_steps: int,
    target: float,
) -> float:
    """Train on ``batches`` until ``measure``, the share of tasks done right, is at least ``target``; that share. Raises
    ``WarmStartError`` after ``max_steps``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    reached = 0.0
    for step in range(1, max_steps + 1):
        ids, labels = batches()
        logits = model(ids).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % CHECK_EVERY == 0 or step == max_steps:
            reached = measure()
            print(f"setup: warm start, step {step}: loss {loss.item():.3f}, accuracy {reached:.3f}", flush=True)
            if reached >= target:
                return reached
    raise WarmStartError(f"the warm start reached an accuracy of {reached:.3f} in {max_steps} steps, not {target}")


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], max_new_tokens: int
) -> list[str | None]:
    """A reply to each text, all of the same number of tokens, at temperature 1; None for one without an end."""
    inputs = tokenizer(list(texts), return_tensors="pt", return_token_type_ids=False)
    # transformers declares generate() in a way that no model fits.
    out: Any = model.generate(  # type: ignore[misc]
        **inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_new_tokens
    )
    texts = [str(tokenizer.decode(ids)) for ids in out[:, inputs["input_ids"].shape[1] :]]
    replies = (text.partition(tokenizer.eos_token) for text in texts)
    return [text if end else None for text, end, _ in replies]


def save(
    out: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Mapping[str, Iterable[Any]]
) -> None:
    """``out/model`` in Hugging Face format, and ``out/NAME.jsonl`` for each name of ``rows``."""
    out.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
