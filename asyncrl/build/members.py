"""Which servers a run has: those that its recipe says, without those that left, and those that were added.

Kept in the run store, so that a run that goes on has the same. A drained server is not among them: it may be about to
be switched off. Where the recipe says other servers than it did, it is the recipe that counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from asyncrl.config import Recipe
from asyncrl.core.journal import Noted
from asyncrl.core.types import Record
from asyncrl.ports import RunStore

NOTE = "fleet"


class _Kept(Record, frozen=True, kw_only=True):
    """``recipe`` tells that the recipe says the same servers. Members are indices of these, or URLs, which are empty
    for servers that are started here."""

    recipe: str
    members: list[int | str]


class Members:
    """Servers are numbered in the order in which they come, and keep their number while the run is in one process."""

    def __init__(self, recipe: Recipe, notes: Mapping[str, float | str], store: RunStore) -> None:
        said = recipe.engine.urls or [""] * recipe.engine.count
        self._store = store
        self._recipe = hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]
        members: list[int | str] = [*range(len(said))]
        self.dropped: list[str] = []
        """URLs that were added to a run whose recipe says other servers now."""
        if (note := notes.get(NOTE)) is not None:
            kept = msgspec.json.decode(str(note), type=_Kept)
            if kept.recipe != self._recipe:
                self.dropped = [member for member in kept.members if isinstance(member, str) and member]
            elif kept.members:
                members = kept.members
        self._members: dict[int, int | str] = dict(enumerate(members))
        self.places = [said[member] if isinstance(member, int) else member for member in members]
        """URLs, empty for those to be started here."""

    def added(self, number: int, url: str) -> None:
        self._members[number] = url
        self._keep()

    def readmitted(self, number: int, member: int | str) -> None:
        self._members[number] = member
        self._keep()

    def left(self, number: int) -> int | str | None:
        """The server drains, or is gone. What it is to be readmitted as."""
        member = self._members.pop(number, None)
        self._keep()
        return member

    async def committed(self) -> None:
        """What was changed is known to whatever process the run goes on in."""
        await self._store.committed()

    def _keep(self) -> None:
        kept = _Kept(recipe=self._recipe, members=[*self._members.values()])
        self._store.put(Noted(key=NOTE, value=msgspec.json.encode(kept).decode()))
