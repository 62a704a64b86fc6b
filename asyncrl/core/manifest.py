"""What a weight set consists of: names, shapes and dtypes in their order of travel, and the version.

Both ends of a transport hold one; a mismatch is refused before a byte is loaded. The order matters: a broadcast group
carries nothing but bytes, so sender and receiver must agree on what comes next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from asyncrl.core.types import Record

FILE_NAME = "asyncrl_manifest.json"
"""The manifest's name inside a folder of weights."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


class ManifestError(Exception):
    """Two weight sets differ; one line names the first difference."""


class TensorInfo(Record, frozen=True, kw_only=True):
    """One tensor. ``dtype`` is torch's name without ``torch.``: ``float32``, ``bfloat16`` …"""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(Record, frozen=True, kw_only=True):
    """A weight set. ``checksums`` (name of the tensor → ``asyncrl.checksum``) is filled for sets that lie on a disk."""

    version: int
    tensors: tuple[TensorInfo, ...]
    checksums: Mapping[str, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def buckets(self, limit: int) -> list[tuple[TensorInfo, ...]]:
        """The tensors in order, cut into runs of at most ``limit`` bytes; a larger tensor is a run of its own."""
        runs: list[list[TensorInfo]] = []
        size = 0
        for tensor in self.tensors:
            if not runs or size + tensor.nbytes > limit:
                runs.append([])
                size = 0
            runs[-1].append(tensor)
            size += tensor.nbytes
        return [tuple(run) for run in runs]

    def check_against(self, other: Manifest) -> None:
        """Raise ``ManifestError`` unless ``other`` has the same tensors, of the same shape and dtype (any order)."""
        mine, theirs = ({t.name: t for t in m.tensors} for m in (self, other))
        for name, tensor in mine.items():
            if name not in theirs:
                raise ManifestError(f"weights do not match: {name} is missing on the other side; is it the same model?")
            if tensor.shape != theirs[name].shape:
                raise ManifestError(
                    f"weights do not match: {name} has shape {list(tensor.shape)} here and {list(theirs[name].shape)} "
                    "on the other side; is it the same model?"
                )
            if tensor.dtype != theirs[name].dtype:
                raise ManifestError(
                    f"weights do not match: {name} is {tensor.dtype} here and {theirs[name].dtype} on the other side; "
                    "set model.dtype to the type that the servers were started with"
                )
        for name in theirs:
            if name not in mine:
                raise ManifestError(f"weights do not match: {name} is unknown here; is it the same model?")


def dumps(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def loads(data: bytes) -> Manifest:
    """Raises ``ManifestError`` when ``data`` is no manifest."""
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"not a weight manifest: {error}") from error
