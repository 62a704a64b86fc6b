"""What went wrong, in few words: the line that a user sees and a summary keeps."""

from __future__ import annotations


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, without the groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves(member)]
    return [error]


def one_line(error: BaseException) -> str:
    """The first line of the first cause: an ExceptionGroup is as many lines as it has members."""
    first = leaves(error)[0]
    text = str(first).splitlines()[0] if str(first) else ""
    return text or type(first).__name__
