"""The dependency audit of .ci: what is vulnerable fails it, and what could not be asked is not passed off as sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "audit.py"
SOUND = {"name": "rich", "version": "14", "vulns": []}
BROKEN = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.10.1"]}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def told(folder: Path, found: list[dict[str, Any]] | None) -> tuple[int, str]:
    """Exit code and output where pip-audit reports ``found``, or cannot connect."""
    venv = folder / "venv"
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    program = folder / "pip-audit"
    report = json.dumps({"dependencies": found})
    write = f"open(sys.argv[-1], 'w').write({report!r})" if found is not None else "sys.exit('ERROR: cannot connect')"
    program.write_text(f"#!{sys.executable}\nimport sys\n{write}\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    ended = subprocess.run([sys.executable, SCRIPT, venv], env=environment, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout.strip()


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        ([SOUND, UNKNOWN], 0, "audit: 1 packages looked up, 0 vulnerable; not looked up: torch"),
        ([UNKNOWN], 0, "audit: NOT DONE, nothing is known of vulnerabilities: the service knows none of 1 packages"),
        (None, 0, "audit: NOT DONE, nothing is known of vulnerabilities: ERROR: cannot connect"),
    ],
)
def test_what_was_not_looked_up_is_said(
    found: list[dict[str, Any]] | None, code: int, line: str, tmp_path: Path
) -> None:
    assert told(tmp_path, found) == (code, line)


def test_a_vulnerable_package_fails_it_with_the_remedy(tmp_path: Path) -> None:
    code, text = told(tmp_path, [SOUND, BROKEN])
    assert code == 1
    assert text.splitlines()[0] == "audit: jinja2 2.10: PYSEC-1, fixed in 2.10.1"
