"""A weight set as one safetensors file, laid out before its first byte is there.

The manifest says where each tensor will stand, so a version can travel as plain bytes of this file, in chunks that know
nothing of tensors, and is ready to load when the last one is written.
"""

from __future__ import annotations

import msgspec

from asyncrl.core.manifest import DTYPE_BYTES, Manifest, TensorInfo
from asyncrl.core.types import Record

NAME = "model.safetensors"
"""The file's name inside a folder of weights."""

_TYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


class Place(Record, frozen=True, kw_only=True):
    """A tensor's bytes are ``start`` to ``end`` (exclusive) of the file."""

    tensor: TensorInfo
    start: int
    end: int


class WeightFile(Record, frozen=True, kw_only=True):
    """``header`` are the first bytes of the file, ``places`` follow each other after it, ``size`` is the whole in
    bytes."""

    header: bytes
    places: tuple[Place, ...]
    size: int


def lay_out(manifest: Manifest) -> WeightFile:
    """Tensors in the manifest's order, but wide types first, so that each is aligned to its type."""
    tensors = sorted(manifest.tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        offset += tensor.nbytes
    table = msgspec.json.encode(entries)
    table += b" " * (-len(table) % 8)
    header = len(table).to_bytes(8, "little") + table
    places = []
    start = len(header)
    for tensor in tensors:
        places.append(Place(tensor=tensor, start=start, end=start + tensor.nbytes))
        start += tensor.nbytes
    return WeightFile(header=header, places=tuple(places), size=start)
