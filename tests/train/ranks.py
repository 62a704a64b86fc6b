"""Real ranks on gloo for tests: processes forked from a server that has torch imported, so that they start at once."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "transformers.modeling_utils", "asyncrl.train.step", "torch.distributed.fsdp"]
)

TIMEOUT_S = 120


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(*args)`` on each of ``count`` ranks, within a default process group; what each returned. ``function``
    is a module's, and all values can be pickled."""
    with tempfile.NamedTemporaryFile() as store:
        ends, processes = [], []
        for rank in range(count):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank, args=(sender, store.name, rank, count, function, args))
            process.start()
            sender.close()
            ends.append(receiver)
            processes.append(process)
        try:
            return [_result(rank, end) for rank, end in enumerate(ends)]
        finally:
            for process in processes:
                process.join(1)
                process.kill()
                process.join()


def _result(rank: int, end: Connection) -> Any:
    if not end.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} did not answer")
    result = pickle.loads(end.recv_bytes())
    if isinstance(result, BaseException):
        raise result
    return result


def _rank(
    sender: Connection, store: str, rank: int, count: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    try:
        result: Any = function(*args)
    except BaseException as error:
        error.add_note(f"on rank {rank} of {count}")
        result = error
    sender.send_bytes(pickle.dumps(result))
    if not isinstance(result, BaseException):
        dist.barrier()  # nobody hangs up on a rank that still talks
    dist.destroy_process_group()
