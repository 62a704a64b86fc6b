"""Servers that hang, come back, join, drain and leave, on virtual time: alone, and in whole runs of every policy.

``ASYNCRL_SEEDS=300 pytest tests/runtime/test_fleet.py`` plays as many random runs.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import msgspec
import pytest

from asyncrl.build.virtual import Simulation
from asyncrl.config import Recipe
from asyncrl.core.policy.routing import round_robin
from asyncrl.ports import EngineError, EngineInfo
from asyncrl.runtime.fleet import Fleet, FleetDown, FleetError
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.loop import run

from .test_faults import SHORT, downs
from .test_llm_proxy import prompt, whole
from .world import (
    check_laws,
    coordinated_recipe,
    dora_recipe,
    laminar_recipe,
    play,
    proxy_over,
    random_recipe,
    recipe,
    sim_engine,
)

SEEDS = int(os.environ.get("ASYNCRL_SEEDS", "25"))


class Launcher:
    """Owns what is in ``began``."""

    def __init__(self, began: dict[str, float]) -> None:
        self.processes = began
        self.killed: list[tuple[str, float]] = []
        self.retired: list[str] = []

    def began(self, name: str) -> float | None:
        return self.processes.get(name)

    def kill(self, name: str) -> None:
        self.killed.append((name, asyncio.get_running_loop().time()))
        self.processes[name] = asyncio.get_running_loop().time()

    def retire(self, name: str) -> None:
        self.retired.append(name)


class Watched:
    """A fleet over simulated servers, which verifies nothing, and what it said."""

    def __init__(self, proxy: LLMProxy, **kwargs: Any) -> None:
        self.proxy = proxy
        self.notes: list[str] = []
        self.restored: list[float] = []
        self.restore_s = 0.0
        self.fleet = Fleet(proxy=proxy, restore=self.restore, note=self.notes.append, **{"probe_s": 1.0, **kwargs})

    async def restore(self, instance: Instance) -> None:
        self.restored.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.restore_s)
        instance.version = 0
        self.proxy.mark_up(instance)

    def __getitem__(self, index: int) -> Instance:
        return self.proxy.instances[index]


async def watched(*engines: SimEngine, route: Any = None, **kwargs: Any) -> Watched:
    return Watched(await proxy_over(*engines, **({"route": route} if route else {})), **kwargs)


def names(proxy: LLMProxy) -> list[str]:
    return [instance.name for instance in proxy.instances]


# --- servers that fail and hang


def test_a_returned_server_is_used_only_after_it_was_restored() -> None:
    async def main() -> None:
        engine = sim_engine()
        w = await watched(engine)
        w.restore_s = 3.0
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            engine.kill()
            task = group.create_task(w.proxy.generate(prompt()))
            await asyncio.sleep(10)
            assert not task.done() and not w.restored
            engine.restart()
            await task
            running.cancel()
        assert len(w.restored) == 1
        assert asyncio.get_running_loop().time() >= w.restored[0] + 3
        assert w.notes[-1].startswith("server 0 serves, with version 0, after ")

    run(main())


def test_no_server_for_too_long_ends_the_run_with_the_last_error() -> None:
    async def main() -> None:
        engine = sim_engine()
        w = await watched(engine, patience_s=30)
        async with asyncio.TaskGroup() as group:
            group.create_task(w.fleet.run())
            group.create_task(w.proxy.generate(prompt()))
            engine.kill()

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    assert caught.group_contains(FleetDown, match="server 0: connection")


@pytest.mark.parametrize("owned", [True, False])
def test_a_server_that_hangs_is_told_in_time_and_its_requests_go_elsewhere(owned: bool) -> None:
    """Long before a request's own deadline; killed is only what was started here."""

    async def main() -> None:
        launcher = Launcher({"server 0": 0.0} if owned else {})
        engines = [sim_engine(f"server {i}", length=400, idle_timeout_s=1e5, stream_interval=8) for i in range(2)]
        w = await watched(*engines, hang_s=20.0, launcher=launcher)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            await asyncio.sleep(30)
            task = group.create_task(w.proxy.generate(prompt(limit=500)))
            await asyncio.sleep(1)
            engines[0].hang(True)
            [completion] = await task
            running.cancel()
        at = asyncio.get_running_loop().time()
        assert whole(completion, 400) and completion.server == "server 1"
        assert not w[0].up and w[1].up
        assert "silent for 2" in w[0].why and "engine.hang_s" in w[0].why
        assert at < 31 + 20 + 15
        assert len(launcher.killed) == owned
        if owned:
            [(name, when)] = launcher.killed
            assert name == "server 0" and 31 + 15 <= when <= 31 + 20

    run(main())


def test_a_process_that_has_begun_is_given_its_time_and_then_killed_again() -> None:
    async def main() -> None:
        launcher = Launcher({"server 0": 0.0})
        engines = [sim_engine(f"server {i}") for i in range(2)]
        w = await watched(*engines, hang_s=20.0, start_s=100.0, launcher=launcher)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            await asyncio.sleep(1)
            engines[0].hang(True)
            await asyncio.sleep(300)
            running.cancel()
        first, second, third = (at for _, at in launcher.killed)
        assert second - first >= 100 and third - second >= 100

    run(main())


def test_a_loop_that_was_held_up_takes_nobody_for_hung() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        launcher = Launcher({"server 0": 0.0})
        engine = sim_engine()
        w = await watched(engine, sim_engine("server 1"), hang_s=20.0, launcher=launcher)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            await asyncio.sleep(21)
            engine.hang(True)
            await asyncio.sleep(5)  # a heartbeat is under way
            loop._now += 60.0  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
            engine.hang(False)
            await asyncio.sleep(10)
            assert w[0].up and not launcher.killed
            running.cancel()

    run(main())


# --- servers that join, drain and leave


def test_a_server_that_joins_is_used_once_it_is_restored() -> None:
    async def main() -> None:
        w = await watched(sim_engine(), context_length=1000)
        w.restore_s = 5.0
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            await asyncio.sleep(1)
            instance = await w.fleet.add(sim_engine("server 1"))
            assert not instance.up and instance.version == -1 and instance.why == "it joins"
            await asyncio.sleep(7)
            assert instance.up
            running.cancel()
        assert w.notes[0] == "server 1 joins"

    run(main())


def test_what_cannot_serve_the_run_does_not_join() -> None:
    class Other(SimEngine):
        async def connect(self, within_s: float | None = None) -> EngineInfo:
            raise EngineError(f"{self.name}: serves a llama model")

    async def main() -> None:
        w = await watched(sim_engine(), context_length=1000)
        with pytest.raises(FleetError, match=r"server 1: takes at most 500 tokens, and rollout.max_tokens is 1000"):
            await w.fleet.add(sim_engine("server 1", context_length=500))
        with pytest.raises(EngineError, match="llama"):
            await w.fleet.add(Other("server 2", rng=random.Random(0), lengths=lambda rng, ids: 1))
        with pytest.raises(FleetError, match="server 7: no such server; there are server 0"):
            w.fleet.drain("server 7")
        with pytest.raises(FleetError, match="server 0 is the last server in use; add another one first"):
            w.fleet.drain("server 0", forget=True)
        with pytest.raises(FleetError, match="server 0 is in use already"):
            w.fleet.readmit("server 0")
        assert names(w.proxy) == ["server 0"]

    run(main())


def test_a_server_that_is_not_there_when_a_run_goes_on_joins_when_it_is() -> None:
    """With the limits that it then says it has."""

    async def main() -> None:
        w = await watched(sim_engine())
        late = sim_engine("server 1")
        late.kill()
        like = EngineInfo(name="server 1", version=-1, max_running_requests=7, max_total_tokens=70, context_length=1000)
        w.fleet.expect(late, like, "server 1: connection refused")
        assert w[1].max_running == 7 and not w[1].up and w[1].why == "server 1: connection refused"
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            await w.proxy.generate(prompt())
            await asyncio.sleep(100)
            assert not w[1].up and not w.restored
            late.restart()
            await asyncio.sleep(10)
            assert w[1].up
            running.cancel()
        assert w.notes[0] == (
            "server 1: connection refused; going on without server 1, which joins when it can be used"
        )
        w[1].meet(await late.connect())
        assert w[1].max_running == (await late.connect()).max_running_requests != 7
        with pytest.raises(EngineError, match="server 1: takes at most 999 tokens now, and took 1000; start it as it"):
            w[1].meet(msgspec.structs.replace(like, context_length=999))

    run(main())


def test_a_server_that_is_removed_while_servers_are_paused_for_new_weights_leaves_once_it_serves_again() -> None:
    """Else it would stay paused, whoever uses it next."""

    async def main() -> None:
        engine = sim_engine()
        w = await watched(engine, sim_engine("server 1"))
        await w.proxy.suspend("interrupt")
        w.fleet.drain("server 0", forget=True)
        assert names(w.proxy) == ["server 0", "server 1"]
        await w.proxy.resume()
        assert names(w.proxy) == ["server 1"] and not engine._paused

    run(main())


@pytest.mark.parametrize("cuts", [True, False])
def test_a_server_drains_and_rests_and_is_used_again(cuts: bool) -> None:
    """What it runs goes elsewhere with its tokens, or ends there; what waits for it goes elsewhere."""

    async def main() -> None:
        engines = [sim_engine(f"server {i}", length=40, max_running=1, stream_interval=4) for i in range(2)]
        w = await watched(*engines, route=round_robin, cuts=cuts)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            tasks = [group.create_task(w.proxy.generate(prompt())) for _ in range(6)]
            await asyncio.sleep(0.1)
            assert w[0].running == 1
            w.fleet.drain("server 0")
            await asyncio.sleep(0.01)
            assert w[0].up != cuts
            done = [(await task)[0] for task in tasks]
            assert all(whole(completion, 40) for completion in done)
            assert sum(c.server == "server 0" for c in done) == (not cuts)
            assert not w[0].up and w[0].draining and w[0].why == "it rests"
            assert w.notes[-1] == "server 0 is drained, and rests"
            w.fleet.drain("server 0")  # harmless
            await asyncio.sleep(100)
            assert not w.restored
            w.fleet.readmit("server 0")
            await asyncio.sleep(2)
            assert w[0].up and len(w.restored) == 1
            running.cancel()

    run(main())


def test_a_server_that_leaves_is_forgotten_and_its_process_retired() -> None:
    async def main() -> None:
        launcher = Launcher({"server 0": 0.0, "server 1": 0.0})
        w = await watched(*(sim_engine(f"server {i}", length=40) for i in range(2)), cuts=False, launcher=launcher)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            task = group.create_task(w.proxy.generate(prompt()))
            await asyncio.sleep(0.1)
            w.fleet.drain("server 0", forget=True)
            assert names(w.proxy) == ["server 0", "server 1"] and not launcher.retired
            assert [c.server for c in await task] == ["server 0"]
            assert names(w.proxy) == ["server 1"] and launcher.retired == ["server 0"]
            running.cancel()
        assert w.notes[-1] == "server 0 has left"

    run(main())


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_dead_server_that_is_to_leave_leaves_at_once(when: str) -> None:
    async def main() -> None:
        engine = sim_engine(length=40)
        w = await watched(engine, sim_engine("server 1", length=40), cuts=False)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(w.fleet.run())
            task = group.create_task(w.proxy.generate(prompt()))
            await asyncio.sleep(0.1)
            if when == "while":
                w.fleet.drain("server 0", forget=True)
            engine.kill()
            await asyncio.sleep(0.1)
            if when == "before":
                w.fleet.drain("server 0", forget=True)
            assert names(w.proxy) == ["server 1"]
            assert whole((await task)[0], 40)
            running.cancel()

    run(main())


# --- whole runs

PRESETS = ["roll-flash", "staleflow", "laminar", "dora"]
RECIPES = {
    "any": random_recipe,
    "staleflow": coordinated_recipe,
    "laminar": laminar_recipe,
    "dora": dora_recipe,
}


def moves(seed: int) -> list[dict[str, Any]]:
    """Servers that join and leave, some of them several times over; the last one never does."""
    rng = random.Random(f"moves {seed}")
    kinds = ["join", *(rng.choice(["join", "leave", "leave"]) for _ in range(7))]
    joined = 0
    found = []
    for kind, at_s in zip(kinds, sorted(rng.uniform(0.0, 60.0) for _ in kinds), strict=True):
        joined += kind == "join"
        found.append({"kind": kind, "at_s": at_s, "server": rng.randint(0, joined - (kind == "join"))})
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", RECIPES)
def test_laws_hold_while_servers_join_and_leave_and_fail(kind: str, seed: int) -> None:
    sim = {"faults": moves(seed), "random_faults": 6, "random_within_s": 60.0, "stall_s": 2e4}
    settings = RECIPES[kind](seed, engine={**SHORT, "hang_s": 10.0}, sim=sim)
    check_laws(settings, play(settings))


def preset(name: str, **tables: Any) -> Recipe:
    control: dict[str, Any] = {
        "roll-flash": {},
        "staleflow": {"staleness": {"control": "buffers", "bound": 2}, "engine": {"routing": "waterfall"}},
        "laminar": {},
        "dora": {},
    }[name]
    engine = {"count": 3, **SHORT, **control.get("engine", {}), **tables.pop("engine", {})}
    return recipe(
        **{
            "preset": name,
            "run": {"steps": 30},
            **({"staleness": control["staleness"]} if "staleness" in control else {}),
            "engine": engine,
            "rollout": {"num_envs": 18},
            **tables,
        }
    )


@pytest.mark.parametrize("name", PRESETS)
def test_under_each_policy_a_server_leaves_and_another_takes_part_with_the_newest_weights(name: str) -> None:
    faults = [{"kind": "leave", "at_s": 6.0, "server": 0}, {"kind": "join", "at_s": 10.0}]
    settings = preset(name, sim={"faults": faults})
    simulation = play(settings)
    check_laws(settings, simulation)
    instances = simulation.run.proxy.instances
    assert [i.name for i in instances] == ["server 1", "server 2", "server 3"]
    assert not downs(simulation)
    joined = [e for e in simulation.trace.events if e[:2] == ("server", "server 3") and e[5]]
    assert joined[0][4] > 0, "its first version is not the newest one"
    assert max(e[3] for e in joined) > 0, "it was given nothing"
    last = [e for e in simulation.trace.events if e[:2] == ("server", "server 0")][-1]
    assert not last[5] and last[3] == 0 and last[2] < 60


def test_a_server_of_a_batch_of_its_own_ends_it_before_it_leaves() -> None:
    """With all turns of its trajectories: none is begun anew elsewhere."""
    slow = {"step": {"kind": "constant", "value": 4.0}}
    faults = [{"kind": "leave", "at_s": 9.0, "server": 0}]
    settings = preset("laminar", env={"max_turns": 3}, sim={"faults": faults, "env": slow})
    simulation = play(settings)
    check_laws(settings, simulation)
    assert [i.name for i in simulation.run.proxy.instances] == ["server 1", "server 2"]
    assert simulation.run.buffer.snapshot().failed_infra == 0
    left = max(e[2] for e in simulation.trace.events if e[:2] == ("server", "server 0"))
    assert left > 9.0 + 4.0


@pytest.mark.parametrize("at_s", [5.0, 7.0])
@pytest.mark.parametrize("name", PRESETS)
def test_a_hung_server_of_the_launcher_is_started_again_in_a_whole_run(name: str, at_s: float) -> None:
    """Also one that was to take weights, and long before the deadline of that."""
    long = dict.fromkeys(("patience_s", "idle_timeout_s", "request_timeout_s", "control_timeout_s"), 1e5)
    settings = preset(
        name,
        run={"steps": 40, "stall_s": 1e5},
        engine={"count": 2, "hang_s": 12.0, **long},
        sim={"faults": [{"kind": "hang", "at_s": at_s, "for_s": 1e4, "server": 1}]},
    )
    simulation = play(settings)
    check_laws(settings, simulation)
    states = [(e[2], e[5]) for e in simulation.trace.events if e[:2] == ("server", "server 1")]
    down = next(at for at, up in states if not up)
    back = next(at for at, up in states if up and at > down)
    assert down <= at_s + 12 + 3 and back < down + 15
    assert any("engine.hang_s" in why for why in downs(simulation))


# --- rollouts while the trainer is down


@pytest.mark.parametrize("name", PRESETS)
def test_rollouts_go_on_without_the_trainer_until_the_buffer_is_full_and_say_so(name: str) -> None:
    trainer = {"fixed_s": 1.0, "start_s": 300.0}
    settings = preset(
        name,
        run={"steps": 8, "stall_s": 1e5},
        sim={"trainer": trainer, "faults": [{"kind": "trainer_crash", "at_s": 8}]},
    )
    said: list[str] = []
    tokens: list[int] = []

    async def look(simulation: Simulation) -> None:
        for at in (5, 8.05, 250):
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            said.append(simulation.run.books.rollouts())
            tokens.append(simulation.run.proxy.generated)
            if at == 250:
                assert f"also: {said[-1]}" in simulation.run.books.status().lines()
                await asyncio.sleep(20)
                assert simulation.run.proxy.generated == tokens[-1], "they wait"

    simulation = play(settings, look)
    check_laws(settings, simulation)
    before, soon, late = said
    assert before == ""
    assert soon.startswith("rollouts go on with version ") and "without the trainer, which is started again" in soon
    assert late.startswith("rollouts wait for the trainer, which is started again: the buffer is full, ")
    ready, taken = (int(word) for word in (late.split("full, ")[1].split()[0], late.split("ready, ")[1].split()[0]))
    assert ready == taken >= settings.rollout.batch_groups
    assert tokens[2] > tokens[1] > tokens[0]


# --- servers that come back as others


@pytest.mark.parametrize("name", PRESETS)
def test_a_server_that_comes_back_with_weights_of_nobody_knows_whom_is_given_the_right_ones_first(name: str) -> None:
    settings = preset(name)

    async def strike(simulation: Simulation) -> None:
        await asyncio.sleep(6)
        engine = simulation.engines[1]
        engine.kill()
        engine.restart()
        await asyncio.sleep(0.6)
        engine.version = 77

    simulation = play(settings, strike)
    check_laws(settings, simulation)
    states = [e for e in simulation.trace.events if e[:2] == ("server", "server 1") and e[2] >= 6]
    assert states[-1][5] and any(not e[5] for e in states)
    assert all(0 <= e[4] <= settings.run.steps for e in states if e[5])
    assert simulation.engines[1].version <= settings.run.steps


@pytest.mark.parametrize("name", PRESETS)
def test_a_server_that_comes_back_with_another_model_is_not_used_and_the_status_says_why(name: str) -> None:
    settings = preset(name)
    seen: list[str] = []

    async def strike(simulation: Simulation) -> None:
        async def refused() -> EngineInfo:
            raise EngineError("server 1: serves a llama model, the recipe trains a qwen3")

        await asyncio.sleep(6)
        engine = simulation.engines[1]
        engine.connect = refused  # type: ignore[method-assign]
        engine.kill()
        engine.restart()
        await asyncio.sleep(12)
        assert not simulation.run.proxy.instances[1].up
        seen.extend(line for line in simulation.run.books.status().lines() if "server 1 is down" in line)
        del engine.connect  # type: ignore[method-assign]

    simulation = play(settings, strike)
    check_laws(settings, simulation)
    assert seen and "serves a llama model" in seen[0]
    assert simulation.run.proxy.instances[1].up
