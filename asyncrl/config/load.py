"""Defaults ⊕ preset ⊕ TOML files ⊕ dotted overrides, and the refusal of what cannot work.

An unknown key, a wrong type or an impossible combination is a ``RecipeError`` of one line that names the key and the
remedy.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from asyncrl.config.algorithm import check_algorithm
from asyncrl.config.base import RecipeError, Section, require
from asyncrl.config.buffer import check_buffer
from asyncrl.config.coordination import check_coordination
from asyncrl.config.kv import check_kv
from asyncrl.config.recipe import Recipe, Source
from asyncrl.config.redact import redacted
from asyncrl.config.relays import check_relays
from asyncrl.core.distributions import Empirical
from asyncrl.core.policy.presets import PRESETS

S = TypeVar("S", bound=Section)


def dumps(recipe: Recipe) -> bytes:
    """The resolved recipe as JSON without secrets, which ``loads_json`` reads back (what the trainer's ranks are
    given)."""
    return msgspec.json.format(msgspec.json.encode(redacted(msgspec.to_builtins(recipe))), indent=2)


def loads_json(data: bytes) -> Recipe:
    return msgspec.json.decode(data, type=Recipe)


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
    if "stream" not in table.get("trainer", {}):
        recipe = _streaming_if_possible(recipe)
    check(recipe)
    return recipe


def under_preset(recipe: Recipe, preset: str) -> Recipe:
    """The recipe with this preset's settings in place of its own. ``RecipeError``."""
    if preset not in PRESETS:
        raise RecipeError(f"preset: unknown {preset!r}; known are {', '.join(PRESETS)}")
    defaults = msgspec.to_builtins(Recipe())
    own = {table: {key: defaults[table][key] for key in row} for table, row in PRESETS[recipe.preset].items()}
    table = _merge(_merge(msgspec.to_builtins(recipe), own), {**PRESETS[preset], "preset": preset})
    changed = _streaming_if_possible(msgspec.convert(table, Recipe))
    check(changed)
    return changed


def _streaming_if_possible(recipe: Recipe) -> Recipe:
    """A preset streams where advantages and buffer allow it; who asks for it himself is told if they do not."""
    if not recipe.trainer.stream or recipe.streamable:
        return recipe
    return msgspec.structs.replace(recipe, trainer=msgspec.structs.replace(recipe.trainer, stream=False))


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
        "trainer.sequence_parallel": t.sequence_parallel,
        "trainer.lora_alpha": t.lora_alpha,
        "run.steps": recipe.run.steps,
        "run.eval_samples": recipe.run.eval_samples,
        "weights.bucket_mb": recipe.weights.bucket_mb,
        "weights.relays": recipe.weights.relays,
        "weights.keep_versions": recipe.weights.keep_versions,
        "weights.chunk_mb": recipe.weights.chunk_mb,
    }
    sim = recipe.sim
    at_least_one |= {
        "sim.instance.gpus": sim.instance.gpus,
        "sim.instance.kv_bytes": sim.instance.kv_bytes,
        "sim.trainer.gpus": sim.trainer.gpus,
        "trainer.replay_steps": t.replay_steps,
        "sim.tasks": sim.tasks,
    }
    for key, value in at_least_one.items():
        require(value >= 1, key, value, "must be at least 1")
    not_negative = {
        "staleness.bound": recipe.staleness.bound,
        "rollout.temperature": r.temperature,
        "run.eval_temperature": recipe.run.eval_temperature,
        "run.eval_tasks": recipe.run.eval_tasks,
        "run.eval_every": recipe.run.eval_every,
        "run.checkpoint_every": recipe.run.checkpoint_every,
        "run.keep_checkpoints": recipe.run.keep_checkpoints,
        "run.last_checkpoint_s": recipe.run.last_checkpoint_s,
        "run.buffer_mb": recipe.run.buffer_mb,
        "run.stall_s": recipe.run.stall_s,
        "rollout.max_additional_running_prompts": r.max_additional_running_prompts,
        "rollout.group_size_redundancy": r.group_size_redundancy,
        "env.workers": recipe.env.workers,
        "env.memory_mb": recipe.env.memory_mb,
        "env.retries": recipe.env.retries,
        "env.backoff_s": recipe.env.backoff_s,
        "engine.host_kv_tokens": e.host_kv_tokens,
        "engine.retries": e.retries,
        "engine.restarts": e.restarts,
        "engine.restart_backoff_s": e.restart_backoff_s,
        "engine.stream_interval": e.stream_interval,
        "trainer.restarts": t.restarts,
        "trainer.restart_backoff_s": t.restart_backoff_s,
        "trainer.warmup_steps": t.warmup_steps,
        "trainer.lora_rank": t.lora_rank,
        "trainer.weight_decay": t.weight_decay,
    }
    not_negative |= {
        "sim.instance.chunked_prefill": sim.instance.chunked_prefill,
        "sim.instance.load_s": sim.instance.load_s,
        "sim.instance.start_s": sim.instance.start_s,
        "sim.trainer.fixed_s": sim.trainer.fixed_s,
        "sim.trainer.save_s": sim.trainer.save_s,
        "sim.trainer.scaling": sim.trainer.scaling,
        "sim.trainer.start_s": sim.trainer.start_s,
        "sim.weights.hop_s": sim.weights.hop_s,
        "sim.heldout": sim.heldout,
        "sim.random_faults": sim.random_faults,
        **{f"sim.faults[{i}].at_s": fault.at_s for i, fault in enumerate(sim.faults)},
        **{f"sim.faults[{i}].for_s": fault.for_s for i, fault in enumerate(sim.faults)},
    }
    for key, number in not_negative.items():
        require(math.isfinite(number) and number >= 0, key, number, "must be 0 or more")
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
        "engine.hang_s": e.hang_s,
        "engine.patience_s": e.patience_s,
        "trainer.connect_timeout_s": t.connect_timeout_s,
        "trainer.step_timeout_s": t.step_timeout_s,
        "trainer.health_timeout_s": t.health_timeout_s,
        "trainer.learning_rate": t.learning_rate,
        "trainer.grad_clip": t.grad_clip,
    }
    positive |= {
        "sim.instance.kv_gb_s": sim.instance.kv_gb_s,
        "sim.trainer.tokens_per_s": sim.trainer.tokens_per_s,
        "sim.weights.gigabytes": sim.weights.gigabytes,
        "sim.weights.gather_gb_s": sim.weights.gather_gb_s,
        "sim.weights.disk_gb_s": sim.weights.disk_gb_s,
        "sim.weights.link_gb_s": sim.weights.link_gb_s,
        "sim.weights.local_gb_s": sim.weights.local_gb_s,
        "sim.env.slow_factor": sim.env.slow_factor,
        "sim.random_within_s": sim.random_within_s,
        "sim.stall_s": sim.stall_s,
        **{f"sim.faults[{i}].factor": fault.factor for i, fault in enumerate(sim.faults)},
    }
    for key, number in positive.items():
        require(math.isfinite(number) and number > 0, key, number, "must be more than 0")
    shares = {
        "env.max_failure_rate": recipe.env.max_failure_rate,
        "env.max_infra_failure_rate": recipe.env.max_infra_failure_rate,
        "sim.task_share": sim.task_share,
        "sim.env.success": sim.env.success,
        "sim.env.spread": sim.env.spread,
        "sim.env.crash": sim.env.crash,
        "sim.env.hang": sim.env.hang,
        "sim.env.slow": sim.env.slow,
    }
    for key, number in shares.items():
        require(0 <= number <= 1, key, number, "is a share, between 0 and 1")
    for i, fault in enumerate(sim.faults):
        servers = len(e.urls) or e.count
        there = servers + sum(other.kind == "join" for other in recipe.sim.faults)
        require(0 <= fault.server < there, f"sim.faults[{i}].server", fault.server, f"there are {there} servers")
    require(0 <= recipe.gateway.port < 65536, "gateway.port", recipe.gateway.port, "must be from 0 to 65535")
    _check_adaptive(recipe)
    held = "must hold at least one batch, and not endlessly many"
    require(1 <= recipe.staleness.queue < math.inf, "staleness.queue", recipe.staleness.queue, held)
    require(all(0 <= b < 1 for b in t.betas), "trainer.betas", list(t.betas), "must be in [0, 1)")
    require(0 < r.top_p <= 1, "rollout.top_p", r.top_p, "must be in (0, 1]")
    check_algorithm(recipe.algorithm)
    require(bool(e.urls) or e.count >= 1, "engine.count", e.count, "must be at least 1, or give engine.urls")
    require(
        t.ranks <= recipe.batch_trajectories,
        "trainer.ranks",
        t.ranks,
        f"is more than the {recipe.batch_trajectories} sequences of a batch; lower it or raise rollout.batch_groups",
    )
    require(
        not t.stream or not recipe.algorithm.of_whole_batch,
        "trainer.stream",
        "true",
        f"needs advantages that each group has by itself, but algorithm.{recipe.algorithm.of_whole_batch} looks at the "
        "whole batch; set one or the other differently",
    )
    require(
        not t.stream or recipe.streamed_groups >= 1,
        "trainer.stream",
        "true",
        f"the first of algorithm.mini_batches = {recipe.algorithm.mini_batches} holds no whole group of "
        f"rollout.batch_groups = {r.batch_groups}; lower it",
    )
    require(
        bool(t.url) or t.ranks % t.sequence_parallel == 0,
        "trainer.sequence_parallel",
        t.sequence_parallel,
        f"must divide trainer.ranks = {t.ranks}",
    )
    require(
        r.group_size >= 2 or not recipe.algorithm.compares_groups,
        "rollout.group_size",
        r.group_size,
        f"must be at least 2: {recipe.algorithm.advantage} compares the trajectories of a group",
    )
    require(
        r.max_new_tokens < r.max_tokens,
        "rollout.max_new_tokens",
        r.max_new_tokens,
        f"leaves no room for a prompt within rollout.max_tokens = {r.max_tokens}",
    )
    require(
        r.max_tokens <= e.max_total_tokens,
        "rollout.max_tokens",
        r.max_tokens,
        f"does not fit into a server's KV cache of engine.max_total_tokens = {e.max_total_tokens}",
    )
    turns = max(source.env.max_turns for source in recipe.mixture.values())
    require(
        r.expand_num_return_sequences or turns == 1,
        "rollout.expand_num_return_sequences",
        "false",
        f"needs a single turn, but env.max_turns = {turns}; set it to true",
    )
    require(
        r.expand_num_return_sequences or r.group_size <= e.max_running_requests,
        "engine.max_running_requests",
        e.max_running_requests,
        f"must hold a whole group of {r.group_size} when expand_num_return_sequences is false",
    )
    require(
        r.expand_num_return_sequences or not r.group_size_redundancy,
        "rollout.group_size_redundancy",
        r.group_size_redundancy,
        "needs separate requests for the members of a group; set rollout.expand_num_return_sequences = true",
    )
    check_coordination(recipe)
    check_kv(e)
    check_buffer(recipe)
    share = recipe.run.eval_share
    require(0 < share <= 1, "run.eval_share", share, "is a share, more than 0 and at most 1")
    require(
        not (recipe.run.eval_tasks or recipe.run.eval_every)
        or recipe.sim.heldout > 0
        or any(s.task.heldout for s in recipe.mixture.values()),
        "run.eval_tasks" if recipe.run.eval_tasks else "run.eval_every",
        recipe.run.eval_tasks or recipe.run.eval_every,
        "needs held-out rows; set task.heldout",
    )
    if recipe.weights.transport == "relay":
        check_relays(recipe.weights.relay_urls, recipe.engine.urls)
    for name, source in recipe.mixture.items():
        _check_source(f"sources.{name}" if name else "env", source)


def _check_source(table: str, source: Source) -> None:
    env = source.env
    positive = {"weight": source.weight, "max_turns": env.max_turns}
    positive |= {key: getattr(env, key) for key in ("reset_timeout_s", "step_timeout_s", "reward_timeout_s")}
    for key, value in positive.items():
        require(math.isfinite(value) and value > 0, f"{table}.{key}", value, "must be more than 0")
    shortest = env.reset_timeout_s + env.step_timeout_s + env.reward_timeout_s
    require(
        shortest <= env.episode_timeout_s,
        "env.episode_timeout_s",
        env.episode_timeout_s,
        f"is less than {table}.reset_timeout_s + {table}.step_timeout_s + {table}.reward_timeout_s = {shortest:g} s, "
        "which a single turn may take; raise it, or lower those",
    )


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
        tables = [t for t in _types_at(path) if isinstance(t, type) and issubclass(t, msgspec.Struct)]
        known = sorted({field.name for table in tables for field in msgspec.structs.fields(table)})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        return f"{path + '.' if path else ''}{name}: unknown key; {hint}"
    if what.startswith("Invalid enum value"):
        known = [name for kind in _types_at(path) for name in get_args(kind)]
        return f"{path}: unknown {what.split(maxsplit=3)[3]}; known are {', '.join(known)}"
    if what.startswith("Invalid value "):  # the tag of one of several tables
        known = [str(t.__struct_config__.tag) for t in _types_at(path.removesuffix(".kind"))]
        return f"{path}: unknown {what.removeprefix('Invalid value ')}; known are {', '.join(known)}"
    return f"{path}: {what[:1].lower()}{what[1:].replace('`object`', '`table`')}"


def _types_at(path: str) -> list[Any]:
    """The types that the value of a dotted key may have: more than one where the table's ``kind`` decides."""
    kinds: list[Any] = [Recipe]
    for name in filter(None, re.sub(r"\[.*?\]", "", path).split(".")):
        found = [f.type for kind in kinds for f in msgspec.structs.fields(kind) if f.name == name]
        kinds = []
        for kind in found:
            if get_origin(kind) in (list, dict):
                kind = get_args(kind)[-1]
            members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
            kinds += [member for member in members if member is not type(None)]
    return kinds


def _resolve_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Make every path of the recipe absolute."""

    def absolute(path: str) -> str:
        return str((folder / path).resolve()) if path else path

    def target(text: str) -> str:
        module, colon, name = text.partition(":")
        return f"{absolute(module)}{colon}{name}" if colon and module.endswith(".py") else text

    def paths(kwargs: dict[str, Any]) -> dict[str, Any]:
        """Only what says that it is a path: ``./…`` or ``../…``."""
        starts = ("./", "../")
        return {k: absolute(v) if isinstance(v, str) and v.startswith(starts) else v for k, v in kwargs.items()}

    replace = msgspec.structs.replace

    def samples(section: S) -> S:
        """With the files of its empirical distributions absolute."""
        values = {name: getattr(section, name) for name in section.__struct_fields__}
        files = {name: replace(v, file=absolute(v.file)) for name, v in values.items() if isinstance(v, Empirical)}
        return replace(section, **files)

    return replace(
        recipe,
        model=replace(recipe.model, path=absolute(recipe.model.path)),
        setup=replace(recipe.setup, script=absolute(recipe.setup.script), out=absolute(recipe.setup.out)),
        sources={
            name: replace(
                s,
                train=absolute(s.train),
                heldout=absolute(s.heldout),
                target=target(s.target),
                kwargs=None if s.kwargs is None else paths(s.kwargs),
            )
            for name, s in recipe.sources.items()
        },
        task=replace(recipe.task, train=absolute(recipe.task.train), heldout=absolute(recipe.task.heldout)),
        env=replace(recipe.env, target=target(recipe.env.target), kwargs=paths(recipe.env.kwargs)),
        engine=replace(recipe.engine, script=absolute(recipe.engine.script)),
        sim=replace(
            samples(recipe.sim),
            instance=replace(recipe.sim.instance, profile=_profile(recipe.sim.instance.profile, absolute)),
            env=samples(recipe.sim.env),
        ),
        algorithm=replace(
            recipe.algorithm,
            loss=target(recipe.algorithm.loss),
            advantage=target(recipe.algorithm.advantage),
            reference=absolute(recipe.algorithm.reference),
            critic_path=absolute(recipe.algorithm.critic_path),
        ),
        buffer=replace(recipe.buffer, sampler=target(recipe.buffer.sampler), writer=target(recipe.buffer.writer)),
        weights=replace(recipe.weights, folder=absolute(recipe.weights.folder)),
    )


def _profile(profile: str, absolute: Callable[[str], str]) -> str:
    """A name such as ``qwen3-8b@h800`` is no path."""
    return profile if "@" in profile else absolute(profile)


def _check_adaptive(recipe: Recipe) -> None:
    s, a, key = recipe.staleness, recipe.staleness.adaptive, "staleness.adaptive"
    require(a.target >= 0, f"{key}.target", a.target, "must not be negative; 0: off")
    require(a.every_steps >= 1, f"{key}.every_steps", a.every_steps, "must be at least 1")
    require(0 <= a.bound_min <= a.bound_max, f"{key}.bound_min", a.bound_min, f"must be from 0 to {key}.bound_max")
    require(a.bound_max < math.inf, f"{key}.bound_max", a.bound_max, "must be a number of versions")
    if a.target:
        wanted = "needs a control whose bound moves; set staleness.control to inflight_cap or buffers"
        require(s.control in ("inflight_cap", "buffers"), f"{key}.target", a.target, wanted)
        within = f"must be from {key}.bound_min to bound_max"
        require(a.bound_min <= s.bound <= a.bound_max, "staleness.bound", s.bound, within)
