"""One rank's part in checkpoints: its state is copied at once, and written by a thread while training goes on.

Weights (float32), optimiser state and random states go through torch.distributed.checkpoint, every rank writing its
shards; they are read back by any number of ranks. Owns that thread and the gloo groups that it works over, so that its
collectives never meet those of a step. One checkpoint is written at a time.

    main thread    begin()   waits for: the checkpoint before     woken by: the writing thread
    thread         write     waits for: the other ranks' threads  woken by: gloo
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Parameter

from asyncrl.config import Recipe
from asyncrl.core.types import Record
from asyncrl.train import model
from asyncrl.train.channel import all_gather
from asyncrl.train.description import (
    FORMAT,
    STATE,
    CheckpointError,
    Description,
    FileInfo,
    check,
    remedy,
    settings,
    write,
)
from asyncrl.train.export import crc32
from asyncrl.train.lora import is_factor
from asyncrl.train.step import Learner

INDEX = frozenset(
    {
        "pathlib.PosixPath",
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                *("Metadata", "StorageMeta", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata"),
                *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            )
        ),
    }
)
"""What the index of a checkpoint is made of, beside types of numbers."""


class WriteFailed(Exception):
    """A rank could not write its part of a checkpoint. One line."""


class Checkpoints:
    """Made by every rank at the same time. ``folder`` is the model's."""

    def __init__(self, learner: Learner, recipe: Recipe, folder: Path) -> None:
        self._learner = learner
        self._recipe = recipe
        self._folder = folder
        timeout_s = recipe.trainer.step_timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._alone = dist.new_group([0], backend="gloo")
        """For what rank 0 reads by itself."""
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use, initargs=(learner.device,))
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        # Taken here: FSDP exchanges the modules' parameters while a step runs.
        self._shapes = [(name, p.shape) for name, p in model.named_parameters(learner.policy)]

    def begin(
        self,
        folder: Path,
        finish: Callable[[], None] = lambda: None,
        within: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Copy the state, and have it written into ``folder``, as all ranks do. On rank 0, ``finish`` is called on the
        thread when all have written theirs, and everything there happens ``within`` a context."""
        self.wait()
        offload = self._learner.offload
        with nullcontext() if offload is None else offload.present():
            state = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(self._learner)}
        state |= _random_states(dist.get_rank())
        about = Description(
            format=FORMAT,
            version=self._learner.version,
            ranks=dist.get_world_size(),
            torch=str(torch.__version__),
            settings=settings(self._recipe, self._folder),
            files={},
        )

        def work() -> None:
            with within or nullcontext():
                files = self._write(state, folder)
                if dist.get_rank() == 0:
                    finish()
                    write(folder, msgspec.structs.replace(about, files=files))

        self._writing = self._thread.submit(work)

    def wait(self) -> None:
        """Until nothing is being written, however that ended."""
        wait([self._writing])

    def saved(self) -> None:
        """Wait until what was begun last is written. Raises what went wrong: ``WriteFailed``, or ``finish``'s own."""
        self._writing.result()

    def _write(self, state: dict[str, Tensor], folder: Path) -> dict[str, FileInfo]:
        """All ranks' files."""
        rank = dist.get_rank()
        error: str | None = None
        files: dict[str, FileInfo] = {}
        try:
            save(state, storage_writer=FileSystemWriter(folder), process_group=self._group)
            own = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
            files = {path.name: FileInfo(bytes=path.stat().st_size, crc32=crc32(path)) for path in own}
        except (CheckpointException, OSError) as failure:
            error = _cause(failure)
        parts = all_gather((error, files), tuple[str | None, dict[str, FileInfo]], self._group)
        for number, (error, _) in enumerate(parts):
            if error is not None:
                raise WriteFailed(f"rank {number}: {error}")
        return {name: info for _, files in parts for name, info in files.items()}

    def read_weights(self, folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Rank 0: the whole parameters, one at a time, from a state that was just written, so that an export needs no
        collective. Raises ``OSError``."""
        for name, shape in self._shapes:
            state = {f"model.{name}": torch.empty(shape)}
            try:
                load(state, storage_reader=_Reader(folder), process_group=self._alone)
            except CheckpointException as error:
                raise OSError(_cause(error)) from error
            yield name, state[f"model.{name}"] if is_factor(name) else state[f"model.{name}"].to(dtype)

    def load(self, checkpoint: Path) -> None:
        """Take on the state in folder ``checkpoint``, at its version. A collective. Raises ``CheckpointError`` on every
        rank; the state is undefined then."""
        description = check(checkpoint, self._recipe, self._folder)
        folder = checkpoint / STATE
        self._verify(checkpoint, description)
        try:
            stored = _Reader(folder).read_metadata().state_dict_metadata
            _make_room(self._learner, stored)
            state = dict(_tensors(self._learner))
            if missing := sorted(state.keys() - stored.keys()):
                raise CheckpointError(f"{folder}: has no {missing[0]}; it is of another model")
            own = f"random.{dist.get_rank()}."
            same = description.ranks == dist.get_world_size()
            state |= {key: _empty(info) for key, info in stored.items() if same and key.startswith(own)}
            load(state, storage_reader=_Reader(folder), process_group=self._group)
        except (CheckpointException, OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{folder}: {_cause(error)}{remedy(checkpoint)}") from error
        _set_random_states({key.removeprefix(own): t for key, t in state.items() if key.startswith(own)})
        self._learner.version = description.version

    def _verify(self, checkpoint: Path, description: Description) -> None:
        """Each rank reads its share of the files."""
        folder = checkpoint / STATE
        error: str | None = None
        for name in sorted(description.files)[dist.get_rank() :: dist.get_world_size()]:
            try:
                if crc32(folder / name) != description.files[name].crc32:
                    error = f"{folder / name}: is corrupt (its checksum differs)"
            except OSError as failure:
                error = f"{folder / name}: cannot be read ({failure.strerror})"
        for wrong in all_gather(error, str | None, self._group):  # type: ignore[arg-type]
            if wrong is not None:
                raise CheckpointError(f"{wrong}{remedy(checkpoint)}")


def _use(device: torch.device) -> None:
    """On the thread: torch writes by way of the current GPU, which is each thread's own, and GPU 0 at first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """The learner's own tensors, by names that do not tell how they are sharded or wrapped."""
    for key, name, parameter in _parameters(learner):
        yield key, parameter.detach()
        for slot, tensor in learner.optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{slot}.{name}", tensor


def _parameters(learner: Learner) -> Iterator[tuple[str, str, Parameter]]:
    """Of each: the key under which it is stored, its name in those of the optimiser's state, and itself."""
    for name, parameter in model.named_parameters(learner.policy):
        yield f"model.{name}", name, parameter
    for name, parameter in model.critic_parameters(learner.policy, learner.critic):
        yield name, name, parameter


def _make_room(learner: Learner, stored: dict[str, Any]) -> None:
    """Give the optimiser tensors for what is stored of its state: before its first step it has none."""
    parameters = {name: parameter for _, name, parameter in _parameters(learner)}
    learner.optimizer.state.clear()
    for key, info in stored.items():
        kind, _, rest = key.partition(".")
        slot, _, name = rest.partition(".")
        if kind == "optimizer" and name in parameters:
            weight = parameters[name].detach()
            tensor = torch.zeros_like(weight) if info.size == weight.shape else _empty(info)
            learner.optimizer.state[parameters[name]][slot] = tensor


def _empty(info: TensorStorageMetadata | BytesStorageMetadata) -> Tensor:
    assert isinstance(info, TensorStorageMetadata), "everything stored is a tensor"
    return torch.empty(info.size, dtype=info.properties.dtype)


class _Index(pickle.Unpickler):
    """Of a checkpoint's index, which torch pickles: makes nothing but what an index consists of, so that a checkpoint
    from elsewhere runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in INDEX or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index holds a {module}.{name}, which no index needs: do not trust it")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            index: Metadata = _Index(file).load()
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Generators(Record, frozen=True, kw_only=True):
    """States of Python's and NumPy's random generators."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]


def _random_states(rank: int) -> dict[str, Tensor]:
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy = (kind, np.asarray(keys).tolist(), int(place), int(has_gauss), float(gauss))
    generators = _Generators(python=random.getstate(), numpy=numpy)
    others = bytearray(msgspec.msgpack.encode(generators))
    states = {"torch": torch.get_rng_state(), "generators": torch.frombuffer(others, dtype=torch.uint8)}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"random.{rank}.{name}": state for name, state in states.items()}


def _set_random_states(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        match name:
            case "torch":
                torch.set_rng_state(state)
            case "cuda" if torch.cuda.is_available():
                torch.cuda.set_rng_state(state)
            case "generators":
                generators = msgspec.msgpack.decode(state.numpy().tobytes(), type=_Generators)
                random.setstate(generators.python)
                kind, keys, place, has_gauss, gauss = generators.numpy
                np.random.set_state((kind, np.array(keys, np.uint32), place, has_gauss, gauss))


def _cause(error: BaseException) -> str:
    """One line; of a failure on several ranks, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split()) or type(error).__name__
