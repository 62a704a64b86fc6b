"""Every figure script says what it shows, imports, and (``-m figures``) runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "bench" / "figures"
SCRIPTS = sorted(path.stem for path in FIGURES.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_shows_and_how_to_run_it(script: Any, name: str) -> None:
    module = script(name)
    assert f"python bench/figures/{name}.py" in module.__doc__
    assert callable(module.measure) and callable(module.draw)


@pytest.mark.figures
@pytest.mark.parametrize("name", SCRIPTS)
def test_quick_figures(name: str, tmp_path: Path) -> None:
    out = tmp_path / "points.json"
    command = [sys.executable, str(FIGURES / f"{name}.py"), "--quick", "--json", str(out)]
    subprocess.run(command, check=True, timeout=280)
    points = json.loads(out.read_text())
    assert points
    assert all({"figure", "point", "paper", "ours", "assumption"} <= point.keys() for point in points)
