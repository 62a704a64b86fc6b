"""A tiny random Qwen3 folder with a byte tokenizer, and what transformers computes with it (the reference)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 320
CONTEXT = 512
EOS = 257


def make_model(folder: Path, seed: int) -> Path:
    """Write model ``seed`` (float32, about 150k parameters) to ``folder``."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_and_specials = {symbol: i for i, symbol in enumerate([*symbols, "<bos>", "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_and_specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=CONTEXT
    )
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=EOS,
        pad_token_id=258,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "bos_token_id": 256}))
    return folder


@lru_cache(maxsize=8)
def reference_model(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logprobs(
    folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> tuple[list[float], list[int]]:
    """Logprob of each output token after temperature, and the greedy choice at each place, by one forward pass."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = reference_model(folder)(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    picked = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
    return picked.tolist(), logits.argmax(dim=-1).tolist()
