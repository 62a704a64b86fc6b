"""Makes the recipe's tasks out of source distributions of real packages from PyPI.

Each task is a bug, made by mutation, that the package's own tests notice: some of them fail with it and pass without.
``train.jsonl`` and ``heldout.jsonl`` are rows in SWE-smith's format (``patch`` is the bug) with ``tree`` in place of an
image; ``trees/`` holds the pristine sources, ``venv/`` what their tests need, shared by all and read-only in a sandbox,
``model/`` the small model that starts (see ``model.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from env import broken_line
from model import warm_start

from asyncrl.env import EnvDown
from asyncrl.envs.sandbox import Limits, open_sandbox
from asyncrl.envs.sandbox.bubblewrap import NOBODY
from asyncrl.envs.swe import SWE, parse_row
from asyncrl.envs.swe.mutation import Mutation, bug_patch, mutations
from asyncrl.envs.swe.repository import run_pytest
from asyncrl.tiny import WarmStartError


class Package(NamedTuple):
    version: str
    source: str
    """Glob of the modules that are mutated."""
    tests: str
    """Glob of the test files."""


PACKAGES = {
    "inflection": Package("0.5.1", "inflection/__init__.py", "test_inflection.py"),
    "toolz": Package("1.2.0", "toolz/*.py", "toolz/tests/test_*toolz.py"),
    "cachetools": Package("8.0.1", "src/cachetools/*.py", "tests/test_*.py"),
    "boltons": Package("26.2.0", "boltons/*utils.py", "tests/test_*.py"),
    "tabulate": Package("0.10.0", "tabulate/__init__.py", "test/test_*.py"),
    "semver": Package("3.1.1", "src/semver/version.py", "tests/test_*.py"),
}
DEFAULT = ["inflection", "toolz", "cachetools", "boltons"]
REQUIREMENTS = ["pytest==9.0.2"]
TEST_TIMEOUT_S = 120.0
MAX_FAILING = 20
"""A bug that breaks more tests than this is too plain."""
AT_ONCE = 2


class SetupError(Exception):
    """One line."""


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise SetupError(f"{' '.join(argv[:6])} …: {lines[-1] if lines else f'exit code {done.returncode}'}")


def make_venv(folder: Path) -> None:
    """Python with pytest, and the sandbox's tree behind all else on its path: modules there shadow nothing."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = ["-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    run(sys.executable, *pip, "install", "--quiet", *REQUIREMENTS)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "testbed.pth").write_text("/testbed\n/testbed/src\n")


def fetch(name: str, out: Path) -> Path:
    """The pristine tree of a package."""
    package = PACKAGES[name]
    downloads = out / "downloads"
    pip = ["-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    run(sys.executable, *pip, "--dest", str(downloads), f"{name}=={package.version}")
    [archive] = downloads.glob(f"{name}-{package.version}.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(out / "trees", filter="data")
    tree = out / "trees" / f"{name}-{package.version}"
    if os.getuid() == 0:  # the sandbox gives up root and must be able to write its copy
        for path in (tree, *tree.rglob("*")):
            os.lchown(path, NOBODY, NOBODY)
    return tree


def make_row(name: str, tree: Path, file: str, mutation: Mutation, patch: str) -> dict[str, Any]:
    module = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return {
        "instance_id": f"{name}.{module.rpartition('.')[2]}.{mutation.function}.{mutation.kind}.{mutation.start}",
        "repo": f"{name}-{PACKAGES[name].version}",
        "tree": f"trees/{tree.name}",
        "patch": patch,
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "problem_statement": "",
        "file": file,
        "function": f"{module}.{mutation.function}",
    }


async def outcomes(env: SWE, row: dict[str, Any], tests: list[str]) -> dict[str, str]:
    """What pytest says of ``tests`` with the row's bug in the tree."""
    instance = parse_row({**row, "FAIL_TO_PASS": tests})
    env.instance = instance
    box = await open_sandbox(env.source(), Limits())
    try:
        if instance.bug:
            _, code = await box.execute(["git", "apply", "-"], timeout_s=60, stdin=instance.bug.encode())
            if code != 0:
                raise SetupError(f"{instance.id}: the bug does not apply")
        return await run_pytest(box, instance, TEST_TIMEOUT_S)
    finally:
        await box.close()


def candidates(tree: Path, package: Package, rng: random.Random) -> list[tuple[str, Mutation]]:
    """Places for bugs, in random order, no function twice before every function had one."""
    found = [
        (str(path.relative_to(tree)), mutation)
        for path in sorted(tree.glob(package.source))
        if path.read_bytes().endswith(b"\n")
        for mutation in mutations(path.read_bytes())
    ]
    rng.shuffle(found)
    seen: dict[tuple[str, str], int] = {}
    rounds: list[tuple[int, str, Mutation]] = []
    for file, mutation in found:
        turn = seen.get((file, mutation.function), 0)
        seen[file, mutation.function] = turn + 1
        rounds.append((turn, file, mutation))
    rounds.sort(key=lambda entry: entry[0])
    return [(file, mutation) for _, file, mutation in rounds]


async def make_tasks(name: str, tree: Path, out: Path, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """``count`` verified tasks of one package, the same for the same seed."""
    package = PACKAGES[name]
    env = SWE(root=str(out))
    tests = sorted(str(path.relative_to(tree)) for path in tree.glob(package.tests))
    blank = {"instance_id": name, "repo": name, "tree": f"trees/{tree.name}", "patch": "", "PASS_TO_PASS": []}
    before = await outcomes(env, {**blank, "problem_statement": ""}, tests)
    good = [test for test, outcome in before.items() if outcome == "passed"]
    if not good:
        raise SetupError(f"{name}: no test of its passes here")
    print(f"setup: {tree.name}: {len(good)} tests pass", flush=True)

    async def verify(file: str, mutation: Mutation) -> dict[str, Any] | None:
        source = (tree / file).read_bytes()
        row = make_row(name, tree, file, mutation, bug_patch(file, source, mutation.apply(source)))
        try:
            broken_line(parse_row(row))
        except ValueError:
            return None
        after = await outcomes(SWE(root=str(out)), row, tests)
        failing = [test for test in good if after.get(test) != "passed"]
        if not 1 <= len(failing) <= MAX_FAILING or len(after) < len(good) // 2:
            return None
        files = {test.partition("::")[0] for test in failing}
        row["FAIL_TO_PASS"] = failing
        row["PASS_TO_PASS"] = [t for t in good if t not in failing and t.partition("::")[0] in files]
        row["problem_statement"] = (
            f"`{row['function']}` in {file} does not do what it should. These tests of the project fail:\n\n"
            + "".join(f"- {test}\n" for test in failing[:5])
        )
        return row

    rows: list[dict[str, Any]] = []
    places = candidates(tree, package, rng)
    while places and len(rows) < count:
        batch = [places.pop(0) for _ in range(min(AT_ONCE, len(places)))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(verify(file, mutation)) for file, mutation in batch]
        rows += [row for task in tasks if (row := task.result()) is not None]
    if len(rows) < count:
        raise SetupError(f"{name}: only {len(rows)} bugs that its tests notice; lower --tasks or add --packages")
    return rows[:count]


async def make(out: Path, packages: list[str], count: int, heldout: int, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    async with asyncio.TaskGroup() as group:
        venv = group.create_task(asyncio.to_thread(make_venv, out / "venv"))
        fetched = [group.create_task(asyncio.to_thread(fetch, name, out)) for name in packages]
    venv.result()
    shutil.rmtree(out / "downloads")
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(packages):
        share = count // len(packages) + (index < count % len(packages))
        tree = fetched[index].result()
        rows += await make_tasks(name, tree, out, share, random.Random(f"{seed}/{name}"))
        print(f"setup: {len(rows)} of {count} tasks", flush=True)
    random.Random(seed).shuffle(rows)
    pairs = [(bad.strip(), good.strip()) for _, bad, good in (broken_line(parse_row(row)) for row in rows[heldout:])]
    warm_start(out, pairs, seed=seed)
    for split, part in (("train", rows[heldout:]), ("heldout", rows[:heldout])):
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def main() -> int:
    parser = argparse.ArgumentParser(description="Make SWE tasks out of packages from PyPI.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=24, help="in all")
    parser.add_argument("--heldout", type=int, default=4, help="of them")
    parser.add_argument("--packages", nargs="+", default=DEFAULT, choices=sorted(PACKAGES))
    args = parser.parse_args()
    try:
        asyncio.run(make(args.out, args.packages, args.tasks, args.heldout, args.seed))
    except (SetupError, WarmStartError, EnvDown, ValueError, OSError, ExceptionGroup) as raised:
        error: Exception = raised
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, SetupError | WarmStartError | EnvDown | ValueError | OSError):
            raise
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
