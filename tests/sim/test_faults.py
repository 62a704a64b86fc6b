"""The schedule of faults, and what overlapping ones do to a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config import EnvModel, FaultConfig, SimConfig, TrainerModel
from asyncrl.ports import EngineError
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.env import SimEnvs
from asyncrl.sim.faults import KINDS, ONCE, Faults, schedule
from asyncrl.sim.loop import run
from asyncrl.sim.tasks import SimTasks
from asyncrl.sim.trace import TraceRecorder
from asyncrl.sim.trainer import SimTrainer


class Listening(SimEngine):
    """Writes down what is done to it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, rng=random.Random(0), lengths=lambda rng, ids: 10, start_s=1.0)
        self.heard: list[tuple[float, str]] = []

    def _hear(self, what: str) -> None:
        self.heard.append((asyncio.get_running_loop().time(), what))

    def kill(self) -> None:
        self._hear("kill")
        super().kill()

    def restart(self) -> None:
        self._hear("restart")
        super().restart()

    def hang(self, on: bool) -> None:
        self._hear(f"hang {on}")
        super().hang(on)

    def partition(self, on: bool) -> None:
        self._hear(f"partition {on}")
        super().partition(on)

    def slow(self, factor: float) -> None:
        self._hear(f"slow {factor:g}")
        super().slow(factor)

    def drop_reply(self) -> None:
        self._hear("drop_reply")

    def duplicate_reply(self) -> None:
        self._hear("duplicate_reply")

    def corrupt_weights(self) -> None:
        self._hear("corrupt_weights")


class World:
    def __init__(self, *faults: FaultConfig) -> None:
        self.engines = [Listening(f"server {i}") for i in range(2)]
        self.trainer = SimTrainer(TrainerModel())
        self.envs = SimEnvs(EnvModel(), SimTasks(SimConfig(), seed=0), seed=0, max_turns=1)
        self.trace = TraceRecorder()
        self.storms: list[tuple[float, float]] = []
        self.left: list[str] = []
        self.faults = Faults(
            faults,
            engines=self.engines,
            trainer=self.trainer,
            envs=self.envs,
            observer=self.trace,
            join=self._join,
            leave=self.left.append,
        )

    async def _join(self) -> None:
        self.engines.append(Listening(f"server {len(self.engines)}"))

    async def play(self, *looks: tuple[float, Callable[[], Any]]) -> list[Any]:
        """Everything until all faults are over, with looks at stated times."""
        loop, seen = asyncio.get_running_loop(), []
        for at, look in looks:
            loop.call_at(at, lambda look=look: seen.append(look()))  # type: ignore[misc]
        await self.faults.run()
        await asyncio.sleep(10)
        for engine in self.engines:
            assert await engine.health(), "a server stayed broken"
        return seen


def fault(kind: str, at_s: float, for_s: float = 10.0, server: int = 0, factor: float = 4.0) -> FaultConfig:
    return FaultConfig(kind=kind, at_s=at_s, for_s=for_s, server=server, factor=factor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "heard"),
    [
        ("kill", [(5, "kill"), (15, "restart")]),
        ("hang", [(5, "hang True"), (15, "hang False")]),
        ("slow", [(5, "slow 4"), (15, "slow 1")]),
        ("partition", [(5, "partition True"), (15, "partition False")]),
        ("drop_reply", [(5, "drop_reply")]),
        ("duplicate_reply", [(5, "duplicate_reply")]),
        ("corrupt_weights", [(5, "corrupt_weights")]),
    ],
)
def test_each_kind_hits_the_server_that_it_names(kind: str, heard: list[tuple[float, str]]) -> None:
    world = World(fault(kind, 5, server=1))
    run(world.play())
    assert (world.engines[1].heard, world.engines[0].heard) == (heard, [])
    instants = [(e[1], e[2], e[3]) for e in world.trace.events]
    assert instants[0] == ("server 1", kind, 5)
    assert instants[1:] == ([] if kind in ONCE else [("server 1", f"{kind} ends", 15)])


def test_servers_join_and_leave_as_the_recipe_says_and_are_not_drawn() -> None:
    world = World(fault("join", 5), fault("leave", 8, server=2), fault("slow", 9, server=2))
    run(world.play())
    assert world.left == ["server 2"]
    assert world.engines[2].heard == [(9, "slow 4"), (19, "slow 1")]
    assert [(e[1], e[2]) for e in world.trace.events[:2]] == [("controller", "join"), ("server 2", "leave")]
    assert not {"join", "leave"} & set(KINDS)


def test_a_storm_is_over_all_environments() -> None:
    world = World(fault("env_storm", 5, factor=3.0), fault("env_storm", 8, for_s=3, factor=9.0, server=1))
    seen = run(world.play(*((at, lambda: world.envs.storm) for at in (1, 6, 9, 12, 16))))
    assert seen == [1, 3, 9, 3, 1]
    assert {e[1] for e in world.trace.events} == {"envs"}


def test_a_crash_of_the_trainer_is_at_once() -> None:
    world = World(fault("trainer_crash", 5))
    seen = run(world.play((4, lambda: repr(world.trainer)), (6, lambda: repr(world.trainer))))
    assert seen == ["<SimTrainer v0 idle>", "<SimTrainer v0 dead>"]
    assert [(e[1], e[2]) for e in world.trace.events] == [("trainer", "trainer_crash")]


def test_overlapping_faults_of_a_kind_last_until_the_last_has_ended() -> None:
    for kind, on, off in (("kill", "kill", "restart"), ("hang", "hang True", "hang False")):
        world = World(fault(kind, 5, 20), fault(kind, 10, 5), fault(kind, 12, 30))
        run(world.play())
        heard = world.engines[0].heard
        assert heard[0] == (5, on) and heard[-1] == (42, off)
        assert [what for _, what in heard].count(off) == 1


def test_of_several_factors_the_largest_counts() -> None:
    world = World(fault("slow", 5, 20, factor=2), fault("slow", 10, 5, factor=6), fault("slow", 10, 3, factor=2))
    run(world.play())
    levels = [what for _, what in world.engines[0].heard]
    assert levels == ["slow 2", "slow 6", "slow 6", "slow 6", "slow 2", "slow 1"]


def test_a_server_that_dies_while_it_hangs_comes_back() -> None:
    run(World(fault("hang", 5, 50), fault("kill", 10, 10), fault("partition", 12, 30)).play())


@pytest.mark.parametrize("seed", range(40))
def test_no_mixture_of_faults_leaves_a_server_broken(seed: int) -> None:
    """What is drawn at random is over in the end, and the servers answer."""
    sim = SimConfig(random_faults=40, random_within_s=100.0)
    world = World(*schedule(sim, servers=2, seed=seed))
    run(world.play())


def test_a_dead_server_refuses_and_a_new_process_needs_its_time() -> None:
    world = World(fault("kill", 5))

    async def asked(at: float) -> bool:
        await asyncio.sleep(at)
        try:
            await world.engines[0].pause()
        except EngineError:
            return False
        return True

    async def main() -> list[bool]:
        async with asyncio.TaskGroup() as group:
            group.create_task(world.play())
            answers = [group.create_task(asked(at)) for at in (4, 6, 15.5, 16.5)]
        return [a.result() for a in answers]

    assert run(main()) == [True, False, False, True]


def test_the_schedule_is_the_recipes_faults_and_those_of_the_seed() -> None:
    own = fault("trainer_crash", 50)
    sim = SimConfig(faults=[own], random_faults=300, random_within_s=100.0)
    faults = schedule(sim, servers=3, seed=1)
    assert faults == schedule(sim, servers=3, seed=1) != schedule(sim, servers=3, seed=2)
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    mortal = schedule(sim, servers=3, seed=1, restartable=False)
    assert [f for f in mortal if f.kind == "trainer_crash"] == [own]
    drawn = [f for f in faults if f is not own]
    assert len(drawn) == 300
    assert {f.kind for f in drawn} == set(KINDS)
    assert {f.server for f in drawn} == {0, 1, 2}
    assert all(0 <= f.at_s <= 100 and f.for_s >= 0 and f.factor > 1 for f in drawn)
    assert schedule(SimConfig(), servers=3, seed=1) == []
