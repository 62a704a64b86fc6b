"""Faults: what breaks in a simulated run, when, and for how long. All of it stands in the recipe or follows its seed.

    kind               what happens                                                 while or until
    kill               the server's process dies                                    ``for_s``, then a new one starts
    hang               the server answers nothing, connections stay open            ``for_s``
    slow               its steps take ``factor`` times as long                      ``for_s``
    partition          nobody reaches the server, it goes on                        ``for_s``
    drop_reply         the next reply that would end is lost                        once
    duplicate_reply    the next reply that ends, ends twice                         once
    corrupt_weights    the next weights that the server gets are not what was sent  once
    trainer_crash      the training job dies, whatever it is doing                  ``sim.trainer.start_s``
    env_storm          every environment's waits take ``factor`` times as long      ``for_s``
    join               another server joins the fleet, as somebody has it do so     for good
    leave              the server is drained and leaves the fleet                   for good

Faults overlap as they like: a state lasts until the last fault that asks for it has ended, and of several factors the
largest counts, so nothing stays broken for ever. Recovery is the runtime's own business; where ``trainer.restarts`` is
0, the end of the trainer is that of the run, and happens only where the recipe names it.

    Faults.run()    waits for: the next beginning and end    woken by: the clock
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import get_args

from asyncrl.config import FaultConfig, SimConfig
from asyncrl.config.virtual import FaultKind
from asyncrl.ports import Observer
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.env import SimEnvs
from asyncrl.sim.trainer import SimTrainer

ONCE = frozenset({"drop_reply", "duplicate_reply", "corrupt_weights", "trainer_crash", "leave"})
"""Kinds without an end of their own."""
KINDS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind not in ("join", "leave"))
"""Those that are drawn: servers join and leave only as the recipe says."""


def schedule(sim: SimConfig, *, servers: int, seed: int, restartable: bool = True) -> list[FaultConfig]:
    """The recipe's faults and its random ones, by time."""
    rng = random.Random(f"{seed}/faults")
    kinds = [kind for kind in KINDS if restartable or kind != "trainer_crash"]
    drawn = [
        FaultConfig(
            kind=rng.choice(kinds),
            at_s=rng.uniform(0.0, sim.random_within_s),
            server=rng.randrange(servers),
            for_s=rng.expovariate(1 / 30.0),
            factor=rng.uniform(1.5, 8.0),
        )
        for _ in range(sim.random_faults)
    ]
    return sorted([*sim.faults, *drawn], key=lambda fault: fault.at_s)


class Faults:
    """Plays ``faults``; each stands in the trace, on the track of what it hits. ``join`` has another server join, which
    is then among ``engines``, and ``leave`` the one of that name leave."""

    def __init__(
        self,
        faults: Sequence[FaultConfig],
        *,
        engines: Sequence[SimEngine],
        trainer: SimTrainer,
        envs: SimEnvs,
        observer: Observer,
        join: Callable[[], Awaitable[None]],
        leave: Callable[[str], None],
    ) -> None:
        self._faults = faults
        self._engines = engines
        self._trainer = trainer
        self._envs = envs
        self._observer = observer
        self._join = join
        self._leave = leave
        self._active: dict[tuple[FaultKind, int], list[float]] = {}
        """(kind, server) → factors of the faults that hold it so."""

    async def run(self) -> None:
        """Until the last fault has ended."""
        async with asyncio.TaskGroup() as group:
            for fault in self._faults:
                group.create_task(self._play(fault))

    async def _play(self, fault: FaultConfig) -> None:
        await asyncio.sleep(fault.at_s)
        self._say(fault, fault.kind)
        if fault.kind == "join":
            await self._join()
            return
        if fault.kind in ONCE:
            self._strike(fault)
            return
        key = fault.kind, 0 if fault.kind == "env_storm" else fault.server
        active = self._active.setdefault(key, [])
        active.append(fault.factor)
        self._set(fault, active, begins=len(active) == 1)
        await asyncio.sleep(fault.for_s)
        active.remove(fault.factor)
        self._set(fault, active)
        self._say(fault, f"{fault.kind} ends")

    def _strike(self, fault: FaultConfig) -> None:
        engine = self._engines[fault.server]
        strikes: dict[str, Callable[[], None]] = {
            "drop_reply": engine.drop_reply,
            "duplicate_reply": engine.duplicate_reply,
            "corrupt_weights": engine.corrupt_weights,
            "trainer_crash": self._trainer.crash,
            "leave": lambda: self._leave(engine.name),
        }
        strikes[fault.kind]()

    def _set(self, fault: FaultConfig, active: Sequence[float], *, begins: bool = False) -> None:
        """Bring what is hit into the state that the active faults ask for."""
        engine = self._engines[fault.server]
        match fault.kind:
            case "kill" if begins:
                engine.kill()
            case "kill" if not active:
                engine.restart()
            case "hang":
                engine.hang(bool(active))
            case "partition":
                engine.partition(bool(active))
            case "slow":
                engine.slow(max(active, default=1.0))
            case "env_storm":
                self._envs.storm = max(active, default=1.0)

    def _say(self, fault: FaultConfig, what: str) -> None:
        track = {"env_storm": "envs", "trainer_crash": "trainer", "join": "controller"}.get(
            fault.kind, self._engines[fault.server].name
        )
        self._observer.instant(
            track, what, asyncio.get_running_loop().time(), {"for_s": fault.for_s, "factor": fault.factor}
        )
