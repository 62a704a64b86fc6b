"""What came over a socket or out of a file is data: nothing in the package makes code or objects of it, or gives it to
a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl

ROOT = Path(asyncrl.__path__[0])
REPOSITORY = ROOT.parent
FILES = sorted(file for folder in ("asyncrl", "launch", "recipes") for file in (REPOSITORY / folder).rglob("*.py"))

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "pickle.load", "pickle.loads"}
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list"}
"""torch's, which unpickle what comes from another process."""
SHELLS = {"create_subprocess_shell", "getoutput", "getstatusoutput"}

ALLOWED = {
    ("asyncrl/train/checkpoint.py", "pickle"): "an Unpickler that makes nothing but an index (tests/train)",
    ("asyncrl/envs/alfworld_engine.py", "eval"): "expressions of ALFWorld's own grammar, in its game files",
}


def risks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, top) for name in named if (top := name.partition(".")[0]) in PICKLES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            if called in CALLS or last in OBJECTS | SHELLS:
                yield node.lineno, called
            for keyword in node.keywords:
                if keyword.arg == "shell" or (keyword.arg == "weights_only" and ast.unparse(keyword.value) == "False"):
                    yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_nothing_makes_code_of_data(file: Path) -> None:
    where = str(file.relative_to(REPOSITORY))
    for line, what in risks(ast.parse(file.read_text(encoding="utf-8"))):
        assert (where, what) in ALLOWED, f"{where}:{line}: {what}; read plain data with msgspec, start programs by argv"


def test_every_exception_is_in_use() -> None:
    found = {
        (name, what) for name, _ in ALLOWED for _, what in risks(ast.parse((REPOSITORY / name).read_text("utf-8")))
    }
    assert found >= set(ALLOWED)


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "import yaml", "eval(text)", "exec(text)", "torch.load(path)"),
        *("dist.all_gather_object(a, b)", "subprocess.run(text, shell=True)", "os.system(text)"),
        *("asyncio.create_subprocess_shell(text)", "load(path, weights_only=False)"),
    ],
)
def test_the_check_itself_finds(code: str) -> None:
    assert list(risks(ast.parse(code)))
