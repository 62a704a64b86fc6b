"""``asyncrl status`` of a run that goes on, hangs, is elsewhere, was killed, has ended, or never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.build.status import SILENT_S, Written, show
from asyncrl.cli import main
from asyncrl.config import Recipe, dumps
from asyncrl.observe.run_dir import METRICS, RECIPE, STALLS, STATUS
from asyncrl.observe.summary import write_summary
from asyncrl.observe.tally import Tally

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / RECIPE).write_bytes(dumps(Recipe()))
    (tmp_path / METRICS).write_text('{"version": 11, "time/at": 125.0}\n{"version": 12, "time/at": 131.0}\n')
    return tmp_path


def born(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def write(run_dir: Path, **fields: Any) -> None:
    written: dict[str, Any] = {
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "host": os.uname().nodename,
        "boot": BOOT,
        "at": time.clock_gettime(time.CLOCK_MONOTONIC),
        "time": "2026-11-21T12:00:00+00:00",
        "lines": ["step 12 waits for its batch, 41 s", "  group 17: trajectory 5, env step 3, 41 s"],
    }
    (run_dir / STATUS).write_bytes(msgspec.json.encode(Written(**{**written, **fields})))


def shown(run_dir: Path, code: int) -> list[str]:
    lines: list[str] = []
    assert show(run_dir, lines.append) == code
    return lines


def test_a_run_that_goes_on(run_dir: Path) -> None:
    write(run_dir)
    first, *rest = shown(run_dir, 0)
    assert first.startswith(f"running, process {os.getpid()}, 12 steps, the last one 0:02:11 after its start; ")
    assert rest == ["  step 12 waits for its batch, 41 s", "    group 17: trajectory 5, env step 3, 41 s"]


def test_one_that_has_said_nothing_for_long(run_dir: Path) -> None:
    write(run_dir, at=time.clock_gettime(time.CLOCK_MONOTONIC) - SILENT_S - 100)
    first, second, *rest = shown(run_dir, 1)
    assert "has said nothing for 120 s: it is stopped, or its event loop or disk hangs" in first
    assert second == "what it said last:" and len(rest) == 2


def test_one_that_was_killed(run_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        write(run_dir, pid=process.pid, born=born(process.pid))
        assert shown(run_dir, 0)[0].startswith("running")
        process.send_signal(signal.SIGKILL)
        process.wait()
    lines = shown(run_dir, 1)
    assert lines[0].startswith(f"killed: process {process.pid} is gone") and "the same command goes on" in lines[0]
    assert "    step 12" not in lines[2] and "step 12 waits for its batch" in lines[2]


def test_another_process_of_that_id_is_not_the_run(run_dir: Path) -> None:
    write(run_dir, born=born(os.getpid()) + 1)
    assert shown(run_dir, 1)[0].startswith("killed")


def test_one_on_another_host_tells_when_it_was_so(run_dir: Path) -> None:
    write(run_dir, host="node17", pid=1)
    assert shown(run_dir, 0)[0] == "as it was at 2026-11-21T12:00:00+00:00 on node17, process 1:"


def test_one_that_has_ended(run_dir: Path) -> None:
    summary = Tally(Recipe(), lambda: 0.0).summary(exit="finished", started="", command=(), ledger={})
    write_summary(run_dir, summary)
    assert shown(run_dir, 0) == ["finished after 0:00:00, 12 steps, the last one 0:02:11 after its start"]
    write_summary(run_dir, msgspec.structs.replace(summary, exit="failed: no inference server is left"))
    assert shown(run_dir, 1)[0].startswith("failed: no inference server is left after")


def test_one_that_left_neither(run_dir: Path) -> None:
    assert shown(run_dir, 1)[0].startswith("it was killed before it could write a status or a summary, 12 steps")


def test_reports_of_stalls_are_pointed_to(run_dir: Path) -> None:
    write(run_dir)
    (run_dir / STALLS).mkdir()
    (run_dir / STALLS / "20261121-120000.txt").write_text("no progress\n")
    assert shown(run_dir, 0)[-1].endswith("stalls/20261121-120000.txt")


@pytest.mark.parametrize("content", [None, b"{", b'{"pid": "x"}'])
def test_what_is_no_run_is_one_line(tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / RECIPE).write_bytes(dumps(Recipe()))
        (tmp_path / STATUS).write_bytes(content)
    assert main(["status", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
