"""What an agent can do: run bash, edit by exact lines, submit. Told to models that know tools as JSON schema, and to
all others as one fenced block a turn; both become the same calls.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from asyncrl.env import Tool, ToolCall
from asyncrl.envs.dialogue import fenced_blocks
from asyncrl.envs.sandbox import Sandbox, told

MAX_VIEW_LINES = 400


def _tool(name: str, description: str, required: list[str], **properties: Mapping[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT = {"type": "string"}
TOOLS: list[Tool] = [
    _tool(
        "bash",
        "Run a command in the repository. Nothing it leaves running stays; there is no network.",
        ["command"],
        command=_TEXT,
    ),
    _tool(
        "edit",
        "view: show a file with line numbers. str_replace: replace old_str, which must occur exactly once, by new_str. "
        "insert: put new_str behind line `line` (0: at the top). create: write new_str as the whole file.",
        ["command", "path"],
        command={"type": "string", "enum": ["view", "str_replace", "insert", "create"]},
        path=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        line={"type": "integer"},
        end_line={"type": "integer", "description": "view: show from `line` to here"},
    ),
    _tool("submit", "Say that the work is done; the tests are run then.", []),
]

FENCED_HELP = """\
Each turn, write exactly one fenced block. Run a command:
```bash
grep -n "def f" package/module.py
```
Or replace lines of a file (they must occur in it exactly once):
```edit package/module.py
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
Or say that the work is done; the tests are run then:
```submit
```
"""

_REPLACE = re.compile(r"<<<<<<< SEARCH\n(.*?)^=======\n(.*)^>>>>>>> REPLACE\n?", re.DOTALL | re.MULTILINE)


class ToolError(Exception):
    """The agent's mistake, in words for the agent."""


def parse_fenced(text: str) -> ToolCall:
    """The one block of a turn. Raises ``ToolError``."""
    named = [(*info.partition(" ")[::2], body) for info, body in fenced_blocks(text)]
    blocks = [block for block in named if block[0] in ("bash", "edit", "submit")]
    if len(blocks) != 1:
        raise ToolError(f"found {len(blocks)} blocks of bash, edit or submit; write exactly one\n{FENCED_HELP}")
    name, path, body = blocks[0]
    if name == "bash":
        return ToolCall(id="0", name=name, arguments={"command": body})
    if name == "submit":
        return ToolCall(id="0", name=name)
    match = _REPLACE.fullmatch(body) if body.endswith("\n>>>>>>> REPLACE\n") else None
    if match is None or not path.strip():
        raise ToolError(f"cannot read the edit block\n{FENCED_HELP}")
    old, new = match.groups()
    arguments = {"command": "str_replace", "path": path.strip(), "old_str": old, "new_str": new}
    return ToolCall(id="0", name=name, arguments=arguments)


async def call_tool(box: Sandbox, call: ToolCall, timeout_s: float, prelude: str = "") -> str:
    """What the agent is told. ``prelude`` is shell code put before its commands. Raises ``ToolError``, ``EnvDown``."""
    if call.error:
        raise ToolError(f"the call of {call.name or 'a tool'} cannot be read: {call.error}")
    if call.name == "bash":
        return told(await box.run(prelude + _text(call, "command"), timeout_s), timeout_s)
    if call.name == "edit":
        try:
            return await _edit(box, call)
        except (OSError, UnicodeEncodeError) as error:  # half of a surrogate pair is no UTF-8
            raise ToolError(str(error)) from None
    raise ToolError(f"no tool {call.name!r}; there are bash, edit and submit")


async def _edit(box: Sandbox, call: ToolCall) -> str:
    command, path = _text(call, "command"), _text(call, "path")
    if command == "create":
        await box.write_file(path, _encode(_text(call, "new_str")))
        return f"{path}: written\n"
    text = (await box.read_file(path)).decode(errors="surrogateescape")
    if command == "view":
        return _view(text, _line(call, "line", 1), _line(call, "end_line", None))
    if command == "str_replace":
        old, new = _text(call, "old_str"), _text(call, "new_str")
        if not old:
            raise ToolError("old_str is empty; use insert or create")
        times = text.count(old)
        if times != 1:
            hint = "give more of the lines around it" if times else "view the file and copy the lines exactly"
            raise ToolError(f"{path}: old_str occurs {times} times, not once; {hint}")
        where = text.index(old)
        await box.write_file(path, _encode(text.replace(old, new)))
        return f"{path}: replaced at line {text.count(chr(10), 0, where) + 1}\n"
    if command == "insert":
        lines = [*io.StringIO(text)]
        line, new = _line(call, "line", None), _text(call, "new_str")
        if line is None or not 0 <= line <= len(lines):
            raise ToolError(f"{path}: line must be between 0 and {len(lines)}")
        if lines[:line] and not lines[line - 1].endswith("\n"):
            lines[line - 1] += "\n"
        lines.insert(line, new if new.endswith("\n") else new + "\n")
        await box.write_file(path, _encode("".join(lines)))
        return f"{path}: inserted behind line {line}\n"
    raise ToolError(f"edit has no command {command!r}; there are view, str_replace, insert and create")


def _view(text: str, first: int | None, last: int | None) -> str:
    lines = [line.rstrip("\r\n") for line in io.StringIO(text)]  # as grep counts them
    start = max(1, first or 1)
    end = min(len(lines), last or len(lines), start + MAX_VIEW_LINES - 1)
    shown = "".join(f"{number:6}\t{lines[number - 1]}\n" for number in range(start, end + 1))
    more = len(lines) - end
    return shown + (f"[{more} more lines]\n" if more > 0 and last is None else "") or "[no lines]\n"


def _text(call: ToolCall, key: str) -> str:
    value = call.arguments.get(key)
    if not isinstance(value, str):
        raise ToolError(f"{call.name}: {key} must be given as text")
    return value


def _line(call: ToolCall, key: str, default: int | None) -> int | None:
    value = call.arguments.get(key, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ToolError(f"{call.name}: {key} must be a whole number")
    return value


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
