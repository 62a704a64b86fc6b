"""bench/chaos.py, short: everything is killed at once, and what comes of it is read from the books."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parents[2] / "bench" / "chaos.py"


@pytest.mark.timeout(900)
def test_all_processes_killed_at_once_cost_time_and_nothing_else(tiny_recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, str(CHAOS), str(tiny_recipe), "--quick", "--faults", "all-at-once", "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [row] = json.loads(out.read_text())["rows"]
    assert row["tries"] == 1 and row["steps"] >= 5
    assert row["lost"] == row["trained_twice"] == 0
    assert row["consumed"] == 16 * row["steps"]
    assert row["left_over"] == []
