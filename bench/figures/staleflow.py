"""What all figures of StaleFlow take for granted, as tables that a recipe is merged from (StaleFlow §6.1).

The paper states the model (Qwen3-30B-A3B), the GPUs (128 H20), the batch (128 groups of 16), the limits (prompt 2k,
response 20k tokens, 40k in §6.5), the servers' cost model (table 4) and the coordinator's settings. It draws lengths,
throughputs and splits of GPUs without numbers. What is missing was chosen once, here, for all its figures:

* **Size: a quarter.** 32 GPUs and batches of 32 groups stand for 128 and 128 (``SCALE``): as many trajectories a server
  and as many seconds a step, at a quarter of the events. Throughputs are printed for the whole size, times 4.
* **Lengths**: lognormal with median 4,000 and a 99th percentile ten times that (Laminar's and DORA's tail), so that 1 %
  reach the limit of 40k and 5 % that of 20k; one distribution for all limits, which cut it. Half of the variance lies
  between prompts ("trajectories within a group tend to be either all long or all short", appendix C).
* **A server is 4 GPUs**, and table 4 is its. With 2 GPUs a server (twice as many, each as fast) training would bound
  steps from η = 3 on, at half of table 3's 460 seconds.
* **A quarter of the GPUs trains**, at 35 % of the peak with one further pass for the old policy's log probabilities
  (core/hardware.py). The paper tunes the split for each system and does not say which it found; see ``SPLIT``.
* **Weights** (61 GB) reach every server from its own host's memory, for all systems, as the paper's parameter server
  brings them; its figure 19 finds other systems' ways no faster.

A baseline is a row of recipe columns, not that system: what a column does not say, all have in common.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from common import Lines, Point, Result, merge, simulate_all, simulated

from asyncrl.config import Recipe, load_table
from asyncrl.core.cost_model import CostModel
from asyncrl.core.hardware import GPUS, MODELS, kv_tokens, training_tokens_per_s
from asyncrl.observe.tally import NO_ARGS

SCALE = 4
"""The paper's GPUs and groups a batch are divided by this; measured throughputs are multiplied by it."""
GPU, MODEL = "h20", "qwen3-30b-a3b"
CLUSTER, GROUPS, GROUP_SIZE = 128, 128, 16
SERVER_GPUS = 4
SPLIT = 0.25
"""Share of the GPUs that train."""
PROMPT_TOKENS, RESPONSE_TOKENS, LONG_RESPONSE_TOKENS = 2_000, 20_000, 40_000
SLOTS = 256
"""Sequences that a server decodes at once; vLLM's usual limit."""
MEDIAN, TAILNESS = 4_000.0, 76.1
"""σ = 0.99: the 99th percentile is ten times the median."""
TASK_SHARE = 0.5
FORWARDS = 1.0
RESHARD_S = 20.0
"""Where servers and trainer share GPUs: weights and optimiser are loaded and offloaded once a step."""
WARM_UP, STEPS = 4, 8
"""Steps that fill the pipeline, and those that are measured."""

SYSTEMS: dict[str, dict[str, Any]] = {
    "VeRL": {"preset": "sync"},
    "VeRL-Pipeline": {"preset": "one-step", "update": {"overlap": True}},
    "VeRL-Async": {"preset": "areal", "update": {"overlap": True}},
    "AReaL": {"preset": "areal", "update": {"overlap": False}},
    "ROLL Flash": {"preset": "roll-flash", "update": {"overlap": False}},
    "StaleFlow": {"preset": "staleflow", "update": {"overlap": True}},
}
"""Recipe columns by system. The three that cap what is in flight differ in where an interrupted request goes on, and in
whether the trainer waits while servers load ("engineering implementations differ", §6.1)."""
SYNCHRONOUS = "VeRL"
BOUNDED = ("VeRL-Async", "AReaL", "ROLL Flash", "StaleFlow")
"""Those of which η may be chosen."""

ASSUMPTION = (
    f"{CLUSTER // SCALE} GPUs and {GROUPS // SCALE} groups a batch stand for {CLUSTER} and {GROUPS}; 4 H20s a server,"
    " with table 4; a quarter of the GPUs trains at 35 % of the peak; lengths lognormal, median 4,000, p99 40,000"
)


def world(
    *, gpus: int = CLUSTER, groups: int = GROUPS, response: int = RESPONSE_TOKENS, shared: bool = False
) -> dict[str, Any]:
    """Servers, trainer, lengths and batch, of a cluster of ``gpus`` and batches of ``groups`` at the paper's size;
    deadlines that nothing meets. ``shared``: servers and trainer take turns on all GPUs."""
    shape, card = MODELS[MODEL], GPUS[GPU]
    cluster = gpus // SCALE
    training = cluster if shared else round(SPLIT * cluster)
    serving = cluster if shared else cluster - training
    never = 1e7  # seconds
    return {
        "engine": {
            "count": serving // SERVER_GPUS,
            "max_running_requests": SLOTS,
            "max_total_tokens": kv_tokens(shape, card, SERVER_GPUS),
            "stream_interval": 1024,
            "request_timeout_s": never,
            "idle_timeout_s": never,
        },
        "env": {"episode_timeout_s": never},
        "rollout": {
            "batch_groups": groups // SCALE,
            "group_size": GROUP_SIZE,
            "max_new_tokens": response,
            "max_tokens": PROMPT_TOKENS + response,
        },
        "run": {"trace_requests": False},
        "sim": {
            "instance": {"cost": msgspec.to_builtins(CostModel()), "gpus": SERVER_GPUS},
            "trainer": {
                "gpus": training,
                "tokens_per_s": training_tokens_per_s(shape, card, forwards=FORWARDS),
                "fixed_s": 5.0 + (RESHARD_S if shared else 0.0),
            },
            "weights": {"transport": "relay", "gigabytes": shape.parameters * 2e-9},
            "lengths": {
                "kind": "lognormal",
                "mean": MEDIAN * math.exp(0.5 * (0.013 * TAILNESS) ** 2),
                "tailness": TAILNESS,
            },
            "task_share": TASK_SHARE,
            "prompt_tokens": {"kind": "constant", "value": 200.0},
            "tasks": 100_000,
        },
    }


def system(name: str, *, eta: int = 1, over: dict[str, Any] | None = None, **of: Any) -> dict[str, Any]:
    """A recipe of one of ``SYSTEMS``, with the tables ``over`` it. ``eta`` counts for those of ``BOUNDED``; ``of``: as
    ``world`` takes it."""
    eta = {"VeRL": 0, "VeRL-Pipeline": 1}.get(name, eta)
    table = merge(world(shared=name == SYNCHRONOUS, **of), SYSTEMS[name])
    batch = table["rollout"]["batch_groups"] * GROUP_SIZE
    bound = {"staleness": {"bound": eta}} if name in BOUNDED else {}
    steps = WARM_UP + STEPS + eta
    return merge(table, {"rollout": {"num_envs": (eta + 1) * batch}, "run": {"steps": steps}}, bound, over or {})


class Run(Point, kw_only=True):
    """A simulated run; ``ours`` is its throughput at the whole size, tokens/s. Seconds a step; shares of the time that
    the trainer waits, and that servers have nothing to do."""

    system: str
    eta: int
    period: float
    trainer_idle: float
    bubbles: float


def summed_up(result: Result, **fields: Any) -> Run:
    """The steps between the filling of the pipeline and the last η, for which nothing new is begun."""
    eta = fields["eta"]
    steps = result.steps[: len(result.steps) - eta]
    seconds = steps[-1]["time/at"] - steps[WARM_UP - 1]["time/at"]
    measured = steps[WARM_UP:]
    waits = sum(line["time/step"] * line["bubble/trainer_idle"] for line in measured)
    bubbles = sum(line["time/step"] * line["bubble/share"] for line in measured)
    return Run(
        paper=None,
        ours=SCALE * sum(line["tokens/batch"] for line in measured) / seconds,
        period=seconds / len(measured),
        trainer_idle=waits / seconds,
        bubbles=bubbles / seconds,
        assumption=ASSUMPTION,
        **fields,
    )


def runs(figure: str, cases: Sequence[tuple[str, str, int, dict[str, Any]]]) -> list[Run]:
    """Simulate systems: a label, the system, η, and what else ``system`` takes."""
    results = simulate_all([system(name, eta=eta, **of) for _, name, eta, of in cases])
    return [
        summed_up(
            result, figure=figure, point=f"{label}: tokens/s", system=label, eta=0 if name == SYNCHRONOUS else eta
        )
        for (label, name, eta, _), result in zip(cases, results, strict=True)
    ]


def ceiling(eta: int, *, response: int = RESPONSE_TOKENS, samples: int = 100_000) -> float:
    """Tokens a second, at the whole size, if servers are never idle, prefill nothing again, take no time to update, and
    all sequences decode at one speed. A step takes as long as lets a response of the limit's length use all the time
    that the bound allows it: from the moment when its version is there until its batch is due, η + 1 periods less the
    time of training. A period is P = W / (1 − k4/s): W seconds a server of k1·kv + k3 for every token."""
    cost, rng = CostModel(), random.Random(0)
    table = world(response=response)
    prompt, sigma = table["sim"]["prompt_tokens"]["value"], 0.013 * TAILNESS
    lengths = [min(response, max(1.0, MEDIAN * math.exp(sigma * rng.gauss(0.0, 1.0)))) for _ in range(samples)]
    batch = table["rollout"]["batch_groups"] * GROUP_SIZE / samples
    tokens = batch * sum(length + prompt for length in lengths)
    work = batch * sum(length * (cost.k3 + cost.k1 * (prompt + length / 2)) for length in lengths)
    work /= table["engine"]["count"]
    trainer = table["sim"]["trainer"]
    training = trainer["fixed_s"] + tokens / (trainer["tokens_per_s"] * trainer["gpus"])
    period = work
    for _ in range(200):
        step = max(1.01 * cost.k4, ((eta + 1) * period - training) / response)
        period = 0.9 * period + 0.1 * max(training, work / (1.0 - cost.k4 / step))
    return SCALE * tokens / period


def gain(runs: Sequence[Run], over: Sequence[Run]) -> list[float]:
    """Throughputs of ``runs``, each over that of its counterpart."""
    return [a.ours / b.ours for a, b in zip(runs, over, strict=True)]


class Watched(Lines):
    """Keeps what each server ran and held, as (at, running, version), the pulls, as (server, begin, end, version,
    requests cut), and what every request had prefilled, as (end, tokens)."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.loads: dict[str, list[tuple[float, int, int]]] = {}
        self.pulls: list[tuple[str, float, float, int, int]] = []
        self.prefilled: list[tuple[float, int]] = []
        self.migrated: list[tuple[float, int]] = []

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        super().server(name, at, running, version, up)
        self.loads.setdefault(name, []).append((at - self.start, running, version))

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().span(track, name, start, end, args)
        start, end = start - self.start, end - self.start
        if name == "update":
            self.pulls.append((track, start, end, args["version"], args["interrupted"]))
        elif name == "migrate":
            self.migrated.append((end, args["requests"]))
        elif name == "generate":
            self.prefilled.append((end, args["prompt"]))


def watched(table: dict[str, Any]) -> tuple[Result, Watched]:
    """Simulate a recipe and keep more of it."""
    seen: list[Watched] = []

    def watch(recipe: Recipe, clock: Callable[[], float]) -> Watched:
        seen.append(Watched(recipe, clock))
        return seen[0]

    return simulated(load_table(table), lines=watch), seen[0]
