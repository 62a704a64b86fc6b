"""What a recipe may hold and nobody should read: secrets, which are left out of every copy that is written or printed.

A text is a secret if its key says so (``api_key``, ``hub_token``, ``password`` …) or if it is the value of an
environment variable whose name does. Of a URL it is the password. Settings of asyncrl's own have none of these names;
those of ``env.kwargs`` are the user's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "(redacted)"
NAME = re.compile(
    r"(^|[^a-z])(api_?key|access_?key|secret|private_?key|token|passwords?|passwd|credentials?|authorization)($|[^a-z])",
    re.IGNORECASE,
)
PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+(?=@)")
SHORTEST = 6
"""Characters of a variable's value that is looked for: a shorter one may be an ordinary word."""


def redacted(table: Any, key: str = "") -> Any:
    """The same without secrets: of plain data as TOML has it."""
    if isinstance(table, Mapping):
        return {name: redacted(value, str(name)) for name, value in table.items()}
    if isinstance(table, list | tuple):
        return [redacted(value, key) for value in table]
    return _text(table, key) if isinstance(table, str) else table


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """A command line: values of ``KEY=VALUE`` go as in a table."""
    kept = []
    for argument in arguments:
        option = "--set=" if argument.startswith("--set=") else ""
        name, equals, value = argument.removeprefix(option).partition("=")
        text = f"{name}={_text(value, name.rpartition('.')[2])}" if equals else _text(argument, "")
        kept.append(option + text)
    return kept


def _text(value: str, key: str) -> str:
    if value and (NAME.search(key) or value.strip("\"'") in _secrets()):
        return REDACTED
    return PASSWORD.sub(rf"\1:{REDACTED}", value)


def _secrets() -> set[str]:
    return {value for name, value in os.environ.items() if len(value) >= SHORTEST and NAME.search(name)}
