"""What all figures of ROLL Flash take for granted where the paper is silent, as tables that a recipe is merged from.

The paper states the model, its mean response lengths (Base 2k, Think 11k), the limits (prompt 2,048, response 30,720
tokens), the batch (appendix A: 256 prompts of 16 responses), α and the split of GPUs. It names no GPU, no speed of
servers or trainer and no distribution of lengths. Those are chosen once, here, for all its figures; a script that
departs from them says so in its points' ``assumption``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens, training_tokens_per_s

GPU = "h800"
PROMPT_TOKENS, RESPONSE_TOKENS = 2048, 30720
"""Limits of appendix A; the prompts themselves are about 200 tokens long."""
RESHARD_S = 20.0
"""Synchronous training on shared GPUs: to take turns, weights and optimiser are loaded and offloaded once a step ("fixed
constant overheads such as model loading and offloading", §3.2)."""
FORWARDS = 2.0
"""The training phase includes passes over the initial and the proximal model (footnote 1)."""
TASK_SHARE = 0.5
"""Share of the variance of log lengths that lies between prompts."""

ASSUMPTION = (
    "Qwen3-8B on one H800 a server by core/hardware.py; trainer at 35 % of the peak with two further forward passes; "
    "half of the lengths' variance lies between prompts; 20 s a step to load and offload where GPUs are shared"
)


def world(
    *,
    servers: int,
    training_gpus: int,
    model: str = "qwen3-8b",
    lengths: str = "qwen3-8b-think",
    shared: bool = False,
) -> dict[str, Any]:
    """Servers of one GPU each, a trainer, lengths of responses, and deadlines that nothing meets. ``shared``: servers
    and trainer take turns on the same GPUs."""
    shape, card = MODELS[model], GPUS[GPU]
    kv = kv_tokens(shape, card)
    hour = 1e6  # seconds: no deadline is ever met
    return {
        "engine": {
            "count": servers,
            "max_running_requests": 256,
            "max_total_tokens": kv,
            "stream_interval": RESPONSE_TOKENS,
            "request_timeout_s": hour,
            "idle_timeout_s": hour,
        },
        "env": {"episode_timeout_s": hour},
        "rollout": {"max_new_tokens": RESPONSE_TOKENS, "max_tokens": PROMPT_TOKENS + RESPONSE_TOKENS},
        "run": {"trace_requests": False},
        "weights": {"transport": "collective"},
        "sim": {
            "instance": {"cost": msgspec.to_builtins(cost_model(shape, card))},
            "trainer": {
                "gpus": training_gpus,
                "tokens_per_s": training_tokens_per_s(shape, card, forwards=FORWARDS),
                "fixed_s": 5.0 + (RESHARD_S if shared else 0.0),
            },
            "weights": {"gigabytes": shape.parameters * 2e-9},
            "lengths": {"kind": "named", "name": lengths},
            "task_share": TASK_SHARE,
            "prompt_tokens": {"kind": "constant", "value": 200.0},
            "tasks": 100_000,
        },
    }


def batch(prompts: int = 256, group_size: int = 16, alpha: float = 0.0) -> dict[str, Any]:
    """A train step's prompts, and an environment slot for each response that may be in flight under ``alpha``."""
    return {
        "rollout": {
            "batch_groups": prompts,
            "group_size": group_size,
            "num_envs": round((1.0 + alpha) * prompts * group_size),
        },
        "staleness": {"bound": alpha},
    }
