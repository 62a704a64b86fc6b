"""What runs in a worker process: the objects of one SyncEnv class, called one after another by the main thread.

A second thread reads the socket, so that a call can be interrupted (SIGUSR1 raises in the very frame that blocks) and
the process ends when the controller is gone, even in the middle of a call.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from types import FrameType

from asyncrl.env import EnvDown, Observation, Step, SyncEnv
from asyncrl.env_workers.messages import (
    LENGTH_BYTES,
    Act,
    Answer,
    Call,
    Close,
    Interrupt,
    Raised,
    Reset,
    decode_order,
    encode,
)

SIGNAL = signal.SIGUSR1
CLOSE_S = 5.0
"""How long the objects may take to close when the run is over; then the process ends without them."""


class Interrupted(BaseException):
    """Raised in a call that nobody waits for any more. Not an ``Exception``: user code should let it pass."""


class Worker:
    """Serves ``connection`` until the other end closes it; then closes what is open."""

    def __init__(self, connection: socket.socket, make: Callable[[], SyncEnv]) -> None:
        self._connection = connection
        self._make = make
        self._envs: dict[int, SyncEnv] = {}
        self._orders: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._current: int | None = None
        """The call that user code is in."""
        self._unwanted: int | None = None

    def serve(self) -> None:
        signal.signal(SIGNAL, self._on_signal)
        threading.Thread(target=self._read, name="asyncrl-orders", daemon=True).start()
        while (order := self._orders.get()) is not None:
            answer = self._carry_out(order)
            try:
                data = encode(answer)
            except BaseException as error:  # what the user returned, or raised, is no plain data
                data = encode(Raised(error=_named(error), details="", down=False))
            with contextlib.suppress(OSError):  # the controller is gone; so is this process, in a moment
                self._connection.sendall(data)
        self._close_all()

    def _carry_out(self, order: Call) -> Answer | Raised:
        try:
            try:
                self._current = order.call
                return self._call(order)
            finally:
                self._current = None
        except Interrupted:
            self._current = None
            return Raised(error="interrupted", details="", down=True)
        except BaseException as error:  # a panic of a Rust extension is no Exception
            if isinstance(order, Close):  # nobody waits for its answer
                traceback.print_exc()
            down = isinstance(error, EnvDown)
            details = _utf8("".join(traceback.format_exception(error)))
            return Raised(error=_named(error, bare=down), details=details, down=down)

    def _call(self, order: Call) -> Answer:
        if isinstance(order, Reset):
            env = self._envs.get(order.env)
            if env is None:
                env = self._envs[order.env] = self._make()
            observation = env.reset(order.task)
            if not isinstance(observation, (Observation, str)):
                raise TypeError(f"gave {type(observation).__name__} as observation; give text or an Observation")
            return Answer(observation=observation)
        if isinstance(order, Act):
            step = self._envs[order.env].step(order.whole())
            if not isinstance(step, Step):
                raise TypeError(f"returned {type(step).__name__}; it must return asyncrl.Step")
            return Answer(step=step)
        closing = self._envs.pop(order.env, None)
        if closing is not None:
            closing.close()
        return Answer()

    def _close_all(self) -> None:
        """One after another; a close that hangs is left behind."""
        guard = threading.Timer(CLOSE_S, os._exit, (1,))
        guard.daemon = True
        guard.start()
        for env in self._envs.values():
            try:
                env.close()
            except BaseException:
                traceback.print_exc()
        guard.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._current is not None and self._current == self._unwanted:
            raise Interrupted

    # --- the reading thread

    def _read(self) -> None:
        while (order := self._receive()) is not None:
            if isinstance(order, Interrupt):
                self._unwanted = order.call
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            else:
                self._orders.put(order)
        self._unwanted = self._current
        self._orders.put(None)
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        guard = threading.Timer(2 * CLOSE_S, os._exit, (1,))  # the call does not let itself be interrupted
        guard.daemon = True
        guard.start()

    def _receive(self) -> Call | Interrupt | None:
        head = self._exactly(LENGTH_BYTES)
        body = None if head is None else self._exactly(int.from_bytes(head, "big"))
        return None if body is None else decode_order(body)

    def _exactly(self, size: int) -> bytes | None:
        """None when the other end has closed."""
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._connection.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def _named(error: BaseException, *, bare: bool = False) -> str:
    """An error in one line; ``bare``: without its type, where it says anything."""
    try:
        text = _utf8(str(error)).split("\n", 1)[0]
    except Exception:  # a conversion of the user's own
        text = ""
    return text if bare and text else f"{type(error).__name__}{': ' if text else ''}{text}"


def _utf8(text: str) -> str:
    """Without halves of surrogate pairs, which no message takes."""
    return text.encode(errors="replace").decode()
