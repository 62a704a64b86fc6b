"""An agent in a repository: what it may do, and that nothing but a repaired source brings the reward."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl import Action, EnvDown, Step, Task, ToolCall
from asyncrl.envs.sandbox import Source
from asyncrl.envs.swe import SWE
from asyncrl.envs.swe.mutation import bug_patch
from asyncrl.envs.swe.repository import grade, is_test_file, parse_summary
from asyncrl.envs.swe.rows import parse_row
from asyncrl.envs.swe.tools import ToolError, parse_fenced

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

GOOD = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
BUGGY = GOOD.replace("a + b", "a - b")
TESTS = """\
from calc import add, double

def test_add():
    assert add(1, 2) == 3

def test_double():
    assert double(2) == 4
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the recipe's setup makes it; its virtual environment is the one that runs this test."""
    folder = tmp_path_factory.mktemp("swe")
    tree = folder / "trees" / "calc"
    tree.mkdir(parents=True)
    (tree / "calc.py").write_text(GOOD)
    (tree / "test_calc.py").write_text(TESTS)
    (folder / "venv").symlink_to(sys.prefix)
    return folder


TASK = Task(
    id="t",
    data={
        "instance_id": "calc.add",
        "repo": "calc",
        "tree": "trees/calc",
        "patch": bug_patch("calc.py", GOOD.encode(), BUGGY.encode()),
        "FAIL_TO_PASS": ["test_calc.py::test_add"],
        "PASS_TO_PASS": ["test_calc.py::test_double"],
        "problem_statement": "add does not add.",
    },
)


class Quick(SWE):
    """Without the plugins of the environment that runs this test."""

    def source(self) -> Source:
        plain = super().source()
        return replace(plain, variables={**plain.variables, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def call(name: str, **arguments: Any) -> Action:
    return Action(
        text="", token_ids=[], finish_reason="stop", tool_calls=[ToolCall(id="c", name=name, arguments=arguments)]
    )


def bash(command: str) -> Action:
    return call("bash", command=command)


SUBMIT = call("submit")


@pytest.fixture
async def env(root: Path) -> AsyncIterator[SWE]:
    env = Quick(root=str(root), command_timeout_s=20, test_timeout_s=30)
    await env.reset(TASK)
    yield env
    await env.close()


async def said(env: SWE, action: Action) -> str:
    step = await env.step(action)
    assert not step.done and not isinstance(step.observation, str)
    return str(step.observation.messages[-1]["content"])


async def ended(env: SWE, *actions: Action) -> Step:
    for action in actions:
        await env.step(action)
    return await env.step(SUBMIT)


async def test_the_right_edit_is_rewarded(env: SWE) -> None:
    assert "a - b" in await said(env, call("edit", command="view", path="calc.py"))
    edit = call("edit", command="str_replace", path="calc.py", old_str="a - b", new_str="a + b")
    assert await said(env, edit) == "calc.py: replaced at line 2\n"
    step = await env.step(SUBMIT)
    assert step.done and step.reward == 1.0
    assert step.metrics["resolved"] == step.metrics["fail_to_pass"] == step.metrics["pass_to_pass"] == 1.0
    assert step.metrics["commands"] == 2 and step.metrics["sandbox_s"] > 0


async def test_no_change_and_a_change_that_breaks_more_are_not(env: SWE, root: Path) -> None:
    step = await ended(env)
    assert (step.reward, step.metrics["fail_to_pass"], step.metrics["pass_to_pass"]) == (0.0, 0.0, 1.0)
    other = Quick(root=str(root))
    await other.reset(TASK)
    step = await ended(other, bash("sed -i 's/a - b/a + b/; s/2 \\* a/3 * a/' calc.py"))
    assert (step.reward, step.metrics["fail_to_pass"], step.metrics["pass_to_pass"]) == (0.0, 1.0, 0.0)
    await other.close()


FORGE = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    out = yield
    out.get_result().outcome = 'passed'
"""


TRICKS = {
    "forged": f"""
        echo 'def test_add(): pass\ndef test_double(): pass' > test_calc.py
        printf '{FORGE.replace(chr(10), chr(92) + "n").replace("'", '"')}' > conftest.py
        git add -A; git -c user.name=x -c user.email=x commit -qm x
        echo 'raise SystemExit(0)' > sitecustomize.py; cp sitecustomize.py usercustomize.py; echo 'import os' > x.pth
        printf '[pytest]\\naddopts = -p forge\\n' > pytest.ini; cp pytest.ini tox.ini""",
    "shadow": "echo 'import os; os._exit(0)' > pytest.py; mkdir _pytest; echo > _pytest/__init__.py",
    "exit": "echo 'import os; print(\"PASSED test_calc.py::test_add\"); os._exit(0)' >> calc.py",
    "symlinks": "ln -sf /etc/passwd calc.py; ln -s / host; mkdir d; ln -s ../.. d/tests; ln -s / tests",
    "git gone": "rm -rf .git; echo > .git",
    "git config": "git config diff.external true; git config core.fsmonitor false; git config diff.noprefix true",
    "all gone": "rm -rf * .git",
    "names": "printf '\\377\\376' > calc.py; touch \"$(printf 'new\\nline')\" $(printf '\\377')",
    "left running": "nohup sh -c 'sleep 0.3; while :; do sed -i s/-/+/ /testbed/calc.py; done' & echo",
}


@pytest.mark.parametrize("trick", TRICKS)
async def test_no_trick_brings_the_reward(env: SWE, root: Path, trick: str) -> None:
    step = await ended(env, bash(TRICKS[trick]))
    assert step.done and step.reward == 0.0
    assert (root / "trees/calc/calc.py").read_text() == GOOD


async def test_a_trick_beside_the_repair_takes_nothing_away(env: SWE) -> None:
    step = await ended(env, bash("sed -i 's/a - b/a + b/' calc.py; echo broken > test_calc.py; echo x > conftest.py"))
    assert step.reward == 1.0


async def test_history_does_not_hold_the_solution(env: SWE) -> None:
    assert await said(env, bash("git log --oneline --all | wc -l; git status --short; git diff HEAD | cat")) == "1\n"
    assert "a + b" not in await said(env, bash("git log -p --all | cat; git stash list; git fsck --lost-found"))


async def test_mistakes_are_explained_to_the_agent(env: SWE) -> None:
    for arguments, answer in [
        ({"command": "str_replace", "path": "calc.py", "old_str": "return", "new_str": ""}, "occurs 2 times, not once"),
        ({"command": "str_replace", "path": "calc.py", "old_str": "absent", "new_str": ""}, "occurs 0 times"),
        ({"command": "str_replace", "path": "calc.py", "old_str": "", "new_str": ""}, "old_str is empty"),
        ({"command": "insert", "path": "calc.py", "line": 99, "new_str": "x"}, "between 0 and 6"),
        ({"command": "view", "path": "gone.py"}, "no such file"),
        ({"command": "view", "path": "calc.py", "line": "2"}, "line must be a whole number"),
        ({"command": "dance", "path": "calc.py"}, "no command 'dance'"),
        ({"path": "calc.py"}, "command must be given as text"),
        ({"command": "create", "path": "new.py", "new_str": "\ud800"}, "surrogates not allowed"),
    ]:
        assert answer in await said(env, call("edit", **arguments))
    assert "no tool 'fly'" in await said(env, call("fly"))
    bad = Action(
        text="", token_ids=[], finish_reason="stop", tool_calls=[ToolCall(id="c", name="bash", error="bad JSON")]
    )
    assert "cannot be read: bad JSON" in await said(env, bad)
    assert "Go on with a tool call" in await said(env, Action(text="hm", token_ids=[], finish_reason="stop"))
    assert "[exit code 3]" in await said(env, bash("exit 3"))
    assert await said(env, bash("true")) == "[no output]\n"


async def test_insert_create_and_a_part_of_a_file(env: SWE) -> None:
    await env.step(call("edit", command="create", path="new.txt", new_str="one\ntwo"))
    await env.step(call("edit", command="insert", path="new.txt", line=2, new_str="three"))
    await env.step(call("edit", command="insert", path="new.txt", line=0, new_str="zero\n"))
    assert await said(env, bash("cat new.txt")) == "zero\none\ntwo\nthree\n"
    assert (
        await said(env, call("edit", command="view", path="new.txt", line=2, end_line=3))
        == "     2\tone\n     3\ttwo\n"
    )


async def test_the_fenced_protocol_and_the_last_turn(root: Path) -> None:
    env = Quick(root=str(root), protocol="text", turns=3)
    opening = await env.reset(TASK)
    assert "add does not add." in opening.text and "```bash" in opening.text

    def say(text: str, turn: int) -> Action:
        return Action(text=text, token_ids=[], finish_reason="stop", turn=turn)

    step = await env.step(say("Let me see.\n```bash\ncat calc.py\n```\n", 0))
    assert not isinstance(step.observation, str) and "a - b" in step.observation.text
    step = await env.step(say("no block", 1))
    assert not isinstance(step.observation, str) and "found 0 blocks" in step.observation.text
    edit = "```edit calc.py\n<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```"
    step = await env.step(say(edit, 2))
    assert step.done and step.reward == 1.0, "the last turn is judged without a submit"
    await env.close()


@pytest.mark.parametrize(
    "text", ["", "```python\nx\n```", "```bash\na\n```\n```bash\nb\n```", "```edit f\nnothing\n```"]
)
def test_an_unclear_turn_is_refused(text: str) -> None:
    with pytest.raises(ToolError, match="fenced block"):
        parse_fenced(text)


async def test_many_at_once(root: Path) -> None:
    async def one(repair: bool) -> None:
        env = Quick(root=str(root))
        try:
            await env.reset(TASK)
            actions = [bash("sed -i 's/a - b/a + b/' calc.py")] if repair else []
            assert (await ended(env, *actions)).reward == float(repair)
        finally:
            await env.close()

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(one(number % 2 == 0))


async def test_what_does_not_fit_is_named(root: Path) -> None:
    env = SWE(root=str(root))
    with pytest.raises(EnvDown, match=r"no folder .*trees/gone"):
        await env.reset(Task(id="t", data={**TASK.data, "tree": "trees/gone"}))
    with pytest.raises(ValueError, match=r"calc\.add: its patch does not apply to trees/calc"):
        await env.reset(Task(id="t", data={**TASK.data, "patch": TASK.data["patch"].replace("a + b", "a * b")}))
    await env.close()
    with pytest.raises(ValueError, match="protocol must be tools, fenced or text"):
        SWE(protocol="morse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        *(("calc.py", False), ("src/pkg/testing.py", False), ("pkg/contest.py", False), ("docs/x.rst", False)),
        *(("tests/data/x.json", True), ("pkg/test_x.py", True), ("x_test.py", True), ("a/conftest.py", True)),
        *(("sitecustomize.py", True), ("setup.cfg", True), ("tests", True), ("evil.pth", True)),
    ],
)
def test_which_files_have_no_say(path: str, is_test: bool) -> None:
    assert is_test_file(path) == is_test


def test_r2e_gyms_rule() -> None:
    log = (
        "lots\n=== \x1b[1mshort test summary info\x1b[0m ===\n\x1b[32mPASSED\x1b[0m r2e_tests/t.py::TestA::test_b\n"
        "FAILED r2e_tests/t.py::test_c - assert 0\n"
    )
    assert parse_summary(log) == {"TestA.test_b": "PASSED", "test_c": "FAILED"}
    assert parse_summary("no summary") == {}


def test_swe_benchs_rule() -> None:
    instance = parse_row({**TASK.data, "PASS_TO_PASS": json.dumps(["a::x", "a::y"])})
    half = grade(instance, {"test_calc.py::test_add": "passed", "a::x": "passed", "a::y": "skipped"})
    assert (half.resolved, half.fail_to_pass, half.pass_to_pass) == (False, 1.0, 0.5)
