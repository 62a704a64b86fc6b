"""The file against the library that reads it."""

from __future__ import annotations

import struct

import torch
from safetensors.torch import load

from asyncrl.core.manifest import Manifest, TensorInfo
from asyncrl.core.weight_file import lay_out


def manifest(*tensors: tuple[str, tuple[int, ...], str]) -> Manifest:
    return Manifest(version=3, tensors=tuple(TensorInfo(name=n, shape=s, dtype=d) for n, s, d in tensors))


def test_safetensors_reads_what_is_written_into_the_places() -> None:
    layout = lay_out(
        manifest(("b", (2, 3), "bfloat16"), ("a", (), "float32"), ("ü", (0,), "float32"), ("c", (3,), "uint8"))
    )
    file = bytearray(layout.size)
    file[: len(layout.header)] = layout.header
    for place in layout.places:
        name = place.tensor.name
        data = torch.arange(6, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes() if name == "b" else None
        data = {"a": struct.pack("<f", 1.5), "c": bytes([7, 8, 9]), "ü": b""}.get(name, data)
        assert data is not None and len(data) == place.end - place.start
        file[place.start : place.end] = data
    read = load(bytes(file))
    assert read["b"].equal(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    assert (read["a"].item(), read["c"].tolist(), read["ü"].shape) == (1.5, [7, 8, 9], (0,))


def test_every_tensor_is_aligned_to_its_type_and_none_overlaps() -> None:
    layout = lay_out(
        manifest(("x", (3,), "uint8"), ("y", (5,), "bfloat16"), ("z", (1,), "float64"), ("w", (1,), "float32"))
    )
    assert [place.tensor.name for place in layout.places] == ["z", "w", "y", "x"]
    assert all(place.start % size == 0 for place, size in zip(layout.places, (8, 4, 2, 1), strict=True))
    assert layout.places[0].start == len(layout.header)
    assert all(a.end == b.start for a, b in zip(layout.places, layout.places[1:], strict=False))
    assert layout.places[-1].end == layout.size
