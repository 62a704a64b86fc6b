"""All presets on the same workloads, 16 to 1,024 GPUs, within the same staleness bound. No paper has this comparison.

Three workloads: short answers (RLVR), long-tailed ones (RLVR with long thoughts), and episodes of about twelve turns
with an environment (agentic). A cluster of N GPUs trains batches that grow with N (weak scaling): 8, 8 and 2
trajectories a GPU and step. The bound is 1 for all that have one; Laminar has none, and has the same number of
environment slots, two batches; a second row gives it StaleFlow's buffers. What Laminar trains is up to 4 versions old,
agentic up to 6, so ``asyncrl`` stands beside it with a bound of 4, too, and still two batches of slots. Synchronous
training takes turns on all GPUs with its servers, 20 s a step for it; all others split them: a half, a quarter and 3/8
of the GPUs train.

Of each run: trained tokens/s; the shares of time that a server has nothing to do and that the trainer waits; staleness
of trained trajectories; and tokens that were prefilled though a server had computed them before, for each that was
generated.

    python bench/figures/presets.py [--cache FOLDER]

What the papers' presets do not say, all have in common: the weights come by relay, the trainer goes on while servers
load them, a group's members are requests of their own. Length limits, speeds and splits were chosen once, before any
result: the middle of what the papers have. One seed, few steps (``MEASURED``), so differences of 3 % mean nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
from common import Lines, Point, each_kept, main, merge
from matplotlib.figure import Figure

from asyncrl.build.virtual import simulated
from asyncrl.config import Recipe, load_table
from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens, training_tokens_per_s
from asyncrl.ports import StepMetrics
from asyncrl.sim.loop import run

GROUP_SIZE = 8
BOUND = 1
RESHARD_S = 20.0
WARM_UP = 3
"""Steps that fill the pipeline."""
MEASURED = {16: 8, 64: 4, 256: 2, 1024: 2}
"""Steps that are measured, by GPUs."""
MEASURED_AHEAD = {16: 8, 64: 8, 256: 8, 1024: 4}
"""Of those that may be more than a step ahead: what they have in stock when the measurement begins weighs more."""
SIZES = tuple(MEASURED)


class Workload(msgspec.Struct, kw_only=True, frozen=True):
    """``lengths`` are tokens of a response, lognormal with this median and 99th percentile; times are seconds."""

    model: str
    gpu: str
    server_gpus: int
    training: float
    """Share of the GPUs that train."""
    per_gpu: int
    """Trajectories of a batch, for each GPU of the cluster."""
    median: float
    p99: float
    limit: int
    prompt: int
    turns: tuple[float, float] = (1.0, 0.0)
    """Mean and standard deviation; at most ``most_turns``."""
    most_turns: int = 1
    env_s: tuple[float, float] = (0.0, 0.0)
    observation: int = 0
    context: int = 0
    """Tokens of a whole trajectory, at most; 0: the prompt and one response."""


WORKLOADS = {
    "RLVR, short": Workload(
        model="qwen3-30b-a3b",
        gpu="h20",
        server_gpus=4,
        training=0.5,
        per_gpu=8,
        median=800.0,
        p99=2_400.0,
        limit=3_000,
        prompt=200,
    ),
    "RLVR, long-tailed": Workload(
        model="qwen3-30b-a3b",
        gpu="h20",
        server_gpus=4,
        training=0.25,
        per_gpu=8,
        median=2_000.0,
        p99=20_000.0,
        limit=16_000,
        prompt=200,
    ),
    "agentic": Workload(
        model="qwen3-32b",
        gpu="h800",
        server_gpus=2,
        training=0.375,
        per_gpu=2,
        median=400.0,
        p99=1_600.0,
        limit=4_000,
        prompt=1_000,
        turns=(12.0, 4.0),
        most_turns=24,
        env_s=(10.0, 5.0),
        observation=1_000,
        context=32_000,
    ),
}

SYSTEMS: dict[str, dict[str, Any]] = {
    "sync": {"preset": "sync"},
    "one-step": {"preset": "one-step"},
    "roll-flash": {"preset": "roll-flash", "staleness": {"bound": BOUND}},
    "areal": {"preset": "areal", "staleness": {"bound": BOUND}},
    "staleflow": {"preset": "staleflow", "staleness": {"bound": BOUND}},
    "asyncrl": {"preset": "asyncrl", "staleness": {"bound": BOUND}},
    "asyncrl, bound 4": {"preset": "asyncrl", "staleness": {"bound": 4}},
    "laminar": {"preset": "laminar"},
    "laminar, bound 1": {"preset": "laminar", "staleness": {"control": "buffers", "bound": BOUND}},
    "dora": {"preset": "dora", "staleness": {"bound": BOUND}},
}
"""Recipe columns by name."""

ASSUMPTION = (
    "RLVR: Qwen3-30B-A3B, 4 H20s a server (StaleFlow's table 4), half (short) or a quarter of the GPUs train; agentic: "
    "Qwen3-32B, 2 H800s a server, 3/8 of the GPUs trains, 12 ± 4 turns of 10 ± 5 s; lengths lognormal; servers of a "
    "cost model, trainer at 35 % of the peak with one further pass"
)


class Measured(msgspec.Struct, kw_only=True):
    """A run's steady steps. Idle shares are of time; ``again`` is tokens that were prefilled though a server had
    computed them before, for each that was generated."""

    tokens_s: float
    period: float
    rollout_idle: float
    trainer_idle: float
    staleness_mean: float
    staleness_max: float
    again: float


class Run(Point, kw_only=True):
    """``ours`` is trained tokens/s."""

    workload: str
    gpus: int
    system: str
    result: Measured


def world(load: Workload, gpus: int, *, shared: bool = False) -> dict[str, Any]:
    """Servers, trainer, lengths and batch of a cluster. ``shared``: servers and trainer take turns on all GPUs."""
    shape, card = MODELS[load.model], GPUS[load.gpu]
    training = gpus if shared else round(load.training * gpus)
    serving = gpus if shared else gpus - training
    cost = cost_model(shape, card, load.server_gpus)
    batch = load.per_gpu * gpus
    never = 1e7  # seconds
    sigma = math.log(load.p99 / load.median) / 2.326
    return {
        "engine": {
            "count": serving // load.server_gpus,
            "max_running_requests": 256,
            "max_total_tokens": kv_tokens(shape, card, load.server_gpus),
            "stream_interval": 512,
            "roofline_batch": round(cost.k2 / cost.k3),
            "request_timeout_s": never,
            "idle_timeout_s": never,
        },
        "env": {
            "max_turns": load.most_turns,
            **dict.fromkeys(("step_timeout_s", "reset_timeout_s", "reward_timeout_s"), never),
            "episode_timeout_s": 3 * never,
        },
        "rollout": {
            "batch_groups": batch // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "num_envs": batch if shared else (1 + BOUND) * batch,
            "max_new_tokens": load.limit,
            "max_tokens": load.context or load.prompt + load.limit,
        },
        "run": {"trace_requests": False},
        "sim": {
            "instance": {"cost": msgspec.to_builtins(cost), "gpus": load.server_gpus},
            "trainer": {
                "gpus": training,
                "tokens_per_s": training_tokens_per_s(shape, card, forwards=1.0),
                "fixed_s": 5.0 + (RESHARD_S if shared else 0.0),
            },
            "weights": {"transport": "relay", "gigabytes": shape.parameters * 2e-9},
            "lengths": {
                "kind": "lognormal",
                "mean": load.median * math.exp(0.5 * sigma * sigma),
                "tailness": sigma / 0.013,
            },
            "task_share": 0.5,
            "prompt_tokens": {"kind": "constant", "value": float(load.prompt)},
            "env": {
                "step": {"kind": "normal", "mean": load.env_s[0], "std": load.env_s[1]},
                "turns": {"kind": "normal", "mean": load.turns[0], "std": load.turns[1]},
                "observation_tokens": {"kind": "constant", "value": float(load.observation)},
            }
            if load.most_turns > 1
            else {},
            "tasks": 100_000,
            "stall_s": never,
        },
    }


def table(workload: str, gpus: int, system: dict[str, Any], *, seed: int = 0, measured: int = 0) -> dict[str, Any]:
    """A recipe. ``measured``: steps, in place of those of ``MEASURED`` and ``MEASURED_AHEAD``."""
    steps = WARM_UP + (measured or _measured(system, gpus)) + _last(load_table(system))
    shared = system["preset"] == "sync"
    return merge(world(WORKLOADS[workload], gpus, shared=shared), {"run": {"steps": steps}, "seed": seed}, system)


def _measured(system: dict[str, Any], gpus: int) -> int:
    limit = load_table(system).staleness.limit
    return (MEASURED_AHEAD if limit is None or limit > BOUND else MEASURED)[gpus]


def _last(recipe: Recipe) -> int:
    """Steps at the end of a run for which nothing new is begun."""
    return BOUND if recipe.staleness.limit is None else recipe.staleness.limit


class Counts(Lines):
    """Keeps with each step's line what servers had prefilled and generated, and what of it was new to them."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.prefilled: Callable[[], int] = lambda: 0
        self.fed = 0

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.fed += sum(len(t.tokens) - t.generated for t in metrics.batch.trajectories)
        self.lines[-1] = self.metrics | {"prefilled": self.prefilled(), "fed": self.fed}


def measured(recipe: Recipe) -> Measured:
    """The steps between the filling of the pipeline and its running dry."""

    async def play() -> Counts:
        counts = Counts(recipe, asyncio.get_running_loop().time)
        simulation = await simulated(recipe, observer=counts)
        counts.prefilled = lambda: sum(engine.server.prefilled for engine in simulation.engines)
        await simulation.play()
        return counts

    lines = run(play(), limit=1e8).lines
    lines = lines[: len(lines) - _last(recipe)]
    first, last, steady = lines[WARM_UP - 1], lines[-1], lines[WARM_UP:]
    seconds = last["time/at"] - first["time/at"]

    def over(key: str) -> float:
        return last[key] - first[key]

    def share(key: str) -> float:
        return sum(line["time/step"] * line[key] for line in steady) / seconds

    return Measured(
        tokens_s=sum(line["tokens/batch"] for line in steady) / seconds,
        period=seconds / len(steady),
        rollout_idle=share("bubble/share"),
        trainer_idle=share("bubble/trainer_idle"),
        staleness_mean=sum(line["staleness/mean"] for line in steady) / len(steady),
        staleness_max=max(line["staleness/max"] for line in steady),
        again=max(0.0, over("prefilled") - over("fed")) / over("tokens/total"),
    )


def measure(quick: bool) -> list[Run]:
    loads, sizes, names = list(WORKLOADS), SIZES, list(SYSTEMS)
    if quick:
        loads, sizes, names = loads[:1], SIZES[:1], ["sync", "asyncrl"]
    wanted = [(workload, gpus, name) for workload in loads for gpus in sizes for name in names]
    tables = [table(workload, gpus, SYSTEMS[name]) for workload, gpus, name in wanted]
    return [
        Run(
            figure="presets",
            point=f"{workload}, {gpus} GPUs, {name}: tokens/s",
            paper=None,
            ours=result.tokens_s,
            assumption=ASSUMPTION,
            workload=workload,
            gpus=gpus,
            system=name,
            result=result,
        )
        for (workload, gpus, name), result in zip(wanted, each_kept(measured, tables, Measured), strict=True)
    ]


def draw(figure: Figure, points: list[Run]) -> None:
    """Where synchronous training was run, of what was run."""
    panels = figure.subplots(2, len(WORKLOADS), sharex=True, sharey="row")
    sizes = sorted({p.gpus for p in points})
    for column, workload in enumerate(WORKLOADS):
        above, below = panels[0][column], panels[1][column]
        mine = [p for p in points if p.workload == workload]
        sync = {p.gpus: p.ours for p in mine if p.system == "sync"}
        for number, name in enumerate(SYSTEMS):
            own = [p for p in mine if p.system == name and p.gpus in sync]
            style = {"color": f"C{number}", "lw": 2.5 if name == "asyncrl" else 1.2, "ms": 4}
            gpus = [p.gpus for p in own]
            above.plot(gpus, [p.ours / sync[p.gpus] for p in own], "s-" if _unbounded(name) else "o-", **style)
            idle = [100 * p.result.rollout_idle for p in own]
            below.plot(gpus, idle, "s-" if _unbounded(name) else "o-", label=name, **style)
        above.set_title(workload, fontsize=10)
        above.set_xscale("log", base=2)
        below.set_xticks(sizes, [f"{gpus:,}" for gpus in sizes])
        below.set_xlabel("GPUs")
        for axes in (above, below):
            axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("trained tokens/s, sync = 1")
    panels[1][0].set_ylabel("servers idle, % of the time")
    panels[1][1].legend(fontsize=7, ncols=2, loc="upper center", title="squares: no bound", title_fontsize=7)


def _unbounded(name: str) -> bool:
    return load_table(SYSTEMS[name]).staleness.limit is None


if __name__ == "__main__":
    main("presets", measure, draw, size=(11.0, 6.0))
