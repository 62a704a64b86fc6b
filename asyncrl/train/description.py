"""What a checkpoint says of itself (``trainer/state.json``), and whether a recipe may go on from it. Imports no torch.

A checkpoint is a folder ``version-N`` in Hugging Face format with the trainer's state in its subfolder ``trainer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Recipe
from asyncrl.core.types import Record

FORMAT = 1
STATE = "trainer"
FILE_NAME = "state.json"
PREFIX = "version-"

IGNORED = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of a model's ``config.json`` that say nothing about its weights or what they compute."""


class CheckpointError(Exception):
    """A checkpoint cannot be resumed from. One line that names the file or key, and the remedy."""


class FileInfo(Record, frozen=True, kw_only=True):
    bytes: int
    crc32: int


class Description(Record, frozen=True, kw_only=True):
    """``settings`` are what must not change, by key; ``files`` all others in the folder, by name. ``ranks`` is how many
    wrote it: their random states are restored where as many read it."""

    format: int
    version: int
    ranks: int
    torch: str
    settings: dict[str, Any]
    files: dict[str, FileInfo]


def settings(recipe: Recipe, model: Path) -> dict[str, Any]:
    """What the trained state depends on: the architecture, the precision, the optimiser, the critic. Not its learning
    rate."""
    kept: dict[str, Any] = {
        "model.dtype": recipe.model.dtype,
        "trainer.betas": recipe.trainer.betas,
        "trainer.weight_decay": recipe.trainer.weight_decay,
    }
    if recipe.trainer.lora_rank:
        kept |= {f"trainer.{key}": getattr(recipe.trainer, key) for key in ("lora_rank", "lora_alpha", "lora_targets")}
    if recipe.algorithm.uses_critic:
        kept["algorithm.critic"] = recipe.algorithm.critic
    config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
    kept |= {f"model.path: {key}": value for key, value in _flat(config) if key.split(".")[-1] not in IGNORED}
    return msgspec.json.decode(msgspec.json.encode(kept), type=dict[str, Any])  # as it reads back


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sorted(table.items()):
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def write(folder: Path, description: Description) -> None:
    """The last file of a checkpoint's state. Raises ``OSError``."""
    (folder / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(description), indent=2))


def check(checkpoint: Path, recipe: Recipe, model: Path) -> Description:
    """The description of ``version-N`` folder ``checkpoint``, if the recipe may go on from it: its format, settings and
    the sizes of its files. Raises ``CheckpointError``."""
    folder = checkpoint / STATE
    file = folder / FILE_NAME
    try:
        description = msgspec.json.decode(file.read_bytes(), type=Description)
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: not a checkpoint (no {STATE}/{FILE_NAME}){remedy(checkpoint)}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}){remedy(checkpoint)}") from None
    if description.format != FORMAT:
        raise CheckpointError(
            f"{file}: format {description.format}, but this version of asyncrl reads {FORMAT}; use the one that made it"
        )
    wanted, found = settings(recipe, model), description.settings
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            raise CheckpointError(
                f"{key} = {_value(wanted, key)}: the checkpoint {checkpoint} was made with {_value(found, key)}; "
                "set it back, or begin a new run"
            )
    for name, info in description.files.items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != info.bytes:
            what = "is missing" if size is None else f"has {size} of {info.bytes} bytes"
            raise CheckpointError(f"{folder / name}: {what}{remedy(checkpoint)}")
    return description


def _value(table: Mapping[str, Any], key: str) -> str:
    return msgspec.json.encode(table[key]).decode() if key in table else "(nothing)"


def remedy(checkpoint: Path) -> str:
    """What to do when a checkpoint is no good: the newest one before it, or another."""
    number, there = version_of(checkpoint), versions(checkpoint.parent)
    before = [v for v in there if number is not None and v < number]
    if not before:
        others = ", ".join(f"{PREFIX}{v}" for v in there if v != number)
        return f"; there are {others}" if others else "; there is no other checkpoint: begin a new run"
    return f"; resume from the one before: --resume {checkpoint.parent / f'{PREFIX}{before[-1]}'}"


def version_of(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix(PREFIX)
    return int(number) if checkpoint.name.startswith(PREFIX) and number.isdecimal() else None


def versions(folder: Path) -> list[int]:
    """Of the checkpoints in ``folder`` that hold the trainer's state, in order."""
    found = [version_of(path) for path in folder.glob(f"{PREFIX}*") if (path / STATE / FILE_NAME).is_file()]
    return sorted(version for version in found if version is not None)
