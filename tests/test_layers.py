"""The tree is the map, and this guards it: import direction, purity of the core, structured concurrency, file size.

    core ← env ← ports, wire, shield, access ← config ← worlds ← build ← cli

The worlds are runtime, engine, serve, train, weights, sim, envs, observe, and the adapter modules workers, env_workers,
processes, leftovers, servers, tokenizer, watchdog, loading, checksum, garbage. They know what is below them and not
each other; ``build`` wires them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl

ROOT = Path(asyncrl.__path__[0])
MODULES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 500

HEIGHT = {
    "core": 0,
    "env": 1,
    "": 2,
    "ports": 2,
    "wire": 2,
    "shield": 2,
    "access": 2,
    "config": 3,
    "build": 5,
    "cli": 6,
}
WORLDS = 4
SAME_LEVEL = {
    ("servers", "processes"): "a local server is a child process",
    ("servers", "leftovers"): "SGLang tidies nothing up",
    ("servers", "weights.store"): "where a relay keeps its weights, which one that is killed leaves there",
    ("envs", "leftovers"): "nor does a forkserver whose parent is killed",
    ("loading", "envs.single_turn"): "a reward function is played in the environment for single turns",
    ("loading", "runtime.reward"): "the type of a reward function",
    ("loading", "runtime.rollout"): "the type of a rollout function",
    ("env_workers", "processes"): "a worker is a child process",
    ("env_workers", "loading"): "a worker imports the class that the recipe names",
    ("train", "processes"): "the torchrun job is a child process",
    ("envs", "processes"): "an agent program is a child process",
    ("train", "checksum"): "what the sending end of a transport says of each tensor",
    ("serve", "checksum"): "and the receiving end compares",
    ("train", "loading"): "a user's loss is named as an environment is",
    ("train", "weights.sender"): "rank 0 is the sending end of a transport",
    ("train", "weights.outlet"): "and of another",
    ("weights", "checksum"): "a relay compares what it received",
}
"""Imports between worlds that the tree needs, each with its reason."""
OUTSIDE_TASK_GROUPS = {
    "shield.py": "the one task that must outlive a cancellation, joined before its call returns",
    "runtime/user_code.py": "user code that swallows every cancellation, which a group would wait for without end",
}


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def name_of(file: Path) -> str:
    """``runtime/reward.py`` → ``runtime.reward``; the package itself is the empty name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(file) for file in MODULES}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every module of asyncrl that the file imports, also inside functions."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            # What is imported from a package may be a module of it.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target == "asyncrl" or target.startswith("asyncrl."):
                name = target.removeprefix("asyncrl").removeprefix(".")
                while name not in NAMES:
                    name = name.rpartition(".")[0]
                yield node.lineno, name


def height(name: str) -> int:
    return HEIGHT.get(name.partition(".")[0], WORLDS)


def allowed(importer: str, imported: str) -> bool:
    top, target = importer.partition(".")[0], imported.partition(".")[0]
    if top == target or height(imported) < height(importer):
        return True
    return any(top == a and (imported == b or imported.startswith(f"{b}.")) for a, b in SAME_LEVEL)


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_imports_point_down(file: Path) -> None:
    importer = name_of(file)
    if not importer:
        return  # what a user imports: any of it
    for number, imported in imports(file):
        assert allowed(importer, imported), (
            f"{file}:{number}: {importer} imports {imported or 'asyncrl'}; let build wire them, or move what both need"
        )


def test_every_exception_to_the_layers_is_in_use() -> None:
    found = {(name_of(f).partition(".")[0], imported) for f in MODULES for _, imported in imports(f)}
    assert set(SAME_LEVEL) <= found


def test_every_top_level_name_has_its_place() -> None:
    worlds = {"runtime", "engine", "serve", "train", "weights", "sim", "envs", "observe"}
    worlds |= {"workers", "env_workers", "processes", "servers", "tokenizer", "watchdog", "loading", "checksum"}
    worlds |= {"garbage", "leftovers", "tiny"}
    assert {name.partition(".")[0] for name in NAMES} == worlds | set(HEIGHT)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        *(("core.types", "env"), ("ports", "config"), ("config", "runtime.reward"), ("build.real", "cli")),
        *(("runtime.llm_proxy", "engine.sglang"), ("observe.report", "runtime"), ("runtime.reward", "loading")),
        *(("sim.engine", "build.virtual"), ("train.client", "servers"), ("loading", "runtime.llm_proxy")),
    ],
)
def test_the_check_itself_refuses(importer: str, imported: str) -> None:
    assert not allowed(importer, imported)


# --- purity -----------------------------------------------------------------------------------------------------------


def external(tree: ast.Module) -> set[str]:
    """Top-level names of everything imported."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def under(*folders: str) -> list[Path]:
    return [f for f in MODULES if f.relative_to(ROOT).parts[0] in folders]


PURE = {
    *("__future__", "array", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "hashlib"),
    *(
        "heapq",
        "itertools",
        "math",
        "operator",
        "random",
        "statistics",
        "struct",
        "typing",
        "msgspec",
        "numpy",
        "asyncrl",
    ),
}


@pytest.mark.parametrize("file", under("core"), ids=name_of)
def test_core_is_pure(file: Path) -> None:
    tree = parse(file)
    assert external(tree) <= PURE, f"{file} imports {external(tree) - PURE}"
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith | ast.AsyncFor), where
        if isinstance(node, ast.Name):
            assert node.id not in {"open", "print", "input", "eval", "exec", "__import__"}, where


@pytest.mark.parametrize("file", under("runtime", "core"), ids=name_of)
def test_time_randomness_and_threads_are_injected(file: Path) -> None:
    tree = parse(file)
    banned = {"time", "datetime", "threading", "uuid", "secrets", "socket", "subprocess", "concurrent", "torch", "os"}
    assert not external(tree) & banned, f"{file} imports {external(tree) & banned}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            use, where = f"{node.value.id}.{node.attr}", f"{file}:{node.lineno}"
            assert not use.startswith("random.") or use == "random.Random", f"{where}: {use} is global; inject a Random"
            assert use not in {"asyncio.to_thread", "loop.run_in_executor"}, f"{where}: use the Blocking port"
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            assert [alias.name for alias in node.names] == ["Random"], f"{file}:{node.lineno}"


# --- structured concurrency -------------------------------------------------------------------------------------------


def task_groups(tree: ast.Module) -> set[str]:
    """Names bound by ``async with asyncio.TaskGroup() as NAME``, or annotated as one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                if ast.unparse(item.context_expr) == "asyncio.TaskGroup()" and isinstance(item.optional_vars, ast.Name):
                    names.add(item.optional_vars.id)
        elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "asyncio.TaskGroup":
            names.add(node.arg)
    return names


def loose_tasks(tree: ast.Module) -> list[int]:
    """Lines that start a task outside a TaskGroup."""
    groups, lines = task_groups(tree), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        loose = {"create_task", "ensure_future"} | (
            {"gather", "run_coroutine_threadsafe"} if owner == "asyncio" else set()
        )
        if node.func.attr in loose and not (node.func.attr == "create_task" and owner in groups):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_every_task_belongs_to_a_task_group(file: Path) -> None:
    lines = loose_tasks(parse(file))
    if str(file.relative_to(ROOT)) in OUTSIDE_TASK_GROUPS:
        assert len(lines) == 1
    else:
        assert not lines, f"{file}:{lines[0]}: start it in a TaskGroup, so that it is awaited and its error is seen"


def test_the_task_check_itself_finds_loose_tasks() -> None:
    inside = "async def f():\n async with asyncio.TaskGroup() as g:\n  g.create_task(h())"
    assert loose_tasks(ast.parse(inside)) == []
    for call in (
        "asyncio.create_task(h())",
        "loop.create_task(h())",
        "asyncio.gather(h())",
        "asyncio.ensure_future(h())",
    ):
        assert loose_tasks(ast.parse(f"async def f():\n {call}")) == [2]


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_no_error_is_swallowed_whole(file: Path) -> None:
    """``except Exception: pass`` (or a bare ``except``, or ``suppress(Exception)``) hides bugs."""
    broad = {"Exception", "BaseException"}
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{file}:{node.lineno}: bare except"
            silent = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            assert not (silent and ast.unparse(node.type) in broad), f"{file}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert not broad & {ast.unparse(a) for a in node.args}, f"{file}:{node.lineno}"


WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow"}
TELLS_THE_TIME = {"cli.py": "a run is named after it, and its summary tells it", "build/status.py": "so are reports"}


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_nothing_is_measured_by_the_time_of_day(file: Path) -> None:
    """It jumps: by hand, by NTP, at the end of a virtual machine's sleep."""
    if str(file.relative_to(ROOT)) not in TELLS_THE_TIME:
        found = [n for n in ast.walk(parse(file)) if isinstance(n, ast.Call) and ast.unparse(n.func) in WALL_CLOCK]
        assert not found, f"{file}:{found[0].lineno}: {ast.unparse(found[0])}; use loop.time() or time.monotonic()"


# --- readability ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_a_module_is_short_and_says_what_it_is_for(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    if text.strip():
        assert ast.get_docstring(parse(file)), f"{file} has no docstring"
