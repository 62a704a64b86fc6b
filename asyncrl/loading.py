"""What a recipe names is loaded here, and refused with one line before anything starts: dataset rows, the user's
environment, the model folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import EnvConfig, RecipeError
from asyncrl.core.types import Task
from asyncrl.env import Cost, Env, RowParser, SyncEnv
from asyncrl.envs.single_turn import SingleTurn
from asyncrl.runtime.reward import RewardFunction
from asyncrl.runtime.rollout import Rollout


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """How to make an ``Env``, or a ``SyncEnv``; the reward function if the recipe names one; how its rows are read, and
    the keys that they must have then. ``kind`` is the class. ``rollout`` is a program that takes its place."""

    kind: type[Env] | type[SyncEnv]
    make: Callable[[], Env] | None = None
    make_sync: Callable[[], SyncEnv] | None = None
    rollout: Rollout | None = None
    reward: RewardFunction | None = None
    parse_row: RowParser | None = None
    required: tuple[str, ...] = ()


def load_environment(config: EnvConfig, table: str = "env") -> Environment:
    """The class or function that the ``target`` of the recipe's ``table`` names. Raises ``RecipeError``."""
    target, name = _load(f"{table}.target", config.target, "Class")
    parse_row: RowParser | None = getattr(target, "parse_row", None)
    if inspect.isclass(target) and issubclass(target, (Env, SyncEnv)):
        is_sync = issubclass(target, SyncEnv)
        base, how = (SyncEnv, "def") if is_sync else (Env, "async def")
        for method in ("reset", "step", "close"):
            if inspect.iscoroutinefunction(getattr(target, method)) == is_sync:
                raise RecipeError(f"{table}.target: {name}.{method} must be `{how}`")
            if method != "close" and getattr(target, method) is getattr(base, method):
                raise RecipeError(f"{table}.target: {name} must define `{how} {method}`")
        if not isinstance(target.cost, Cost) or target.cost.per_process < 1:
            raise RecipeError(f"{table}.target: {name}.cost must be an asyncrl.Cost with per_process of at least 1")
        try:
            inspect.signature(target).bind(**config.kwargs)
        except TypeError as error:
            raise RecipeError(f"{table}.kwargs: {name} cannot be made with them: {error}") from None

        def make() -> Any:
            return target(**config.kwargs)

        if is_sync:
            return Environment(kind=target, make_sync=make, parse_row=parse_row)
        return Environment(kind=target, make=make, parse_row=parse_row)
    if inspect.isclass(target) or not callable(target):
        raise RecipeError(
            f"{table}.target: {name} is no asyncrl.Env or SyncEnv class, no rollout function (task, agent) and no "
            "reward function (task, response)"
        )
    if _second_parameter(target) == "agent":
        if not inspect.iscoroutinefunction(target):
            raise RecipeError(f"{table}.target: {name} must be `async def {name}(task, agent)`")
        try:
            inspect.signature(target).bind(None, None, **config.kwargs)
        except TypeError as error:
            raise RecipeError(f"{table}.kwargs: {name} cannot be called with them: {error}") from None
        rollout = partial(target, **config.kwargs) if config.kwargs else target
        return Environment(kind=Env, make=Env, rollout=rollout, parse_row=parse_row)
    try:
        inspect.signature(target).bind(None, None, **config.kwargs)
    except TypeError as error:
        raise RecipeError(f"{table}.target: {name} is not a reward function (task, response): {error}") from None
    return Environment(
        kind=SingleTurn,
        make=SingleTurn,
        reward=_with_kwargs(target, config.kwargs),
        parse_row=parse_row,
        required=("prompt",),
    )


def _second_parameter(function: Callable[..., Any]) -> str:
    """What tells a rollout function from a reward function."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # a builtin
        return ""
    return names[1] if len(names) > 1 else ""


def load_own(target: str, key: str) -> Callable[..., Any] | None:
    """The user's function that the recipe's ``key`` names by ``package.module:function`` or ``file.py:function``; None
    for the plain name of a shipped one. Raises ``RecipeError``."""
    if ":" not in target:
        return None
    function, name = _load(key, target, "function")
    if not callable(function):
        raise RecipeError(f"{key}: {name} is not a function")
    loaded: Callable[..., Any] = function
    return loaded


def _load(key: str, target: str, kind: str) -> tuple[Any, str]:
    """What ``target`` names, and its name within its module."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise RecipeError(f"{key} = {target!r}: write package.module:{kind} or file.py:{kind}")
    module = _import_file(Path(module_name), key) if module_name.endswith(".py") else _import(module_name, key)
    found = getattr(module, name, None)
    if found is None:
        raise RecipeError(f"{key}: {module_name} has no {name!r}")
    return found, name


def _with_kwargs(function: RewardFunction, kwargs: Mapping[str, Any]) -> RewardFunction:
    if not kwargs:
        return function
    if inspect.iscoroutinefunction(function):

        async def reward(task: Any, action: Any) -> Any:
            return await function(task, action, **kwargs)

        return reward
    return lambda task, action: function(task, action, **kwargs)


def _import(name: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{key}: cannot import {name}: {_where(error)}") from None


def _import_file(file: Path, key: str) -> Any:
    if not file.is_file():
        raise RecipeError(f"{key}: no file {file}")
    spec = importlib.util.spec_from_file_location(f"asyncrl_recipe_{file.parent.name}_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{key}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{key}: cannot import {file}: {_where(error)}") from None
    return module


def _where(error: BaseException) -> str:
    """The error in one line, with the file and line that raised it, where that is not the import system itself."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    own = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in own and f.filename[0] != "<"]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"


def load_tasks(
    path: str, key: str, required: Sequence[str] = (), source: str = "", parse_row: RowParser | None = None
) -> list[Task]:
    """Rows of a JSONL or Parquet file as tasks of ``source``; ids are ``FILE/ROW``, behind the source's name if it has
    one. What ``parse_row`` makes of several rows alike is one task. ``key`` is the recipe's, for messages."""
    file = Path(path)
    if not path:
        raise RecipeError(f"{key}: not set; name a .jsonl or .parquet file")
    if not file.is_file():
        raise RecipeError(f"{key}: no file {file}")
    tasks: list[Task] = []
    seen: set[bytes] = set()
    for number, row in _parquet_rows(file, key) if file.suffix == ".parquet" else _jsonl_rows(file, key):
        data: Mapping[str, Any] = row
        if parse_row is not None:
            data = _parsed(row, parse_row, f"{key}: {file}:{number}")
            digest = hashlib.sha256(msgspec.json.encode(data, enc_hook=repr)).digest()
            if digest in seen:
                continue
            seen.add(digest)
        missing = [name for name in required if name not in data]
        if missing:
            raise RecipeError(f"{key}: {file}:{number}: the row has no {missing[0]!r} (it has {', '.join(data)})")
        tasks.append(Task(id="/".join(filter(None, (source, file.stem, str(number)))), data=data, source=source))
    if not tasks:
        raise RecipeError(f"{key}: {file} has no rows")
    return tasks


def _parsed(row: Mapping[str, Any], parse_row: RowParser, where: str) -> Mapping[str, Any]:
    try:
        return parse_row(row)
    except ValueError as error:
        raise RecipeError(f"{where}: {' '.join(str(error).split())}") from None
    except Exception as error:
        raise RecipeError(f"{where}: the environment cannot read this row: {_where(error)}") from None


def _jsonl_rows(file: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        raise RecipeError(f"{key}: {file}:{number}: not a JSON object: {error}") from None
                    yield number, row
    except OSError as error:
        raise RecipeError(f"{key}: {file}: cannot read it ({error.strerror})") from None


def _parquet_rows(file: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise RecipeError(f"{key}: {file} needs pyarrow; pip install 'asyncrl[parquet]'") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(f"{key}: {file}: not a Parquet file: {str(error).splitlines()[0]}") from None


def check_model(path: str) -> tuple[str, int]:
    """The ``model_type`` of a model folder, and how many token ids the model knows. Raises ``RecipeError`` if it is
    none."""
    folder = Path(path)
    if not path:
        raise RecipeError("model.path: not set; name a folder in Hugging Face format")
    if not folder.is_dir():
        raise RecipeError(f"model.path: no folder {folder}; make it with save_pretrained, or set setup.script")
    config = folder / "config.json"
    try:
        table = json.loads(config.read_text())
        model_type = table.get("model_type")
    except OSError:
        raise RecipeError(f"model.path: no config.json in {folder}; give a folder in Hugging Face format") from None
    except (ValueError, AttributeError):
        raise RecipeError(f"model.path: {config} is not a JSON object") from None
    if not isinstance(model_type, str):
        raise RecipeError(f"model.path: {config} names no model_type")
    if not any(folder.glob("*.safetensors")):
        raise RecipeError(f"model.path: no .safetensors file in {folder}")
    vocabulary = {**table, **table.get("text_config", {})}.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise RecipeError(f"model.path: {config} names no vocab_size")
    return model_type, vocabulary
