"""What all figures of DORA take for granted, as tables that a recipe is merged from (DORA §5.1, §5.2).

The paper states the model (Qwen2.5-32B), the GPUs (H800, 64 and 128 of them), the batch (512 prompts of 16 responses),
limits (prompt 2k, response 30k tokens) and the mean length, 2.4k. Synchronous training and partial rollout have all
GPUs take turns, one-off and DORA split them. It names no split, no τ and no speeds. What is missing was chosen here:

* **The trainer** is as its synchronous steps show: 8.0 of 22.91 min on 64 GPUs and 5.5 of 20.23 min on 128 do not
  overlap with rollout, which is ``FIXED_S`` and ``TRAINED_A_GPU`` at 2,373 tokens a trajectory.
* **The split is a half**: by this trainer, DORA's own training takes 12.9 and 8.0 min on half of the GPUs. That is
  88 % of 14.67 min and 76 % of 10.46 min, as the paper has it.
* **Servers** are 4 GPUs, of a roofline cost model (core/hardware.py) but for ``k4``, what a decode step takes whatever
  it decodes: as long as it must for synchronous rollout to take 14.9 min on 64 GPUs. At most 256 sequences, which is
  vLLM's default.
* **KV** that moves with a request goes at 50 GB/s, one of a node's eight links of 400 Gbit/s; weights by a chain of
  relays (core/transfer.py).
* **Lengths**: lognormal, the 99th percentile ten times the median ("over an order of magnitude", §1), cut at 30k.
* **Size: an eighth** of the trajectories (``SCALE``), on as many servers. Each takes as much of a server, its KV cache
  and the trainer as eight, so the loads are the paper's; only the longest of a batch is the longest of fewer.
* **τ = 2**; one-off is bounded by 1, partial rollout by 2. DORA and partial rollout have slots for two batches.
* **Partial rollout** lets all servers rest while all GPUs train. So it is simulated with a trainer that takes no time,
  and what training takes is added to its steps. Requests are cut at each update, and prefilled again.
"""

from __future__ import annotations

from typing import Any

import msgspec
from common import merge

from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens

GPU, MODEL, SERVER_GPUS = "h800", "qwen2.5-32b", 4
SCALE = 8
GROUPS, GROUP_SIZE = 512 // SCALE, 16
PROMPT_TOKENS, RESPONSE_TOKENS = 2_000, 30_000
PROMPT = 150
"""Tokens of each prompt; the others are limits."""
MAX_RUNNING, K4_S = 256, 0.0132
KV_GB_S = 50
FIXED_S, TRAINED_A_GPU = 175.0, 993.0
TAU = 2
WARM_UP, STEPS, LAST = 3, 6, 1
"""Steps that fill the pipeline, those that are measured, and those for which nothing new is begun."""

ASSUMPTION = (
    "half of the GPUs train where they are split; the trainer as the paper's synchronous steps show it; servers of 4 "
    "GPUs, 256 sequences at most, roofline model with a step's constant cost fitted to synchronous rollout on 64 GPUs; "
    "lengths lognormal, p99 ten times the median; τ = 2; six steps of one seed"
)

SYSTEMS: dict[str, dict[str, Any]] = {
    "synchronous": {"preset": "sync"},
    "one-off": {"preset": "one-step"},
    "partial rollout": {"preset": "roll-flash", "staleness": {"bound": TAU}},
    "DORA": {"preset": "dora", "staleness": {"bound": TAU}},
}
COLOCATED = ("synchronous", "partial rollout")


def train_seconds(gpus: int, tokens: float) -> float:
    """A step of the trainer, of a batch of so many tokens as simulated."""
    return FIXED_S + SCALE * tokens / (TRAINED_A_GPU * gpus)


def world(system: str, gpus: int) -> dict[str, Any]:
    """A recipe of one of ``SYSTEMS`` on so many GPUs."""
    shape, card = MODELS[MODEL], GPUS[GPU]
    c = cost_model(shape, card, SERVER_GPUS)
    cost = msgspec.structs.replace(c, k1=SCALE * c.k1, k3=SCALE * c.k3, k4=K4_S, k5=SCALE * c.k5)
    own = gpus if system in COLOCATED else gpus // 2
    never = 1e7  # seconds
    table: dict[str, Any] = {
        "engine": {
            "count": own // SERVER_GPUS,
            "max_running_requests": MAX_RUNNING // SCALE,
            "max_total_tokens": kv_tokens(shape, card, SERVER_GPUS) // SCALE,
            "stream_interval": 1024,
            "kv_reuse": system == "DORA",
            "request_timeout_s": never,
            "idle_timeout_s": never,
        },
        "env": {"episode_timeout_s": never},
        "rollout": {
            "batch_groups": GROUPS,
            "group_size": GROUP_SIZE,
            "num_envs": GROUPS * GROUP_SIZE * (2 if system in ("partial rollout", "DORA") else 1),
            "max_new_tokens": RESPONSE_TOKENS,
            "max_tokens": PROMPT_TOKENS + RESPONSE_TOKENS,
        },
        "run": {"steps": WARM_UP + STEPS + LAST, "trace_requests": False},
        "weights": {"transport": "relay"},
        "sim": {
            "instance": {
                "cost": msgspec.to_builtins(cost),
                "gpus": SERVER_GPUS,
                "kv_bytes": SCALE * shape.kv_bytes,
                "kv_gb_s": KV_GB_S,
            },
            "trainer": {
                "gpus": own,
                "tokens_per_s": TRAINED_A_GPU / SCALE,
                "fixed_s": FIXED_S,
            },
            "weights": {"gigabytes": shape.parameters * 2e-9},
            "lengths": {"kind": "named", "name": "dora"},
            "prompt_tokens": {"kind": "constant", "value": PROMPT},
            "tasks": 100_000,
        },
    }
    instant = {"sim": {"trainer": {"fixed_s": 0.0, "tokens_per_s": 1e9}}} if system == "partial rollout" else {}
    return merge(table, SYSTEMS[system], instant)
