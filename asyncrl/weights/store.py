"""Versions of the weights in a host's shared memory, one copy for all servers on it: folders that load as they are.

``<folder>/v7`` is version 7, a safetensors file and its manifest: SGLang loads it from there as from a disk, and the
embedded engine maps it. What is still on its way is in ``.v7.part`` and renamed when it is whole and every tensor has
its checksum, so nobody ever sees half a version. A server that has a file open keeps it when its folder is dropped.

A version that is dropped for one to come leaves its memory to it, as new pages cost about as much as all else that is
done with a byte here. Only if nobody uses it any more: no taker of this relay's, no process that has it open or mapped.
Otherwise a thread gives it back to the system, which takes about 0.1 s/GB: the relay must not fall silent for so long.

The folder belongs to one process at a time, which holds a lock on it. A lock ends with its process however that dies,
so whatever unlocked folder is beside it under the same prefix is a dead relay's, and removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.checksum import checksum_of_part
from asyncrl.core import manifest as manifests
from asyncrl.core.manifest import Manifest
from asyncrl.core.weight_file import NAME, lay_out

PREFIX = "asyncrl-relay-"
LOCK = "lock"
OLD = ".old"
FREE = ".free-"


class StoreError(Exception):
    """The folder cannot be used; one line with the remedy."""


class NoRoom(Exception):
    """A version does not fit into the shared memory; one line with the remedy."""


class Corrupt(Exception):
    """A tensor arrived with another checksum than it was sent with; it has to be sent again."""


class Incoming:
    """A version on its way: a file that is filled from its beginning on."""

    def __init__(self, folder: Path, manifest: Manifest, old: Incoming | None = None) -> None:
        """In the memory of ``old``, if that is given: of the same size, unused, and no more after this. Raises
        ``NoRoom``."""
        self.manifest = manifest
        self.layout = lay_out(manifest)
        self.size = self.layout.size
        self.received = 0
        """So many bytes from the beginning are in the file."""
        self.checksums: dict[str, int] = {}
        """Of its tensors, when it is complete."""
        self.folder = folder
        self._tensor = 0
        """The first tensor that is not complete."""
        self._sums = [0] * len(self.layout.places)
        """Each tensor's checksum, of what is there of it."""
        self._readers = 0
        if old is not None:
            self._file: int = old._file
            try:
                old.folder.rename(folder)
            except OSError as error:
                raise self._no_room(error.strerror) from None
            return
        space = os.statvfs(folder.parent)
        if self.size > (free := space.f_bavail * space.f_frsize):
            raise self._no_room(f"{free / 1e9:.2f} GB are free")
        try:
            folder.mkdir()
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.truncate(self._file, self.size)  # others may map it before it is full
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise self._no_room(error.strerror) from None

    @property
    def path(self) -> Path:
        return self.folder / NAME

    def write(self, data: memoryview) -> None:
        """The next bytes. Raises ``NoRoom``, after which nothing has changed; and ``Corrupt``, after which all is to be
        sent again."""
        start, done = self.received, 0
        try:
            while done < len(data):  # a write may be cut short
                done += os.pwrite(self._file, data[done:], start + done)
        except OSError as error:
            raise self._no_room(error.strerror) from None
        self.received = end = start + len(data)
        header, places = self.layout.header, self.layout.places
        if data[: max(0, len(header) - start)] != header[start:end]:
            self.received = 0
            raise Corrupt(f"version {self.manifest.version}: the header arrived corrupt")
        while self._tensor < len(places) and (place := places[self._tensor]).start < end:
            first = max(start, place.start)
            part = data[first - start : min(end, place.end) - start]
            self._sums[self._tensor] += checksum_of_part(part, first - place.start)
            if end < place.end:
                return
            self._tensor += 1

    def complete(self, checksums: Mapping[str, int], target: Path) -> None:
        """Let it appear as ``target``, if its tensors have these ``checksums``. Raises ``NoRoom``; and ``Corrupt``,
        after which everything from the first tensor that was so on is to be sent again."""
        for number, place in enumerate(self.layout.places):
            name = place.tensor.name
            if self._sums[number] % 2**64 != checksums.get(name):
                self._tensor, self.received = number, place.start
                self._sums[number:] = [0] * (len(self._sums) - number)
                raise Corrupt(f"version {self.manifest.version}: tensor {name} arrived corrupt")
        self.checksums = dict(checksums)
        whole = msgspec.structs.replace(self.manifest, checksums=self.checksums)
        try:
            (self.folder / manifests.FILE_NAME).write_bytes(manifests.dumps(whole))
            self.folder.rename(target)
        except OSError as error:
            raise self._no_room(error.strerror) from None
        self.folder = target

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """To read what is there, and what comes; it stays as it is when the version is dropped, until this is left."""
        self._readers += 1
        try:
            with os.fdopen(os.dup(self._file), "rb") as file:
                yield file
        finally:
            self._readers -= 1

    def is_unused(self) -> bool:
        """Nobody reads it, here or in another process: only then the kernel grants a lease to write."""
        if self._readers:
            return False
        try:
            # Of another that opens it meanwhile a signal tells: not one that ends this process.
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def hide(self) -> None:
        """No server finds it any more. Raises ``OSError``."""
        (self.folder / manifests.FILE_NAME).unlink()
        self.folder = self.folder.rename(self.folder.with_name(OLD))

    def close(self) -> None:
        os.close(self._file)

    def _no_room(self, why: str | None) -> NoRoom:
        return NoRoom(
            f"no room for version {self.manifest.version} ({self.size / 1e9:.2f} GB) in {self.folder.parent}: {why}; "
            "make room there, or lower weights.keep_versions"
        )


class Store:
    """One host's folder, named after what tells the relays of a host apart. Use as a context."""

    def __init__(self, memory: Path, name: str) -> None:
        """``memory`` is the shared memory's mount (``/dev/shm``). Raises ``StoreError``."""
        self.folder = memory / f"{PREFIX}{name}"
        self._versions: dict[int, Incoming] = {}
        self._old: Incoming | None = None
        """Was dropped, and is out of sight, but has memory for one to come."""
        self._thread = ThreadPoolExecutor(1, "free")
        self._frees = count()
        self._freed: Future[None] | None = None
        """Done when all memory that was to be freed is."""
        try:
            everyone = os.open(memory, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"--memory {memory}: {error.strerror}; name a folder in shared memory") from None
        try:
            fcntl.flock(everyone, fcntl.LOCK_EX)  # else one that starts could take another that starts for dead
            for other in memory.glob(f"{PREFIX}*"):
                _remove_if_dead(other)
            self.folder.mkdir()
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileExistsError:
            raise StoreError(f"{self.folder} belongs to a relay that runs; choose another --port") from None
        except OSError as error:
            raise StoreError(f"cannot keep weights in {memory} ({error.strerror}); choose another --memory") from None
        finally:
            os.close(everyone)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_all_but(())
        self._thread.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    @property
    def versions(self) -> list[int]:
        """Those that are complete."""
        return sorted(self._versions)

    def get(self, version: int) -> Incoming | None:
        return self._versions.get(version)

    def begin(self, manifest: Manifest) -> Incoming:
        """Raises ``NoRoom``."""
        folder = self.folder / f".v{manifest.version}.part"
        old, self._old = self._old, None
        if old is not None:
            if old.size == lay_out(manifest).size and old.is_unused():
                try:
                    return Incoming(folder, manifest, old)
                except NoRoom:
                    self.discard(old)
                    raise
            self.discard(old)
        try:
            return Incoming(folder, manifest)
        except NoRoom:
            if self._freed is None or self._freed.done():
                raise
            wait([self._freed])
            return Incoming(folder, manifest)

    def complete(self, incoming: Incoming, checksums: Mapping[str, int]) -> None:
        """Raises ``NoRoom`` or ``Corrupt``."""
        version = incoming.manifest.version
        incoming.complete(checksums, self.folder / f"v{version}")
        self._versions[version] = incoming
        self._drop_old()

    def discard(self, incoming: Incoming) -> None:
        """What is not complete and will not be, or is not wanted any more."""
        with suppress(OSError):
            incoming.folder = incoming.folder.rename(self.folder / f"{FREE}{next(self._frees)}")
        self._freed = self._thread.submit(_free, incoming)

    def drop_all_but(self, versions: tuple[int, ...]) -> None:
        """Those that are not here yet may take the place of one that is dropped."""
        dropped = [self._versions.pop(version) for version in sorted(self._versions.keys() - set(versions))]
        if self._versions.keys() >= set(versions):
            self._drop_old()
        elif dropped and self._old is None:
            with suppress(OSError):
                dropped[0].hide()
                self._old = dropped.pop(0)
        for version in dropped:
            self.discard(version)

    def _drop_old(self) -> None:
        old, self._old = self._old, None
        if old is not None:
            self.discard(old)


def _free(incoming: Incoming) -> None:
    incoming.close()
    shutil.rmtree(incoming.folder, ignore_errors=True)


def _remove_if_dead(folder: Path) -> None:
    """Unless its lock is held, or it is another user's."""
    with suppress(OSError):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
