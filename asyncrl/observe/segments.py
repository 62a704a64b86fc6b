"""Segment files: where the run store puts token data. Each only grows, by whole payloads, and is removed whole.

What refers to a payload stands in the database, and is written after it: a payload that a kill cut short is one that
nobody refers to. A run that goes on begins a new file, so it never writes behind a torn end.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.core.advantage import TurnRewards
from asyncrl.observe.run_dir import LineFile, RunDirError

SEGMENT_BYTES = 64 * 1024 * 1024
"""A file that has reached this length is followed by a new one."""


def encode(value: Any) -> bytes:
    """``value`` as msgpack: builtins, records and arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_pack_array)


def decode(data: bytes) -> Any:
    """What was encoded: records as dicts, sequences as tuples, arrays as they were."""
    return _tuples(msgspec.msgpack.decode(data, ext_hook=_unpack_array))


def _pack_array(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(ord(value.typecode), value.tobytes())
    raise TypeError(f"a {type(value).__name__} cannot be stored")


def _unpack_array(code: int, data: memoryview) -> array[Any]:
    column: array[Any] = array(chr(code))
    column.frombytes(data)
    return column


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def advantage(value: Any) -> Any:
    """An advantage, as ``decode`` gives it back."""
    return TurnRewards(**value) if isinstance(value, dict) else value


class Segments:
    """The files ``segment-N`` of ``folder``. ``live`` are the payloads that are still referred to, as ``write`` named
    them. Raises ``RunDirError``."""

    def __init__(self, folder: Path, live: Iterable[str]) -> None:
        self._folder = folder
        try:
            folder.mkdir(exist_ok=True)
            known = sorted(int(path.name.removeprefix("segment-")) for path in folder.glob("segment-*"))
        except OSError as error:
            raise RunDirError(f"{folder}: cannot make the folder ({error.strerror})") from None
        self._live = Counter(_place(name)[0] for name in live)
        self._number = known[-1] if known else 0
        self._file: LineFile | None = None
        self._size = 0
        self._buffered: list[bytes] = []
        for number in known:
            if not self._live[number]:
                self._path(number).unlink(missing_ok=True)

    def write(self, data: bytes) -> str:
        """Append ``data`` with the next ``sync``; the name under which it can be read. Raises ``RunDirError``."""
        if self._file is None or self._size >= SEGMENT_BYTES:
            if self._file is not None:
                self.sync()
                self._file.close()
                self._sweep(self._number, current=False)
            self._number += 1
            self._file, self._size = LineFile(self._path(self._number)), 0
        name = f"{self._number}:{self._size}:{len(data)}:{zlib.crc32(data):08x}"
        self._buffered.append(data)
        self._size += len(data)
        self._live[self._number] += 1
        return name

    def sync(self) -> None:
        """What was written is in the file, and survives also the machine's death. Raises ``RunDirError``."""
        if self._buffered and self._file is not None:
            data, self._buffered = b"".join(self._buffered), []
            self._file.write(data)
            self._file.sync()

    def read(self, name: str) -> bytes:
        """See ``read_payload``."""
        return read_payload(self._folder, name)

    def free(self, name: str) -> None:
        """Nobody refers to this payload any more."""
        number = _place(name)[0]
        self._live[number] -= 1
        self._sweep(number, current=number == self._number and self._file is not None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sweep(self, number: int, *, current: bool) -> None:
        if not self._live[number] and not current:
            del self._live[number]
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return _path(self._folder, number)


def read_payload(folder: Path, name: str) -> bytes:
    """What was written under ``name``. Raises ``RunDirError`` for what is not there whole."""
    number, offset, size, checksum = _place(name)
    path = _path(folder, number)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise RunDirError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
    if len(data) < size or zlib.crc32(data) != checksum:
        raise RunDirError(f"{path}: damaged at byte {offset}; {REMEDY}")
    return data


REMEDY = "go on from a checkpoint: --resume RUN/checkpoints/version-N"


def _place(name: str) -> tuple[int, int, int, int]:
    number, offset, size, checksum = name.split(":")
    return int(number), int(offset), int(size), int(checksum, 16)


def _path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number}"
