"""The recipe: what a run is, as frozen structs. Derived numbers are properties, never knobs.

``[sim]``, what only a simulation and a plan need to know, is in ``virtual.py``.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.base import Section
from asyncrl.config.buffer import BufferConfig
from asyncrl.config.virtual import SimConfig


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy: a folder in Hugging Face format (config.json, safetensors, tokenizer)."""

    path: str = ""
    """Model folder. Trainer and servers start from it (version 0)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in trainer compute and in the servers; master weights are always float32."""
    tool_parser: Literal["auto", "hermes", "json", "pythonic", "none"] = "auto"
    """How the model writes tool calls (runtime/tool_calls.py). ``auto``: as its chat template says."""


class SetupConfig(Section, frozen=True, kw_only=True):
    """A script that makes the model and the data when they are not there yet."""

    script: str = ""
    """Python file; run as ``python SCRIPT --out DIR --seed SEED`` once, when ``out`` does not exist. Empty: nothing to
    make."""
    out: str = "build"
    """Folder that the script fills. It appears under this name only when the script has succeeded."""


class TaskConfig(Section, frozen=True, kw_only=True):
    """Where tasks come from: JSONL or Parquet rows, one task a row."""

    train: str = ""
    heldout: str = ""
    shuffle: bool = True


class EnvConfig(Section, frozen=True, kw_only=True):
    """The environment and its deadlines (seconds)."""

    target: str = ""
    """``package.module:Class``, or ``file.py:Class`` relative to the recipe. An ``Env`` or ``SyncEnv`` class, or a
    reward function."""
    kwargs: dict[str, Any] = {}
    """Arguments of the class or the reward function. A text that begins with ``./`` or ``../`` is a path, relative to
    the recipe's folder as all paths are."""
    workers: int = 0
    """Most processes of a ``SyncEnv``. 0: as many as ``rollout.num_envs`` objects need, at least one a core."""
    memory_mb: int = 0
    """What live environment objects may take together, by their declared ``cost.memory_mb``; others wait. 0: any."""
    max_turns: int = 1
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    reward_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    block_timeout_s: float = 30.0
    """How long user code may hold the event loop (a missing ``await``) before it is interrupted."""
    retries: int = 1
    """How often a failed episode is started anew before its group is given up."""
    backoff_s: float = 1.0
    """Wait before the first retry; it doubles with each, and is drawn within half of that more or less."""
    max_failure_rate: float = 0.5
    """The run stops when more than this share of the last ``failure_window`` episodes failed by the environment's own
    fault: an exception, a missed deadline, an answer that cannot be used."""
    max_infra_failure_rate: float = 0.5
    """The same for failures of what it runs on: ``EnvDown``, a dead worker process, a refused generation."""
    failure_window: int = 64


class SourceConfig(Section, frozen=True, kw_only=True):
    """``[sources.NAME]``: one of several kinds of tasks that a run mixes. What is left out is that of ``[task]`` and
    ``[env]``; ``kwargs`` belong to their ``target``, so they are not taken over by another one."""

    weight: float = 1.0
    """Its share of the groups that begin, over the sum of all weights."""
    train: str = ""
    heldout: str = ""
    target: str = ""
    kwargs: dict[str, Any] | None = None
    max_turns: int | None = None
    reset_timeout_s: float | None = None
    step_timeout_s: float | None = None
    reward_timeout_s: float | None = None


class Source(Section, frozen=True, kw_only=True):
    """A kind of tasks, resolved."""

    weight: float
    task: TaskConfig
    env: EnvConfig


class GatewayConfig(Section, frozen=True, kw_only=True):
    """OpenAI's API for agent programs; opened where an environment is a rollout function."""

    host: str = "127.0.0.1"
    """Where it listens. Anything but loopback lets programs on other machines in, each by its episode's key."""
    port: int = 0
    """0: a free one."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """How much is generated for a train step, and how."""

    batch_groups: int = 8
    """Groups that one train step consumes."""
    group_size: int = 8
    """Trajectories of one task that are trained."""
    group_size_redundancy: int = 0
    """Redundant environments (ROLL Flash §5.2.2): further trajectories of a task that run beside its ``group_size``;
    the first ``group_size`` that end count, the surplus is aborted. ROLL's ``group_size`` is the sum of the two."""
    num_envs: int = 64
    """Environment slots: EnvManagers that run at once."""
    max_new_tokens: int = 512
    """Tokens that one turn may generate."""
    max_tokens: int = 2048
    """Length limit of a whole trajectory, prompt included; of each of its segments, where it has several."""
    history: Literal["segments", "keep", "refuse"] = "segments"
    """Where the chat template drops a thinking model's earlier thoughts: go on in a new segment, a sequence of its own
    without them; keep them and extend the sequence all the same; or fail the episode."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1, tokens are drawn from what it leaves; their logprobs, SGLang's as the embedded engine's, are not
    renormalised over that: they stay those of the whole distribution, as the trainer's are."""
    expand_num_return_sequences: bool = True
    """Prompt replication (ROLL Flash §5.1.2): a group is ``group_size`` independent requests, else one with ``n``."""
    queue_scheduling: bool = True
    """False: batch rollout, ROLL Flash's baseline in §5.1.1: prompts go out in waves, the next when all have ended."""
    max_additional_running_prompts: int = 0
    """Groups that run beside what the batches need (ROLL Flash §5.1.1, §5.2.2); the surplus is aborted. ROLL's
    ``num_env_groups`` is ``batch_groups`` and these: its 9 × 17 for a batch of 8 × 16 is 1 here, and a
    ``group_size_redundancy`` of 1, with ``num_envs = 153``."""
    filter_zero_variance: bool = False
    """Dynamic filtering: drop groups whose rewards are all equal, and refill exactly what was dropped."""


class AdaptiveConfig(Section, frozen=True, kw_only=True):
    """A budget for the mean staleness (core/staleness/adaptive.py), of ``inflight_cap`` and ``buffers``."""

    target: float = 0.0
    """Mean staleness to hold, in versions, by moving ``staleness.bound`` and how many of ``rollout.num_envs`` are in
    use. 0: neither moves."""
    bound_min: float = 0.0
    bound_max: float = 4.0
    """Between these the bound moves, from ``staleness.bound`` on."""
    every_steps: int = 10
    """Steps between two moves; more than the bound, for a lower bound shows only after as many steps."""


class StalenessConfig(Section, frozen=True, kw_only=True):
    control: Literal["inflight_cap", "buffers", "window", "inherent", "queue_drop", "queue_max"] = "inflight_cap"
    """``inflight_cap`` starts only what can be trained in time and wastes nothing; so do StaleFlow's ``buffers``, with
    which a coordinator decides where each request runs and when each server takes new weights. So it does with
    ``window`` (DORA §4.2), where groups start on any of the last versions and none is surplus; and with
    ``inherent`` (Laminar §6), which has no bound: groups are trained in the order in which they ended, and none starts
    while the buffer is full. With ``queue_drop`` and ``queue_max`` (Applied Compute) the servers never wait, and what
    the trainer is too slow for is dropped."""
    bound: float = 1.0
    """α (ROLL Flash §4.3): how many versions older than the one being trained a sample's start may be. η of ``buffers``
    (StaleFlow §4) and τ of ``window`` are whole numbers. ``queue_max`` discards what is older; ``queue_drop`` and
    ``inherent`` have no bound."""
    queue: float = 1.0
    """Capacity of ``queue_drop``'s queue and of ``inherent``'s buffer, in batches."""
    adaptive: AdaptiveConfig = AdaptiveConfig()

    @property
    def limit(self) -> int | None:
        """Largest staleness that a trained sample can have."""
        bound = max(self.bound, self.adaptive.bound_max) if self.adaptive.target else self.bound
        match self.control:
            case "inflight_cap":
                return math.ceil(bound)
            case "queue_max" | "buffers" | "window":
                return math.floor(bound)
            case "queue_drop" | "inherent":
                return None

    @property
    def family(self) -> Literal["inflight_cap", "queue_drop", "queue_max"]:
        """As which the closed forms take it: buffers and a window keep at most (1 + bound) batches in flight, as a cap
        does. With ``inherent`` the slots decide what is in flight, as with a queue."""
        match self.control:
            case "buffers" | "window":
                return "inflight_cap"
            case "inherent":
                return "queue_drop"
            case other:
                return other


class UpdateConfig(Section, frozen=True, kw_only=True):
    running: Literal["interrupt", "drain"] = "interrupt"
    """What a weight update does to running requests: cut them and go on with their tokens, or let them end first. With
    a coordinator, the latter has every trajectory generated by one version, whatever its turns (Laminar §6)."""
    overlap: bool = True
    """The next train step begins when the new weights are gathered, while the servers take them (StaleFlow figure 21).
    Where groups of an older version may be trained: ``inflight_cap`` with a ``staleness.bound`` above 0. With
    a coordinator it is always so."""
    synchronization: Literal["all", "selective", "when_empty"] = "all"
    """With a coordinator, which servers pull new weights (StaleFlow §5.3): each at once, or only those that may serve
    nothing of what waits and would get some of it with new weights. ``when_empty`` (Laminar §3.1): each when what it
    has begun has ended or gone to others; for ``update.running = "drain"``."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """The inference servers."""

    kind: Literal["embedded", "sglang"] = "embedded"
    count: int = 1
    """Servers to start here, when ``urls`` is empty."""
    urls: list[str] = []
    """Servers that already run (``http://host:port``); they are used and never stopped."""
    python: str = ""
    """Interpreter that has ``sglang`` installed, for ``kind = "sglang"``. Empty: the one that runs asyncrl."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: list[str] = []
    """``CUDA_VISIBLE_DEVICES`` of each server started here, in turn. Empty: all see all GPUs."""
    script: str = ""
    """Python file that starts an SGLang server, in place of ``-m sglang.launch_server``."""
    args: list[str] = []
    """Further command-line arguments for servers started here."""
    threads: int = 1
    """CPU threads of each server (OMP_NUM_THREADS)."""
    max_running_requests: int = 64
    max_total_tokens: int = 65536
    """KV cache of each server, in tokens."""
    host_kv_tokens: int = 0
    """KV kept in host memory beside that, in tokens: of trajectories that wait for their environment, for one. With
    SGLang it sizes its hierarchical cache (HiCache), which registers that memory with CUDA: it needs a GPU."""
    kv_reuse: bool = False
    """A request that goes on at another server of its version takes its KV along, and is not prefilled again
    (DORA §4.4). SGLang servers share it through Mooncake: not tried, as that needs GPUs (engine/shared_kv.py)."""
    kv_storage: dict[str, Any] = {}
    """For that, Mooncake's settings (``master_server_address`` …; HiCache's ``storage-backend-extra-config``)."""
    stream_interval: int = 64
    """Tokens between two chunks of a stream: what a dying server can cost each of its requests, beside a chunk that is
    on its way. 0: all that they have got from it, as their tokens come at their end."""
    routing: Literal["least_loaded", "prefix_affine", "round_robin", "waterfall", "own_batch", "newest_first"] = (
        "least_loaded"
    )
    """``waterfall`` (StaleFlow §5.3), for a coordinator: the server that gains most by the request, of the oldest
    version on which it gains enough. ``own_batch`` (Laminar §3.1), for ``update.running = "drain"``: each server begins
    a batch, its share of ``rollout.num_envs``, when the one before has ended. So is ``newest_first`` (DORA §4.3): new
    groups go to the newest version, to older ones only where slots are idle."""
    mu: float = 0.8
    """μ of ``waterfall``: what the best server of all versions would gain, times this, is enough."""
    migration: Literal["none", "throughput", "repack", "repartition"] = "none"
    """With a coordinator, whether running requests leave their server for others (StaleFlow §5.3): those that wait
    inside it, beyond ``phi_wait``, and some of the slowest server's where a sequence decodes ``phi_throughput`` times
    as fast on the fastest. ``repack`` (Laminar §5), for ``own_batch``: what servers have left is packed onto few of
    their version, and the others begin anew. ``repartition`` (DORA §4.3), for ``newest_first``: older versions keep
    servers in proportion to their work, and those that they give up take the newest weights."""
    phi_wait: int = 3
    phi_throughput: float = 1.1
    rebalance_s: float = 5.0
    """Seconds between two looks at whether to ``repack`` or ``repartition``; each new version is another reason."""
    kv_threshold: float = 0.99
    """C_max of ``repack``: the share of its KV cache below which a server has nothing to wait for room. Above it
    ``repartition`` moves requests to other servers of their version."""
    roofline_batch: int = 64
    """B of ``repack``: sequences that a server decodes in hardly more time than a few, as memory bounds it."""
    fit_cost: bool = True
    """With ``buffers``, correct the cost model by what the servers are seen to take; ``false``: go by ``sim.instance``
    alone. Needs streaming: it looks at stretches of 4 · max(16, ``stream_interval``) decode steps without a pause,
    so where responses are short or new weights frequent, a ``stream_interval`` of a few tokens."""
    connect_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    """A stream that brings nothing for this long is given up and retried elsewhere."""
    control_timeout_s: float = 120.0
    retries: int = 3
    restarts: int = 3
    """How often a server that was started here and died is started again, until it ran for ten minutes."""
    restart_backoff_s: float = 1.0
    """Pause before the first restart; twice as long before each further one, up to 30 s."""
    probe_s: float = 2.0
    """Time between two probes of a server that failed."""
    hang_s: float = 30.0
    """A server that answers no heartbeat for so long hangs: its requests go elsewhere, and one that was started here is
    killed and started again."""
    patience_s: float = 300.0
    """The run ends when no server was up for this long; a server that is started again needs its start-up time."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The torchrun job."""

    url: str = ""
    """Rank 0 of a job that was started elsewhere; it is used and never stopped. Empty: one is started here."""
    ranks: int = 1
    threads: int = 1
    """CPU threads of each rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: str = ""
    """``CUDA_VISIBLE_DEVICES`` of the job. Empty: all GPUs."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    micro_batch_tokens: int = 8192
    """Token budget of one packed forward and backward pass on one rank."""
    stream: bool = False
    """Begin with groups that are certain of the next batch while the rest of it is generated: as soon as they fill a
    micro-batch on every rank, and as far as they are of its first mini-batch. The gradient is the same, to rounding."""
    activation_checkpointing: bool = False
    offload: Literal["none", "optimizer"] = "none"
    """``optimizer``: AdamW's moments (8 bytes a parameter) are in pinned host memory but during updates."""
    attention: Literal["auto", "blocks", "varlen", "flash", "flex"] = "auto"
    """``auto``: on CUDA in half precision ``flash`` (the flash-attn package) where installed, else ``varlen`` (torch's
    own FlashAttention), or ``flex`` (FlexAttention) for models with soft caps; elsewhere ``blocks`` (torch's scaled dot
    product over blocks of similar length). What is chosen is compared with ``blocks`` at the start."""
    sequence_parallel: int = 1
    """k > 1: k neighbouring ranks share each packed row, of up to k · micro_batch_tokens, for sequences too long for
    one rank. Must divide ``ranks`` and the model's attention heads."""
    compile: bool = False
    """torch.compile the decoder layers: some minutes at the start, faster steps on a GPU."""
    lora_rank: int = 0
    """r > 0: only low-rank adapters of this rank are trained (peft); servers get them merged into the weights."""
    lora_alpha: int = 32
    """The adapters' part of a weight is lora_alpha / lora_rank · B·A."""
    lora_targets: list[str] = []
    """Names of the linear layers with adapters, as ``q_proj``. Empty: all but the output layer."""
    restarts: int = 3
    """How often a job that died is started again without a new step between; 0: its death ends the run. The steps since
    its newest checkpoint are trained again: on CPUs exactly, or the run ends; on GPUs to rounding, and a difference is
    told. Rollouts go on meanwhile. Not for a job at ``url``."""
    restart_backoff_s: float = 5.0
    """Pause before the first restart; twice as long before each further one."""
    replay_steps: int = 20
    """So often a checkpoint is made for the sake of ``restarts`` and of a run that is killed, also where
    ``run.checkpoint_every`` asks for fewer. The batches since then are in the run store, on the disk."""
    connect_timeout_s: float = 300.0
    step_timeout_s: float = 3600.0
    health_timeout_s: float = 120.0
    """How long rank 0 may leave unanswered whether it is there, while it works: it hangs, or its host is cut off."""

    @property
    def restartable(self) -> bool:
        return self.restarts > 0 and not self.url


class WeightsConfig(Section, frozen=True, kw_only=True):
    transport: Literal["disk", "collective", "relay"] = "disk"
    """``relay`` (Laminar §4): a chain of relays, one on every host with servers, brings each version into that host's
    shared memory while training and generation go on; servers load it from there."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Of ``collective``. ``auto``: the trainer's own; a trainer that shares a GPU with a server needs gloo."""
    address: str = "127.0.0.1"
    """Where the servers (``collective``) or the relays reach the trainer's rank 0. Ranks on other machines offer their
    share to relays at the address by which they reach rank 0."""
    folder: str = ""
    """Shared folder of the ``disk`` transport. Empty: ``weights/`` in the run directory."""
    bucket_mb: int = 256
    """Largest piece that is gathered or broadcast at once."""
    relays: int = 1
    """Relays to start here, when ``relay_urls`` is empty; servers take turns at them. More than one is for trying out a
    chain on one machine."""
    relay_urls: list[str] = []
    """Relays that already run (``asyncrl relay``), one on every host with servers, in the order of the chain."""
    keep_versions: int = 2
    """Versions that each relay keeps in its host's memory, beside the one that arrives."""
    chunk_mb: int = 32
    """What a relay has of a version before it gives it on."""
    link: Literal["tcp", "nixl"] = "tcp"
    """How weights travel from the trainer to relays and between them. ``nixl``: by RDMA, where trainer and relays have
    NIXL (pip install nixl) and a network that does it; elsewhere by UCX's TCP or shared memory. NIXL's own
    connections ask for no token: they belong into a trusted network (weights/nixl.py)."""


class RunConfig(Section, frozen=True, kw_only=True):
    steps: int = 100
    eval_tasks: int = 0
    """Held-out tasks of each source that are played before and after training; 0: all of them."""
    eval_temperature: float = 1.0
    eval_samples: int = 1
    """How often each is played; with several, pass@k is estimated too."""
    eval_every: int = 0
    """Steps between evaluations while training goes on; 0: none. Each is of one version, which some servers keep until
    it has ended; with a single server the weight updates wait for it."""
    eval_share: float = 0.25
    """Share of the servers, and of what all may run at once, that such an evaluation takes; at least one server."""
    checkpoint_every: int = 0
    """Steps between checkpoints; the last one is always written. See also ``trainer.replay_steps``."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay, beside the best; 0: all."""
    last_checkpoint_s: float = 120.0
    """How long a run that ends early may take to write its last checkpoint; 0: it writes none."""
    stall_s: float = 0.0
    """No progress for so long (no token, step of an environment, reward, micro-batch or move of weights): the run says
    who holds it up, and does as ``on_stall`` says. 0: a minute more than the longest deadline of a single wait."""
    on_stall: Literal["mend", "report", "end"] = "mend"
    """``mend``: cut what holds the run up (re-route the request and start its server anew, fail the episode, start the
    trainer anew), and end the run if that does not help. ``report``: only say it. ``end``: end the run at once."""
    buffer_mb: int = 4096
    """What the tokens of finished trajectories may take of memory while they wait for their batch; those beyond wait on
    the disk, in the run store."""
    trace_requests: bool = True
    """False: ``trace.json`` leaves single requests and episodes out, a few hundred bytes each."""


class Recipe(Section, frozen=True, kw_only=True):
    """One run, resolved."""

    name: str = "run"
    seed: int = 0
    preset: str = "asyncrl"
    model: ModelConfig = ModelConfig()
    setup: SetupConfig = SetupConfig()
    task: TaskConfig = TaskConfig()
    env: EnvConfig = EnvConfig()
    sources: dict[str, SourceConfig] = {}
    """Several environments and datasets in one run. Empty: ``[task]`` and ``[env]`` are the only one."""
    rollout: RolloutConfig = RolloutConfig()
    gateway: GatewayConfig = GatewayConfig()
    staleness: StalenessConfig = StalenessConfig()
    buffer: BufferConfig = BufferConfig()
    update: UpdateConfig = UpdateConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    weights: WeightsConfig = WeightsConfig()
    run: RunConfig = RunConfig()
    sim: SimConfig = SimConfig()

    @property
    def mixture(self) -> dict[str, Source]:
        """What tasks come from, by name: at least one."""
        if not self.sources:
            return {"": Source(weight=1.0, task=self.task, env=self.env)}
        return {name: _source(config, self.task, self.env) for name, config in self.sources.items()}

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator routes requests and has each server take new weights by itself."""
        return self.staleness.control in ("buffers", "window", "inherent")

    @property
    def one_version(self) -> bool:
        """Whether each trajectory is generated by one version."""
        return self.coordinated and self.update.running == "drain"

    @property
    def overlaps_update(self) -> bool:
        """Whether a train step may begin before the servers hold the version that it starts from."""
        return self.coordinated or (
            self.update.overlap and self.staleness.control == "inflight_cap" and self.staleness.bound > 0
        )

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints, as the user and what may have to be trained again ask for them."""
        return min(filter(None, (self.run.checkpoint_every, self.trainer.replay_steps)), default=0)

    @property
    def stall_s(self) -> float:
        """Without progress for so long the run is stalled."""
        engine = self.engine
        waits = [engine.request_timeout_s, engine.control_timeout_s, engine.connect_timeout_s, engine.patience_s]
        for source in self.mixture.values():
            waits += [source.env.reset_timeout_s, source.env.step_timeout_s, source.env.reward_timeout_s]
        if self.trainer.compile:  # during which a job does not say how far it is
            waits.append(self.trainer.step_timeout_s)
        return self.run.stall_s or 60.0 + max(waits)

    @property
    def batch_trajectories(self) -> int:
        return self.rollout.batch_groups * self.rollout.group_size

    @property
    def streamable(self) -> bool:
        """Whether a group has its own advantages, the first mini-batch has whole groups, and no sampler chooses."""
        whole_groups = self.rollout.batch_groups // max(1, self.algorithm.mini_batches)
        return not self.algorithm.of_whole_batch and whole_groups >= 1 and not self.buffer.samples

    @property
    def streamed_groups(self) -> int:
        """Whole groups of a batch's first mini-batch, if those go to the trainer one by one."""
        return self.rollout.batch_groups // self.algorithm.mini_batches if self.trainer.stream else 0


def _source(config: SourceConfig, task: TaskConfig, env: EnvConfig) -> Source:
    replace = msgspec.structs.replace
    given = {key: value for key, value in msgspec.structs.asdict(config).items() if value not in ("", None)}
    if "target" in given:
        given.setdefault("kwargs", {})
    own_task = {key: given.pop(key) for key in ("train", "heldout") if key in given}
    return Source(weight=given.pop("weight"), task=replace(task, **own_task), env=replace(env, **given))
