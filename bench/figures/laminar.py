"""What all figures of Laminar take for granted, as tables that a recipe is merged from (Laminar §8, appendix A).

The paper states models (Qwen2.5), GPUs (H800), the batch (512 prompts of 16 responses), limits (prompt 2k, response 16k
tokens), the concurrency of a server, tensor parallelism, and the split of GPUs of each system and size (table 2). It
draws lengths and throughputs without numbers, and says nothing of the speed of its servers and its trainer. What is
missing was chosen once, here, for all its figures:

* **Size**: ``scale`` divides GPUs, servers and batch, so that a server has as many trajectories as in the paper.
* **Servers** are a roofline by the data sheet: 80 % of the bandwidth for weights and KV cache, half of the peak for
  matrix products, and for everything else in a step the 10.7 ms of StaleFlow's table 4. B of the repack is where the
  roofline turns from bound by memory to bound by compute. (By all of table 4, which is of another GPU, attention would
  get a third of the bandwidth, and a full server hardly gain by any sequence more.)
* **Training** scales as GPUs^s. Table 2's splits of Laminar are "tuned by matching the generation and training
  throughput" (§8.1), so they say how fast training is: as fast as its servers generate, full to the 82.2 % of table 1,
  in the smallest and in the largest cluster of each model. That gives rate and s, for all systems.
* **Lengths**: lognormal with median 3,000 and a 99th percentile ten times that (figure 2), cut at 16k. Tool calls:
  0 to 8 (the paper's limit) of 2 s on average, responses in as many parts.
* **A Laminar server's batch** is figure 9's 512 trajectories, where that is between one global batch for all servers
  and two, else what is nearest, and at most the paper's 1,024. (Four, 512 for 32B on 512 GPUs, are up to 6 stale, more
  than the paper ever saw; one does not fill the servers of the largest clusters.)
* **AReaL** has 1,024 trajectories a server too, but at most those of five batches: its staleness bound is 4, as in
  table 3, not the infinite one of §8.1, with which a simulated run would take dozens of steps to settle.
* **verl** moves between training and generation in 10 s a step; its and the other baselines' weights come by a
  collective broadcast, Laminar's by relays.

A baseline is a row of recipe columns, not that system: what a column does not say, all have in common.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from common import Lines, Result, merge, simulated

from asyncrl.config import Recipe, load_table
from asyncrl.core.cost_model import CostModel
from asyncrl.core.distributions import LogNormal
from asyncrl.core.hardware import GPUS, MODELS, TABLE_4, WEIGHT_BYTES, kv_tokens
from asyncrl.core.types import Record, Trajectory
from asyncrl.observe.tally import NO_ARGS

CARD = GPUS["h800"]
BANDWIDTH_SHARE, PEAK_SHARE = 0.8, 0.5
GROUPS, GROUP_SIZE = 512, 16
BATCH = GROUPS * GROUP_SIZE
PROMPT, PROMPT_LIMIT, RESPONSE_LIMIT = 200, 2_000, 16_384
CONCURRENCY, OWN_BATCH = 1024, 512
MEDIAN, TAILNESS = 3_000.0, 76.1
LENGTHS = LogNormal(mean=MEDIAN * math.exp(0.5 * (0.013 * TAILNESS) ** 2), tailness=TAILNESS)
CALLS, CALL_S = 8, 2.0
KV_USE = 0.822
"""With repack, table 1."""
RESHARD_S = 10.0
ARRIVAL_GB_S, PULL_GB_S = 100.0, 50.0
"""Relay to relay (1.6 s for 72B and 127 relays, appendix C), which is also what the trainer's 0.64 and 1.4 s for 32B
and 72B are (§8.3); and PCIe or a network port of one GPU (8 × 400 Gbps a machine, §8)."""
WARM_UP, STEPS = 2, 3
"""Steps that fill the pipeline, and those that are measured."""
AHEAD = {"verl": 0, "AReaL": 4, "Laminar": 4}
"""Batches that may be begun beside the one being trained, by the bound or by what is seen; 1 for others. So many steps
come after those that are measured, as nothing new is begun for them."""


class Size(Record, frozen=True, kw_only=True):
    """GPUs that train and that generate, of table 2; ``batchwise`` are one-step staleness and stream generation."""

    gpus: int
    batchwise: tuple[int, int]
    areal: tuple[int, int]
    laminar: tuple[int, int]


def _sizes(*rows: tuple[int, int, int, int]) -> list[Size]:
    """Rows are all GPUs, and those that train: batch-wise, AReaL's, Laminar's."""
    splits = ((gpus, *((trains, gpus - trains) for trains in row)) for gpus, *row in rows)
    return [Size(gpus=gpus, batchwise=one, areal=two, laminar=three) for gpus, one, two, three in splits]


TABLE_2 = {
    "7B": _sizes((16, 8, 8, 8), (32, 8, 16, 24), (64, 16, 32, 40), (128, 32, 64, 80), (256, 40, 128, 192)),
    "32B": _sizes((32, 16, 16, 16), (64, 32, 32, 32), (128, 48, 64, 64), (256, 64, 128, 128), (512, 80, 256, 256)),
    "72B": _sizes(
        (64, 32, 32, 32), (128, 64, 64, 64), (256, 96, 128, 128), (512, 192, 320, 320), (1024, 256, 640, 768)
    ),
}
TENSOR_PARALLEL = {"7B": 1, "32B": 4, "72B": 8}
SYSTEMS: dict[str, dict[str, Any]] = {
    "verl": {"preset": "sync"},
    "one-step": {"preset": "one-step"},
    "stream generation": {"preset": "one-step", "trainer": {"stream": True, "micro_batch_tokens": 100_000}},
    "AReaL": {"preset": "areal", "staleness": {"bound": 4}, "update": {"overlap": False}},
    "Laminar": {"preset": "laminar"},
}


def warm_up(system: str) -> int:
    """Steps before the measured ones. AReaL's bound binds only when five batches are under way, and then waits once
    for the oldest group."""
    return 5 if system == "AReaL" else WARM_UP


def scale_of(model: str, gpus: int) -> int:
    """By which a cluster and its batch are divided: at most 16, and Laminar has at least eight servers, or all."""
    servers = split("Laminar", model, gpus)[1] // TENSOR_PARALLEL[model]
    return max(scale for scale in (1, 2, 4, 8, 16) if scale == 1 or servers >= 8 * scale)


def servers_of(system: str, model: str) -> int:
    """GPUs of one server (appendix A.3)."""
    return 2 if model == "7B" and system not in ("AReaL", "Laminar") else TENSOR_PARALLEL[model]


def split(system: str, model: str, gpus: int) -> tuple[int, int]:
    """GPUs that train and that generate; verl's do both."""
    [size] = [s for s in TABLE_2[model] if s.gpus == gpus]
    known = {"verl": (gpus, gpus), "AReaL": size.areal, "Laminar": size.laminar}
    return known.get(system, size.batchwise)


def roofline(model: str, gpus: int) -> CostModel:
    """Of a server of so many GPUs."""
    shape = MODELS[f"qwen2.5-{model.lower()}"]
    bandwidth, peak = BANDWIDTH_SHARE * CARD.bandwidth * gpus, PEAK_SHARE * CARD.peak * gpus
    return CostModel(
        k1=shape.kv_bytes / bandwidth,
        k2=shape.active * WEIGHT_BYTES / bandwidth,
        k3=2 * shape.active / peak,
        k4=TABLE_4.k4,
        k5=2 * shape.active / peak,
    )


@cache
def training(model: str) -> tuple[float, float]:
    """Rate and exponent: so many GPUs train rate · gpus^exponent tokens a second."""
    smallest, *_, largest = TABLE_2[model]
    (few, slow), (many, fast) = ((s.laminar[0], generated(model, s.laminar[1])) for s in (smallest, largest))
    exponent = math.log(fast / slow) / math.log(many / few)
    return slow / few**exponent, exponent


def generated(model: str, gpus: int) -> float:
    """Tokens a second of so many GPUs of Laminar that are full to the share of table 1, prompts counted."""
    width = TENSOR_PARALLEL[model]
    servers = gpus // width
    ends = [min(RESPONSE_LIMIT, LENGTHS.quantile((i + 0.5) / 10_000)) for i in range(10_000)]
    mean = sum(ends) / len(ends)
    held = PROMPT + sum(n * n for n in ends) / (2 * sum(ends))
    running = min(BATCH / servers, CONCURRENCY, _kv_tokens(model, width) / held)
    cost, share = roofline(model, width), KV_USE * running
    return servers * share / cost.step(round(share), round(share * held)) * (1 + PROMPT / mean)


def _kv_tokens(model: str, gpus: int) -> int:
    return kv_tokens(MODELS[f"qwen2.5-{model.lower()}"], CARD, gpus)


def world(
    system: str = "Laminar", model: str = "32B", gpus: int = 128, *, scale: int = 4, tools: bool = False
) -> dict[str, Any]:
    """A recipe of a system on a cluster of ``gpus``, a ``scale``-th part of which is simulated. With ``tools``, calls
    of a sandbox cut the responses in parts."""
    trains, serves = split(system, model, gpus)
    width = servers_of(system, model)
    servers = max(1, round(serves / width / scale))
    batch = BATCH // scale
    slots = {
        "AReaL": min(CONCURRENCY * servers, 5 * batch),
        "Laminar": min(CONCURRENCY * servers, max(batch, min(OWN_BATCH * servers, 2 * batch))),
    }
    weights = MODELS[f"qwen2.5-{model.lower()}"].parameters * WEIGHT_BYTES / 1e9
    cost, (rate, exponent) = roofline(model, width), training(model)
    ahead = AHEAD.get(system, 1)
    never = 1e7  # seconds
    table = {
        "engine": {
            "count": servers,
            "max_running_requests": CONCURRENCY,
            "max_total_tokens": _kv_tokens(model, width),
            "stream_interval": 1024,
            "request_timeout_s": never,
            "idle_timeout_s": never,
            "roofline_batch": round(cost.k2 / cost.k3),
        },
        "env": {"episode_timeout_s": never},
        "rollout": {
            "batch_groups": GROUPS // scale,
            "group_size": GROUP_SIZE,
            "num_envs": slots.get(system, (1 + ahead) * batch),
            "max_new_tokens": RESPONSE_LIMIT,
            "max_tokens": PROMPT_LIMIT + RESPONSE_LIMIT,
        },
        "run": {"steps": warm_up(system) + STEPS + ahead, "trace_requests": False},
        "sim": {
            "instance": {"cost": msgspec.to_builtins(cost), "gpus": width, "load_s": 0.1},
            "trainer": {
                "gpus": 1,
                "tokens_per_s": rate * trains**exponent / scale,
                "fixed_s": RESHARD_S if system == "verl" else 0.0,
            },
            "weights": {
                "transport": "relay" if system == "Laminar" else "collective",
                "gigabytes": weights,
                "gather_gb_s": ARRIVAL_GB_S,
                "link_gb_s": ARRIVAL_GB_S if system == "Laminar" else PULL_GB_S * width,
                "hop_s": 5e-6,
                "local_gb_s": PULL_GB_S * width,
            },
            "lengths": msgspec.to_builtins(LENGTHS),
            "prompt_tokens": {"kind": "constant", "value": float(PROMPT)},
            "tasks": 100_000,
        },
    }
    return merge(table, SYSTEMS[system], _tools() if tools else {})


def _tools() -> dict[str, Any]:
    """Episodes of 1 to 9 turns, equally often; their lengths add up to one response's, on average."""
    turns = 1 + CALLS / 2
    return {
        "env": {"max_turns": 1 + CALLS},
        "sim": {
            "env": {
                "step": {"kind": "lognormal", "mean": CALL_S, "tailness": TAILNESS},
                "turns": {"kind": "empirical", "values": [float(n) for n in range(1, CALLS + 2)]},
                "observation_tokens": {"kind": "constant", "value": 100.0},
            },
            "lengths": msgspec.to_builtins(LogNormal(mean=LENGTHS.mean / turns, tailness=TAILNESS)),
        },
    }


def assumption(scale: int) -> str:
    return (
        f"1/{scale} of GPUs and batch; servers: roofline of 80 % of the bandwidth, 50 % of the peak, 10.7 ms a step"
        "; training by table 2's splits; lengths lognormal, median 3,000, p99 30,000, cut at 16k"
    )


class Watched(Lines):
    """Keeps what each request was and when, the moments of the trainer's versions, and the trajectories."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.generated: list[tuple[float, float, int, int]] = []
        """Begin, end, prompt and new tokens of every stay on a server."""
        self.trained: list[float] = []
        self.pulls: list[tuple[float, float]] = []
        """Begin and seconds of every server's update."""
        self.moved: list[tuple[float, int]] = []
        """Seconds and requests of every repack of a server."""
        self.episodes: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """Group → (seconds, end) of each of its episodes."""
        self.trajectories: dict[int, list[Trajectory]] = defaultdict(list)

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().span(track, name, start, end, args)
        if name == "generate":
            self.generated.append((start, end, args["prompt"], args["tokens"]))
        elif name == "train":
            self.trained.append(end)
        elif name == "update":
            self.pulls.append((start, end - start))
        elif name == "migrate":
            self.moved.append((end - start, args["requests"]))
        elif name == "episode" and args["outcome"] == "done":
            self.episodes[args["group"]].append((end - start, end))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        super().trajectory(trajectory, state)
        if state == "consumed":
            self.trajectories[trajectory.group_id].append(trajectory)

    def finished(self, since: float = 0.0) -> list[tuple[float, int]]:
        """Seconds of generation and inherent staleness of every trained trajectory that ended ``since`` then. A group's
        trajectories and episodes are matched by how long they lasted."""
        found = []
        for group, trajectories in self.trajectories.items():
            ended = sorted(self.episodes[group])
            for trajectory, (_, end) in zip(sorted(trajectories, key=_seconds), ended, strict=True):
                [(_, generated, _)] = trajectory.turn_seconds
                if end >= since:
                    found.append((generated, bisect_right(self.trained, end) - trajectory.v_traj))
        return found

    def tokens(self, begin: float, end: float) -> float:
        """Tokens generated between two moments, each stay's spread evenly over it."""
        return sum(
            new * max(0.0, min(stop, end) - max(start, begin)) / (stop - start)
            for start, stop, _, new in self.generated
            if stop > start
        )

    def kv_use(self, begin: float, end: float) -> float:
        """Share of the servers' KV cache that requests held between two moments, tokens growing evenly."""
        held = 0.0
        for start, stop, prompt, tokens in self.generated:
            a, b = max(start, begin), min(stop, end)
            if b > a:
                middle = (a + b) / 2 - start
                held += (b - a) * (prompt + tokens * middle / (stop - start))
        engine = self.recipe.engine
        return held / (engine.count * engine.max_total_tokens * (end - begin))


def _seconds(trajectory: Trajectory) -> float:
    return sum(trajectory.turn_seconds[0])


def watched(table: dict[str, Any]) -> tuple[Result, Watched]:
    """Simulate a recipe and keep more of it."""
    seen: list[Watched] = []

    def watch(recipe: Recipe, clock: Callable[[], float]) -> Watched:
        seen.append(Watched(recipe, clock))
        return seen[0]

    return simulated(load_table(table), lines=watch), seen[0]
