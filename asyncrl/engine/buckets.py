"""Which tensors of a weight set a server receives at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

BUCKET_BYTES = 256 << 20
"""The server keeps that much beside its own copy."""

_ELEMENT_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def buckets(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Ranges of tensors of at most ``BUCKET_BYTES`` each (or one larger tensor)."""
    start = held = 0
    for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
        size = prod(shape) * _ELEMENT_BYTES.get(dtype, 4)
        if i > start and held + size > BUCKET_BYTES:
            yield start, i
            start, held = i, 0
        held += size
    if len(shapes) > start:
        yield start, len(shapes)
