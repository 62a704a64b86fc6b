"""A player of ALFWorld that reads only the game's text: it searches where a thing may lie, takes, treats and places it.

It verifies generated games and gives demonstrations. In which order it searches is drawn from the given randomness,
open places before closed ones. It knows ALFRED's table of what may lie where, as ALFWorld's own hand-coded expert does,
and the sentences of ALFWorld's goal library; people's own descriptions of a task it does not read.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator

from asyncrl.core.types import Record

Play = Generator[str, str, None]
"""Yields commands and is sent what the game answers."""
PLACES = re.compile(r"you see (?P<places>.*?)\.$", re.MULTILINE)
THING = re.compile(r"\ba (?P<name>\w+ \d+)")
CLOSED = re.compile(r"^.*The .* is closed\.$")
OPENABLE = ("fridge", "cabinet", "microwave", "drawer", "safe", "box")
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
GOALS = (
    ("look", re.compile(r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<place>\w+)")),
    ("two", re.compile(r"(?:put|find) two (?P<object>\w+) (?:in|and put them in) (?P<place>\w+)")),
    ("clean", re.compile(r"(?:put a clean|clean some) (?P<object>\w+) (?:in|and put it in) (?P<place>\w+)")),
    ("heat", re.compile(r"(?:put a hot|heat some) (?P<object>\w+) (?:in|and put it in) (?P<place>\w+)")),
    ("cool", re.compile(r"(?:put a cool|cool some) (?P<object>\w+) (?:in|and put it in) (?P<place>\w+)")),
    ("put", re.compile(r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<place>\w+)")),
)


class Goal(Record, frozen=True, kw_only=True):
    """``kind`` is look, two, clean, heat, cool or put; ``place`` a receptacle's type, or the lamp's for look."""

    kind: str
    object: str
    place: str


def read_goal(intro: str) -> Goal:
    """The goal in a game's first words. Raises ``ValueError`` for one that is none of the goal library's."""
    sentence = intro.partition("Your task is to: ")[2].strip().rstrip(".")
    for kind, pattern in GOALS:
        found = pattern.fullmatch(sentence)
        if found:
            return Goal(kind=kind, object=found["object"], place=found["place"])
    raise ValueError(f"no goal that the expert reads: {sentence!r}")


def things(text: str) -> list[str]:
    """What a text says is there: ``["apple 2", "mug 1"]``."""
    found = PLACES.search(text)
    return [] if found is None else THING.findall(found["places"])


class Expert:
    """One episode. ``may_hold(object type)``: the receptacle types it can lie in."""

    def __init__(self, intro: str, rng: random.Random, may_hold: Callable[[str], frozenset[str]]) -> None:
        self._goal = read_goal(intro)
        self._places = things(intro)
        self._rng = rng
        self._may_hold = may_hold
        self._seen: dict[str, str] = {}
        """Where each thing lies that was seen."""
        self._here = ""

    def play(self) -> Play:
        """Until the task should be done; ends early where it finds no way."""
        goal = self._goal
        used: set[str] = set()
        if goal.kind == "look":
            if (yield from self._fetch(goal.object, used)) is not None:
                lamp = yield from self._find(goal.place, used, anywhere=True)
                if lamp is not None:
                    yield f"use {lamp}"
            return
        homes = [p for p in self._places if p.split()[0] == goal.place]
        if not homes:
            return
        home = self._rng.choice(homes)
        for _ in range(2 if goal.kind == "two" else 1):
            held = yield from self._fetch(goal.object, used)
            if held is None:
                return
            used.add(held)
            if goal.kind in TOOLS:
                tool = next((p for p in self._places if p.split()[0] == TOOLS[goal.kind]), None)
                if tool is None:
                    return
                yield from self._go(tool)
                yield f"{goal.kind} {held} with {tool}"
            answer = yield from self._go(home)
            yield from self._open(home, answer)
            yield f"move {held} to {home}"

    def _fetch(self, kind: str, used: set[str]) -> Generator[str, str, str | None]:
        found = yield from self._find(kind, used)
        if found is not None:
            yield f"take {found} from {self._seen.pop(found)}"
        return found

    def _find(self, kind: str, used: set[str], *, anywhere: bool = False) -> Generator[str, str, str | None]:
        """Search until one is in reach; its name."""
        for thing, place in sorted(self._seen.items()):
            if thing.split()[0] == kind and thing not in used:
                yield from self._go(place)
                return thing
        homes = self._may_hold(kind)
        searched = set(self._seen.values())
        places = [p for p in self._places if (anywhere or p.split()[0] in homes) and p not in searched]
        self._rng.shuffle(places)
        places.sort(key=lambda p: p.split()[0] in OPENABLE)
        if kind != self._goal.place:
            places = [p for p in places if p.split()[0] != self._goal.place]
        for place in places:
            answer = yield from self._go(place)
            answer = yield from self._open(place, answer)
            for thing in things(answer):
                self._seen.setdefault(thing, place)
            for thing in things(answer):
                if thing.split()[0] == kind and thing not in used:
                    return thing
        return None

    def _go(self, place: str) -> Generator[str, str, str]:
        if self._here == place:
            return ""
        self._here = place
        return (yield f"go to {place}")

    def _open(self, place: str, answer: str) -> Generator[str, str, str]:
        if CLOSED.match(answer):
            return (yield f"open {place}")
        return answer
