"""Bugs by mutation: small changes of functions, each at one place, that leave the program's syntax right.

Five kinds: a comparison turned (``<`` to ``<=``, ``in`` to ``not in`` …), ``and`` for ``or``, arithmetic changed (``+``
to ``-`` …), a condition negated, a constant changed (a number by one, ``True`` for ``False``). The text around the
place stays as it was, so the bug's patch is one or two lines.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from asyncrl.core.types import Record

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}


class Mutation(Record, frozen=True, kw_only=True):
    """``new`` in place of the bytes from ``start`` to ``end`` of the source."""

    kind: str
    function: str
    start: int
    end: int
    new: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new + source[self.end :]


def mutations(source: bytes) -> list[Mutation]:
    """All that its functions allow, in the order of the source. Raises ``SyntaxError``."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def operator(left: ast.expr, right: ast.expr, old: str, new: str) -> tuple[int, int, bytes] | None:
        """The operator between two operands, where nothing but space and brackets is beside it."""
        start, end = span(left)[1], span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        match = re.fullmatch(rf"([\s)]*){pattern}([\s(]*)".encode(), source[start:end])
        if match is None:
            return None
        return start + match.end(1), start + match.start(2), new.encode()

    def changes(node: ast.AST) -> Iterator[tuple[str, tuple[int, int, bytes] | None]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                yield "comparison", operator(left, right, *COMPARISONS[type(op)])
            case ast.BoolOp(op=op, values=[left, right]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield "boolean", operator(left, right, old, new)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                if not any(isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side) for side in (left, right)):
                    yield "arithmetic", operator(left, right, *ARITHMETIC[type(op)])
            case ast.If(test=test) | ast.IfExp(test=test):
                start, end = span(test)
                yield "condition", (start, end, b"not (" + source[start:end] + b")")
            case ast.Constant(value=bool(value)):
                yield "constant", (*span(node), str(not value).encode())
            case ast.Constant(value=int(value)) if 0 <= value < 100:
                yield "constant", (*span(node), str(value + 1).encode())

    found = [
        Mutation(kind=kind, function=function, start=change[0], end=change[1], new=change[2])
        for function, node in _in_functions(ast.parse(source))
        for kind, change in changes(node)
        if change is not None
    ]
    return sorted(found, key=lambda m: (m.start, m.end, m.kind))


def bug_patch(path: str, old: bytes, new: bytes) -> str:
    """Unified diff, as ``git apply`` takes it."""
    before, after = ([line.decode() for line in text.splitlines(keepends=True)] for text in (old, new))
    return f"diff --git a/{path} b/{path}\n" + "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"))


def _is_text(node: ast.expr) -> bool:
    return not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes)


def _in_functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node of a function's body, with the function's dotted name; annotations and decorators are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}".lstrip(".")
            is_class = isinstance(node, ast.ClassDef)
            for statement in node.body:
                holder = ast.Module(body=[statement], type_ignores=[])
                yield from ((n, c) for n, c in _in_functions(holder, name) if not is_class or n != name)
        elif inside:
            if not isinstance(node, ast.FormattedValue | ast.JoinedStr):  # positions in f-strings are not the source's
                yield inside, node
                yield from _in_functions(node, inside)
        else:
            yield from _in_functions(node, inside)
