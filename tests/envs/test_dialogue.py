"""How replies are read, whatever a model writes."""

from __future__ import annotations

import time

import pytest

from asyncrl.envs.dialogue import fenced_blocks, read_action
from asyncrl.envs.swe.tools import ToolError, parse_fenced


def test_closed_blocks_are_found_with_what_they_are_called() -> None:
    text = "```\nno name\n```\nSo:\n```edit a.py\n  x\x0cy\n``` \nand\n```bash\nls\n```json\n```\n```bash\nleft open"
    assert list(fenced_blocks(text)) == [("edit a.py", "  x\x0cy\n"), ("bash", "ls\n```json\n")]


@pytest.mark.parametrize("repeated", ["\n", " \n", "Action:\n", "Action: *", "```bash\n", "```bash\n```x\n"])
def test_a_model_that_repeats_itself_is_read_at_once(repeated: str) -> None:
    """It would hold the event loop, and all other episodes with it."""
    began = time.process_time()
    read_action(repeated * 20_000 + "x")
    edit = "```edit a\n<<<<<<< SEARCH\n" + "=======\n" * 20_000 + repeated * 20_000 + "\n```\n"
    for text in (repeated * 20_000, edit):
        with pytest.raises(ToolError):
            parse_fenced(text)
    assert time.process_time() - began < 1
