from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.observe.run_dir import LineFile, RunDirError, read_lines, write_atomic


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to grow a file beyond ``size`` bytes, and writes what fits: a full disk, for a moment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_reach_the_file_at_once(tmp_path: Path):
    file = LineFile(tmp_path / "a.jsonl")
    file.write(b'{"a":1}\n')
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"a": 1}]
    file.write(b'{"a":2}\n{"a":3}\n')
    assert [row["a"] for row in read_lines(tmp_path / "a.jsonl")] == [1, 2, 3]
    file.close()


def test_a_write_that_does_not_fit_is_undone_and_later_writes_go_on(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    file = LineFile(path)
    file.write(b'{"a":1}\n')
    with files_at_most(12), pytest.raises(RunDirError, match=r"a\.jsonl: cannot write .*: free space there") as error:
        file.write(b'{"a":2}\n')
    assert "\n" not in str(error.value)
    assert path.read_bytes() == b'{"a":1}\n'
    file.write(b'{"a":3}\n')
    file.close()
    assert [row["a"] for row in read_lines(path)] == [1, 3]


def test_a_file_of_another_run_is_refused_and_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    with pytest.raises(RunDirError, match=r"metrics\.jsonl: already exists.*give another --run-dir"):
        LineFile(path)
    assert path.read_text() == "old\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(RunDirError, match=r"missing/a\.jsonl: cannot write"):
        LineFile(tmp_path / "missing" / "a.jsonl")


def test_atomic_write_keeps_the_old_file_when_the_new_one_does_not_fit(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    with files_at_most(100), pytest.raises(RunDirError, match=r"summary\.json: cannot write"):
        write_atomic(path, b"x" * 1000)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_readers_skip_a_last_line_that_a_kill_cut_short(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    whole = b'{"a":1}\n{"a":2}\n'
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert len(list(read_lines(path))) == whole[:cut].count(b"\n")


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n{"a":3}\n')
    with pytest.raises(RunDirError, match=r"a\.jsonl:2: not a JSON object"):
        list(read_lines(path))


def test_no_file_has_no_lines(tmp_path: Path):
    assert list(read_lines(tmp_path / "none.jsonl")) == []
