"""The recipe: what a run is, as frozen structs. Imports no torch.

``load`` layers defaults ⊕ preset ⊕ TOML files ⊕ dotted overrides, and refuses what cannot work: an unknown key, a wrong
type or an impossible combination is a ``RecipeError`` of one line that names the key and the remedy. Derived numbers
are properties, never knobs. Paths in a recipe are relative to the recipe's own folder.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from asyncrl.core.policy.presets import PRESETS
from asyncrl.core.types import Record


class RecipeError(Exception):
    """A recipe that cannot work; one line naming the key, file or URL, and the remedy."""


class Section(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the recipe's tables."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy: a folder in Hugging Face format (config.json, safetensors, tokenizer)."""

    path: str = ""
    """Model folder. Trainer and servers start from it (version 0)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in trainer compute and in the servers; master weights are always float32."""


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
    """``package.module:Class``, or ``file.py:Class`` relative to the recipe. An ``Env`` class or a reward function."""
    kwargs: dict[str, Any] = {}
    max_turns: int = 1
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    reward_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    block_timeout_s: float = 30.0
    """How long user code may hold the event loop (a missing ``await``) before it is interrupted."""
    retries: int = 1
    """How often a failed episode is started anew before its group is given up."""
    max_failure_rate: float = 0.5
    """The run stops when more than this share of the last ``failure_window`` episodes failed."""
    failure_window: int = 64


class RolloutConfig(Section, frozen=True, kw_only=True):
    """How much is generated for a train step, and how."""

    batch_groups: int = 8
    """Groups that one train step consumes."""
    group_size: int = 8
    """Trajectories of one task."""
    num_envs: int = 64
    """Environment slots: EnvManagers that run at once."""
    max_new_tokens: int = 512
    """Tokens that one turn may generate."""
    max_tokens: int = 2048
    """Length limit of a whole trajectory, prompt included."""
    temperature: float = 1.0
    top_p: float = 1.0
    expand_num_return_sequences: bool = True
    """Prompt replication (ROLL Flash §5.1.2): a group is ``group_size`` independent requests, else one with ``n``."""
    max_additional_running_prompts: int = 0
    """Groups that run beside what the batches need (ROLL Flash §5.1.1); the surplus is aborted."""
    filter_zero_variance: bool = False
    """Dynamic filtering: drop groups whose rewards are all equal, and refill exactly what was dropped."""


class StalenessConfig(Section, frozen=True, kw_only=True):
    control: Literal["inflight_cap"] = "inflight_cap"
    bound: float = 1.0
    """α (ROLL Flash §4.3): how many versions older than the one being trained a sample's start may be."""


class UpdateConfig(Section, frozen=True, kw_only=True):
    running: Literal["interrupt", "drain"] = "interrupt"
    """What a weight update does to running requests: cut them and go on with their tokens, or let them end first."""


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
    stream_interval: int = 64
    """Tokens between two chunks of a stream: what a dying server can cost."""
    routing: Literal["least_loaded", "prefix_affine"] = "least_loaded"
    connect_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    """A stream that brings nothing for this long is given up and retried elsewhere."""
    control_timeout_s: float = 120.0
    retries: int = 3
    probe_s: float = 2.0
    """Time between two probes of a server that failed."""
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
    activation_checkpointing: bool = False
    connect_timeout_s: float = 300.0
    step_timeout_s: float = 3600.0


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Losses are named in ``train/loss.py``, advantages in ``core/advantage.py``."""

    loss: Literal["ppo"] = "ppo"
    """GRPO's clipped objective is ``ppo`` with the ``group_norm`` advantage."""
    advantage: Literal["group_norm", "group_mean"] = "group_norm"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    importance_cap: float = 5.0
    """C of truncated importance sampling against the engine's logprobs (ROLL Flash Eq. 12)."""


class WeightsConfig(Section, frozen=True, kw_only=True):
    transport: Literal["disk", "collective"] = "disk"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Of ``collective``. ``auto``: the trainer's own; a trainer that shares a GPU with a server needs gloo."""
    address: str = "127.0.0.1"
    """Where the servers reach the trainer's rank 0, for ``collective``."""
    folder: str = ""
    """Shared folder of the ``disk`` transport. Empty: ``weights/`` in the run directory."""
    bucket_mb: int = 256
    """Largest piece that is gathered or broadcast at once."""


class RunConfig(Section, frozen=True, kw_only=True):
    steps: int = 100
    eval_tasks: int = 0
    """Held-out tasks that are played before and after training; 0: all of them."""
    eval_temperature: float = 1.0
    checkpoint_every: int = 0
    """Steps between checkpoints; the last one is always written."""


class Recipe(Section, frozen=True, kw_only=True):
    """One run, resolved."""

    name: str = "run"
    seed: int = 0
    preset: str = "roll-flash"
    model: ModelConfig = ModelConfig()
    setup: SetupConfig = SetupConfig()
    task: TaskConfig = TaskConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    staleness: StalenessConfig = StalenessConfig()
    update: UpdateConfig = UpdateConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    weights: WeightsConfig = WeightsConfig()
    run: RunConfig = RunConfig()

    @property
    def batch_trajectories(self) -> int:
        return self.rollout.batch_groups * self.rollout.group_size


def dumps(recipe: Recipe) -> bytes:
    """The resolved recipe as JSON, which ``loads_json`` reads back (what the trainer's ranks are given)."""
    return msgspec.json.format(msgspec.json.encode(recipe), indent=2)


def loads_json(data: bytes) -> Recipe:
    return msgspec.json.decode(data, type=Recipe)


# --- loading ----------------------------------------------------------------------------------------------------------


def load(path: str | Path, *, files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Recipe:
    """Defaults ⊕ preset ⊕ recipe ⊕ ``files`` ⊕ ``overrides`` (``a.b=value``, value as TOML, else text).

    ``path`` is a recipe file or a folder with ``recipe.toml``. Relative paths in the result are resolved against that
    folder. Raises ``RecipeError``.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "recipe.toml"
    layers = [_read_toml(file), *(_read_toml(Path(f)) for f in files), *(_parse_override(o) for o in overrides)]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer)
    folder = file.resolve().parent
    return _resolve_paths(load_table(_merge({"name": folder.name}, merged)), folder)


def load_table(table: Mapping[str, Any]) -> Recipe:
    """The recipe that a table of the same shape as the TOML gives, on top of its preset, checked. ``RecipeError``."""
    preset = table.get("preset", Recipe().preset)
    if not isinstance(preset, str) or preset not in PRESETS:
        raise RecipeError(f"preset: unknown {preset!r}; known are {', '.join(PRESETS)}")
    try:
        recipe = msgspec.convert(_merge(PRESETS[preset], table), Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(_explain(error)) from None
    check(recipe)
    return recipe


def check(recipe: Recipe) -> None:
    """Refuse combinations that cannot work. Raises ``RecipeError`` for the first one."""
    r, t, e = recipe.rollout, recipe.trainer, recipe.engine
    at_least_one = {
        "rollout.batch_groups": r.batch_groups,
        "rollout.group_size": r.group_size,
        "rollout.num_envs": r.num_envs,
        "rollout.max_new_tokens": r.max_new_tokens,
        "rollout.max_tokens": r.max_tokens,
        "env.max_turns": recipe.env.max_turns,
        "env.failure_window": recipe.env.failure_window,
        "engine.max_running_requests": e.max_running_requests,
        "engine.max_total_tokens": e.max_total_tokens,
        "engine.threads": e.threads,
        "trainer.ranks": t.ranks,
        "trainer.threads": t.threads,
        "trainer.micro_batch_tokens": t.micro_batch_tokens,
        "run.steps": recipe.run.steps,
        "weights.bucket_mb": recipe.weights.bucket_mb,
    }
    for key, value in at_least_one.items():
        _require(value >= 1, key, value, "must be at least 1")
    not_negative = {
        "staleness.bound": recipe.staleness.bound,
        "rollout.temperature": r.temperature,
        "run.eval_temperature": recipe.run.eval_temperature,
        "run.eval_tasks": recipe.run.eval_tasks,
        "run.checkpoint_every": recipe.run.checkpoint_every,
        "rollout.max_additional_running_prompts": r.max_additional_running_prompts,
        "env.retries": recipe.env.retries,
        "engine.retries": e.retries,
        "engine.stream_interval": e.stream_interval,
        "trainer.warmup_steps": t.warmup_steps,
        "trainer.weight_decay": t.weight_decay,
    }
    for key, number in not_negative.items():
        _require(math.isfinite(number) and number >= 0, key, number, "must be 0 or more")
    positive = {
        "env.reset_timeout_s": recipe.env.reset_timeout_s,
        "env.step_timeout_s": recipe.env.step_timeout_s,
        "env.reward_timeout_s": recipe.env.reward_timeout_s,
        "env.episode_timeout_s": recipe.env.episode_timeout_s,
        "env.block_timeout_s": recipe.env.block_timeout_s,
        "engine.connect_timeout_s": e.connect_timeout_s,
        "engine.request_timeout_s": e.request_timeout_s,
        "engine.idle_timeout_s": e.idle_timeout_s,
        "engine.control_timeout_s": e.control_timeout_s,
        "engine.probe_s": e.probe_s,
        "engine.patience_s": e.patience_s,
        "trainer.connect_timeout_s": t.connect_timeout_s,
        "trainer.step_timeout_s": t.step_timeout_s,
        "trainer.learning_rate": t.learning_rate,
        "trainer.grad_clip": t.grad_clip,
        "algorithm.importance_cap": recipe.algorithm.importance_cap,
    }
    for key, number in positive.items():
        _require(math.isfinite(number) and number > 0, key, number, "must be more than 0")
    _require(all(0 <= b < 1 for b in t.betas), "trainer.betas", list(t.betas), "must be in [0, 1)")
    _require(0 < r.top_p <= 1, "rollout.top_p", r.top_p, "must be in (0, 1]")
    _require(0 <= recipe.env.max_failure_rate <= 1, "env.max_failure_rate", recipe.env.max_failure_rate, "is a share")
    _require(0 < recipe.algorithm.clip_low <= 1, "algorithm.clip_low", recipe.algorithm.clip_low, "must be in (0, 1]")
    _require(recipe.algorithm.clip_high > 0, "algorithm.clip_high", recipe.algorithm.clip_high, "must be more than 0")
    _require(bool(e.urls) or e.count >= 1, "engine.count", e.count, "must be at least 1, or give engine.urls")
    _require(
        t.ranks <= recipe.batch_trajectories,
        "trainer.ranks",
        t.ranks,
        f"is more than the {recipe.batch_trajectories} sequences of a batch; lower it or raise rollout.batch_groups",
    )
    _require(
        r.group_size >= 2,
        "rollout.group_size",
        r.group_size,
        f"must be at least 2: {recipe.algorithm.advantage} compares the trajectories of a group",
    )
    _require(
        r.max_new_tokens < r.max_tokens,
        "rollout.max_new_tokens",
        r.max_new_tokens,
        f"leaves no room for a prompt within rollout.max_tokens = {r.max_tokens}",
    )
    _require(
        r.max_tokens <= e.max_total_tokens,
        "rollout.max_tokens",
        r.max_tokens,
        f"does not fit into a server's KV cache of engine.max_total_tokens = {e.max_total_tokens}",
    )
    _require(
        r.expand_num_return_sequences or recipe.env.max_turns == 1,
        "rollout.expand_num_return_sequences",
        "false",
        f"needs a single turn, but env.max_turns = {recipe.env.max_turns}; set it to true",
    )
    _require(
        r.expand_num_return_sequences or r.group_size <= e.max_running_requests,
        "engine.max_running_requests",
        e.max_running_requests,
        f"must hold a whole group of {r.group_size} when expand_num_return_sequences is false",
    )
    _require(
        not recipe.run.eval_tasks or bool(recipe.task.heldout),
        "run.eval_tasks",
        recipe.run.eval_tasks,
        "needs held-out rows; set task.heldout",
    )
    nested = max(recipe.env.reset_timeout_s, recipe.env.step_timeout_s, recipe.env.reward_timeout_s)
    _require(
        nested <= recipe.env.episode_timeout_s,
        "env.episode_timeout_s",
        recipe.env.episode_timeout_s,
        f"is shorter than one reset, step or reward may take ({nested:g} s)",
    )


def _require(condition: bool, key: str, value: Any, remedy: str) -> None:
    if not condition:
        raise RecipeError(f"{key} = {value}: {remedy}")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{file}: {error.strerror}; give a recipe.toml or its folder") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: not valid TOML: {error}") from None


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(f"--set {text!r}: write key=value, for instance --set trainer.learning_rate=1e-5")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for name in reversed(names):
        parsed = {name: parsed}
    table: dict[str, Any] = parsed
    return table


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _explain(error: msgspec.ValidationError) -> str:
    """msgspec's message with the key in front, and what would be right where one of a few names is."""
    what, _, where = str(error).partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".")
    if unknown := re.search(r"unknown field `(.+)`", what):
        name = unknown.group(1)
        known = [f.name for f in msgspec.structs.fields(_type_at(path))]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        return f"{path + '.' if path else ''}{name}: unknown key; {hint}"
    if what.startswith("Invalid enum value"):
        return f"{path}: unknown {what.split(maxsplit=3)[3]}; known are {', '.join(get_args(_type_at(path)))}"
    return f"{path}: {what[:1].lower()}{what[1:].replace('`object`', '`table`')}"


def _type_at(path: str) -> Any:
    """The type of a dotted key."""
    kind: Any = Recipe
    for name in filter(None, path.split(".")):
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.name == name)
    return kind


def _resolve_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Make every path of the recipe absolute."""

    def absolute(path: str) -> str:
        return str((folder / path).resolve()) if path else path

    target = recipe.env.target
    module, colon, name = target.partition(":")
    if module.endswith(".py"):
        target = f"{absolute(module)}{colon}{name}"
    replace = msgspec.structs.replace
    return replace(
        recipe,
        model=replace(recipe.model, path=absolute(recipe.model.path)),
        setup=replace(recipe.setup, script=absolute(recipe.setup.script), out=absolute(recipe.setup.out)),
        task=replace(recipe.task, train=absolute(recipe.task.train), heldout=absolute(recipe.task.heldout)),
        env=replace(recipe.env, target=target),
        engine=replace(recipe.engine, script=absolute(recipe.engine.script)),
        weights=replace(recipe.weights, folder=absolute(recipe.weights.folder)),
    )
