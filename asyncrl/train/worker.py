"""The trainer's process: ``torchrun --nproc-per-node N -m asyncrl.train.worker --recipe FILE --model FOLDER --port P``.

Every rank holds a shard of the model and runs the same collectives. Rank 0 serves the controller over HTTP on loopback
(``wire.py``, msgpack) and waits for its commands; the others wait for rank 0. What is refused (a wrong step, a batch
that cannot be trained, a full disk) is an answer with ``error`` set. Anything else ends the rank with one line at the
end of its log (``fatal`` where a new one would come to the same end); torchrun then ends the others, and starts none
anew: that is the controller's business, which hears of it by its broken connection.

This module and ``leader`` are the composition root of the trainer's processes, as ``build.py`` is of the controller's.
It imports torch late: the rank has to be tied to its parent, and a port in use reported, before the slow part.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncrl.access import AccessError, demand, given_token, is_loopback
from asyncrl.config import Recipe, RecipeError, loads_json
from asyncrl.train.description import CheckpointError, check
from asyncrl.train.lifetime import die_with_parent

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


class GivenUp(Exception):
    """The rank cannot start or go on, and a new one could not either. One line with the remedy."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="asyncrl.train.worker", description="One rank of the trainer (for torchrun).")
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe, JSON (config.dumps)")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--port", type=int, required=True, help="port of rank 0's HTTP server on loopback")
    parser.add_argument("--resume", type=Path, help="checkpoint (RUN/checkpoints/version-N) to go on from")
    args = parser.parse_args()
    die_with_parent()
    try:
        token = given_token()
        run(loads_json(args.recipe.read_bytes()), token, args.model, args.port, args.recipe.parent, args.resume)
    except BaseException as error:
        # The controller shows the last such line of the log, so it is written in any case.
        print(f"trainer rank {os.environ.get('RANK', '?')}: {_explain(error)}", file=sys.stderr, flush=True)
        # Not sys.exit: threads and half-open collectives must not keep a failed rank alive.
        os._exit(1)
    # Nothing is left to save, and taking the interpreter down with all its modules would take seconds.
    os._exit(0)


def run(recipe: Recipe, token: str, folder: str, port: int, run_dir: Path, resume: Path | None) -> None:
    """One rank's life, from start to /shutdown. What went wrong in a step is kept in ``run_dir``."""
    address = _address(recipe.weights.address)
    if recipe.weights.transport == "relay":
        demand("weights.address =", address, token)
    listener = _listen(port) if os.environ["RANK"] == "0" else None
    if resume is not None:
        check(resume, recipe, Path(folder))

    import torch
    import torch.distributed as dist

    from asyncrl.train.leader import Leader
    from asyncrl.train.model import ModelError
    from asyncrl.train.rank import Rank
    from asyncrl.train.server import Server
    from asyncrl.train.step import StepBroken

    kind = recipe.trainer.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device(kind)
        torch.set_num_threads(recipe.trainer.threads)
    backend = "nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=recipe.trainer.step_timeout_s)
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(number, ranks, timeout)
    dist.init_process_group(backend, store=store, rank=number, world_size=ranks, timeout=timeout)
    try:
        rank = Rank(recipe, folder, device, address, token)
        if resume is not None:
            rank.checkpoints.load(resume)
    except (ModelError, RecipeError) as error:
        raise GivenUp(str(error)) from error
    try:
        if listener is None:
            rank.follow()
        else:
            leader = Leader(rank, run_dir)
            server = Server(listener, leader, token)
            for job in rank.commands(server.jobs()):
                job()
            leader.shutdown()
            server.close()
    except StepBroken as error:
        raise GivenUp(str(error)) from error
    dist.destroy_process_group()


def _address(first: str) -> str:
    """Where relays reach this rank: ``first`` on the machine of rank 0; on another that by which it reaches rank 0."""
    if os.environ.get("GROUP_RANK", "0") == "0":
        return first
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


def _store(rank: int, ranks: int, timeout: timedelta) -> TCPStore | None:
    """Where the ranks of one machine meet, on loopback; None: where torchrun says."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False" or not is_loopback(address):
        return None

    from torch._C._distributed_c10d import TCPStore

    if rank:
        return TCPStore(address, port, ranks, is_master=False, timeout=timeout)
    listener = _listen(port).detach()  # by itself it would listen on all of the machine's addresses
    return TCPStore(address, port, ranks, is_master=True, timeout=timeout, master_listen_fd=listener)


def _listen(port: int) -> socket.socket:
    """Bound before the slow start, so that a port in use is known at once and early clients wait instead of failing."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise GivenUp(f"port {port} cannot be used: {error.strerror}; free it or use another") from None
    listener.listen()
    return listener


def _explain(error: BaseException) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, GivenUp | CheckpointError | AccessError):
        return f"fatal: {line}"
    if isinstance(error, OSError | msgspec.MsgspecError):
        return f"error: {line}"
    if "gloo/transport" in text or "NCCL" in text:
        return "lost contact with another rank"
    traceback.print_exception(error)
    return f"error: {type(error).__name__}: {line}"


if __name__ == "__main__":
    main()
