"""What all figures of ROLL Flash take for granted where the paper is silent, as tables that a recipe is merged from.

The paper states the model, its mean response lengths (Base 2k, Think 11k), the limits (appendix A: prompt 2,048,
response 30,720 tokens), α and the split of GPUs. It names no GPU, no speed of servers or trainer and no distribution of
lengths. Those are chosen once, here, for all its figures; a script that departs from them says so in its points'
``assumption``.

* **GPU: H20**, by core/hardware.py. With 8Train32Infer the paper's trainer never waits and the servers are "excessively
  underutilized"; 24Train16Infer is best (fig. 3a). So training is at least as much work as inference. By the data
  sheets that is an H20 (148 Tflop/s beside 4 TB/s). An H800 computes seven times as fast with less bandwidth: training
  would be a fifth of the work and 8Train32Infer as good as any split (fig3.py shows both).
* **Batch: 256 responses**, 16 prompts of 16 (``ROLLOUTS``). §3.2 says "256 rollouts, and a group size of 32 prompts per
  minibatch", appendix A 256 prompts of 16 responses, 16 times as much. No one batch explains all its numbers. The
  more work, the less the longest response matters: on fig. 3a's 40 GPUs asynchrony brings 1.8 to 2.0 times with 256
  responses, 1.1 with 1,024 (both simulated), less with 4,096; the paper measures 1.64. On fig. 1b's 128 GPUs, 256
  responses are too little work to scale. So 256 is read as responses, and fig1b.py shows both readings.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from common import Result, merge

from asyncrl.build.plan import shape_of, system_of
from asyncrl.config import load_table
from asyncrl.core.hardware import GPUS, MODELS, cost_model, kv_tokens, training_tokens_per_s
from asyncrl.core.planning import predict
from asyncrl.core.theory.completion import Step, async_bound, sync_bound
from asyncrl.core.workload import Workload

GPU = "h20"
ROLLOUTS, GROUP_SIZE = 256, 16
PROMPT_TOKENS, RESPONSE_TOKENS = 2048, 30720
"""Limits of appendix A; the prompts themselves have 200 tokens."""
RESHARD_S = 20.0
"""Where servers and trainer share GPUs, weights and optimiser are loaded and offloaded once a step ("fixed constant
overheads such as model loading and offloading", §3.2)."""
FORWARDS = 2.0
"""The training phase includes passes over the initial and the proximal model (footnote 1)."""
TASK_SHARE = 0.5
"""Share of the variance of log lengths that lies between prompts."""

ASSUMPTION = (
    "one H20 a server and a training rank, by core/hardware.py; trainer at 35 % of the peak, with two further forward "
    "passes; half of the lengths' variance lies between prompts; 20 s a step to load and offload where GPUs are shared"
)
BATCH = f"a batch is {ROLLOUTS} responses, {ROLLOUTS // GROUP_SIZE} prompts of {GROUP_SIZE}"


def world(
    *,
    servers: int,
    training_gpus: int,
    model: str = "qwen3-8b",
    lengths: str = "qwen3-8b-think",
    shared: bool = False,
    gpu: str = GPU,
) -> dict[str, Any]:
    """Servers of one GPU each, a trainer, lengths of responses, and deadlines that nothing meets. ``shared``: servers
    and trainer take turns on the same GPUs."""
    shape, card = MODELS[model], GPUS[gpu]
    never = 1e6  # seconds
    return {
        "engine": {
            "count": servers,
            "max_running_requests": 256,
            "max_total_tokens": kv_tokens(shape, card),
            "stream_interval": RESPONSE_TOKENS,
            "request_timeout_s": never,
            "idle_timeout_s": never,
        },
        "env": {"episode_timeout_s": never},
        "update": {"overlap": False},
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


def batch(*, rollouts: int = ROLLOUTS, alpha: float = 0.0) -> dict[str, Any]:
    """The responses of a train step, and a slot for each that may be in flight under ``alpha``."""
    return {
        "rollout": {
            "batch_groups": rollouts // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "num_envs": round((1.0 + alpha) * rollouts),
        },
        "staleness": {"bound": alpha},
    }


def synchronous(gpus: int, *, steps: int, naive: bool = False, rollouts: int = ROLLOUTS, **of: str) -> dict[str, Any]:
    """Sync-ROLL, or Sync-Naive, on all ``gpus``, which generate and then train. ``of``: as ``world`` takes it."""
    return merge(
        world(servers=gpus, training_gpus=gpus, shared=True, **of),
        batch(rollouts=rollouts),
        {"preset": "sync-naive" if naive else "sync", "run": {"steps": steps}},
    )


def asynchronous(
    train: int, infer: int, *, alpha: float, steps: int, rollouts: int = ROLLOUTS, **of: str
) -> dict[str, Any]:
    """ROLL Flash with so many GPUs for training and for inference."""
    return merge(
        world(servers=infer, training_gpus=train, **of),
        batch(rollouts=rollouts, alpha=alpha),
        {"preset": "roll-flash", "run": {"steps": steps}},
    )


def steady(result: Result, alpha: float) -> Result:
    """Without the last ⌈α⌉ steps: a run starts no more than it will train, so they have servers with less and less."""
    return Result(steps=result.steps[: len(result.steps) - math.ceil(alpha)], summary=result.summary)


def throughput(result: Result, skip: int) -> float:
    """Generated tokens a second, over the steps after the first ``skip`` (at least one). All of them are trained on."""
    first, last = result.steps[skip - 1], result.steps[-1]
    return (last["tokens/total"] - first["tokens/total"]) / (last["time/at"] - first["time/at"])


def planned(table: dict[str, Any]) -> float:
    """Seconds a step, by ``asyncrl plan``."""
    recipe = load_table(table)
    return predict(system_of(recipe), Workload(shape_of(recipe))).period


def bound(table: dict[str, Any]) -> float:
    """Eq. 8 or 9: the paper's bound on the seconds of a step, synchronous or not.

    A worker is a sequence that the servers decode at once; all of them have the speed of servers with every slot in
    use. The longest generation is the response limit's.
    """
    recipe = load_table(table)
    work = Workload(shape_of(recipe))
    plan = predict(system_of(recipe), work)
    servers, train = recipe.engine.count, recipe.sim.trainer.gpus
    alpha = recipe.staleness.bound
    share = train / (train + servers) if alpha else 0.0
    workers = plan.per_server * servers / (1.0 - share)
    samples = recipe.batch_trajectories
    step = Step(
        samples=samples,
        workers=workers,
        mean_gen=work.generated * plan.token_s,
        max_gen=RESPONSE_TOKENS * plan.token_s,
        mean_train=plan.train_s * (share or 1.0) * workers / samples,
    )
    return async_bound(step, alpha=alpha, train_share=share) if alpha else sync_bound(step)
