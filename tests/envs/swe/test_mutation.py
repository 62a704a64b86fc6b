"""Bugs by mutation."""

from __future__ import annotations

import ast
import json as module
from pathlib import Path

import pytest

from asyncrl.envs.swe.mutation import bug_patch, mutations

SOURCE = '''"""Docstring with 1 < 2."""
LIMIT = 3

@decorated(1)
def f(a: int = 1, é="ü"):
    """a and b"""
    if a < LIMIT and not b:
        return (a) + 2
    return True

class C:
    x = 1 + 2

    def m(self, n):
        return f"{n + 1}" if n is not None else "%s" % n
'''


def test_every_kind_and_only_inside_functions() -> None:
    source = SOURCE.encode()
    found = mutations(source)
    changed = {(m.function, m.kind, source[m.start : m.end].decode(), m.new.decode()) for m in found}
    assert changed == {
        ("f", "comparison", "<", "<="),
        ("f", "boolean", "and", "or"),
        ("f", "condition", "a < LIMIT and not b", "not (a < LIMIT and not b)"),
        ("f", "arithmetic", "+", "-"),
        ("f", "constant", "2", "3"),
        ("f", "constant", "True", "False"),
        ("C.m", "comparison", "is not", "is"),
        ("C.m", "condition", "n is not None", "not (n is not None)"),
    }
    assert found == mutations(source)


@pytest.mark.parametrize("name", ["decoder.py", "encoder.py"])
def test_the_programs_stay_programs(name: str) -> None:
    source = (Path(module.__file__).parent / name).read_bytes()
    found = mutations(source)
    assert len(found) > 30
    for mutation in found:
        broken = mutation.apply(source)
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))
        assert "\n@@ " in bug_patch(name, source, broken)
