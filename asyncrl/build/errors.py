"""What went wrong, in few words: the line that a user sees and a summary keeps."""

from __future__ import annotations

import traceback
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, without the groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves(member)]
    return [error]


def of_user(error: Exception) -> str:
    """One line of what user code raised, with its place; of a check of ours, what that says."""
    text = " ".join(str(error).split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    if Path(place.filename).is_relative_to(PACKAGE) and text:
        return text
    return f"{type(error).__name__}{': ' if text else ''}{text} ({place.filename}:{place.lineno})"


def one_line(error: BaseException) -> str:
    """The first line of the first cause: an ExceptionGroup is as many lines as it has members."""
    first = leaves(error)[0]
    text = str(first).splitlines()[0] if str(first) else ""
    return text or type(first).__name__
