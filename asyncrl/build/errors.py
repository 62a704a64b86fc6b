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
    """One line of what user code raised, with its place in the file that we called; of a check of ours, what that
    says."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).is_relative_to(PACKAGE)]
    if text and (not theirs or frames[-1] is not theirs[-1]):
        return text
    named = f"{type(error).__name__}{': ' if text else ''}{text}"
    if not theirs:
        return named
    place = [frame for frame in theirs if frame.filename == theirs[0].filename][-1]
    return f"{named} ({place.filename}:{place.lineno})"


def one_line(error: BaseException) -> str:
    """The first line of the first cause: an ExceptionGroup is as many lines as it has members."""
    first = leaves(error)[0]
    text = str(first).splitlines()[0] if str(first) else ""
    return text or type(first).__name__
