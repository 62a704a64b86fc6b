"""``asyncrl serve MODEL``: start the embedded engine on one port. Owns the process: its socket, signals and exit code.

0 after SIGTERM or SIGINT; 1 when the engine broke; 2, with one line on stderr, for what cannot be served.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from asyncrl.access import AccessError, demand, given_token
from asyncrl.serve.spec import ModelSpec, ServeError, read_spec

if TYPE_CHECKING:
    from asyncrl.serve.model import Model

log = logging.getLogger("asyncrl.serve")

PARENT_VARIABLE = "ASYNCRL_PARENT_PID"
STOP_TIMEOUT_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _die_with_parent()
        args.token = given_token()
        demand("--host", args.host, args.token)
        spec = read_spec(args.model)
        _check(args, spec)
        with _bind(args.host, args.port) as bound:
            for number in _SIGNALS:
                signal.signal(number, _leave)
            return uvloop.run(_serve(args, _load(args, spec), bound))
    except (ServeError, AccessError) as error:
        print(f"asyncrl serve: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl serve", description="Serve a model over SGLang's HTTP API.")
    parser.add_argument("model", type=Path, help="Hugging Face model folder (Qwen3, Qwen2 or Llama)")
    parser.add_argument("--host", default="127.0.0.1", help="any but loopback needs ASYNCRL_TOKEN")
    parser.add_argument("--port", type=int, default=30000, help="0: any free one")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-running-requests", type=int, default=64, help="sequences decoded at once")
    parser.add_argument(
        "--max-total-tokens", type=int, default=65536, help="KV cache of all running sequences, in tokens"
    )
    parser.add_argument(
        "--disable-radix-cache", action="store_true", help="compute every prompt whole (the option's name is SGLang's)"
    )
    parser.add_argument(
        "--host-kv-tokens", type=int, default=0, help="further tokens of kept KV, in host memory (0: none)"
    )
    parser.add_argument(
        "--kv-reuse", action="store_true", help="give KV to other servers of the same weights, and take it from them"
    )
    parser.add_argument(
        "--context-length", type=int, default=None, help="tokens of one sequence (default: the model's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampler")
    parser.add_argument("--served-model-name", default=None, help="default: the model folder")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _check(args: argparse.Namespace, spec: ModelSpec) -> None:
    if args.context_length is None:
        args.context_length = min(spec.context_length, args.max_total_tokens)
    for name in ("max_running_requests", "max_total_tokens", "context_length"):
        if (value := getattr(args, name)) < 1:
            raise ServeError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.host_kv_tokens < 0:
        raise ServeError(f"--host-kv-tokens must be 0 or more, got {args.host_kv_tokens}")
    for option in ("kv_reuse", "host_kv_tokens"):
        if getattr(args, option) and args.disable_radix_cache:
            raise ServeError(f"--{option.replace('_', '-')} needs kept KV; leave out --disable-radix-cache")
    if args.context_length > spec.context_length:
        raise ServeError(f"--context-length {args.context_length} exceeds the model's {spec.context_length}; lower it")


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded, so that a busy port is known at once."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ServeError(_no_port(host, port, error)) from None
    return bound


def _no_port(host: str, port: int, error: Exception) -> str:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"cannot listen on {host}:{port}: {reason}; choose another --port"


def _leave(number: int, frame: object) -> None:
    """A signal while the model is loading."""
    sys.exit(0)


async def _serve(args: argparse.Namespace, model: Model, bound: socket.socket) -> int:
    # Imported here: torch takes a second, and a bad argument should not have to wait for it.
    from aiohttp import web

    from asyncrl.serve.server import Limits, Server

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    crashes: list[BaseException] = []
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopped.set)

    def on_crash(error: BaseException) -> None:
        crashes.append(error)
        stopped.set()

    server = Server(
        model,
        Limits(
            context_length=args.context_length,
            max_running_requests=args.max_running_requests,
            max_total_tokens=args.max_total_tokens,
            prefix_cache=not args.disable_radix_cache,
            host_kv_tokens=args.host_kv_tokens,
            kv_reuse=args.kv_reuse,
        ),
        model_path=args.model,
        served_name=args.served_model_name or str(args.model),
        seed=args.seed,
        on_crash=on_crash,
        token=args.token,
    )
    # A disconnected client cancels its handler, which aborts its request.
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
    except OSError as error:
        await runner.cleanup()
        raise ServeError(_no_port(args.host, args.port, error)) from None
    # The engine and the handlers share the interpreter: a handler must not keep a step waiting for 5 ms.
    sys.setswitchinterval(0.0005)
    server.engine.start()
    log.info("%s ready on http://%s:%d", args.model, args.host, bound.getsockname()[1])
    await stopped.wait()
    for crash in crashes:
        log.critical("the engine broke: %s", crash, exc_info=crash)
    await runner.cleanup()
    if not server.engine.stop(STOP_TIMEOUT_S) or server.working:
        # A thread is still inside torch (a collective without its peer, say). Ending the interpreter under it can
        # crash or hang, and nothing here needs to be saved.
        logging.shutdown()
        os._exit(1 if crashes else 0)
    return 1 if crashes else 0


def _load(args: argparse.Namespace, spec: ModelSpec) -> Model:
    """The model with its folder's weights, on the device that was asked for."""
    import torch

    from asyncrl.serve.weights import DTYPES, load_model

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ServeError("--device cuda: this machine has no CUDA device that torch can use; try --device cpu")
    cuda = args.device != "cpu" and torch.cuda.is_available()
    # One thread unless told otherwise: the steps are small, and two threads on shared cores are far slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    return load_model(args.model, spec, context_length=args.context_length, dtype=DTYPES[args.dtype], device=device)


def _die_with_parent() -> None:
    """With ``ASYNCRL_PARENT_PID`` set, ask the kernel to end this process when its parent dies, however it dies."""
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    try:
        os.kill(int(parent), 0)  # it may have died before the line above
    except ValueError:
        raise ServeError(f"{PARENT_VARIABLE} must be a process id, got {parent!r}") from None
    except ProcessLookupError:
        raise ServeError(f"the parent process {parent} ({PARENT_VARIABLE}) is gone") from None
    except PermissionError:
        pass  # alive, another user's


if __name__ == "__main__":
    sys.exit(main())
