"""Rows of the usual SWE data sets, recognised by their fields, as one record.

| data set | told by | image |
|---|---|---|
| SWE-bench, -Verified | ``environment_setup_commit`` | ``swebench/sweb.eval.x86_64.ID``, ``__`` written ``_1776_`` |
| SWE-Gym | ``base_commit`` without it | ``xingyaoww/sweb.eval.x86_64.ID``, ``__`` written ``_s_`` |
| SWE-smith | ``image_name``, or ``tree`` for a folder | as given; ``patch`` is the *bug*, so gold is its reverse |
| R2E-Gym(-Lite, -Subset) | ``docker_image`` and ``expected_output_json`` | as given |

Only ``problem`` may reach a model. Gold patches, tests, hints, and R2E-Gym's ``prompt`` and ``parsed_commit_content``
(which hold the solution) stay here or are never read.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from asyncrl.core.types import Record


class Instance(Record, frozen=True, kw_only=True):
    """One task, whatever its data set."""

    id: str
    dataset: str
    """``swe-bench``, ``swe-gym``, ``swe-smith`` or ``r2e-gym``."""
    problem: str
    repo: str = ""
    base_commit: str = ""
    image: str = ""
    tree: str = ""
    """Folder of the pristine source, in place of an image; relative to the environment's ``root``."""
    bug: str = ""
    """Patch that makes the task out of the pristine source (SWE-smith)."""
    gold: str = ""
    """Patch that solves it; empty for R2E-Gym, which has it in another form."""
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    expected: Mapping[str, str] = {}
    """R2E-Gym: the outcome of each of its tests, which all have to come out like this."""


def parse_row(row: Mapping[str, Any]) -> Instance:
    """Raises ``ValueError``, in one line, for a row that is of none of the data sets or lacks a field."""
    try:
        if "docker_image" in row and "expected_output_json" in row:
            return _r2e_gym(row)
        if "image_name" in row or "tree" in row:
            return _swe_smith(row)
        if "base_commit" in row and "test_patch" in row:
            return _swe_bench(row)
    except KeyError as error:
        raise ValueError(f"SWE row {row.get('instance_id', '')!r}: it has no {error}") from None
    known = "SWE-bench, SWE-Gym, SWE-smith or R2E-Gym"
    raise ValueError(f"SWE row: its fields are not those of {known} (it has {', '.join(map(str, row))})")


def _swe_bench(row: Mapping[str, Any]) -> Instance:
    name = _text(row, "instance_id")
    if "environment_setup_commit" in row:
        dataset, image = "swe-bench", f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}"
    else:
        dataset, image = "swe-gym", f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}"
    return Instance(
        id=name,
        dataset=dataset,
        problem=_text(row, "problem_statement"),
        repo=_text(row, "repo"),
        base_commit=_text(row, "base_commit"),
        image=f"{image.lower()}:latest",
        gold=_text(row, "patch"),
        test_patch=_text(row, "test_patch"),
        fail_to_pass=_names(row, "FAIL_TO_PASS"),
        pass_to_pass=_names(row, "PASS_TO_PASS"),
    )


def _swe_smith(row: Mapping[str, Any]) -> Instance:
    image, tree = (_text(row, key) if row.get(key) else "" for key in ("image_name", "tree"))
    if not image and not tree:
        raise ValueError(f"SWE row {row['instance_id']!r}: it names neither an image nor a tree")
    return Instance(
        id=_text(row, "instance_id"),
        dataset="swe-smith",
        problem=_text(row, "problem_statement"),
        repo=_text(row, "repo"),
        image=image,
        tree=tree,
        bug=_text(row, "patch"),
        gold=reverse_patch(_text(row, "patch")),
        fail_to_pass=_names(row, "FAIL_TO_PASS"),
        pass_to_pass=_names(row, "PASS_TO_PASS"),
    )


def _r2e_gym(row: Mapping[str, Any]) -> Instance:
    image = _text(row, "docker_image")
    expected = row["expected_output_json"]
    if isinstance(expected, str):
        expected = _json(row, expected)
    if not isinstance(expected, dict) or not expected:
        raise ValueError(f"SWE row {image!r}: expected_output_json names no tests")
    return Instance(
        id=str(row.get("instance_id") or image),
        dataset="r2e-gym",
        problem=_text(row, "problem_statement"),
        repo=_text(row, "repo_name"),
        base_commit=_text(row, "commit_hash"),
        image=image,
        expected={plain(str(name)): str(outcome) for name, outcome in expected.items()},
    )


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        name = row.get("instance_id", row.get("docker_image"))
        raise ValueError(f"SWE row {name!r}: {key} is {type(value).__name__}; it must be text")
    return value


def _names(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of tests; SWE-bench writes it as JSON text."""
    value = row[key]
    if isinstance(value, str):
        value = _json(row, value)
    if not isinstance(value, list):
        raise ValueError(f"SWE row {row['instance_id']!r}: {key} is not a list of tests")
    if key == "FAIL_TO_PASS" and not value:
        raise ValueError(f"SWE row {row['instance_id']!r}: {key} names no test, so that nothing has to be repaired")
    return tuple(map(str, value))


def files_of_tests(instance: Instance) -> list[str]:
    """Where its tests are. Raises ``ValueError`` for tests of other runners (Django's, SymPy's)."""
    files = sorted({name.partition("::")[0] for name in (*instance.fail_to_pass, *instance.pass_to_pass)})
    for name in files:
        if not name.endswith(".py"):
            raise ValueError(f"{instance.id}: {name!r} is not a test of pytest; leave rows of other runners out")
    return files


def _json(row: Mapping[str, Any], text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        name = row.get("instance_id", row.get("docker_image"))
        raise ValueError(f"SWE row {name!r}: a field that must be JSON is not: {error}") from None


def plain(text: str) -> str:
    """Without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


_HUNK = re.compile(r"@@ -(\S+) \+(\S+) @@(.*)", re.DOTALL)


def reverse_patch(patch: str) -> str:
    """The unified diff that undoes ``patch``."""
    lines: list[str] = []
    added: list[str] = []  # held back, so that removals come first, as diff writes them
    old_file = ""
    left = [0, 0]  # lines of the old and of the new side that the hunk still has

    def flush() -> None:
        lines.extend(added)
        added.clear()

    for line in io.StringIO(patch):  # not splitlines: sources have form feeds and the like within lines
        if left[0] > 0 or left[1] > 0:
            if line[0] == "-":
                added.append("+" + line[1:])
                left[0] -= 1
            elif line[0] == "+":
                lines.append("-" + line[1:])
                left[1] -= 1
            else:
                flush()
                lines.append(line)
                if line[0] != "\\":
                    left = [left[0] - 1, left[1] - 1]
            continue
        flush()
        if hunk := _HUNK.fullmatch(line):
            old, new, rest = hunk.groups()
            left = [int(side.partition(",")[2] or 1) for side in (old, new)]
            lines.append(f"@@ -{new} +{old} @@{rest}")
        elif line.startswith("--- "):
            old_file = line[4:]
        elif line.startswith("+++ "):
            lines += [f"--- {_side(line[4:], 'a')}", f"+++ {_side(old_file, 'b')}"]
        elif line.startswith("new file mode"):
            lines.append(line.replace("new", "deleted", 1))
        elif line.startswith("deleted file mode"):
            lines.append(line.replace("deleted", "new", 1))
        elif not line.startswith("index "):
            lines.append(line)
    flush()
    return "".join(lines)


def _side(path: str, prefix: str) -> str:
    return f"{prefix}{path[1:]}" if path[:2] in ("a/", "b/") else path
