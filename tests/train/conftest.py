"""A tiny Qwen3 folder, and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from .batches import VOCABULARY


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with grouped heads and tied embeddings, weights large enough that every path matters; and a file that
    stands for a tokenizer."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
    return folder


@pytest.fixture(scope="module")
def lone_rank() -> Iterator[dist.ProcessGroup]:
    """A default process group with this process as its only member."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
