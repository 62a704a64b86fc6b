"""Brings new weights into a model: from a safetensors folder, or from a trainer's broadcast.

Both ways end in ``apply``, one copy a tensor into the model's own memory, which the engine's thread runs between two
steps. Everything before it (reading, receiving, and comparing names, shapes and dtypes with the model's) leaves the
model untouched, and what does not match is refused with a ``ServeError``. These functions block; the server runs them
on a worker thread of their own, and every collective has a deadline.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from asyncrl.checksum import checksum
from asyncrl.core.manifest import FILE_NAME, Manifest, ManifestError, loads
from asyncrl.serve.model import Model, Parameter
from asyncrl.serve.spec import ModelSpec, ServeError
from asyncrl.wire import InitGroupReq, UpdateFromDistributedReq

CONNECT_TIMEOUT = timedelta(seconds=5)
"""How long a join waits for the trainer to listen, which it does before it has servers join. torch tries two or three
times as long."""

JOIN_TIMEOUT = timedelta(seconds=30)
"""How long it waits for all members to be there."""

BROADCAST_TIMEOUT = timedelta(seconds=120)
"""How long a broadcast waits for the trainer."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Parameters = Mapping[str, Parameter]
Tensors = Mapping[str, torch.Tensor]


def check(parameters: Parameters, shapes: Mapping[str, Sequence[int]], *, complete: bool) -> None:
    """Compare a weight set with the model. ``complete`` sets must name every tensor. Raises ``ServeError``."""
    for name, shape in shapes.items():
        if name not in parameters:
            raise ServeError(f"tensor {name} is not part of this model; update with weights of the same architecture")
        if tuple(shape) != parameters[name].shape:
            raise ServeError(f"tensor {name} has shape {list(shape)}, but the model's is "
                             f"{list(parameters[name].shape)}; update with weights of the same size")  # fmt: skip
    if complete and (missing := [name for name in parameters if name not in shapes]):
        raise ServeError(f"tensor {missing[0]} is missing ({len(missing)} in all); the weight set is not complete")


def apply(parameters: Parameters, tensors: Tensors) -> None:
    """Copy checked tensors into the model, in place, converting the dtype where it differs."""
    for name, tensor in tensors.items():
        parameters[name].view.copy_(tensor)


def digest(model: Model) -> str:
    """Of the architecture and of the checksums of all weights: alike where two servers compute the same KV. Reads the
    weights once."""
    shape = replace(model.spec, context_length=0, eos_ids=frozenset())
    sums = {name: checksum(parameter.view) for name, parameter in sorted(model.parameters.items())}
    return hashlib.sha256(repr((shape, sums)).encode()).hexdigest()


def load_model(
    folder: Path, spec: ModelSpec, *, context_length: int, dtype: torch.dtype, device: torch.device
) -> Model:
    """A model with a folder's weights. Raises ``ServeError``."""
    model = Model(spec, context_length=context_length, dtype=dtype, device=device)
    apply(model.parameters, read_folder(folder, model.parameters))
    return model


def read_folder(folder: Path, parameters: Parameters) -> dict[str, torch.Tensor]:
    """A whole weight set from a Hugging Face folder, one file or sharded. Raises ``ServeError``."""
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    try:
        for file, names in _files(folder).items():
            with safe_open(file, framework="pt") as source:
                for name in names or source.keys():
                    if _is_known_extra(name, parameters):
                        continue
                    shapes[name] = source.get_slice(name).get_shape()
                    if name in parameters and tuple(shapes[name]) == parameters[name].shape:
                        tensors[name] = source.get_tensor(name)
        manifest = _manifest(folder)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ServeError(f"{folder}: cannot read the weights: {error}") from None
    check(parameters, shapes, complete=True)
    if manifest is not None:
        verify(tensors, manifest.checksums, f"{folder}, version {manifest.version}")
    return tensors


def verify(tensors: Tensors, checksums: Mapping[str, int], what: str) -> None:
    """Compare tensors with the checksums that the trainer sent along. Raises ``ServeError``."""
    for name, tensor in tensors.items():
        if (expected := checksums.get(name)) is not None and (found := checksum(tensor)) != expected:
            raise ServeError(f"{what}: tensor {name} is corrupt (checksum {found:x}, was {expected:x}); send it again")


def _manifest(folder: Path) -> Manifest | None:
    """What the trainer says of a folder that it wrote; other folders have none. Raises ``ValueError``."""
    file = folder / FILE_NAME
    try:
        return loads(file.read_bytes()) if file.exists() else None
    except ManifestError as error:
        raise ValueError(str(error)) from None


def _files(folder: Path) -> dict[Path, list[str]]:
    """Safetensors files of a folder and the names to take from each (none given: all of them)."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files: dict[Path, list[str]] = {}
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            files.setdefault(folder / file, []).append(name)
        return files
    if single.exists():
        return {single: []}
    if not folder.is_dir():
        raise ServeError(f"{folder}: no such model folder")
    raise ServeError(f"{folder}: no model.safetensors or model.safetensors.index.json; save the weights as safetensors")


def _is_known_extra(name: str, parameters: Parameters) -> bool:
    """Tensors that folders carry beside the weights: a tied head's copy, and rotary buffers."""
    return (name == "lm_head.weight" and name not in parameters) or name.endswith("rotary_emb.inv_freq")


class UpdateGroups:
    """Process groups in which rank 0 is the trainer; one call at a time.

    A trainer forms its side with ``TCPStore`` and ``_new_process_group_helper`` as below, not with
    ``init_process_group``, which prefixes the store with another name.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, request: InitGroupReq) -> None:
        """Join a group; returns when all of it is there. Older ones are left: their trainer sends there no more. Raises
        ``ServeError``."""
        name, rank, world = request.group_name, request.rank_offset, request.world_size
        if name in self._groups:
            raise ServeError(f"group {name} exists already; destroy it first, or use another name")
        if not 0 < rank < world:
            raise ServeError(f"group {name}: rank_offset {rank} must lie between 1 and world_size - 1 = {world - 1}")
        if not c10d.is_backend_available(request.backend):
            raise ServeError(f"group {name}: this torch has no backend {request.backend!r}; use gloo or nccl")
        if request.backend == "nccl" and self._device.type != "cuda":
            raise ServeError(f"group {name}: backend nccl needs a CUDA device; use gloo")
        for old in list(self._groups):
            with suppress(ServeError):
                self.leave(old)
        host, port = request.master_address, request.master_port
        with _as_serve_error(f"group {name}: cannot join at tcp://{host}:{port}"):
            store = TCPStore(host, port, world, timeout=CONNECT_TIMEOUT, wait_for_workers=False)
            store.set_timeout(JOIN_TIMEOUT)
            group, _ = c10d._new_process_group_helper(
                world,
                rank,
                [],
                c10d.Backend(request.backend),
                c10d.PrefixStore(name, store),
                group_name=c10d.GroupName(name),
                timeout=JOIN_TIMEOUT,
            )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        c10d._set_pg_timeout(BROADCAST_TIMEOUT, group)
        self._groups[name] = group

    def receive(self, request: UpdateFromDistributedReq, parameters: Parameters) -> dict[str, torch.Tensor]:
        """The tensors that rank 0 broadcasts, in fresh memory. Raises ``ServeError``; mismatches before receiving."""
        group = self._group(request.group_name)
        count = len(request.names)
        sums = request.checksums
        lengths = {count, len(request.dtypes), len(request.shapes), count if sums is None else len(sums)}
        if len(lengths) > 1 or len(set(request.names)) != count:
            raise ServeError("names, dtypes, shapes and checksums must have one entry a tensor, and names must differ")
        if request.load_format not in (None, "flattened_bucket"):
            raise ServeError(f"load_format {request.load_format!r} is not known; use flattened_bucket, or leave it out")
        dtypes = [_dtype(name) for name in request.dtypes]
        wanted = dict(zip(request.names, request.shapes, strict=True))
        taken = {name: shape for name, shape in wanted.items() if not _is_known_extra(name, parameters)}
        check(parameters, taken, complete=False)
        kinds = list(zip(request.names, dtypes, request.shapes, strict=True))
        with _as_serve_error(f"group {request.group_name}: the broadcast failed"):
            if request.load_format is None:
                tensors = {name: torch.empty(shape, dtype=t, device=self._device) for name, t, shape in kinds}
                for tensor in tensors.values():
                    self._broadcast(tensor, group)
            else:
                sizes = [t.itemsize * math.prod(shape) for _, t, shape in kinds]
                bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
                self._broadcast(bucket, group)
                # A copy each: a slice may start where the dtype's alignment does not allow a view.
                parts = (part.clone() for part in torch.split(bucket, sizes))
                tensors = {n: part.view(t).view(shape) for (n, t, shape), part in zip(kinds, parts, strict=True)}
        if sums is not None:
            sent = dict(zip(request.names, sums, strict=True))
            verify(tensors, sent, f"group {request.group_name}, version {request.weight_version}")
        return {name: tensor for name, tensor in tensors.items() if name in taken}

    def leave(self, name: str) -> None:
        """Destroy a group. Raises ``ServeError``."""
        group = self._group(name)
        del self._groups[name]
        with _as_serve_error(f"group {name}: cannot be destroyed"):
            dist.destroy_process_group(group)

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise ServeError(f"no group {name!r}; POST /init_weights_update_group first")
        return self._groups[name]

    def _broadcast(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.broadcast(tensor, src=0, group=group)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ServeError(f"dtype {name!r} is not served; use one of {', '.join(DTYPES)}")
    return dtype


@contextmanager
def _as_serve_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:  # torch.distributed's errors are RuntimeErrors
        text = str(error).strip()
        raise ServeError(f"{what}: {text.splitlines()[0] if text else type(error).__name__}") from None
