"""Folders appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from asyncrl.core.manifest import Manifest
from asyncrl.train import export, model
from asyncrl.train.export import FolderWriter, drop_other_versions
from asyncrl.train.model import Policy

LIMIT = 10_000


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    return model.load(str(model_folder), 1.0)


def write(policy: Policy, weights: Manifest, source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    with FolderWriter(target, source, weights, LIMIT) as writer:
        for bucket in model.gather(policy, weights, dtype, LIMIT, keep=True):
            writer.write(bucket)


def test_several_files_and_their_index_load_as_one_model(policy: Policy, model_folder: Path, tmp_path: Path) -> None:
    weights = model.manifest(policy, 4, torch.float32)
    write(policy, weights, model_folder, tmp_path / "out")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == len(weights.buckets(LIMIT)) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = dict(model.named_parameters(policy))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_the_config_names_the_dtype_that_was_written(policy: Policy, model_folder: Path, tmp_path: Path) -> None:
    write(policy, model.manifest(policy, 0, torch.bfloat16), model_folder, tmp_path / "out", torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_failed_write_leaves_the_folder_that_was_there_and_no_trace_of_itself(
    policy: Policy, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    weights = model.manifest(policy, 0, torch.float32)
    write(policy, weights, model_folder, target)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    calls = 0

    def disk_fills_up(tensors: object, path: Path, metadata: object) -> None:
        nonlocal calls
        calls += 1
        path.write_bytes(b"half")
        if calls == 2:
            raise SafetensorError("No space left on device")

    monkeypatch.setattr(export, "save_file", disk_fills_up)
    with pytest.raises(SafetensorError, match="No space"):
        write(policy, weights, model_folder, target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    assert list(tmp_path.iterdir()) == [target]


def test_weights_of_the_source_folder_are_not_copied(policy: Policy, model_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in model_folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for name in ("model.safetensors.index.json", "pytorch_model.bin", "chat_template.jinja", "modeling_own.py"):
        (source / name).write_text("x")
    write(policy, model.manifest(policy, 0, torch.float32), source, tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"chat_template.jinja", "modeling_own.py", "tokenizer.json"} <= names
    assert "pytorch_model.bin" not in names
    assert (tmp_path / "out" / "model.safetensors.index.json").read_text() != "x"


def test_only_the_published_version_and_the_one_before_stay(tmp_path: Path) -> None:
    for name in ("v3", "v4", "v5", "v6", "v41", "vocabulary"):
        (tmp_path / name).mkdir()
    drop_other_versions(tmp_path, 5)
    assert {p.name for p in tmp_path.iterdir()} == {"v4", "v5", "vocabulary"}
