"""EnvProcesses: a SyncEnv's objects in worker processes, as ``Env``s on the loop.

Owns the nursery, the workers and the places in them. A slot serves one call after another in its process, and a call's
deadline begins when the process does. A call that misses it has its process killed; the next call into the slot starts
a new one. Episodes whose object was in the dead process hear of it at their next call (``EnvDown``).

    acquire()      waits for: a place            woken by: _free()
    a call         waits for: its answer         woken by: its slot
    a slot         waits for: a call, its answer woken by: an environment; the worker's socket
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from asyncrl.env import Action, Cost, Env, EnvDown, Observation, Step, Task
from asyncrl.env_workers.messages import (
    LENGTH_BYTES,
    Act,
    Answer,
    Call,
    Close,
    Interrupt,
    Raised,
    Reset,
    decode_answer,
    encode,
)
from asyncrl.env_workers.nursery import ENDED, KILL, RECORD, SPEC_VARIABLE, START, Spec
from asyncrl.ports import RemoteError
from asyncrl.processes import Child, ChildError

GRACE_S = 0.25
"""How long a call that nobody waits for may go on before it is interrupted."""
OBEY_S = 1.0
"""How long an interrupted call may take to end, where its process holds nobody else's environment."""
STATUS_S = 2.0
"""How long the nursery may take to say how a worker ended."""
MAX_RESTARTS = 3
"""Of the nursery, until one ran for ``STEADY_S``: one that dies again and again has a cause that a restart does not
mend."""
STEADY_S = 600.0
REORDER_S = 0.01
"""Pause before a worker is ordered again: the nursery has just died, or has too many orders before it."""
RUN_OVER = "the run is over"
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""One thread a worker: processes are the parallelism, and a process with threads must not fork."""


class _Pending:
    """A call on its way."""

    __slots__ = ("data", "env", "future", "order", "timeout_s")

    def __init__(self, env: RemoteEnv, order: Call, timeout_s: float, future: asyncio.Future[Answer]) -> None:
        self.env = env
        self.order = order
        self.data = encode(order)
        self.timeout_s = timeout_s
        self.future = future


class _Process(asyncio.Protocol):
    """The controller's end of one worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.died = ""
        """Why it is gone; empty while it lives."""
        self.lost = False
        """Its end of the socket is closed."""
        self.answer: asyncio.Future[bytes] | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()

    async def connect(self, ours: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._received += data
        size = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
        if len(self._received) >= max(size, LENGTH_BYTES) and self.answer is not None and not self.answer.done():
            self.answer.set_result(bytes(self._received[LENGTH_BYTES:size]))
            del self._received[:size]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(b"")

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        """The answer to a call; empty when the process died over it."""
        assert self._transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        if self.lost:
            self.answer.set_result(b"")
        else:
            self._transport.write(data)
        return self.answer

    def interrupt(self, call: int) -> None:
        assert self._transport is not None
        self._transport.write(encode(Interrupt(call=call)))

    def close(self) -> None:
        """The worker closes its objects and ends."""
        if self._transport is not None:
            self._transport.close()


class _Slot:
    """One process at a time, and the environments that have a place in it."""

    def __init__(self) -> None:
        self.taken = 0
        self.idle: list[RemoteEnv] = []
        self.calls: asyncio.Queue[_Pending] = asyncio.Queue()
        self.process: _Process | None = None


class RemoteEnv(Env):
    """A SyncEnv's object in a worker process; it is made there by its first ``reset``."""

    def __init__(self, pool: EnvProcesses, slot: _Slot, number: int) -> None:
        self.slot = slot
        self.process: _Process | None = None
        """The process that holds the object."""
        self.number = number
        self._pool = pool

    async def reset(self, task: Task) -> Observation | str:
        order = Reset(call=self._pool.next_call(), env=self.number, task=task)
        answer = await self._pool.call(self, order, self._pool.reset_timeout_s(first=self.process is None))
        assert answer.observation is not None
        return answer.observation

    async def step(self, action: Action) -> Step:
        order = Act.of(action, call=self._pool.next_call(), env=self.number)
        answer = await self._pool.call(self, order, self._pool.step_timeout_s)
        assert answer.step is not None
        return answer.step

    async def close(self) -> None:
        """See ``EnvProcesses.release``."""


class EnvProcesses:
    """An ``EnvSource``. ``workers`` processes at most, with ``cost.per_process`` objects each, and as many objects in
    all as fit into ``memory_mb`` (0: any). The workers' output goes to ``log``."""

    keeps_deadlines = True

    def __init__(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        cost: Cost,
        reusable: bool,
        workers: int,
        memory_mb: int = 0,
        reset_timeout_s: float,
        step_timeout_s: float,
        close_timeout_s: float = 10.0,
        log: Path,
    ) -> None:
        spec = Spec(target=target, kwargs=dict(kwargs), path=[os.path.abspath(p) for p in sys.path])
        self._spec = msgspec.json.encode(spec).decode()
        self._cost = cost
        self._reusable = reusable
        self._reset_timeout_s = reset_timeout_s
        self.step_timeout_s = step_timeout_s
        self._close_timeout_s = close_timeout_s
        self._log = log
        self._slots = [_Slot() for _ in range(workers)]
        self._free_places = cost.per_process * workers
        if memory_mb and cost.memory_mb:
            self._free_places = min(self._free_places, max(1, memory_mb // cost.memory_mb))
        self._waiting: deque[asyncio.Future[RemoteEnv]] = deque()
        self._calls = itertools.count()
        self._numbers = itertools.count()
        self._workers: dict[int, _Process] = {}
        self._control: socket.socket | None = None
        self._ready = asyncio.Event()
        self._over = False

    # --- environments

    async def acquire(self) -> RemoteEnv:
        future: asyncio.Future[RemoteEnv] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._place()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was given in the same tick
                self._free(future.result(), keep=False)
            raise

    def release(self, env: Env, *, whole: bool) -> None:
        """The place is free again when the object is closed; nobody waits for that."""
        assert isinstance(env, RemoteEnv)
        if env.process is None or env.process.died or (whole and self._reusable):
            self._free(env, keep=env.process is not None and not env.process.died)
            return
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda closed: self._closed(env, closed))
        order = Close(call=self.next_call(), env=env.number)
        env.slot.calls.put_nowait(_Pending(env, order, self._close_timeout_s, future))

    def _closed(self, env: RemoteEnv, closed: asyncio.Future[Answer]) -> None:
        if not closed.cancelled():
            closed.exception()  # a close that fails loses nothing: the episode is over
        self._free(env, keep=False)

    def _place(self) -> None:
        """Give places to those who wait: idle objects first, then the emptiest process."""
        while self._waiting and self._free_places:
            future = self._waiting.popleft()
            if future.done():
                continue
            idle = [slot for slot in self._slots if slot.idle]
            if idle:
                slot = min(idle, key=lambda s: s.taken)
                env = slot.idle.pop()
            else:
                slot = min(self._slots, key=lambda s: s.taken)
                env = RemoteEnv(self, slot, next(self._numbers))
            slot.taken += 1
            self._free_places -= 1
            future.set_result(env)

    def _free(self, env: RemoteEnv, *, keep: bool) -> None:
        env.slot.taken -= 1
        self._free_places += 1
        if keep:
            env.slot.idle.append(env)
        self._place()

    # --- calls

    def next_call(self) -> int:
        return next(self._calls)

    def reset_timeout_s(self, *, first: bool) -> float:
        return self._reset_timeout_s + (self._cost.startup_s if first else 0.0)

    async def call(self, env: RemoteEnv, order: Call, timeout_s: float) -> Answer:
        """Raises ``EnvDown`` and ``RemoteError``; ``TypeError`` for a task that is no plain data."""
        if self._over:
            raise EnvDown(RUN_OVER)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        env.slot.calls.put_nowait(_Pending(env, order, timeout_s, future))
        return await future

    async def run(self) -> None:
        """Nursery and slots, until cancelled. Raises ``ChildError`` when the nursery cannot be kept alive."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_nursery())
                for slot in self._slots:
                    group.create_task(self._serve(slot))
        finally:
            self._over = True
            for slot in self._slots:
                while not slot.calls.empty():
                    _fail(slot.calls.get_nowait(), EnvDown(RUN_OVER))

    async def _serve(self, slot: _Slot) -> None:
        while True:
            pending = await slot.calls.get()
            if pending.future.done() and not isinstance(pending.order, Close):
                continue
            try:
                await self._play(slot, pending)
            finally:
                _fail(pending, EnvDown(RUN_OVER))

    async def _play(self, slot: _Slot, pending: _Pending) -> None:
        """One call, from its beginning to its answer, or to the end of its process."""
        env, process = pending.env, slot.process
        if process is not None and process.lost:
            await self._autopsy(process)
        if isinstance(pending.order, Reset):
            if process is None or process.died:
                process = slot.process = await self._start()
                if pending.future.done():
                    return
            env.process = process
        process = env.process
        assert process is not None
        if process.died:
            _fail(pending, EnvDown(process.died))
            return
        answer = process.ask(pending.data)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + pending.timeout_s
        either: list[asyncio.Future[Any]] = [answer, pending.future]
        await asyncio.wait(either, timeout=pending.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and pending.future.cancelled():
            await asyncio.wait([answer], timeout=min(GRACE_S, deadline - loop.time()))
            if not answer.done():
                process.interrupt(pending.order.call)
                left = deadline - loop.time()
                await asyncio.wait([answer], timeout=min(OBEY_S, left) if slot.taken == 1 else left)
        if not answer.done():
            process.died = "its worker process was killed: another environment in it hung"
            _fail(pending, RemoteError(f"no answer within {pending.timeout_s:g} s"))
            self._order(KILL, process.number)
            process.close()
        elif data := answer.result():
            _settle(pending, data)
        else:
            await self._autopsy(process)
            _fail(pending, EnvDown(process.died))

    async def _autopsy(self, process: _Process) -> None:
        """Find out why it ended."""
        await asyncio.wait([process.ended], timeout=STATUS_S)
        known = process.ended.done() and not process.ended.cancelled()
        process.died = process.died or f"its worker process {_ending(process.ended.result() if known else None)}"
        process.close()

    # --- processes

    async def _start(self) -> _Process:
        """A new worker."""
        while True:
            await self._ready.wait()
            number = next(self._numbers)
            process = self._workers[number] = _Process(number)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                ordered = self._order(START, number, theirs)
            if ordered:
                await process.connect(ours)
                return process
            ours.close()
            del self._workers[number]
            await asyncio.sleep(REORDER_S)

    def _order(self, kind: bytes, number: int, attached: socket.socket | None = None) -> bool:
        """Tell the nursery; False if it is gone."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [RECORD.pack(kind, number, 0)], [attached.fileno()] if attached else [])
        except OSError:
            return False
        return True

    async def _keep_nursery(self) -> None:
        with tempfile.TemporaryDirectory(prefix="asyncrl-envs-", ignore_cleanup_errors=True) as scratch:
            await self._keep_nursery_in(scratch)

    async def _keep_nursery_in(self, scratch: str) -> None:
        command = [sys.executable, "-m", "asyncrl.env_workers.nursery", scratch]
        environment = {name: os.environ.get(name, value) for name, value in THREADS.items()}
        environment["PYTHONUNBUFFERED"] = "1"  # a killed process flushes nothing
        environment[SPEC_VARIABLE] = self._spec
        loop = asyncio.get_running_loop()
        died = 0
        while died <= MAX_RESTARTS:
            started = loop.time()
            Path(scratch).mkdir(exist_ok=True)  # the one before may have removed it
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    nursery = await Child.start(
                        "env nursery", command, log=self._log, env=environment, stdin=theirs.fileno()
                    )
                self._control = ours
                ours.setblocking(False)
                self._ready.set()
                try:
                    await self._listen(ours)
                    await nursery.wait()
                finally:
                    self._ready.clear()
                    self._control = None
                    for process in self._workers.values():
                        process.close()
                    await nursery.stop()
                    for process in self._workers.values():
                        process.died = process.died or "the nursery of its worker process died"
                        if not process.ended.done():
                            process.ended.cancel()
                    self._workers.clear()
            died = 1 if loop.time() - started > STEADY_S else died + 1
        raise ChildError(nursery.death())

    async def _listen(self, control: socket.socket) -> None:
        """What the nursery tells, until it is gone."""
        loop = asyncio.get_running_loop()
        data = b""
        while True:
            try:
                part = await loop.sock_recv(control, 4096)
            except OSError:
                return
            if not part:
                return
            data += part
            while len(data) >= RECORD.size:
                kind, number, code = RECORD.unpack(data[: RECORD.size])
                data = data[RECORD.size :]
                process = self._workers.pop(number, None)
                if kind == ENDED and process is not None and not process.ended.done():
                    process.ended.set_result(code)


def _settle(pending: _Pending, data: bytes) -> None:
    try:
        answer = decode_answer(data)
    except msgspec.DecodeError as error:
        _fail(pending, RemoteError(f"gave what cannot be used: {error}"))
        return
    if isinstance(answer, Raised):
        _fail(pending, EnvDown(answer.error) if answer.down else RemoteError(answer.error, answer.details))
    elif not pending.future.done():
        pending.future.set_result(answer)


def _fail(pending: _Pending, error: Exception) -> None:
    """Nothing, if it has its result or nobody waits for one."""
    if not pending.future.done():
        pending.future.set_exception(error)


def _ending(code: int | None) -> str:
    if code is None:
        return "broke off"
    if code >= 0:
        return f"exited with {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + ("; is there too little memory?" if name == "SIGKILL" else "")
