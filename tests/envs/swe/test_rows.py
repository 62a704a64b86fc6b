"""Rows of the four data sets become one record; what leaks a solution stays behind."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs.swe import SWE, parse_row
from asyncrl.envs.swe.env import checked_row
from asyncrl.envs.swe.mutation import bug_patch
from asyncrl.envs.swe.rows import reverse_patch

PATCH = "diff --git a/f.py b/f.py\n--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n x\n-SECRET old\n+SECRET new\n"
BENCH: dict[str, Any] = {
    "repo": "django/django",
    "instance_id": "Django__django-11099",
    "base_commit": "d26b2424",
    "patch": PATCH,
    "test_patch": "SECRET tests",
    "problem_statement": "It is broken.",
    "hints_text": "SECRET hint",
    "version": "3.0",
    "FAIL_TO_PASS": '["tests/a.py::b", "tests/a.py::c"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "abc",
}
GYM = {k: v for k, v in BENCH.items() if k != "environment_setup_commit"} | {"FAIL_TO_PASS": ["t.py::b"]}
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__0fceycuu",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "patch": PATCH,
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": ["t.py::b"],
    "PASS_TO_PASS": ["t.py::c"],
}
R2E = {
    "repo_name": "orange3",
    "docker_image": "namanjain12/orange3_final:2d9617b",
    "commit_hash": "2d9617b",
    "problem_statement": "It is broken.",
    "expected_output_json": json.dumps({"TestA.test_b": "PASSED", "\x1b[1mTestA.test_c\x1b[0m": "FAILED"}),
    "parsed_commit_content": "SECRET",
    "execution_result_content": "SECRET",
    "prompt": "SECRET",
}


@pytest.mark.parametrize(
    ("row", "dataset", "image"),
    [
        (BENCH, "swe-bench", "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"),
        (GYM, "swe-gym", "xingyaoww/sweb.eval.x86_64.django_s_django-11099:latest"),
        (SMITH, "swe-smith", "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536"),
        (R2E, "r2e-gym", "namanjain12/orange3_final:2d9617b"),
    ],
)
async def test_each_format_is_recognised_and_leaks_nothing(row: dict[str, Any], dataset: str, image: str) -> None:
    instance = parse_row(row)
    assert (instance.dataset, instance.image, instance.problem) == (dataset, image, "It is broken.")
    for protocol in ("tools", "fenced", "text"):
        env = SWE(protocol=protocol)
        env.instance = instance
        opening = env.opening()
        assert "It is broken." in str(opening) and "SECRET" not in str(opening)
        assert bool(opening.tools) == (protocol == "tools") and bool(opening.text) == (protocol == "text")
        assert env.source().image == image


def test_what_the_fields_mean() -> None:
    bench = parse_row(BENCH)
    assert bench.fail_to_pass == ("tests/a.py::b", "tests/a.py::c") and bench.pass_to_pass == ()
    assert (bench.gold, bench.bug, bench.base_commit) == (PATCH, "", "d26b2424")
    smith = parse_row(SMITH)
    assert smith.bug == PATCH and "-SECRET new\n+SECRET old\n" in smith.gold
    assert dict(parse_row(R2E).expected) == {"TestA.test_b": "PASSED", "TestA.test_c": "FAILED"}
    assert parse_row({**SMITH, "image_name": None, "tree": "trees/x"}).tree == "trees/x"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"its fields are not those of .* \(it has prompt\)"),
        ({k: v for k, v in BENCH.items() if k != "PASS_TO_PASS"}, "'Django__django-11099': it has no 'PASS_TO_PASS'"),
        ({**BENCH, "FAIL_TO_PASS": "[oops"}, "must be JSON is not"),
        ({**BENCH, "FAIL_TO_PASS": "3"}, "FAIL_TO_PASS is not a list"),
        ({**R2E, "expected_output_json": "{}"}, "names no tests"),
        ({**BENCH, "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS names no test"),
        ({**BENCH, "problem_statement": None}, "problem_statement is NoneType; it must be text"),
        ({**SMITH, "patch": None}, "patch is NoneType"),
        ({**SMITH, "image_name": None}, "neither an image nor a tree"),
        ({**BENCH, "FAIL_TO_PASS": '["test_x (tests.T)"]'}, "is not a test of pytest; leave rows of other runners out"),
    ],
)
def test_a_bad_row_is_refused_in_one_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        checked_row(row)
    assert "\n" not in str(raised.value)


def test_a_reversed_patch_undoes_the_patch(tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "f"
    for _ in range(10):
        old = [f"line {rng.randrange(30)}" + rng.choice(["", "\f", "\u2028"]) + "\n" for _ in range(60)]
        new = [line for line in old if rng.random() > 0.1]
        for _ in range(3):
            new.insert(rng.randrange(len(new)), "- new\n")
        before, after = ("".join(lines).encode() for lines in (old, new))
        file.write_bytes(after)
        patch = reverse_patch(bug_patch("f", before, after))
        subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True)
        assert file.read_bytes() == before
        assert reverse_patch(patch) == bug_patch("f", before, after)


def test_reversing_a_new_file_deletes_it(tmp_path: Path) -> None:
    patch = "diff --git a/n b/n\nnew file mode 100644\nindex 000..111\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    (tmp_path / "n").write_text("x\n")
    subprocess.run(["git", "apply", "-"], input=reverse_patch(patch).encode(), cwd=tmp_path, check=True)
    assert not (tmp_path / "n").exists()
