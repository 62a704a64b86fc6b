"""Known vulnerabilities of the packages in a virtual environment, by pip-audit, which must be on the PATH.

    python .ci/audit.py VENV

Exit code 1 if there are any. Where the advisories cannot be reached nothing is known: that is said, and is no failure.
pip-audit itself passes a package that its service does not know, so what was looked up is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = ("pip-audit", "--progress-spinner", "off", "--format", "json")


def audit(packages: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ended = subprocess.run(
            [*COMMAND, "--path", str(packages), "--output", str(report)], capture_output=True, text=True
        )
        if not report.exists():  # whatever it found it would have written
            return _not_done((ended.stderr.strip() or "pip-audit gave no reason").splitlines()[-1])
        found = json.loads(report.read_text())["dependencies"]
    known = [package for package in found if "vulns" in package]
    if not known:
        return _not_done(f"the service knows none of {len(found)} packages")
    affected = [package for package in known if package["vulns"]]
    for package in affected:
        for one in package["vulns"]:
            remedy = f"fixed in {', '.join(one['fix_versions'])}" if one["fix_versions"] else "not fixed yet"
            print(f"audit: {package['name']} {package['version']}: {one['id']}, {remedy}")
    others = [package["name"] for package in found if "vulns" not in package]
    print(
        f"audit: {len(known)} packages looked up, {len(affected)} vulnerable; not looked up: {', '.join(others) or '–'}"
    )
    return int(bool(affected))


def _not_done(reason: str) -> int:
    print(f"audit: NOT DONE, nothing is known of vulnerabilities: {reason}")
    return 0


if __name__ == "__main__":
    [site_packages] = Path(sys.argv[1]).glob("lib/python*/site-packages")
    sys.exit(audit(site_packages))
