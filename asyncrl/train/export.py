"""A Hugging Face folder with given weights: what ``from_pretrained`` and the inference servers load.

Written under a temporary name beside the target and renamed, so that nobody ever sees half a folder. Everything in the
source folder that is not weights (configuration, tokenizer, chat template, model code) goes along. A checkpoint is such
a folder too, with the trainer's own state in it.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from types import TracebackType

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.checksum import checksum
from asyncrl.core import manifest as manifests
from asyncrl.core.manifest import Manifest

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")


class FolderWriter:
    """Writes one folder bucket by bucket, as a context: left normally the folder appears as ``target``, replacing what
    was there; left by an exception nothing remains of it. ``weights`` says what will come and goes along. ``durable``:
    it appears only when it would survive a power failure. What a killed process leaves matches ``LEFTOVERS``."""

    def __init__(
        self, target: Path, source: Path, weights: Manifest, bucket_bytes: int, *, durable: bool = False
    ) -> None:
        self._target = target
        self._source = source
        self._weights = weights
        self._count = max(1, len(weights.buckets(bucket_bytes)))
        self._durable = durable
        self._folder = target.parent / f".{target.name}.{os.getpid()}.part"
        self._files: dict[str, str] = {}
        self._checksums: dict[str, int] = {}

    @property
    def folder(self) -> Path:
        """Where the folder is until it is complete; others may add to it."""
        return self._folder

    def __enter__(self) -> FolderWriter:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._discard()
        try:
            self._folder.mkdir()
            _copy_companions(self._source, self._folder, self._weights.tensors[0].dtype)
        except OSError:
            self._discard()
            raise
        return self

    def write(self, bucket: dict[str, Tensor]) -> None:
        """One file. Raises ``OSError`` or ``SafetensorError``, on a full disk for instance."""
        number = len(set(self._files.values())) + 1
        name = "model.safetensors" if self._count == 1 else f"model-{number:05}-of-{self._count:05}.safetensors"
        self._checksums |= {key: checksum(tensor) for key, tensor in bucket.items()}
        save_file({key: tensor.cpu() for key, tensor in bucket.items()}, self._folder / name, metadata={"format": "pt"})
        self._files.update(dict.fromkeys(bucket, name))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._discard()

    def _finish(self) -> None:
        if self._count > 1:
            index = {"metadata": {"total_size": self._weights.nbytes}, "weight_map": self._files}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        listed = msgspec.structs.replace(self._weights, checksums=self._checksums)
        (self._folder / manifests.FILE_NAME).write_bytes(manifests.dumps(listed))
        if self._durable:
            for path in (*self._folder.rglob("*"), self._folder):
                _sync(path)
        old = self._folder.with_suffix(".old")
        if self._target.exists():
            self._target.rename(old)
        self._folder.rename(self._target)
        if self._durable:
            _sync(self._target.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _copy_companions(source: Path, folder: Path, dtype: str) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != manifests.FILE_NAME:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_bytes())
    # transformers 5 says ``dtype``; servers on older versions read ``torch_dtype``.
    config["dtype"] = config["torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
    return crc


def drop_other_versions(folder: Path, version: int) -> None:
    """Remove every ``folder/v<n>`` but ``version`` and the one before, which a server may just be loading.

    Also what an earlier run left there, whatever its numbers.
    """
    for path in folder.glob("v*"):
        if path.name[1:].isdecimal() and int(path.name[1:]) not in (version, version - 1):
            shutil.rmtree(path, ignore_errors=True)
