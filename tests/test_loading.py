"""What a recipe names, and the one line that refuses it."""

from __future__ import annotations

import json
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import EnvConfig, RecipeError
from asyncrl.core.types import Task
from asyncrl.env import Action
from asyncrl.envs.single_turn import SingleTurn
from asyncrl.loading import check_model, load_environment, load_own, load_tasks

# --- rows -------------------------------------------------------------------------------------------------------------


def rows(folder: Path, content: str | bytes, name: str = "train.jsonl") -> str:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def refused_rows(path: str, *required: str) -> str:
    with pytest.raises(RecipeError) as error:
        load_tasks(path, "task.train", required)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_become_tasks_with_the_line_as_id(tmp_path: Path) -> None:
    path = rows(tmp_path, '{"prompt": "a", "x": [1]}\n\n  \n{"prompt": "é"}\r\n{"prompt": "last"}')
    assert load_tasks(path, "task.train", ["prompt"]) == [
        Task(id="train/1", data={"prompt": "a", "x": [1]}),
        Task(id="train/4", data={"prompt": "é"}),
        Task(id="train/5", data={"prompt": "last"}),
    ]


@pytest.mark.parametrize("bad", [b"{", b"[1]", b"3", b"null", b'{"a": 1} x', b'{"a": NaN}', b'{"a": "\xff"}', b"\xff"])
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: bytes) -> None:
    path = rows(tmp_path, b'{"prompt": "a"}\n\n' + bad + b'\n{"prompt": "b"}\n')
    assert refused_rows(path).startswith(f"task.train: {path}:3: not a JSON object: ")


def test_a_row_without_a_key_that_the_environment_needs(tmp_path: Path) -> None:
    path = rows(tmp_path, '{"prompt": "a"}\n{"question": "b", "answer": 1}\n')
    assert refused_rows(path, "prompt") == f"task.train: {path}:2: the row has no 'prompt' (it has question, answer)"


def test_no_rows_no_file_no_path(tmp_path: Path) -> None:
    empty = rows(tmp_path, "\n \n")
    assert refused_rows(empty) == f"task.train: {empty} has no rows"
    assert refused_rows("/no/such.jsonl") == "task.train: no file /no/such.jsonl"
    assert refused_rows(str(tmp_path)) == f"task.train: no file {tmp_path}"
    assert refused_rows("/proc/self/mem") == "task.train: /proc/self/mem: cannot read it (Input/output error)"
    assert refused_rows("") == "task.train: not set; name a .jsonl or .parquet file"


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = rows(tmp_path, "x", "train.parquet")
    assert refused_rows(path) == f"task.train: {path} needs pyarrow; pip install 'asyncrl[parquet]'"


def test_parquet_rows_are_tasks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with pyarrow's names, which is an optional dependency of 40 MB."""

    class ArrowException(Exception):
        pass

    class Batch:
        def __init__(self, *rows: dict[str, Any]) -> None:
            self.rows = rows

        def to_pylist(self) -> list[dict[str, Any]]:
            return list(self.rows)

    class ParquetFile:
        def __init__(self, file: Path) -> None:
            if file.read_text() != "PAR1":
                raise ArrowException("Parquet magic bytes not found in footer.\nSecond line")

        def iter_batches(self) -> Iterator[Batch]:
            yield Batch({"prompt": "a", "n": 1})
            yield Batch({"prompt": "b", "n": 2})

    parquet = types.SimpleNamespace(ParquetFile=ParquetFile)
    pyarrow = types.SimpleNamespace(ArrowException=ArrowException, parquet=parquet)
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)  # type: ignore[misc]
    path = rows(tmp_path, "PAR1", "train.parquet")
    assert load_tasks(path, "task.train", ["prompt"])[1] == Task(id="train/2", data={"prompt": "b", "n": 2})
    assert refused_rows(path, "answer") == f"task.train: {path}:1: the row has no 'answer' (it has prompt, n)"
    bad = rows(tmp_path, "x", "bad.parquet")
    assert refused_rows(bad) == f"task.train: {bad}: not a Parquet file: Parquet magic bytes not found in footer."


# --- environments -----------------------------------------------------------------------------------------------------

ENV = """
import asyncrl

class Guess(asyncrl.Env):
    def __init__(self, *, size=3):
        self.size = size
    async def reset(self, task):
        return "?"
    async def step(self, action):
        return asyncrl.Step(done=True)

class Blocks(Guess):
    def step(self, action):
        return asyncrl.Step(done=True)

class ClosesSync(Guess):
    def close(self):
        pass

class Half(asyncrl.Env):
    async def reset(self, task):
        return "?"

class Waits(asyncrl.SyncEnv):
    async def reset(self, task):
        return "?"

class HalfSync(asyncrl.SyncEnv):
    def reset(self, task):
        return "?"

class Costly(HalfSync):
    cost = asyncrl.Cost(per_process=0)

    def step(self, action):
        return asyncrl.Step(done=True)

class Sync(Costly):
    cost = asyncrl.Cost(per_process=4)

class Other:
    pass

def reward(task, response, *, scale=1.0):
    return scale * (response.text == task.data["answer"])

async def later(task, response, scale=1.0):
    return scale * 2

def one(task):
    return 0.0

NUMBER = 3
async def rollout(task, agent, depth=1):
    return depth
def plain_rollout(task, agent):
    return 1
"""


def target(folder: Path, name: str, **kwargs: Any) -> EnvConfig:
    file = folder / "env.py"
    if not file.exists():
        file.write_text(ENV)
    return EnvConfig(target=f"{file}:{name}", kwargs=kwargs)


def refused(config: EnvConfig) -> str:
    with pytest.raises(RecipeError) as error:
        load_environment(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_env_class_is_made_anew_with_its_kwargs(tmp_path: Path) -> None:
    environment = load_environment(target(tmp_path, "Guess", size=5))
    one, other = environment.make(), environment.make()
    assert one is not other
    assert type(one).__name__ == "Guess"
    assert vars(one) == {"size": 5}
    assert environment.reward is None
    assert environment.required == ()


def test_a_module_on_the_path_is_imported_by_name() -> None:
    environment = load_environment(EnvConfig(target="asyncrl.envs.single_turn:SingleTurn"))
    assert isinstance(environment.make(), SingleTurn)


async def test_a_reward_function_is_played_as_a_single_turn_and_needs_prompts(tmp_path: Path) -> None:
    task, right = Task(id="t", data={"answer": "4"}), Action(text="4", token_ids=[1], finish_reason="stop")
    plain = load_environment(target(tmp_path, "reward"))
    assert isinstance(plain.make(), SingleTurn)
    assert plain.required == ("prompt",)
    assert plain.reward is not None and plain.reward(task, right) == 1.0
    scaled = load_environment(target(tmp_path, "reward", scale=0.5))
    assert scaled.reward is not None and scaled.reward(task, right) == 0.5
    later = load_environment(target(tmp_path, "later", scale=0.5))
    assert later.reward is not None and await later.reward(task, right) == 1.0  # type: ignore[misc]


async def test_a_second_parameter_called_agent_tells_a_rollout_function(tmp_path: Path) -> None:
    environment = load_environment(target(tmp_path, "rollout", depth=3))
    agent: Any = None
    assert environment.rollout is not None and await environment.rollout(Task(id="t", data={}), agent) == 3
    assert environment.reward is None
    assert load_environment(target(tmp_path, "reward")).rollout is None


def test_a_sync_env_is_made_where_it_is_told_to(tmp_path: Path) -> None:
    environment = load_environment(target(tmp_path, "Sync"))
    assert environment.make is None and environment.kind.cost.per_process == 4
    assert environment.make_sync is not None and type(environment.make_sync()) is environment.kind


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Missing", {}, "has no 'Missing'"),
        ("Blocks", {}, "Blocks.step must be `async def`"),
        ("ClosesSync", {}, "ClosesSync.close must be `async def`"),
        ("Waits", {}, "Waits.reset must be `def`"),
        ("HalfSync", {}, "HalfSync must define `def step`"),
        ("Costly", {}, "Costly.cost must be an asyncrl.Cost with per_process of at least 1"),
        ("Half", {}, "Half must define `async def step`"),
        ("Guess", {"sise": 5}, "env.kwargs: Guess cannot be made with them: got an unexpected keyword argument 'sise'"),
        (
            "Other",
            {},
            "Other is no asyncrl.Env or SyncEnv class, no rollout function (task, agent) and no reward "
            "function (task, response)",
        ),
        (
            "NUMBER",
            {},
            "NUMBER is no asyncrl.Env or SyncEnv class, no rollout function (task, agent) and no reward "
            "function (task, response)",
        ),
        ("plain_rollout", {}, "plain_rollout must be `async def plain_rollout(task, agent)`"),
        ("rollout", {"x": 1}, "rollout cannot be called with them: got an unexpected keyword argument 'x'"),
        ("one", {}, "one is not a reward function (task, response): too many positional arguments"),
        (
            "reward",
            {"x": 1},
            "reward is not a reward function (task, response): got an unexpected keyword argument 'x'",
        ),
    ],
)
def test_a_target_that_cannot_be_an_environment(tmp_path: Path, name: str, kwargs: Any, message: str) -> None:
    got = refused(target(tmp_path, name, **kwargs))
    assert got.startswith("env.")
    assert got.endswith(message)


@pytest.mark.parametrize("text", ["", "module", ":Class", "module:", "env.py"])
def test_a_target_that_names_no_class(text: str) -> None:
    assert refused(EnvConfig(target=text)) == f"env.target = {text!r}: write package.module:Class or file.py:Class"


def test_a_missing_file_and_a_missing_module(tmp_path: Path) -> None:
    missing = tmp_path / "no.py"
    assert refused(EnvConfig(target=f"{missing}:Guess")) == f"env.target: no file {missing}"
    assert refused(EnvConfig(target="no_such_package.env:Guess")) == (
        "env.target: cannot import no_such_package.env: ModuleNotFoundError: No module named 'no_such_package'"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nimport no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing' ({file}:2)"),
        ("x = 1\n\nx = = 2", "SyntaxError: invalid syntax ({file}:3)"),
        ("def f():\n    raise ValueError('two\\nlines')\nf()", "ValueError: two lines ({file}:2)"),
        ("import sys\nsys.exit('no display')", "SystemExit: no display ({file}:2)"),
    ],
)
def test_an_import_that_fails_names_the_line(tmp_path: Path, code: str, message: str) -> None:
    file = tmp_path / "env.py"
    file.write_text(textwrap.dedent(code))
    expected = f"env.target: cannot import {file}: {message.format(file=file)}"
    assert refused(EnvConfig(target=f"{file}:Guess")) == expected


# --- model ------------------------------------------------------------------------------------------------------------


def test_a_users_function_is_loaded_by_name_and_a_plain_name_is_no_users(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def double(x):\n    return 2 * x\n\nvalue = 3\n")
    double = load_own(f"{tmp_path}/own.py:double", "algorithm.loss")
    assert double is not None
    assert double(4) == 8
    assert load_own("ppo", "algorithm.loss") is None
    for name, says in {"value": "value is not a function", "absent": "own.py has no 'absent'"}.items():
        with pytest.raises(RecipeError, match=f"^algorithm.loss: .*{says}"):
            load_own(f"{tmp_path}/own.py:{name}", "algorithm.loss")


def test_a_model_folder_gives_its_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 64}))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert check_model(str(tmp_path)) == ("qwen3", 64)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json in {folder}; give a folder in Hugging Face format"),
        ({"config.json": "{"}, "{folder}/config.json is not a JSON object"),
        ({"config.json": "[]"}, "{folder}/config.json is not a JSON object"),
        ({"config.json": "{}"}, "{folder}/config.json names no model_type"),
        ({"config.json": '{"model_type": "qwen3"}', "a.safetensors": ""}, "{folder}/config.json names no vocab_size"),
        ({"config.json": '{"model_type": "qwen3"}', "model.bin": ""}, "no .safetensors file in {folder}"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as error:
        check_model(str(tmp_path))
    assert str(error.value) == "model.path: " + message.format(folder=tmp_path)


def test_no_model_folder() -> None:
    with pytest.raises(RecipeError, match=r"^model.path: not set; name a folder in Hugging Face format$"):
        check_model("")
    with pytest.raises(RecipeError, match=r"^model.path: no folder /no/such; make it with .* or set setup.script$"):
        check_model("/no/such")
