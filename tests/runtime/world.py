"""Small worlds on virtual time for the runtime's tests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.build.virtual import Simulation, simulated
from asyncrl.config import Recipe, load_table
from asyncrl.core.ledger import FINAL
from asyncrl.core.policy.routing import least_loaded
from asyncrl.ports import EngineInfo
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.sim.engine import SimEngine
from asyncrl.sim.loop import VirtualLoop, run
from asyncrl.sim.trace import TraceRecorder

T = TypeVar("T")

SMALL: dict[str, Any] = {
    "env": {"max_turns": 2, "failure_window": 1000, "max_failure_rate": 1.0},
    "rollout": {"batch_groups": 3, "group_size": 2, "num_envs": 8, "max_new_tokens": 60, "max_tokens": 400},
    "engine": {"count": 2, "max_running_requests": 3, "max_total_tokens": 1000, "stream_interval": 8},
    "run": {"steps": 4},
    "sim": {
        "instance": {"load_s": 0.5, "start_s": 0.5},
        "trainer": {"fixed_s": 1.0},
        "weights": {"gigabytes": 0.2},
        "lengths": {"kind": "lognormal", "mean": 90, "tailness": 77},
        "prompt_tokens": {"kind": "constant", "value": 10},
        "tasks": 50,
        "stall_s": 1e5,
    },
}


def recipe(**tables: Any) -> Recipe:
    """``SMALL`` with whole tables updated: ``recipe(staleness={"bound": 2})``. Checked like a user's. Whole batches are
    trained, unless the test says otherwise."""
    merged: dict[str, Any] = {"preset": "roll-flash", **{name: dict(value) for name, value in SMALL.items()}}
    for name, value in tables.items():
        merged[name] = _over(merged.get(name, {}), value)
    return load_table(merged)


def random_recipe(seed: int, **tables: Any) -> Recipe:
    """A small recipe whose settings are drawn from the seed, with ``tables`` laid over it as in ``recipe``."""
    rng = random.Random(f"recipe {seed}")
    replicate = rng.random() < 0.7
    group_size = rng.randint(2, 4)
    slow = rng.choice([0.0, 0.5, 5.0])
    drawn: dict[str, Any] = {
        "seed": seed,
        "staleness": {
            "control": rng.choice(["inflight_cap", "inflight_cap", "queue_drop", "queue_max"]),
            "bound": rng.choice([0, 0, 0.5, 1, 1, 1.5, 2, 3]),
            "queue": rng.choice([1, 1.5, 3]),
        },
        "update": {"running": rng.choice(["interrupt", "interrupt", "drain"])},
        "env": {
            "max_turns": rng.randint(1, 4) if replicate else 1,
            "retries": rng.randint(0, 2),
            **dict.fromkeys(("reset_timeout_s", "step_timeout_s", "reward_timeout_s"), 20.0),
        },
        "rollout": {
            "batch_groups": rng.randint(1, 4),
            "group_size": group_size,
            "queue_scheduling": rng.random() < 0.8,
            "num_envs": rng.randint(1, 12),
            "expand_num_return_sequences": replicate,
            "filter_zero_variance": rng.random() < 0.4,
            "max_additional_running_prompts": rng.choice([0, 0, 1, 3]),
            "group_size_redundancy": rng.choice([0, 0, 1, 2]) if replicate else 0,
        },
        "engine": {
            "count": rng.randint(1, 3),
            "max_running_requests": rng.randint(group_size, 8),
            "stream_interval": rng.choice([0, 1, 8]),
            "routing": rng.choice(["least_loaded", "prefix_affine", "round_robin"]),
        },
        "sim": {
            "instance": {
                "load_s": rng.choice([0.0, 0.5]),
                "start_s": 0.5,
                "chunked_prefill": rng.choice([0, 0, 16]),
                "prefix_cache": rng.random() < 0.7,
            },
            "weights": {
                "transport": rng.choice(["disk", "collective", "relay"]),
                "gigabytes": rng.choice([0.01, 0.2, 2.0, 40.0]),
            },
            "env": {
                "step": {"kind": "normal", "mean": slow, "std": slow} if slow else {"kind": "constant", "value": 0},
                "turns": rng.choice([None, {"kind": "empirical", "values": [1, 2, 3]}]),
                "crash": rng.choice([0.0, 0.0, 0.1]),
                "hang": rng.choice([0.0, 0.0, 0.02]),
                "spread": rng.choice([0.0, 0.5]),
            },
            "task_share": rng.choice([0.0, 0.5]),
            "heldout": rng.choice([0, 0, 5]),
        },
        "trainer": {"stream": rng.random() < 0.5, "micro_batch_tokens": rng.choice([1, 300])},
    }
    if drawn["sim"]["heldout"]:
        drawn["run"] = {"eval_every": rng.choice([0, 1, 2]), "eval_share": rng.choice([0.1, 0.5, 1.0])}
    return recipe(**{**drawn, **{name: _over(drawn.get(name), value) for name, value in tables.items()}})


def coordinated_recipe(seed: int, **tables: Any) -> Recipe:
    """The same with staleness buffers and a coordinator, whose settings are drawn too."""
    rng = random.Random(f"coordinated {seed}")
    drawn: dict[str, Any] = {
        "preset": "staleflow",
        "staleness": {"control": "buffers", "bound": rng.choice([0, 1, 1, 2, 3])},
        "update": {"running": "interrupt", "synchronization": rng.choice(["all", "selective", "selective"])},
        "engine": {
            "count": rng.randint(1, 4),
            "routing": rng.choice(["waterfall", "waterfall", "least_loaded", "prefix_affine", "round_robin"]),
            "max_total_tokens": rng.choice([400, 600, 1000]),
            "mu": rng.choice([0.05, 0.3, 0.7, 1.0]),
            "migration": rng.choice(["none", "throughput", "throughput"]),
            "phi_wait": rng.choice([0, 1, 3]),
            "phi_throughput": rng.choice([1.1, 2.0, 5.0]),
        },
    }
    if rng.random() < 0.5:  # steps that take the longer, the more tokens a server holds: something to gain by migration
        drawn["engine"]["max_total_tokens"] *= 8
        drawn["sim"] = {"instance": {"cost": {"k1": 1e-4}}}
    return random_recipe(seed, **{name: _over(drawn.get(name), tables.get(name)) for name in {**drawn, **tables}})


def laminar_recipe(seed: int, **tables: Any) -> Recipe:
    """The same with a batch of its own for each server, with and without a bound."""
    rng = random.Random(f"laminar {seed}")
    drawn: dict[str, Any] = {
        "preset": "laminar",
        "staleness": {
            "control": rng.choice(["inherent", "inherent", "buffers"]),
            "bound": rng.choice([0, 1, 2, 3]),
            "queue": rng.choice([1, 1.5, 3]),
        },
        "update": {"running": "drain", "synchronization": "when_empty"},
        "rollout": {"max_additional_running_prompts": 0, "num_envs": rng.randint(1, 24)},
        "engine": {
            "count": rng.randint(1, 4),
            "routing": "own_batch",
            "max_total_tokens": rng.choice([400, 600, 1000]),
            "migration": rng.choice(["none", "repack", "repack"]),
            "rebalance_s": rng.choice([0.05, 0.5, 5.0]),
            "kv_threshold": rng.choice([0.5, 0.99]),
            "roofline_batch": rng.choice([2, 4, 64]),
        },
    }
    return random_recipe(seed, **{name: _over(drawn.get(name), tables.get(name)) for name in {**drawn, **tables}})


def dora_recipe(seed: int, **tables: Any) -> Recipe:
    """The same with several versions side by side, by any control of a coordinator's."""
    rng = random.Random(f"dora {seed}")
    drawn: dict[str, Any] = {
        "preset": "dora",
        "staleness": {
            "control": rng.choice(["window", "window", "window", "buffers", "inherent"]),
            "bound": rng.choice([0, 1, 2, 2, 3, 4]),
        },
        "update": {"running": "drain", "synchronization": "when_empty"},
        "rollout": {
            "max_additional_running_prompts": 0,
            "group_size_redundancy": 0,
            "num_envs": rng.randint(1, 24),
        },
        "engine": {
            "count": rng.randint(1, 5),
            "routing": "newest_first",
            "max_total_tokens": rng.choice([400, 600, 1000]),
            "migration": rng.choice(["none", "repartition", "repartition"]),
            "rebalance_s": rng.choice([0.05, 0.5, 5.0]),
            "kv_threshold": rng.choice([0.5, 0.9]),
            "kv_reuse": rng.random() < 0.5,
        },
    }
    return random_recipe(seed, **{name: _over(drawn.get(name), tables.get(name)) for name in {**drawn, **tables}})


def _over(below: Any, above: Any) -> Any:
    if above is None:
        return below
    return {**below, **above} if isinstance(below, dict) and isinstance(above, dict) else above


def play(settings: Recipe, during: Callable[[Simulation], Coroutine[Any, Any, None]] | None = None) -> Simulation:
    """The whole run on virtual time. ``during`` runs beside it (faults), and is cancelled with it."""
    simulations: list[Simulation] = []
    run(started(settings, simulations, during), limit=1e6)
    return simulations[0]


async def started(
    settings: Recipe,
    simulations: list[Simulation],
    during: Callable[[Simulation], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """The whole run; the simulation is put into ``simulations`` before it begins."""

    async def disturb() -> None:
        if during is not None:
            await during(simulations[0])

    simulation = await simulated(settings, services=[disturb])
    simulations.append(simulation)
    await simulation.play()


def check_laws(settings: Recipe, simulation: Simulation) -> None:
    """What every finished run must satisfy, whatever happened in it."""
    ledger, limit = simulation.run.buffer.ledger, settings.staleness.limit
    ledger.check_balanced()
    batches = simulation.trace.batches
    assert [b.step for b in batches] == list(range(settings.run.steps))
    consumed = [t.id for b in batches for t in b.trajectories]
    assert len(set(consumed)) == ledger.counts()["consumed"]
    assert len(consumed) == ledger.uses and max(Counter(consumed).values()) <= settings.buffer.reuse
    for batch in batches:
        assert len(batch.groups) == settings.rollout.batch_groups
        assert {len(g.trajectories) for g in batch.groups} == {settings.rollout.group_size}
        assert all(s >= 0 and (limit is None or s <= limit) for s in batch.staleness)
        for t in batch.trajectories:
            versions = [v for v, mask in zip(t.versions, t.loss_mask, strict=True) if mask]
            assert versions == sorted(versions), "a version goes backwards within a trajectory"
            assert t.v_traj <= versions[0] and versions[-1] <= batch.step
            assert not settings.one_version or versions[0] == versions[-1], "two versions generated a trajectory"
            assert all(v == -1 for v, mask in zip(t.versions, t.loss_mask, strict=True) if not mask)
            assert len(t.tokens) <= settings.rollout.max_tokens
        if settings.rollout.filter_zero_variance:
            assert all(len(set(g.rewards)) > 1 for g in batch.groups)
    ended = [e for e in simulation.trace.events if e[0] == "trajectory"]
    assert len({e[1] for e in ended}) == len(ended), "a trajectory was reported twice"
    assert {e[2] for e in ended} <= {str(s) for s in FINAL}
    assert simulation.envs.open == 0, "an environment was not closed"


async def proxy_over(*engines: SimEngine, **kwargs: Any) -> LLMProxy:
    """An LLMProxy over simulated servers, least loaded first unless ``route`` says otherwise."""
    proxy = LLMProxy(observer=TraceRecorder(), context_length=1000, **{"route": least_loaded, **kwargs})
    for engine in engines:
        info: EngineInfo = await engine.connect()
        proxy.add(engine, info)
    return proxy


def sim_engine(name: str = "server 0", *, length: int = 20, seed: int = 0, **kwargs: Any) -> SimEngine:
    return SimEngine(name, rng=random.Random(seed), lengths=lambda rng, ids: length, load_s=0.1, **kwargs)


class CancellingLoop(VirtualLoop):
    """Cancels the main task at the loop's ``cancel_at``-th turn, so that a sweep cancels at every await."""

    cancel_at = 0
    main: asyncio.Task[Any] | None = None
    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns >= self.cancel_at and self.main is not None:
            self.main.cancel()
            self.main = None
        super()._run_once()


def cancelled_at(turn: int, main: Coroutine[Any, Any, T]) -> bool:
    """Run ``main`` and cancel it at the loop's ``turn``-th turn; False if it ended before."""
    loop = CancellingLoop()
    loop.cancel_at = turn
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        async def outer() -> bool:
            loop.main = asyncio.current_task()
            try:
                await main
            except asyncio.CancelledError:
                return True
            was_cancelled, loop.main = loop.main is None, None
            return was_cancelled

        return runner.run(outer())


def aim(victim: asyncio.Task[Any]) -> None:
    """Within ``cancelled_at``: cancel this task instead of the whole."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CancellingLoop)
    loop.main = victim
