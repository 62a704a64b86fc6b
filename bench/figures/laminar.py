"""What all figures of Laminar take for granted, as tables that a recipe is merged from (Laminar §8, appendix A).

The paper states models (Qwen2.5), GPUs (H800), the batch (512 prompts of 16 responses), limits (prompt 2k, response 16k
tokens), concurrency and the split (table 2). It draws lengths without numbers, and says nothing of its servers' speed.
What is missing was chosen once, here:

* **Size: a quarter.** Of 64 + 64 GPUs and batches of 512 groups, 16 + 16 GPUs and 128 groups (``SCALE``): as many
  trajectories a server, and a quarter of the servers, so that a repack has fewer to pack.
* **Servers** are 4 GPUs, of a roofline cost model (core/hardware.py). B of the repack is where it turns from bound by
  memory to bound by compute, k2/k3.
* **Lengths**: lognormal with median 3,000 and a 99th percentile ten times that, cut at 16k.
* **The trainer** takes 2,500 tokens/s a GPU, so that generation is what limits: the paper tunes the split to that end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from common import Lines, Result, simulated

from asyncrl.config import Recipe, load_table
from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens
from asyncrl.core.types import Trajectory
from asyncrl.observe.tally import NO_ARGS

SCALE = 4
GPU, MODEL = "h800", "qwen2.5-32b"
SERVER_GPUS, TRAINING_GPUS, ROLLOUT_GPUS = 4, 64, 64
GROUPS, GROUP_SIZE = 512, 16
PROMPT_TOKENS, RESPONSE_TOKENS = 2_000, 16_384
MEDIAN, TAILNESS = 3_000.0, 76.1
TRAINED_A_GPU = 2_500.0
WARM_UP, STEPS, LAST = 3, 5, 1
"""Steps that fill the pipeline, those that are measured, and those for which nothing new is begun."""

ASSUMPTION = (
    f"a quarter of the size: {ROLLOUT_GPUS // SCALE} GPUs for rollout, {GROUPS // SCALE} groups a batch; servers"
    " of a roofline model; lengths lognormal, median 3,000, p99 30,000, cut at 16k; generation limits, not training"
)


def world(*, migration: str = "repack", small: bool = False) -> dict[str, Any]:
    """A recipe of Laminar on Qwen2.5-32B. ``small``: for a quick look, an eighth of the trajectories."""
    shape, card = MODELS[MODEL], GPUS[GPU]
    cost = cost_model(shape, card, SERVER_GPUS)
    servers = ROLLOUT_GPUS // SCALE // SERVER_GPUS
    groups = GROUPS // SCALE // (8 if small else 1)
    never = 1e7  # seconds
    return {
        "preset": "laminar",
        "engine": {
            "count": servers,
            "max_running_requests": 1024,
            "max_total_tokens": kv_tokens(shape, card, SERVER_GPUS) // (8 if small else 1),
            "stream_interval": 256,
            "request_timeout_s": never,
            "idle_timeout_s": never,
            "migration": migration,
            "roofline_batch": round(cost.k2 / cost.k3),
        },
        "env": {"episode_timeout_s": never},
        "rollout": {
            "batch_groups": groups,
            "group_size": GROUP_SIZE,
            "num_envs": groups * GROUP_SIZE,
            "max_new_tokens": RESPONSE_TOKENS,
            "max_tokens": PROMPT_TOKENS + RESPONSE_TOKENS,
        },
        "run": {"steps": WARM_UP + STEPS + LAST, "trace_requests": False},
        "sim": {
            "instance": {"cost": msgspec.to_builtins(cost), "gpus": SERVER_GPUS},
            "trainer": {"gpus": TRAINING_GPUS // SCALE, "tokens_per_s": TRAINED_A_GPU},
            "weights": {"transport": "relay", "gigabytes": shape.parameters * 2e-9},
            "lengths": {
                "kind": "lognormal",
                "mean": MEDIAN * math.exp(0.5 * (0.013 * TAILNESS) ** 2),
                "tailness": TAILNESS,
            },
            "prompt_tokens": {"kind": "constant", "value": 200.0},
            "tasks": 100_000,
        },
    }


class Watched(Lines):
    """Keeps what each request was and when, the moments of the trainer's versions, and the trajectories."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        super().__init__(recipe, clock)
        self.generated: list[tuple[float, float, int, int]] = []
        """Begin, end, prompt and new tokens of every stay on a server."""
        self.trained: list[float] = []
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
        elif name == "migrate":
            self.moved.append((end - start, args["requests"]))
        elif name == "episode" and args["outcome"] == "done":
            self.episodes[args["group"]].append((end - start, end))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        super().trajectory(trajectory, state)
        if state == "consumed":
            self.trajectories[trajectory.group_id].append(trajectory)

    def finished(self) -> list[tuple[float, int]]:
        """Seconds of generation and inherent staleness of every trained trajectory. A group's trajectories and episodes
        are matched by how long they lasted."""
        found = []
        for group, trajectories in self.trajectories.items():
            ended = sorted(self.episodes[group])
            for trajectory, (_, end) in zip(sorted(trajectories, key=_seconds), ended, strict=True):
                [(_, generated, _)] = trajectory.turn_seconds
                found.append((generated, bisect_right(self.trained, end) - trajectory.v_traj))
        return found

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


def watched(**of: Any) -> tuple[Result, Watched]:
    """Simulate ``world(**of)`` and keep more of it."""
    seen: list[Watched] = []

    def watch(recipe: Recipe, clock: Callable[[], float]) -> Watched:
        seen.append(Watched(recipe, clock))
        return seen[0]

    return simulated(load_table(world(**of)), lines=watch), seen[0]
