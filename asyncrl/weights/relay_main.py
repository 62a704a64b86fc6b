"""``asyncrl relay``: one relay on one port. Owns the process: its sockets, its folder in shared memory, signals, exit.

0 after SIGTERM or SIGINT; 2, with one line on stderr, for what it cannot start with.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from asyncrl.access import AccessError, demand, given_token
from asyncrl.weights.relay import Relay
from asyncrl.weights.store import Store, StoreError


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        if args.chunk_mb < 1:
            raise StoreError(f"--chunk-mb {args.chunk_mb}: must be at least 1")
        if not 0 <= args.max_mb_s < 2**11:
            raise StoreError(f"--max-mb-s {args.max_mb_s}: must be from 0 (any speed) to 2047")
        token = given_token()
        demand("--host", args.host, token)
        with (
            _bind(args.host, args.port) as control,
            _bind(args.host, args.data_port) as data,
            Store(args.memory, str(control.getsockname()[1])) as store,
        ):
            # The selector loop: uvloop has no sendfile of a plain socket.
            relay = Relay(store, data, args.chunk_mb * 2**20, args.max_mb_s * 2**20, token)
            asyncio.run(_run(relay, control))
    except (StoreError, AccessError) as error:
        print(f"asyncrl relay: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl relay", description="Keep the newest weights in this host's shared memory, for its servers."
    )
    parser.add_argument("--host", default="127.0.0.1", help="any but loopback needs ASYNCRL_TOKEN")
    parser.add_argument("--port", type=int, default=31000, help="of the controller's connection")
    parser.add_argument("--data-port", type=int, default=0, help="where others take weights (default: any free one)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="mount of the shared memory")
    parser.add_argument("--chunk-mb", type=int, default=32, help="what is there of a version before it is given on")
    parser.add_argument("--max-mb-s", type=int, default=0, help="give no faster, to leave the network to others")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()
        bound.setblocking(False)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise StoreError(f"cannot listen on {host}:{port}: {reason}; choose another port") from None
    return bound


async def _run(relay: Relay, control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    runner = web.AppRunner(relay.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, control).start()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(relay.run())
            await stopped.wait()
            running.cancel()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
