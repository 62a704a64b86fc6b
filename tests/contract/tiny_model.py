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
CONTEXT = 2048
EOS = 257


def make_model(folder: Path, seed: int, *, stop_instead_of: int | None = None) -> Path:
    """Write model ``seed`` (float32, about 150k parameters) to ``folder``.

    Its greedy choice is never the end of text, except, with ``stop_instead_of``, where it would be that token.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
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
    )
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        # A zero row has logit 0, and one of the others is always above; a doubled row wins wherever the row won.
        embedding[EOS] = 0.0 if stop_instead_of is None else 2 * embedding[stop_instead_of]
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "bos_token_id": 256}))
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>", "<pad>"]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=CONTEXT
    )


@lru_cache(maxsize=8)
def _reference(folder: Path) -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters by their Hugging Face names, as a trainer would send them (a tied head is not sent)."""
    return {name: p.detach() for name, p in _reference(folder).named_parameters()}


def logprobs(folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Logprob of each output token, after temperature, by one forward pass over prompt and output."""
    with torch.no_grad():
        logits = _reference(folder)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@lru_cache(maxsize=32)
def greedy(folder: Path, prompt: tuple[int, ...], length: int) -> list[int]:
    """The most likely continuation, token by token, ``length`` long or up to the end of text."""
    output: list[int] = []
    cache = None
    ids = torch.tensor([prompt])
    with torch.no_grad():
        while len(output) < length and (not output or output[-1] != EOS):
            step = _reference(folder)(ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            ids = step.logits[:, -1:].argmax(dim=-1)
            output.append(int(ids))
    return output
