"""bench/soak.py, short: what it kills is started again, and its account is in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "bench" / "soak.py"


@pytest.mark.figures
def test_servers_and_ranks_killed_again_and_again_cost_nothing(tiny_recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, str(SOAK), str(tiny_recipe), "--minutes", "0.7", "--every", "8", "--kill"]
    subprocess.run([*command, "server,trainer", "--json", str(out)], check=True, timeout=280)
    account = json.loads(out.read_text())
    assert sum(account["killed"].values()) >= 3
    assert account["steps"] >= 10
    assert account["lost"] == account["trained_twice"] == 0
    assert account["staleness_max"] <= account["staleness_limit"]
    assert account["left_over"] == []
