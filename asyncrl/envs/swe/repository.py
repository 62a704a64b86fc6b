"""What is done to a repository in its box: made ready for the agent, and judged afterwards.

An agent can write whatever it likes, also ``conftest.py``, ``sitecustomize.py`` or the tests themselves, to make them
seem to pass. So nothing is judged where it worked: its changes to files that are not tests or settings of the test
runner are taken as a patch and applied in a fresh box, and a small runner there writes down what pytest says of each
test. Code under test still runs in pytest's own process and could, knowing how, forge its reports from within.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath

from asyncrl.core.types import Record
from asyncrl.env import EnvDown
from asyncrl.envs.sandbox import Sandbox
from asyncrl.envs.swe.rows import Instance, files_of_tests, plain

PREPARE_TIMEOUT_S = 120.0
MAX_PATCH_BYTES = 8 * 2**20
MAX_FILES = 1000

PRELUDES = {
    "swe-bench": "source /opt/miniconda3/bin/activate testbed 2>/dev/null; ",
    "swe-gym": "source /opt/miniconda3/bin/activate testbed 2>/dev/null; ",
    "swe-smith": "source /opt/miniconda3/bin/activate testbed 2>/dev/null; ",
    "r2e-gym": "export PATH=/testbed/.venv/bin:$PATH; ",
}
"""How each data set's images bring their Python to the front."""

_GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.autocrlf=false -c user.name=a -c user.email=a@a "
# The history of a repository may hold the solution, so the agent gets one that begins now.
_HIDE_HISTORY = f"""
rm -rf .git
{_GIT} init -q && echo .venv > .git/info/exclude &&
    {_GIT} add -A && {_GIT} commit -q --allow-empty -m base && {_GIT} rev-parse HEAD"""

_DIFF = f"{_GIT} --literal-pathspecs diff --cached --no-renames --no-ext-diff --no-textconv --no-color"

# Old enough for every Python that an image may have.
RUNNER = """\
import json, sys
import pytest

class Report(object):
    def __init__(self):
        self.outcomes = {}
    def pytest_runtest_logreport(self, report):
        if report.outcome == "failed" or self.outcomes.get(report.nodeid) != "failed":
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[report.nodeid] = report.outcome

report = Report()
pytest.main(sys.argv[2:], plugins=[report])
with open(sys.argv[1], "w") as file:
    json.dump(report.outcomes, file)
"""
_PYTEST = "-q --tb=no -p no:cacheprovider -o addopts= -o xfail_strict=false"


class Grade(Record, frozen=True, kw_only=True):
    """``fail_to_pass`` and ``pass_to_pass`` are shares of the tests that have to pass and do."""

    resolved: bool
    fail_to_pass: float
    pass_to_pass: float


def prelude(instance: Instance) -> str:
    """Shell code before every command; a tree needs none, its Python is on the path."""
    return "" if instance.tree else PRELUDES[instance.dataset]


async def prepare(box: Sandbox, instance: Instance) -> str:
    """Make the task's source out of the pristine one, with a history of one commit: its id. Raises ``ValueError`` for a
    row that does not fit its source."""
    await _apply(box, instance.bug, f"{instance.id}: its patch does not apply to {instance.tree or instance.image}")
    hide_tests = "rm -rf run_tests.sh r2e_tests /r2e_tests /root/r2e_tests" if instance.expected else ""
    done = await box.run(hide_tests + _HIDE_HISTORY, PREPARE_TIMEOUT_S)
    if done.returncode:
        raise EnvDown(f"sandbox: no repository in {instance.tree or instance.image}: {done.output.strip()[-200:]}")
    return done.output.split()[-1]


def is_test_file(path: str) -> bool:
    """Whether an agent's version of a file has no say when it is judged: tests, and what steers Python or pytest."""
    file = PurePosixPath(path)
    steering = {"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "tox.ini"}
    return (
        any(part in ("test", "tests", ".git") for part in file.parts)
        or file.name in steering | {"setup.cfg", "pyproject.toml", "run_tests.sh"}
        or file.name.startswith("test_")
        or file.name.endswith(("_test.py", ".pth"))
        or file.parts[:1] in (("r2e_tests",), (".venv",))
    )


async def changes(box: Sandbox, base: str, instance: Instance) -> str:
    """The agent's patch since ``base``, without test files; empty if there is none, or its git is beyond use."""
    names, code = await _bytes(box, f"{_GIT} add -A && {_DIFF} --name-only -z {base}")
    tests = set(re.findall(r"^(?:---|\+\+\+) [ab]/(.+)$", instance.test_patch, re.MULTILINE))
    files = [n for n in names.decode(errors="surrogateescape").split("\0") if n and n not in tests]
    files = [n for n in files if not is_test_file(n)]
    if code or not files or len(files) > MAX_FILES:
        return ""
    argv = ["bash", "-c", f'{_DIFF} --binary --src-prefix=a/ --dst-prefix=b/ {base} -- "$@"', "diff", *files]
    patch, code = await box.execute(argv, timeout_s=PREPARE_TIMEOUT_S, output_bytes=MAX_PATCH_BYTES)
    return "" if code != 0 else patch.decode(errors="surrogateescape")


async def judge(box: Sandbox, instance: Instance, patch: str, timeout_s: float) -> Grade:
    """Run the task's tests on ``patch`` in a fresh box. Raises ``ValueError`` for a row that does not fit."""
    where = instance.tree or instance.image
    await _apply(box, instance.bug, f"{instance.id}: its patch does not apply to {where}")
    try:
        await _apply(box, patch, "")
    except ValueError:
        return Grade(resolved=False, fail_to_pass=0.0, pass_to_pass=0.0)
    if instance.expected:
        return _grade_expected(instance, await _run_r2e(box, instance, timeout_s))
    await _apply(box, instance.test_patch, f"{instance.id}: its test patch does not apply to {where}")
    return grade(instance, await run_pytest(box, instance, timeout_s))


async def run_pytest(box: Sandbox, instance: Instance, timeout_s: float) -> dict[str, str]:
    """Outcome of each test in the files of the task's tests: ``passed``, ``failed`` or ``skipped``; empty if pytest did
    not come to its end."""
    files = files_of_tests(instance)
    report = f"/tmp/{secrets.token_hex(16)}"  # nobody knows the name before, so nobody has left one there
    await box.write_file(f"{report}.py", RUNNER.encode())
    isolated = "-I " if instance.tree else ""  # images may have their package on PYTHONPATH
    quoted = " ".join(map(shlex.quote, files))
    await box.run(
        f"{prelude(instance)}python {isolated}{report}.py {report} {_PYTEST} {quoted} >/dev/null 2>&1",
        timeout_s,
    )
    try:
        outcomes = json.loads(await box.read_file(report, limit=MAX_PATCH_BYTES))
    except (OSError, ValueError):
        return {}
    return {str(name): str(outcome) for name, outcome in outcomes.items()} if isinstance(outcomes, dict) else {}


def grade(instance: Instance, outcomes: Mapping[str, str]) -> Grade:
    """SWE-bench's rule: every test of FAIL_TO_PASS and of PASS_TO_PASS passes."""

    def share(names: tuple[str, ...]) -> float:
        return sum(outcomes.get(name) == "passed" for name in names) / len(names) if names else 1.0

    repaired, kept = share(instance.fail_to_pass), share(instance.pass_to_pass)
    return Grade(resolved=repaired == 1.0 and kept == 1.0, fail_to_pass=repaired, pass_to_pass=kept)


async def _run_r2e(box: Sandbox, instance: Instance, timeout_s: float) -> dict[str, str]:
    """R2E-Gym's images bring their tests and the script that runs them."""
    script = "[ -e r2e_tests ] || [ ! -e /r2e_tests ] || ln -s /r2e_tests r2e_tests; bash run_tests.sh"
    output, code = await box.execute(
        ["bash", "-c", prelude(instance) + script], timeout_s=timeout_s, output_bytes=MAX_PATCH_BYTES
    )
    return {} if code is None else parse_summary(output.decode(errors="replace"))


_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+)", re.MULTILINE)


def parse_summary(log: str) -> dict[str, str]:
    """Outcomes in pytest's short summary (``-rA``), by R2E-Gym's names: ``Class.test``, without the file."""
    _, _, summary = plain(log).partition("short test summary info")
    return {name.partition("::")[2].replace("::", "."): outcome for outcome, name in _SUMMARY.findall(summary)}


def _grade_expected(instance: Instance, outcomes: Mapping[str, str]) -> Grade:
    """R2E-Gym's rule: the same tests, with the same outcomes."""
    expected = {name.split(" - ")[0]: outcome for name, outcome in instance.expected.items()}
    share = sum(outcomes.get(name) == outcome for name, outcome in expected.items()) / len(expected)
    return Grade(resolved=dict(outcomes) == expected, fail_to_pass=share, pass_to_pass=share)


async def _apply(box: Sandbox, patch: str, problem: str) -> None:
    if not patch:
        return
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    _, code = await box.execute(argv, timeout_s=PREPARE_TIMEOUT_S, stdin=patch.encode(errors="surrogateescape"))
    if code != 0:
        raise ValueError(problem)


async def _bytes(box: Sandbox, command: str) -> tuple[bytes, int | None]:
    return await box.execute(["bash", "-c", command], timeout_s=PREPARE_TIMEOUT_S, output_bytes=MAX_PATCH_BYTES)
