"""What every table of a recipe is, and the error that a bad one raises."""

from __future__ import annotations

from typing import Any

from asyncrl.core.types import Record


class RecipeError(Exception):
    """A recipe that cannot work; one line naming the key, file or URL, and the remedy."""


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    if not condition:
        raise RecipeError(f"{key} = {value}: {remedy}")


class Section(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the recipe's tables."""
