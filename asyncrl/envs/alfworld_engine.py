"""ALFWorld's engine without its repeated work: Fast Downward's state, TextWorld's logic and text grammar, ALFWorld's
names, in a shell that remembers what does not change.

TextWorld's own shell (``PddlEnv``) translates a game's PDDL to SAS twice at every load and again at every reset
(0.7 s), parses the text grammar at every load and templates at every step, and derives every admissible command from
the grammar at every step. Here a game is translated once, and the translation kept on disk if there is a
``cache``; grammars and queries are parsed once; a command's text is derived once a game. What the game says is the
same, byte for byte.

Not thread-safe: Fast Downward's translator changes ``sys.argv`` and the standard output while it works.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import fast_downward
import msgspec
from alfworld.agents.utils.misc import Demangler
from fast_downward.translate import pddl
from textworld.envs.pddl import logic, textgen
from textworld.generator.game import EntityInfo
from textworld.logic import GameLogic, Placeholder, Proposition, Rule, Type, Variable
from textworld.logic import State as Facts

from asyncrl.core.types import Record

UNKNOWN_GOAL = "UNKNOWN GOAL"
GOAL = re.compile(r"Your task is to: (?P<goal>[^\"]*?)\.?\"")
"""Where a game's grammar states its goal; all else in it is the same in every game."""

_libraries: list[Any] = []
"""Copies of Fast Downward's library that no engine uses. Each takes 34 MB of disk until the process ends: one that was
unloaded would crash the process at its end."""

Mapped = Mapping[Placeholder, Variable]


class GameFile(Record, frozen=True, kw_only=True):
    """``game.tw-pddl``."""

    pddl_domain: str
    pddl_problem: str
    grammar: str
    walkthrough: list[str] | None = None


class Translation(Record, frozen=True, kw_only=True):
    """A game as the planner sees it. ``sas`` is its task; the rest are the problem's parts by name: types with their
    supertypes, objects with their types, actions with (parameter, type) pairs, and the facts of the beginning."""

    sas: str
    types: dict[str, list[str]]
    objects: dict[str, str]
    actions: dict[str, list[tuple[str, str]]]
    facts: list[tuple[str, list[str]]]


class AlfredEngine:
    """One live game at a time. ``cache``: a folder for translations, shared by any number of processes."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._library = _libraries.pop() if _libraries else fast_downward.load_lib()
        self._file: Path | None = None

    def load(self, file: Path) -> str:
        """Begin the game; its first words. Raises ``OSError``, and ``ValueError`` for a file that is no game."""
        if file != self._file:
            self._file = None
            try:
                game = msgspec.json.decode(file.read_bytes(), type=GameFile)
                grammar, self._goal = _split_goal(game.grammar)
                self._logic = _logic(game.pddl_domain, grammar)
                self._translation = _translation(game.pddl_domain, game.pddl_problem, self._cache)
            except (ValueError, SystemExit) as error:  # the translator exits
                raise ValueError(f"{file} is not an ALFWorld game: {error}") from None
            self._commands: dict[str, str] = {}
            self._file = file
        self._begin()
        return self._text("#intro#", {}).replace(UNKNOWN_GOAL, self._goal)

    def step(self, command: str) -> tuple[str, bool]:
        """What the game answers, and whether its task is done."""
        operator = self._admissible.get(command.strip())
        if operator is None:
            return "Nothing happens.", bool(self._library.check_goal())
        effects = (logic.Atom * operator.nb_effect_atoms)()
        self._library.apply_operator(operator.id, effects)
        for effect in effects:
            fact = effect.get_fact(self._translation.objects)
            self._facts.remove_fact(fact.negate())
            self._facts.add_fact(fact)
        name, _, arguments = operator.name.partition(" ")
        answer = self._text(self._logic.actions[name].feedback_rule, self._mapped(name, arguments))
        self._look_around()
        return answer, bool(self._library.check_goal())

    @property
    def admissible_commands(self) -> list[str]:
        return sorted(self._admissible)

    def close(self) -> None:
        """Leave the library to the next engine."""
        _libraries.append(self._library)

    def _begin(self) -> None:
        translation = self._translation
        self._library.load_sas(translation.sas.encode())
        self._facts = Facts(_types(translation))
        kinds = translation.objects
        for name, arguments in translation.facts:
            self._facts.add_fact(Proposition(name, [Variable(a, kinds[a]) for a in arguments]))
        atoms = (logic.Atom * self._library.get_state_size())()
        self._library.get_state(atoms)
        facts = [atom.get_fact(kinds) for atom in atoms]
        self._facts.add_facts(fact for fact in facts if not fact.is_negation)
        self._entities = {v.name: EntityInfo(v.name, v.type) for fact in self._facts.facts for v in fact.arguments}
        demangler = Demangler(game_infos=self._entities)
        for entity in self._entities.values():
            entity.name, entity.indefinite, entity.definite = demangler.demangle_alfred_name(entity.id), "a", "the"
        self._look_around()

    def _look_around(self) -> None:
        """What can be done now. Of operators with the same command the first counts, as in TextWorld."""
        operators = (fast_downward.Operator * self._library.get_applicable_operators_count())()
        self._library.get_applicable_operators(operators)
        self._admissible: dict[str, Any] = {}
        for operator in operators:
            self._admissible.setdefault(self._command(operator.name), operator)

    def _command(self, operator: str) -> str:
        command = self._commands.get(operator)
        if command is None:
            name, _, arguments = operator.partition(" ")
            mapped = self._mapped(name, arguments)
            command = self._commands[operator] = self._text(self._logic.actions[name].template, mapped)
        return command

    def _mapped(self, action: str, arguments: str) -> dict[Placeholder, Variable]:
        # Normalisation adds the quantified variables behind an action's own; operators name only those.
        parameters = self._translation.actions[action]
        return {
            Placeholder(name, kind): Variable(argument, kind)
            for (name, kind), argument in zip(parameters, arguments.split(), strict=False)
        }

    # --- the grammar: the derivation of TextWorld's ContextSensitiveGrammar, without copies of its contexts

    def _text(self, start: str, mapped: Mapped) -> str:
        return "".join(self._derive(_symbols(start), mapped))

    def _derive(self, symbols: Sequence[Any], mapped: Mapped) -> Iterator[str]:
        for symbol in symbols:
            if isinstance(symbol, textgen.ListSymbol):
                yield self._list(["".join(item) for item in self._each(symbol.symbol, mapped)], mapped)
            elif isinstance(symbol, textgen.ConditionalSymbol):
                for item in self._each(symbol, mapped):
                    yield from item
            elif isinstance(symbol, textgen.EvalSymbol):
                # ALFWorld's grammar holds Python expressions, so a game file is as trusted as a program.
                yield str(eval(symbol.expression, {}, self._variables(mapped)))
            elif isinstance(symbol, textgen.NonterminalSymbol):
                yield from self._derive(self._rule(symbol.symbol, mapped), mapped)
            else:
                yield str(symbol)

    def _each(self, symbol: Any, mapped: Mapped) -> list[list[str]]:
        """A conditional symbol: its expression, once for every way in which its query holds."""
        if symbol.given:
            found = [{**mapped, **more} for more in self._facts.all_assignments(_query(symbol.given), mapped)]
        else:
            found = [dict(mapped)]
        return [list(self._derive([symbol.expression], more)) for more in found]

    def _list(self, items: list[str], mapped: Mapped) -> str:
        if not items:
            return self._text("#list_empty#", mapped)
        *first, last = items
        if not first:
            return last
        return self._text("#list_separator#", mapped).join(first) + self._text("#list_last_separator#", mapped) + last

    def _rule(self, name: str, mapped: Mapped) -> Sequence[Any]:
        """The right side of the first rule whose condition holds."""
        for rule in self._logic.grammar._rules[name]:
            condition = rule.condition
            if not condition or any(True for _ in self._facts.all_assignments(_query(condition), mapped)):
                symbols: Sequence[Any] = rule.rhs
                return symbols
        raise ValueError(f"the grammar of {self._file} has no rule for {name}")

    def _variables(self, mapped: Mapped) -> dict[str, EntityInfo]:
        return {placeholder.name: self._entities[variable.name] for placeholder, variable in mapped.items()}


@cache
def _symbols(text: str) -> Sequence[Any]:
    symbols: Sequence[Any] = textgen._parse_and_convert(text, rule_name="symbols")
    return symbols


@cache
def _query(text: str) -> Rule:
    return Rule.parse_conjunctive_query(text)


@lru_cache(maxsize=8)
def _logic(domain: str, grammar: str) -> logic.GameLogic:
    return logic.GameLogic(domain=domain, grammar=grammar)


@lru_cache(maxsize=64)
def _translation(domain: str, problem: str, cache: Path | None) -> Translation:
    """From memory, from the cache, or made now (0.3 s)."""
    key = hashlib.sha256(f"{fast_downward.__name__}\0{domain}\0{problem}".encode()).hexdigest()
    file = None if cache is None else cache / f"{key}.msgpack.z"
    if file is not None and file.is_file():
        return msgspec.msgpack.decode(zlib.decompress(file.read_bytes()), type=Translation)
    made = _translate(domain, problem)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(zlib.compress(msgspec.msgpack.encode(made), 1))
        part.replace(file)  # whole or not at all: other processes read it
    return made


def _translate(domain: str, problem: str) -> Translation:
    argv = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(domain, problem)
    finally:
        sys.argv = argv  # the translator leaves its own
    kinds = {o.name: o.type_name for o in task.objects}
    types: dict[str, list[str]] = {}
    for kind in task.types:
        types.setdefault(kind.name, list(kind.supertype_names))  # ALFWorld's "object" is PDDL's own too
    facts = [
        (fact.predicate, list(fact.args)) for fact in task.init if isinstance(fact, pddl.Atom) and fact.predicate != "="
    ]
    return Translation(
        sas=sas,
        types=types,
        objects=kinds,
        actions={a.name: [(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions},
        facts=facts,
    )


def _types(translation: Translation) -> GameLogic:
    rules = GameLogic()
    for name, parents in translation.types.items():
        rules.types.add(Type(name, parents))
    return rules


def _split_goal(grammar: str) -> tuple[str, str]:
    """The grammar that all games have in common, and this one's goal."""
    found = GOAL.search(grammar)
    if found is None:
        raise ValueError("its grammar states no goal: it has no 'Your task is to:'")
    start, end = found.span("goal")
    return grammar[:start] + UNKNOWN_GOAL + grammar[end:], found["goal"]
