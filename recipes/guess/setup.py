"""Makes what the recipe starts from: the secrets, a word tokenizer, and a small Qwen3 with random weights."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ["<eos>", *"123456789", "guess", "higher", "lower", "nonsense"]
TRAIN, HELDOUT = 4096, 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    rng = random.Random(args.seed)
    for name, count in (("train", TRAIN), ("heldout", HELDOUT)):
        secrets = [1 + i % 9 for i in range(count)]
        rng.shuffle(secrets)
        rows = "".join(json.dumps({"secret": secret}) + "\n" for secret in secrets)
        (args.out / f"{name}.jsonl").write_text(rows)

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="nonsense"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=32,
            initializer_range=0.1,  # with the usual 0.02 so small a model learns several times slower
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    for part in (tokenizer, model):
        part.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
