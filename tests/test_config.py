"""The recipe: layers, strictness, one-line errors; and that the controller's side needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Recipe, RecipeError, Source, dumps, load, load_table, loads_json
from asyncrl.config.load import under_preset
from asyncrl.core.policy.presets import PRESETS


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def line(error: pytest.ExceptionInfo[RecipeError]) -> str:
    """The message, which must be one line."""
    text = str(error.value)
    assert text and "\n" not in text
    return text


# --- layers -----------------------------------------------------------------------------------------------------------


def test_an_empty_recipe_is_the_defaults_under_the_folder_s_name(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, ""))
    assert recipe.name == tmp_path.name
    assert recipe.rollout == Recipe().rollout
    assert recipe.staleness.bound == 1.0


def test_each_layer_wins_over_the_one_below(tmp_path: Path) -> None:
    recipe = write(
        tmp_path, 'preset = "sync"\n[run]\nsteps = 1\n[trainer]\nranks = 1\nthreads = 1\nlearning_rate = 0.1'
    )
    first = write(tmp_path, "[trainer]\nranks = 2\nthreads = 2", "first.toml")
    second = write(tmp_path, "[trainer]\nranks = 3", "second.toml")
    got = load(recipe, files=[first, second], overrides=["trainer.ranks=4", "trainer.ranks=5"])
    assert got.staleness.bound == 0.0, "of the preset"
    assert got.rollout.batch_groups == Recipe().rollout.batch_groups, "of the defaults"
    assert (got.run.steps, got.trainer.learning_rate) == (1, 0.1), "of the recipe"
    assert got.trainer.threads == 2, "of the first file"
    assert load(recipe, files=[first, second]).trainer.ranks == 3, "of the second file"
    assert got.trainer.ranks == 5, "of the last override"


def test_a_recipe_wins_over_its_preset_wherever_the_preset_is_named(tmp_path: Path) -> None:
    recipe = write(tmp_path, "[staleness]\nbound = 3.0")
    for preset, rows in PRESETS.items():
        got = load(recipe, overrides=[f"preset={preset}"])
        assert got.preset == preset
        assert got.staleness.bound == 3.0
        assert got.update.running == rows["update"]["running"]
        assert got.engine.routing == rows["engine"]["routing"]


def test_the_default_streams_groups_to_the_trainer_where_the_advantages_allow_it(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")).preset == "asyncrl"
    assert load(write(tmp_path, "")).trainer.stream
    assert not load(write(tmp_path, 'algorithm.reward_norm = "batch"')).trainer.stream
    assert not load(write(tmp_path, "algorithm.mini_batches = 2\nrollout.batch_groups = 1")).trainer.stream
    assert not load(write(tmp_path, "trainer.stream = false")).trainer.stream
    with pytest.raises(RecipeError, match=r"trainer\.stream = true: needs advantages that each group has by itself"):
        load(write(tmp_path, 'algorithm.reward_norm = "batch"\ntrainer.stream = true'))
    whole = load_table({"preset": "sync", "algorithm": {"reward_norm": "batch"}})
    assert not under_preset(whole, "asyncrl").trainer.stream


def test_a_folder_means_its_recipe_toml(tmp_path: Path) -> None:
    write(tmp_path, "seed = 7")
    assert load(tmp_path).seed == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trainer.learning_rate=1e-5", 1e-5),
        ("run.steps=12", 12),
        ("staleness.bound=2", 2.0),
        ("rollout.filter_zero_variance=true", True),
        ("model.path=", ""),
        ("name=plain text", "plain text"),
        ('name="quoted"', "quoted"),
        ('engine.urls=["http://a:1", "http://b:2"]', ["http://a:1", "http://b:2"]),
        ("trainer.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("env.kwargs.size=4", {"size": 4}),
        ("env.kwargs={a = 1, b = 'x'}", {"a": 1, "b": "x"}),
        (" run.steps = 3", 3),
        ("engine.python=/opt/a=b/python", "/opt/a=b/python"),
    ],
)
def test_overrides_are_toml_values_or_else_text(tmp_path: Path, text: str, value: Any) -> None:
    found: Any = load(write(tmp_path, ""), overrides=[text])
    for name in text.partition("=")[0].strip().removesuffix(".size").split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["run.steps", "=3", ".steps=3", "run.=3", ""])
def test_an_override_that_is_no_assignment_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError) as error:
        load(write(tmp_path, ""), overrides=[text])
    assert line(error).startswith(f"--set {text!r}: write key=value")


# --- strictness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"nme": "x"}, "nme: unknown key; did you mean 'name'?"),
        ({"engine": {"cuont": 1}}, "engine.cuont: unknown key; did you mean 'count'?"),
        ({"update": {"zzz": 1}}, "update.zzz: unknown key; known are overlap, running, synchronization"),
        ({"seed": "x"}, "seed: expected `int`, got `str`"),
        ({"run": {"steps": 2.5}}, "run.steps: expected `int`, got `float`"),
        ({"staleness": {"bound": True}}, "staleness.bound: expected `float`, got `bool`"),
        ({"engine": {"urls": "http://a"}}, "engine.urls: expected `array`, got `str`"),
        ({"engine": {"urls": ["a", 1]}}, "engine.urls[1]: expected `str`, got `int`"),
        ({"trainer": {"betas": [0.9]}}, "trainer.betas: expected `array` of length 2, got 1"),
        ({"rollout": 5}, "rollout: expected `table`, got `int`"),
        ({"engine": {"kind": "vllm"}}, "engine.kind: unknown 'vllm'; known are embedded, sglang"),
        ({"weights": {"transport": "usb"}}, "weights.transport: unknown 'usb'; known are disk, collective, relay"),
        ({"preset": "roll"}, f"preset: unknown 'roll'; known are {', '.join(PRESETS)}"),
        ({"preset": ["sync"]}, f"preset: unknown ['sync']; known are {', '.join(PRESETS)}"),
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_one_line_with_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table(table)
    assert line(error) == message


IMPOSSIBLE = [
    ("rollout.batch_groups", 0),
    ("weights.relays", 0),
    ("weights.keep_versions", 0),
    ("weights.chunk_mb", 0),
    ("rollout.group_size", 0),
    ("rollout.group_size", 1),
    ("rollout.num_envs", 0),
    ("rollout.max_new_tokens", 0),
    ("rollout.max_tokens", 0),
    ("rollout.temperature", -1.0),
    ("rollout.top_p", 0.0),
    ("rollout.top_p", 1.5),
    ("rollout.max_additional_running_prompts", -1),
    ("rollout.group_size_redundancy", -1),
    ("env.max_turns", 0),
    ("env.retries", -1),
    ("env.failure_window", 0),
    ("env.backoff_s", -1.0),
    ("env.workers", -1),
    ("env.memory_mb", -1),
    ("env.max_failure_rate", 1.1),
    ("env.max_infra_failure_rate", -0.1),
    ("env.reset_timeout_s", 0.0),
    ("env.step_timeout_s", -1.0),
    ("env.reward_timeout_s", 0.0),
    ("env.episode_timeout_s", 0.0),
    ("staleness.bound", -0.5),
    ("staleness.bound", float("nan")),
    ("staleness.bound", float("inf")),
    ("engine.count", 0),
    ("engine.threads", 0),
    ("engine.max_running_requests", 0),
    ("engine.max_total_tokens", 0),
    ("engine.stream_interval", -1),
    ("engine.retries", -1),
    ("engine.connect_timeout_s", 0.0),
    ("engine.request_timeout_s", 0.0),
    ("engine.idle_timeout_s", 0.0),
    ("engine.control_timeout_s", 0.0),
    ("engine.probe_s", 0.0),
    ("engine.hang_s", 0.0),
    ("engine.patience_s", 0.0),
    ("gateway.port", 65536),
    ("gateway.port", -1),
    ("trainer.ranks", 0),
    ("trainer.sequence_parallel", 0),
    ("trainer.threads", 0),
    ("trainer.learning_rate", 0.0),
    ("trainer.warmup_steps", -1),
    ("trainer.lora_rank", -1),
    ("trainer.lora_alpha", 0),
    ("trainer.weight_decay", -0.1),
    ("trainer.betas", [0.9, 1.0]),
    ("trainer.grad_clip", 0.0),
    ("trainer.micro_batch_tokens", 0),
    ("trainer.connect_timeout_s", 0.0),
    ("trainer.step_timeout_s", float("inf")),
    ("algorithm.clip_low", 0.0),
    ("algorithm.clip_low", 1.5),
    ("algorithm.clip_high", 0.0),
    ("algorithm.importance_cap", 0.0),
    ("weights.bucket_mb", 0),
    ("run.steps", 0),
    ("run.eval_tasks", -1),
    ("run.eval_temperature", -1.0),
    ("run.checkpoint_every", -1),
]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_one_line_with_the_key(key: str, value: Any) -> None:
    section, name = key.split(".")
    with pytest.raises(RecipeError) as error:
        load_table({section: {name: value}})
    assert line(error).startswith(f"{key} = {value}: ")


@pytest.mark.parametrize(
    ("table", "key", "also"),
    [
        ({"trainer": {"ranks": 3, "sequence_parallel": 2}}, "trainer.sequence_parallel = 2", "trainer.ranks = 3"),
        (
            {"rollout": {"batch_groups": 1, "group_size": 2}, "trainer": {"ranks": 3}},
            "trainer.ranks = 3",
            "2 sequences",
        ),
        ({"rollout": {"max_new_tokens": 64, "max_tokens": 64}}, "rollout.max_new_tokens = 64", "rollout.max_tokens"),
        ({"engine": {"max_total_tokens": 1000}}, "rollout.max_tokens = 2048", "engine.max_total_tokens = 1000"),
        (
            {"rollout": {"expand_num_return_sequences": False}, "env": {"max_turns": 2}},
            "rollout.expand_num_return_sequences = false",
            "env.max_turns = 2",
        ),
        (
            {"rollout": {"expand_num_return_sequences": False}, "engine": {"max_running_requests": 4}},
            "engine.max_running_requests = 4",
            "group of 8",
        ),
        (
            {"rollout": {"expand_num_return_sequences": False, "group_size_redundancy": 1}},
            "rollout.group_size_redundancy = 1",
            "set rollout.expand_num_return_sequences = true",
        ),
        (
            {"env": {"episode_timeout_s": 179.0}},
            "env.episode_timeout_s = 179.0",
            "= 180 s, which a single turn may take",
        ),
    ],
)
def test_an_impossible_combination_names_both_sides(table: dict[str, Any], key: str, also: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table(table)
    assert line(error).startswith(f"{key}: ")
    assert also in line(error)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"staleness": {"bound": 1.5}}, "staleness.bound = 1.5: η of staleness buffers is a whole number"),
        ({"update": {"running": "drain"}}, 'engine.routing = waterfall: set it to "own_batch" or'),
        ({"staleness": {"control": "inherent"}}, "update.running = interrupt: with staleness.control"),
        ({"update": {"synchronization": "when_empty"}}, "update.synchronization = when_empty: goes with"),
        ({"engine": {"migration": "repack"}}, "engine.migration = repack: goes with"),
        ({"engine": {"routing": "own_batch"}}, "engine.routing = own_batch: goes with"),
        ({"update": {"overlap": False}}, "update.overlap = false: servers take weights at their own pace"),
        ({"engine": {"mu": -0.1}}, "engine.mu = -0.1: is a share, from 0 to 1"),
        ({"engine": {"phi_wait": -1}}, "engine.phi_wait = -1: must be 0 or more"),
        ({"engine": {"phi_throughput": 1.0}}, "engine.phi_throughput = 1.0: is how many times as fast"),
        ({"staleness": {"control": "inflight_cap"}}, "engine.routing = waterfall: is the coordinator's; set"),
        (
            {"staleness": {"control": "inflight_cap"}, "engine": {"routing": "least_loaded"}},
            "engine.migration = throughput: is the coordinator's; set",
        ),
        (
            {"staleness": {"control": "queue_max"}, "engine": {"routing": "round_robin", "migration": "none"}},
            "update.synchronization = selective: is the coordinator's; set",
        ),
    ],
)
def test_what_no_coordinator_can_do_and_what_only_one_can_is_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table({"preset": "staleflow", **table})
    assert line(error).startswith(message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"update": {"running": "interrupt"}}, "update.running = interrupt: with staleness.control"),
        ({"update": {"synchronization": "selective"}}, "update.synchronization = selective: set it to"),
        ({"engine": {"routing": "least_loaded"}}, "engine.routing = least_loaded: set it to"),
        ({"engine": {"migration": "throughput"}}, "engine.migration = throughput: does not go with"),
        ({"engine": {"rebalance_s": 0.0}}, "engine.rebalance_s = 0.0: must be more than 0"),
        ({"engine": {"kv_threshold": 1.5}}, "engine.kv_threshold = 1.5: is a share, at most 1"),
        ({"engine": {"roofline_batch": 0}}, "engine.roofline_batch = 0: must be at least 1"),
        ({"rollout": {"max_additional_running_prompts": 2}}, "rollout.max_additional_running_prompts = 2: has no"),
        ({"staleness": {"control": "inflight_cap"}}, "engine.routing = own_batch: is the coordinator's; set"),
    ],
)
def test_what_does_not_go_with_a_batch_of_each_server_s_own_is_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table({"preset": "laminar", **table})
    assert line(error).startswith(message)


def test_laminar_takes_a_bound_from_staleness_buffers_and_may_leave_trajectories_where_they_are() -> None:
    plain = load_table({"preset": "laminar"})
    assert plain.one_version and plain.overlaps_update and plain.staleness.limit is None
    bounded = load_table(
        {"preset": "laminar", "staleness": {"control": "buffers", "bound": 4}, "engine": {"migration": "none"}}
    )
    assert bounded.one_version and bounded.staleness.limit == 4


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"staleness": {"bound": 1.5}}, "staleness.bound = 1.5: τ of a sliding window is a whole number"),
        ({"update": {"running": "interrupt"}}, 'update.running = interrupt: with staleness.control = "window" set it'),
        ({"update": {"synchronization": "all"}}, "update.synchronization = all: set it to"),
        ({"engine": {"migration": "repack"}}, 'engine.migration = repack: does not go with engine.routing = "newest'),
        ({"rollout": {"max_additional_running_prompts": 2}}, "rollout.max_additional_running_prompts = 2: would be"),
        ({"rollout": {"group_size_redundancy": 1}}, "rollout.group_size_redundancy = 1: would be surplus"),
        ({"staleness": {"adaptive": {"target": 1.0}}}, "staleness.adaptive.target = 1.0: needs a control"),
        ({"staleness": {"control": "queue_drop"}}, "engine.routing = newest_first: is the coordinator's; set"),
    ],
)
def test_what_does_not_go_with_several_versions_side_by_side_is_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table({"preset": "dora", **table})
    assert line(error).startswith(message)


def test_dora_s_columns_and_laminar_s_controls_go_together() -> None:
    plain = load_table({"preset": "dora"})
    assert plain.one_version and plain.overlaps_update and plain.staleness.limit == 2
    for control, limit in (("buffers", 3), ("inherent", None), ("window", 3)):
        recipe = load_table({"preset": "dora", "staleness": {"control": control, "bound": 3}})
        assert recipe.one_version and recipe.staleness.limit == limit
    own_batches = load_table({"preset": "laminar", "staleness": {"control": "window"}})
    assert own_batches.one_version and own_batches.staleness.limit == 1


@pytest.mark.parametrize("migration", ["none", "throughput"])
@pytest.mark.parametrize("synchronization", ["all", "selective"])
@pytest.mark.parametrize("routing", ["least_loaded", "waterfall"])
def test_a_coordinator_s_strategies_go_together_as_one_likes(
    routing: str, synchronization: str, migration: str
) -> None:
    """StaleFlow figure 16's eight combinations."""
    engine = {"routing": routing, "migration": migration}
    recipe = load_table({"preset": "staleflow", "engine": engine, "update": {"synchronization": synchronization}})
    assert recipe.coordinated and recipe.overlaps_update and recipe.staleness.limit == 1


def test_another_preset_takes_back_what_the_recipe_s_own_has_set() -> None:
    for first in PRESETS:
        for preset in PRESETS:
            changed, plain = under_preset(load_table({"preset": first}), preset), load_table({"preset": preset})
            assert changed == plain, (first, preset)


def test_the_edges_of_what_is_possible_are_accepted() -> None:
    load_table({"staleness": {"bound": 0}})
    load_table({"rollout": {"batch_groups": 1, "group_size": 2}, "trainer": {"ranks": 2}})
    load_table({"rollout": {"max_new_tokens": 63, "max_tokens": 64}, "engine": {"max_total_tokens": 64}})
    load_table({"engine": {"count": 0, "urls": ["http://127.0.0.1:30000"]}})
    load_table(
        {"rollout": {"expand_num_return_sequences": False, "group_size": 4}, "engine": {"max_running_requests": 4}}
    )


@pytest.mark.parametrize("text", ["a = ", "[run\nsteps = 1", "seed = 1\nseed = 2", "\x00"])
def test_a_file_that_is_not_toml_is_one_line_with_its_name(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(RecipeError) as error:
        load(file)
    assert line(error).startswith(f"{file}: not valid TOML: ")


def test_a_missing_file_is_one_line_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load(tmp_path)
    assert line(error) == f"{tmp_path / 'recipe.toml'}: No such file or directory; give a recipe.toml or its folder"
    with pytest.raises(RecipeError, match=r"overlay\.toml: No such file"):
        load(write(tmp_path, ""), files=[tmp_path / "overlay.toml"])


# --- resolution -------------------------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_recipe_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes" / "one"
    folder.mkdir(parents=True)
    write(
        folder,
        """
        model.path = "../model"
        setup.script = "setup.py"
        task = {train = "build/train.jsonl", heldout = "/data/heldout.jsonl"}
        env.target = "env.py:Guess"
        env.kwargs = {data = "./build/games", other = "../games", style = "plain", size = 3, url = "a/b"}
        engine.script = "start.py"
        weights.folder = "w"
        """,
    )
    monkeypatch.chdir(tmp_path)
    recipe = load("recipes/one")
    assert recipe.name == "one"
    assert recipe.model.path == str(tmp_path / "recipes" / "model")
    assert recipe.setup.script == str(folder / "setup.py")
    assert recipe.setup.out == str(folder / "build"), "also a default path"
    assert recipe.task.train == str(folder / "build" / "train.jsonl")
    assert recipe.task.heldout == "/data/heldout.jsonl"
    assert recipe.env.target == f"{folder / 'env.py'}:Guess"
    assert recipe.env.kwargs == {
        "data": str(folder / "build" / "games"),
        "other": str(tmp_path / "recipes" / "games"),
        "style": "plain",
        "size": 3,
        "url": "a/b",
    }
    assert recipe.engine.script == str(folder / "start.py")
    assert recipe.weights.folder == str(folder / "w")


def test_what_is_not_set_and_what_is_a_module_are_no_paths(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, 'env.target = "package.module:Class"'))
    assert recipe.env.target == "package.module:Class"
    assert recipe.model.path == recipe.task.train == recipe.weights.folder == recipe.setup.script == ""


def test_json_round_trip(tmp_path: Path) -> None:
    recipe = load(
        write(tmp_path, 'preset = "sync"\nenv.kwargs = {a = [1, 2.5, "x"], b = {c = true}}\ntrainer.betas = [0.1, 0.2]')
    )
    assert loads_json(dumps(recipe)) == recipe
    assert json.loads(dumps(recipe))["trainer"]["betas"] == [0.1, 0.2]


def test_a_batch_is_groups_times_group_size() -> None:
    assert load_table({"rollout": {"batch_groups": 3, "group_size": 5}}).batch_trajectories == 15


# --- imports ----------------------------------------------------------------------------------------------------------


def test_the_controller_s_side_loads_no_torch_and_starts_quickly() -> None:
    """All that runs in the controller's process, imported in one; torch alone costs more than all of this together."""
    package = Path(sys.modules["asyncrl"].__path__[0])
    names = [
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for folder in ("core", "runtime", "engine", "sim", "envs", "build")
        for file in sorted((package / folder).rglob("*.py"))
        if file.stem != "__init__"
    ]
    assert "asyncrl.build.real" in names and "asyncrl.runtime.controller" in names
    code = (
        "import importlib, json, sys, time\n"
        f"for name in {['asyncrl.config', 'asyncrl.cli', *names]!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"  # of what is an extra
        "        assert not (error.name or '').startswith('asyncrl'), error\n"
        "heavy = [m for m in ('torch', 'transformers', 'matplotlib.pyplot', 'sglang') if m in sys.modules]\n"
        "print(json.dumps([heavy, time.process_time()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    heavy, seconds = json.loads(done.stdout)
    assert heavy == []
    assert seconds < 5, "CPU seconds"


# --- the virtual world ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"lengths": {"kind": "longtail"}}, "sim.lengths.kind: unknown 'longtail'; known are constant, normal"),
        ({"lengths": {"kind": "normal", "mena": 3}}, "sim.lengths.mena: unknown key; did you mean 'mean'?"),
        ({"lengths": {"kind": "constant", "value": -1}}, "sim.lengths: constant: value = -1"),
        ({"faults": [{"kind": "explode", "at_s": 1}]}, "sim.faults[0].kind: unknown 'explode'; known are kill"),
        ({"faults": [{"kind": "kill", "at_s": 1, "server": 1}]}, "sim.faults[0].server = 1: there are 1 servers"),
        ({"env": {"crash": 1.5}}, "sim.env.crash = 1.5: is a share, between 0 and 1"),
        ({"trainer": {"tokens_per_s": 0}}, "sim.trainer.tokens_per_s = 0.0: must be more than 0"),
    ],
)
def test_what_a_simulation_cannot_do_is_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table({"sim": table})
    assert line(error).startswith(message)


@pytest.mark.parametrize(
    ("control", "bound", "limit"),
    [
        ("inflight_cap", 1.5, 2),
        ("inflight_cap", 0, 0),
        ("buffers", 2, 2),
        ("queue_max", 2.5, 2),
        ("queue_drop", 1, None),
    ],
)
def test_the_limit_of_staleness_follows_from_its_control(control: str, bound: float, limit: int | None) -> None:
    assert load_table({"staleness": {"control": control, "bound": bound}}).staleness.limit == limit


def test_a_profile_is_a_file_beside_the_recipe_or_a_name(tmp_path: Path) -> None:
    file = write(tmp_path, '[sim.instance]\nprofile = "p.json"')
    assert load(file).sim.instance.profile == str(tmp_path / "p.json")
    assert load(file, overrides=["sim.instance.profile=qwen3-8b@h800"]).sim.instance.profile == "qwen3-8b@h800"


def test_sources_take_over_what_they_leave_out(tmp_path: Path):
    (tmp_path / "recipe.toml").write_text(
        """
        model.path = "model"
        task.train = "games.jsonl"
        env = { target = "play.py:Game", kwargs = { size = 3 }, max_turns = 30, reset_timeout_s = 20 }
        [sources.games]
        weight = 3
        [sources.maths]
        train = "maths.jsonl"
        heldout = "held.jsonl"
        target = "score.py:reward"
        max_turns = 1
        """
    )
    mixture = load(tmp_path).mixture
    games, maths = mixture["games"], mixture["maths"]
    assert (games.weight, games.task.train, games.task.heldout) == (3.0, str(tmp_path / "games.jsonl"), "")
    assert (games.env.target, games.env.kwargs, games.env.max_turns) == (f"{tmp_path}/play.py:Game", {"size": 3}, 30)
    assert (maths.task.train, maths.task.heldout) == (str(tmp_path / "maths.jsonl"), str(tmp_path / "held.jsonl"))
    assert (maths.env.target, maths.env.kwargs, maths.env.max_turns) == (f"{tmp_path}/score.py:reward", {}, 1)
    assert maths.env.reset_timeout_s == 20
    assert loads_json(dumps(load(tmp_path))).mixture == mixture


def test_without_sources_task_and_env_are_the_only_one():
    recipe = Recipe()
    assert recipe.mixture == {"": Source(weight=1.0, task=recipe.task, env=recipe.env)}


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"weight": 0.0}, "sources.a.weight"),
        ({"max_turns": 0}, "sources.a.max_turns"),
        ({"step_timeout_s": 0.0}, "sources.a.step_timeout_s"),
        ({"step_timeout_s": 1e9}, "env.episode_timeout_s = 600.0: is less than sources.a.reset_timeout_s"),
        ({"wight": 1.0}, "sources[...].wight: unknown key; did you mean 'weight'"),
    ],
)
def test_a_bad_source_is_one_line_with_its_key(table: dict[str, Any], key: str):
    with pytest.raises(RecipeError) as caught:
        load_table({"sources": {"a": table}})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("run", "trainer", "every"),
    [
        ({}, {}, 20),
        ({"checkpoint_every": 5}, {}, 5),
        ({"checkpoint_every": 50}, {"replay_steps": 8}, 8),
        ({"checkpoint_every": 50}, {"restarts": 0}, 20),
    ],
)
def test_checkpoints_are_as_frequent_as_steps_may_be_trained_again(
    run: dict[str, Any], trainer: dict[str, Any], every: int
) -> None:
    assert load_table({"run": run, "trainer": trainer}).checkpoint_every == every


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"restarts": -1}, "trainer.restarts = -1: must be 0 or more"),
        ({"replay_steps": 0}, "trainer.replay_steps = 0: must be at least 1"),
    ],
)
def test_restarts_and_kept_steps_are_counts(trainer: dict[str, int], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_table({"trainer": trainer})
    assert line(error) == message
