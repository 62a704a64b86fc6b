"""``[sim]``: the world that ``asyncrl sim`` and ``asyncrl plan`` put in place of servers, trainer and environments.

What the recipe says elsewhere holds there too: how many servers, their slots and KV cache, the batch, the deadlines.
Here stands what a recipe does not know: how fast things are, how long responses get, what breaks. Times are seconds.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.config.base import Section
from asyncrl.core.cost_model import CostModel
from asyncrl.core.distributions import Constant, Distribution, LogNormal


class InstanceModel(Section, frozen=True, kw_only=True):
    """One inference server (sim/engine.py)."""

    profile: str = ""
    """JSON that ``asyncrl plan --fit`` wrote, or an estimate by name, such as ``qwen3-8b@h800`` or
    ``qwen2.5-72b@h800x4`` (core/hardware.py); its coefficients take the place of ``cost``."""
    cost: CostModel = CostModel()
    """StaleFlow's table 4 (Qwen3-30B-A3B) unless given."""
    gpus: int = 1
    """GPUs of one server: what a plan may move between rollout and training."""
    chunked_prefill: int = 0
    """Tokens of prefill that ride along in one decode step; 0: prefill runs first and alone, SGLang's default."""
    prefix_cache: bool = True
    kv_bytes: int = 98_304
    """KV of one token, which travels with ``engine.kv_reuse``: Qwen3-30B-A3B's. A ``profile`` by name has its own."""
    kv_gb_s: float = 20.0
    """From one server to another."""
    load_s: float = 1.0
    """What a weight load takes on the server itself, beside the transfer."""
    start_s: float = 60.0
    """From the start of a new process until it answers."""


class TrainerModel(Section, frozen=True, kw_only=True):
    """The training job: a step takes ``fixed_s + tokens / (tokens_per_s · gpus^scaling)``."""

    tokens_per_s: float = 5000.0
    """Tokens that one GPU trains in a second, all passes over a token counted."""
    gpus: int = 8
    scaling: float = 1.0
    """1: twice the GPUs, twice the speed."""
    fixed_s: float = 2.0
    start_s: float = 60.0
    """Until a job that was started again is ready."""
    save_s: float = 10.0
    """Until a checkpoint is on the disk; training goes on meanwhile."""


class WeightsModel(Section, frozen=True, kw_only=True):
    """A version's way to the servers (sim/weights.py has the formula of each transport)."""

    transport: Literal["recipe", "disk", "collective", "relay"] = "recipe"
    """``recipe``: what ``weights.transport`` says. ``relay`` is Laminar's chain broadcast (Laminar appendix C)."""
    gigabytes: float = 16.0
    gather_gb_s: float = 20.0
    """The trainer's own gathering, beside generation; with ``relay`` the copying of the ranks' shares, together."""
    disk_gb_s: float = 2.0
    """Write and read of the shared folder."""
    link_gb_s: float = 20.0
    """One hop between two hosts."""
    hop_s: float = 0.001
    """Start-up time of one chunk on one hop."""
    local_gb_s: float = 40.0
    """From a host's memory into its servers."""


class EnvModel(Section, frozen=True, kw_only=True):
    """The environments. Probabilities are of one step, ``success`` is of one episode."""

    reset: Distribution = Constant(value=0.0)
    step: Distribution = Constant(value=0.0)
    turns: Distribution | None = None
    """Turns of an episode; none: always ``env.max_turns``."""
    observation_tokens: Distribution = Constant(value=8.0)
    success: float = 0.5
    """Share of episodes with reward 1, the rest have 0."""
    spread: float = 0.0
    """How much tasks differ: 0, all are equally hard; 1, each is always or never solved. Its share of the variance of
    the reward lies between tasks, so it decides how many groups have zero variance."""
    crash: float = 0.0
    """The step raises."""
    hang: float = 0.0
    """Fail-stop: the step never answers."""
    slow: float = 0.0
    """Fail-slow: the step takes ``slow_factor`` times as long."""
    slow_factor: float = 10.0


FaultKind = Literal[
    "kill",
    "hang",
    "slow",
    "partition",
    "drop_reply",
    "duplicate_reply",
    "corrupt_weights",
    "trainer_crash",
    "env_storm",
    "join",
    "leave",
]


class FaultConfig(Section, frozen=True, kw_only=True):
    """Something that breaks at a stated time (sim/faults.py says what each does)."""

    kind: FaultKind
    at_s: float
    server: int = 0
    """Index of the server that it hits; one that joins has the next index."""
    for_s: float = 30.0
    """How long it lasts; a killed server is started again after it."""
    factor: float = 4.0
    """How much slower, for ``slow`` and ``env_storm``."""


class SimConfig(Section, frozen=True, kw_only=True):
    """The virtual world. One seed (the recipe's), one trace."""

    instance: InstanceModel = InstanceModel()
    trainer: TrainerModel = TrainerModel()
    weights: WeightsModel = WeightsModel()
    env: EnvModel = EnvModel()
    lengths: Distribution = LogNormal(mean=1000.0, tailness=50.0)
    """Tokens of a turn's response; ``rollout.max_new_tokens`` cuts them."""
    lengths_end: Distribution | None = None
    """What the lengths drift to, evenly over the run's steps; none: they do not."""
    task_share: float = 0.0
    """Share of the lengths' variance that lies between tasks: 1, all responses to a prompt are equally long."""
    prompt_tokens: Distribution = Constant(value=64.0)
    tasks: int = 1000
    heldout: int = 0
    faults: list[FaultConfig] = []
    random_faults: int = 0
    """Further faults, drawn from the seed, within the first ``random_within_s``."""
    random_within_s: float = 600.0
    stall_s: float = 86400.0
    """Without a train step for this long, the simulation fails and names who holds what."""
