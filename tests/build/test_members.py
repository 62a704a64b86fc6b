"""Members: what a run that goes on finds of a fleet that was changed."""

from __future__ import annotations

from typing import Any

from asyncrl.build.members import Members
from asyncrl.config import Recipe, load_table
from asyncrl.core.journal import Entry, Noted
from asyncrl.ports import NoStore

URLS = ["http://me:secret@a:30000", "http://b:30000"]


class Notes(NoStore):
    def __init__(self) -> None:
        self.notes: dict[str, float | str] = {}

    def put(self, entry: Entry) -> None:
        assert isinstance(entry, Noted)
        self.notes[entry.key] = entry.value


def recipe(**engine: Any) -> Recipe:
    return load_table({"engine": engine})


def test_a_run_begins_with_what_its_recipe_says() -> None:
    assert Members(recipe(count=3), {}, NoStore()).places == ["", "", ""]
    assert Members(recipe(urls=URLS), {}, NoStore()).places == URLS


def test_a_run_that_goes_on_has_what_it_had_and_no_password_is_written() -> None:
    notes = Notes()
    members = Members(recipe(urls=URLS), {}, notes)
    members.added(2, "http://c:30000")
    members.left(1)
    assert Members(recipe(urls=URLS), notes.notes, notes).places == [URLS[0], "http://c:30000"]
    assert "secret" not in str(notes.notes)


def test_a_server_that_is_readmitted_is_there_again() -> None:
    notes = Notes()
    members = Members(recipe(count=2), {}, notes)
    members.added(2, "")
    member = members.left(0)
    assert member == 0 and Members(recipe(count=2), notes.notes, notes).places == ["", ""]
    members.readmitted(0, member)
    assert Members(recipe(count=2), notes.notes, notes).places == ["", "", ""]
    assert members.left(7) is None


def test_another_recipe_counts_for_more() -> None:
    notes = Notes()
    Members(recipe(count=2), {}, notes).added(2, "http://c:30000")
    other = Members(recipe(count=4), notes.notes, notes)
    assert other.places == [""] * 4 and other.dropped == ["http://c:30000"]
    assert Members(recipe(count=2), notes.notes, notes).places == ["", "", "http://c:30000"]


def test_what_goes_on_twice_keeps_the_whole_change() -> None:
    notes = Notes()
    Members(recipe(count=2), {}, notes).added(2, "http://c:30000")
    Members(recipe(count=2), notes.notes, notes).left(0)
    assert Members(recipe(count=2), notes.notes, notes).places == ["", "http://c:30000"]
