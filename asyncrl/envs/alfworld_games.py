"""Makes ALFWorld games where the official data set cannot be had, from what ALFWorld's own package holds.

    python -m asyncrl.envs.alfworld_games --out DIR --train 200 --valid-seen 30 --valid-unseen 30 --seed 0

The rooms are AI2-THOR's 120 scenes (``gen/layouts``: every receptacle with the pose to reach it from, the types of
objects in the room), the rules ALFWorld's PDDL domain and text grammar, the goals its goal library. Where an object is,
and which one is wanted, is drawn from the seed, by ALFRED's table of what may lie where. Each game is played to its end
by ``alfworld_expert`` before it is kept. The tree is that of the official data set (json_2.1.1), and ALFWorld's own
tools read it. Unlike there, the receptacles whose poses the layouts do not hold (stove burners, most bins) are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from asyncrl.core.types import Record
from asyncrl.envs.alfworld_expert import Expert

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""In the order of ALFWorld's numbers 1 to 6."""
Split = Literal["train", "valid_seen", "valid_unseen"]
SPLITS: tuple[Split, ...] = ("train", "valid_seen", "valid_unseen")
UNSEEN_SCENES = (10, 219, 308, 424)
"""The official data set's ``valid_unseen``: one room of each kind, met nowhere else."""
COORDINATES = {"-": "_minus_", "|": "_bar_", "+": "_plus_", ".": "_dot_", ",": "_comma_"}
"""How ALFWorld writes AI2-THOR's names (``Mug|+00.15|-01.20``) in PDDL."""
NEEDS = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
"""What can be done to the object, and the receptacle type that does it."""
LAMPS = ("DeskLamp", "FloorLamp")
LAMP_STANDS = ("SideTable", "Desk", "Dresser", "CoffeeTable", "DiningTable", "Shelf")
ATTEMPTS = 60
"""Games drawn in the place of one that was not solved, or that the drawn room does not have."""
COPIES = 3
"""Most objects of one type in a room, as ALFRED draws them."""


class Receptacle(Record, frozen=True, kw_only=True):
    """``location`` is the pose to reach it from: x, z (quarters of a metre), rotation and horizon (degrees)."""

    id: str
    type: str
    location: tuple[int, int, int, int]


class Scene(Record, frozen=True, kw_only=True):
    """One room. ``objects``: the types that its drawn objects are of."""

    number: int
    kind: str
    receptacles: tuple[Receptacle, ...]
    objects: tuple[str, ...]
    start: tuple[int, int, int, int]


class Game(Record, frozen=True, kw_only=True):
    """A game before it was played. ``name`` is its folder's in the data set."""

    name: str
    task_type: str
    problem: str
    goal: str
    traj_data: dict[str, Any]


@cache
def _package() -> Path:
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("ALFWorld is not installed: pip install 'asyncrl[alfworld]'")
    return Path(spec.submodule_search_locations[0])


@cache
def _gen(name: str) -> Any:
    """``alfworld.gen.NAME`` as data, without the imports of its package."""
    spec = importlib.util.spec_from_file_location(f"alfworld_gen_{name}", _package() / "gen" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logic() -> tuple[str, str]:
    """ALFWorld's PDDL domain and its text grammar."""
    data = _package() / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


@cache
def scene(number: int) -> Scene:
    """Room ``number`` of AI2-THOR. Raises ``ValueError`` if there is none."""
    kinds: dict[str, range] = _gen("constants").SCENE_TYPE
    kind = next((name for name, numbers in kinds.items() if number in numbers), None)
    if kind is None:
        raise ValueError(f"no AI2-THOR scene {number}; there are 1-30, 201-230, 301-330 and 401-430")
    layouts = _package() / "gen" / "layouts"
    poses = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
    receptacles = tuple(
        Receptacle(
            id=name,
            type=name.split("|")[-1] if name.endswith("Basin") else name.split("|")[0],
            location=(round(x * 4), round(z * 4), round(rotation), round(horizon)),
        )
        for name, (x, z, rotation, horizon) in sorted(poses.items())
    )
    movable = set().union(*_may_contain().values()) | set(LAMPS)
    objects = tuple(sorted(movable & set(json.loads((layouts / f"FloorPlan{number}-objects.json").read_text()))))
    first = receptacles[0].location
    start = (first[0], first[1], (first[2] + 90) % 360, 30)
    return Scene(number=number, kind=kind, receptacles=receptacles, objects=objects, start=start)


def scenes(split: Split, max_receptacles: int = 0) -> list[int]:
    """The rooms of a split; with ``max_receptacles``, of the seen ones only those with no more than so many."""
    if split == "valid_unseen":
        return list(UNSEEN_SCENES)
    kinds: dict[str, range] = _gen("constants").SCENE_TYPE
    return [
        number
        for numbers in kinds.values()
        for number in numbers
        if number not in UNSEEN_SCENES and (not max_receptacles or len(scene(number).receptacles) <= max_receptacles)
    ]


@cache
def _may_contain() -> dict[str, frozenset[str]]:
    """Object types by the receptacle type that they may be put in; slices and furniture left out."""
    constants = _gen("constants")
    table = {
        place: frozenset(name for name in names if name in constants.OBJECTS_SET and not name.endswith("Sliced"))
        for place, names in constants.VAL_RECEPTACLE_OBJECTS.items()
        if place not in constants.MOVABLE_RECEPTACLES_SET
    }
    return {place: names for place, names in table.items() if names}


def plausible(object_name: str) -> frozenset[str]:
    """Receptacle types, in the lower case of the game's text, that an object may lie in or on."""
    return frozenset(
        place.lower() for place, names in _may_contain().items() if object_name in {name.lower() for name in names}
    )


def draw_goal(rng: random.Random, room: Scene, task_type: str) -> tuple[str, str] | None:
    """An object type and a receptacle type (a lamp's, for ``look_at_obj_in_light``) that make a task in this room."""
    constants = _gen("constants")
    if room.kind not in constants.GOALS_VALID[task_type]:
        return None
    places = sorted({r.type for r in room.receptacles})
    goals: list[tuple[str, str]] = []
    for name in room.objects:
        homes = [place for place in places if name in _may_contain().get(place, ())]
        if name in LAMPS or not homes:
            continue
        if task_type == "look_at_obj_in_light":
            if set(places) & set(LAMP_STANDS):
                goals += [(name, lamp) for lamp in LAMPS if lamp in room.objects]
            continue
        kind, tool = NEEDS.get(task_type, ("", ""))
        if kind and (name not in constants.VAL_ACTION_OBJECTS[kind] or tool not in places):
            continue
        goals += [(name, home) for home in homes if home != tool and len(homes) > 1]
    return rng.choice(goals) if goals else None


def draw_game(rng: random.Random, room: Scene, task_type: str) -> Game | None:
    """A game of this type in this room; None where the room has none."""
    target = draw_goal(rng, room, task_type)
    if target is None:
        return None
    name, parent = target
    lamp = parent if task_type == "look_at_obj_in_light" else ""
    objects: dict[str, Receptacle] = {}
    for kind in room.objects:
        stands = [r for r in room.receptacles if kind in _may_contain().get(r.type, ())]
        if kind in LAMPS:
            stands = [r for r in room.receptacles if r.type in LAMP_STANDS] if kind == lamp else []
        elif kind == name:
            stands = [r for r in stands if r.type != parent]
        fewest = 2 if kind == name and task_type == "pick_two_obj_and_place" else 1
        for copy in range(rng.randint(fewest, COPIES) if stands and kind != lamp else min(1, len(stands))):
            place = rng.choice(stands)
            objects[_object_id(rng, kind, place, copy)] = place
    library = _gen("goal_library").gdict[task_type]
    words = {"obj": name, "recep": parent, "toggle": lamp, "mrecep": ""}
    sentence = rng.choice(library["templates"]).format(**{k: v.lower() for k, v in words.items()})
    goal = library["pddl"].format(**words).replace("#", "-")
    return Game(
        name=f"{task_type}-{name}-None-{parent}-{room.number}",
        task_type=task_type,
        problem=_problem(room, objects, goal),
        goal=sentence,
        traj_data={
            "task_type": task_type,
            "pddl_params": {
                "object_target": name,
                "parent_target": "" if lamp else parent,
                "toggle_target": lamp,
                "mrecep_target": "",
                "object_sliced": False,
            },
            "scene": {"floor_plan": f"FloorPlan{room.number}", "scene_num": room.number},
            "turk_annotations": {"anns": [{"task_desc": f"{sentence}.", "high_descs": []}]},
        },
    )


def _object_id(rng: random.Random, kind: str, place: Receptacle, copy: int) -> str:
    """AI2-THOR's name of an object: its type and where it lies, in metres."""
    x, z, _, _ = place.location
    spot = (x / 4 + rng.uniform(-0.4, 0.4), 0.8 + 0.01 * copy, z / 4 + rng.uniform(-0.4, 0.4))
    return "|".join([kind, *(f"{v:+06.2f}" for v in spot)])


def _mangled(name: str) -> str:
    for character, word in COORDINATES.items():
        name = name.replace(character, word)
    return name


def _problem(room: Scene, objects: dict[str, Receptacle], goal: str) -> str:
    """The PDDL problem: what ALFRED's generator writes, of a room at its beginning."""
    constants = _gen("constants")
    fixed = constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET
    places = {r.id: _mangled(r.id) for r in room.receptacles}
    things = {name: _mangled(name) for name in objects}
    points = sorted({_location(r.location) for r in room.receptacles} | {_location(room.start)})
    declared = [
        "agent1 - agent",
        *(f"{kind}Type - otype" for kind in sorted(constants.OBJECTS_SET - fixed)),
        *(f"{kind}Type - rtype" for kind in sorted(fixed)),
        *(f"{name} - object" for name in things.values()),
        *(f"{name} - receptacle" for name in places.values()),
        *(f"{point} - location" for point in points),
    ]
    facts = [f"atLocation agent1 {_location(room.start)}"]
    facts += [
        f"canContain {place}Type {kind}Type"
        for place, kinds in sorted(_may_contain().items())
        for kind in sorted(kinds)
        if place in fixed and kind not in fixed
    ]
    for place in room.receptacles:
        facts.append(f"receptacleType {places[place.id]} {place.type}Type")
        facts.append(f"receptacleAtLocation {places[place.id]} {_location(place.location)}")
        if place.type in constants.OPENABLE_CLASS_SET:
            facts.append(f"openable {places[place.id]}")
    for name, place in objects.items():
        kind = name.split("|")[0]
        facts.append(f"objectType {things[name]} {kind}Type")
        facts.append(f"objectAtLocation {things[name]} {_location(place.location)}")
        facts.append(f"inReceptacle {things[name]} {places[place.id]}")
        if kind not in LAMPS:
            facts.append(f"pickupable {things[name]}")
        if kind in constants.MOVABLE_RECEPTACLES_SET:
            facts.append(f"isReceptacleObject {things[name]}")
        facts += [
            f"{can.lower()} {things[name]}" for can, kinds in constants.VAL_ACTION_OBJECTS.items() if kind in kinds
        ]
    head = f"(define (problem plan_{room.number})\n    (:domain alfred)\n    (:objects\n"
    body = "".join(f"        {line}\n" for line in declared)
    init = "".join(f"        ({fact})\n" for fact in facts)
    return f"{head}{body}    )\n    (:init\n        (= (total-cost) 0)\n{init}    )\n{goal}"


def _location(pose: tuple[int, int, int, int]) -> str:
    return _mangled("loc|" + "|".join(map(str, pose)))


# --- playing and writing them


def solve(engine: Any, file: Path, rng: random.Random, max_steps: int) -> list[str] | None:
    """The expert's commands to the end of the game; None if it does not get there in ``max_steps``."""
    play = Expert(engine.load(file), rng, plausible).play()
    commands: list[str] = []
    try:
        command = next(play)
        while len(commands) < max_steps:
            answer, won = engine.step(command)
            commands.append(command)
            if won:
                return commands
            command = play.send(answer)
    except StopIteration:
        pass
    return None


def write_game(game: Game, folder: Path, walkthrough: Sequence[str] | None) -> Path:
    """The files of one game, as in the data set; its ``game.tw-pddl``."""
    folder.mkdir(parents=True, exist_ok=True)
    domain, grammar = logic()
    (folder / "initial_state.pddl").write_text(game.problem)
    (folder / "traj_data.json").write_text(json.dumps(game.traj_data | {"task_id": folder.name}, indent=1))
    file = folder / "game.tw-pddl"
    fields = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", game.goal),
        "pddl_problem": game.problem,
        "solvable": walkthrough is not None,
        "walkthrough": walkthrough,
    }
    file.write_text(json.dumps(fields))
    return file


def generate(
    engine: Any,
    out: Path,
    split: Split,
    numbers: Iterable[int],
    *,
    seed: int,
    max_steps: int = 50,
    max_receptacles: int = 0,
    task_types: Sequence[str] = TASK_TYPES,
) -> list[Path]:
    """Games of a split under ``out/json_2.1.1``, their types in turn, each solved within ``max_steps``; their files.

    What the n-th game is depends on the seed, the split, n, the limits and the types only. Raises ``ValueError`` when
    the limits leave too little.
    """
    rooms = scenes(split, max_receptacles)
    write_logic(out)
    files: list[Path] = []
    for number in numbers:
        task_type = task_types[number % len(task_types)]
        rng = random.Random(f"{seed}/{split}/{number}")
        for _ in range(ATTEMPTS):
            game = draw_game(rng, scene(rng.choice(rooms)), task_type)
            if game is None:
                continue
            folder = out / "json_2.1.1" / split / game.name / f"trial_{seed:04d}_{number:06d}"
            file = write_game(game, folder, None)
            walkthrough = solve(engine, file, rng, max_steps)
            if walkthrough is not None:
                files.append(write_game(game, folder, walkthrough))
                break
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
        else:
            raise ValueError(
                f"no {task_type} of {ATTEMPTS} drawn for {split} was solved in {max_steps} steps in a room with at "
                f"most {max_receptacles or 'any number of'} receptacles; raise the limits"
            )
    return files


def write_logic(out: Path) -> None:
    """``logic/alfred.{pddl,twl2}``, which ALFWorld's tools look for beside the games."""
    domain, grammar = logic()
    (out / "logic").mkdir(parents=True, exist_ok=True)
    (out / "logic" / "alfred.pddl").write_text(domain)
    (out / "logic" / "alfred.twl2").write_text(grammar)


def main() -> int:
    from asyncrl.envs.alfworld_engine import AlfredEngine

    parser = argparse.ArgumentParser(prog="python -m asyncrl.envs.alfworld_games", description="Make ALFWorld games.")
    parser.add_argument("--out", type=Path, required=True)
    for split, count in zip(SPLITS, (300, 30, 30), strict=True):
        parser.add_argument(f"--{split.replace('_', '-')}", type=int, default=count, help="games")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=50, help="that the expert may take")
    parser.add_argument("--max-receptacles", type=int, default=0, help="of a seen room; 0: any")
    args = parser.parse_args()
    engine = AlfredEngine()
    for split in SPLITS:
        try:
            files = generate(
                engine,
                args.out,
                split,
                range(getattr(args, split)),
                seed=args.seed,
                max_steps=args.max_steps,
                max_receptacles=args.max_receptacles,
            )
        except ValueError as error:
            print(f"alfworld_games: {error}", file=sys.stderr)
            return 1
        print(f"{split}: {len(files)} games", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
