"""A relay's folder: whose it is, what becomes visible, whose memory is used again, and what is said when it is full."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file

import asyncrl.weights.store
from asyncrl.checksum import checksum_of_part
from asyncrl.core.manifest import FILE_NAME, Manifest, TensorInfo, loads
from asyncrl.weights.store import FREE, Incoming, NoRoom, Store, StoreError


def test_a_folder_belongs_to_one_relay(tmp_path: Path) -> None:
    with Store(tmp_path, "1"):
        with pytest.raises(StoreError, match="asyncrl-relay-1 belongs to a relay that runs; choose another --port"):
            Store(tmp_path, "1")
        with Store(tmp_path, "2"):
            assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())


def test_what_a_dead_relay_left_is_removed(tmp_path: Path) -> None:
    for name in ("1", "7"):
        (tmp_path / f"asyncrl-relay-{name}" / "v3").mkdir(parents=True)
        (tmp_path / f"asyncrl-relay-{name}" / ".v4.part").mkdir()
    (tmp_path / "somebody-elses").touch()
    with Store(tmp_path, "1") as store:
        assert store.versions == []
        assert sorted(path.name for path in tmp_path.iterdir()) == ["asyncrl-relay-1", "somebody-elses"]


def test_what_cannot_fit_is_refused_before_its_first_byte(tmp_path: Path) -> None:
    huge = TensorInfo(name="a", shape=(2**50,), dtype="float32")
    with Store(tmp_path, "1") as store:
        with pytest.raises(
            NoRoom, match=r"no room for version 9 \(4503\d+\.\d+ GB\) in .*asyncrl-relay-1: .* GB are free"
        ):
            store.begin(Manifest(version=9, tensors=(huge,)))
        assert [path.name for path in store.folder.iterdir()] == ["lock"]


def test_memory_that_runs_full_in_mid_version_is_one_line_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = (TensorInfo(name="a", shape=(1024,), dtype="float32"),)
    with Store(tmp_path, "1") as store:
        incoming = store.begin(Manifest(version=9, tensors=infos))
        file = memoryview(incoming.layout.header + bytes(4096))
        incoming.write(file[:2000])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(NoRoom, match=r"no room for version 9 .*: No space left on device; make room there"):
            incoming.write(file[2000:])
        monkeypatch.undo()
        assert incoming.received == 2000
        incoming.write(file[2000:])
        store.complete(incoming, {"a": 0})
        assert store.versions == [9]


def kept(store: Store, version: int, value: int, count: int = 1024) -> Path:
    """A version of one tensor, of bytes ``value``, in the store; its file."""
    tensor = TensorInfo(name="a", shape=(count,), dtype="uint8")
    incoming = store.begin(Manifest(version=version, tensors=(tensor,)))
    data = bytes([value]) * count
    incoming.write(memoryview(incoming.layout.header + data))
    store.complete(incoming, {"a": checksum_of_part(memoryview(data), 0)})
    return store.folder / f"v{version}" / "model.safetensors"


def names(store: Store) -> list[str]:
    """In its folder, but for what is being given back."""
    return sorted(path.name for path in store.folder.iterdir() if not path.name.startswith(FREE))


def test_a_version_takes_the_memory_of_the_one_that_is_dropped_for_it(tmp_path: Path) -> None:
    with Store(tmp_path, "1") as store:
        inode = kept(store, 1, 1).stat().st_ino
        kept(store, 2, 2)
        store.drop_all_but((2, 3))
        assert names(store) == [".old", "lock", "v2"]
        file = kept(store, 3, 3)
        assert file.stat().st_ino == inode
        assert (load_file(file)["a"] == 3).all()
        assert loads((file.parent / FILE_NAME).read_bytes()).version == 3
        assert names(store) == ["lock", "v2", "v3"]
        store.drop_all_but((3, 4))
        kept(store, 4, 4, count=2048)
        assert names(store) == ["lock", "v3", "v4"], "another size: let go"
        store.drop_all_but((4, 5))
        store.drop_all_but((4,))
        assert names(store) == ["lock", "v4"], "nothing is to come any more"


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_memory_that_a_server_still_uses_is_not_taken(tmp_path: Path, how: str) -> None:
    with Store(tmp_path, "1") as store, kept(store, 1, 1).open("rb") as file:
        used = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if how == "mapped":
            file.close()
        store.drop_all_but((2,))
        kept(store, 2, 2)
        assert used[-1024:] == bytes([1]) * 1024


def test_memory_that_a_taker_still_takes_from_is_not_taken(tmp_path: Path) -> None:
    with Store(tmp_path, "1") as store:
        kept(store, 1, 1)
        version = store.get(1)
        assert version is not None
        with version.open() as file:
            store.drop_all_but((2,))
            kept(store, 2, 2)
            assert file.read()[-1024:] == bytes([1]) * 1024


def test_nobody_waits_for_memory_to_be_given_back_but_who_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, given_back = threading.Event(), threading.Event()

    def slowly(incoming: Incoming) -> None:
        assert go_on.wait(30)
        given_back.set()
        free(incoming)

    free = asyncrl.weights.store._free
    monkeypatch.setattr(asyncrl.weights.store, "_free", slowly)
    with Store(tmp_path, "1") as store:
        kept(store, 1, 1)
        store.drop_all_but(())
        assert names(store) == ["lock"] and not given_back.is_set()
        kept(store, 1, 2)
        assert names(store) == ["lock", "v1"] and not given_back.is_set(), "of the same name"
        store.drop_all_but(())
        space = os.statvfs(tmp_path)

        def full(path: Path) -> SimpleNamespace:
            """Until it is given back."""
            if given_back.is_set():
                return SimpleNamespace(f_bavail=space.f_bavail, f_frsize=space.f_frsize)
            go_on.set()
            return SimpleNamespace(f_bavail=0, f_frsize=1)

        monkeypatch.setattr(os, "statvfs", full)
        kept(store, 2, 3)
        assert given_back.is_set() and names(store) == ["lock", "v2"]
    assert not list(tmp_path.iterdir())


def test_a_memory_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"--memory .*nowhere: No such file or directory; name a folder"):
        Store(tmp_path / "nowhere", "1")
