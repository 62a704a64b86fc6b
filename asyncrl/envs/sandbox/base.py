"""What every sandbox offers, and the one way in which commands are run: bounded output, a deadline, nobody left behind.

Files are read and written by commands inside the box, with its rights: a symlink planted there can only lead to what
the box may see, never out onto the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

from asyncrl.core.types import Record
from asyncrl.env import EnvDown
from asyncrl.shield import to_the_end

TIMED_OUT = 124
"""Return code of a command that ran past its deadline, as ``timeout(1)`` has it."""
TOO_LONG = 126
MAX_COMMAND = 120_000
"""Bytes. Linux passes no argument of more than 128 KiB."""
FILE_TIMEOUT_S = 60.0
KILL_GRACE_S = 10.0
"""How long a killed command may take to be gone before the sandbox is called broken."""


class Limits(Record, frozen=True, kw_only=True):
    """Of one box. Time is a limit of each command."""

    memory_mb: int = 1024
    """RAM of all processes together; of each process where the machine offers no memory cgroup."""
    disk_mb: int = 512
    """What may be written, ``/tmp`` included. It is held in RAM under bubblewrap."""
    processes: int = 128
    cpus: float = 1.0
    """Cores; only where the machine offers a cpu cgroup."""
    output_bytes: int = 65_536
    """Of a command; of longer output the middle is left out."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"sandbox: {name} = {value}: must be more than 0")


class Source(Record, frozen=True, kw_only=True):
    """What a box starts from. Nothing that happens in a box changes it."""

    tree: str = ""
    """Folder that appears as ``workdir``. Empty: an empty one."""
    image: str = ""
    """Container image, which has its tree at ``workdir``; in place of ``tree``."""
    engine: str = ""
    """``docker`` or ``podman``. Empty: the first that is installed."""
    workdir: str = "/testbed"
    read_only: Mapping[str, str] = {}
    """Further folders of the host, host path → path in the box."""
    variables: Mapping[str, str] = {}
    """Environment variables of every command; nothing else of the host's environment is there."""


class Completed(Record, frozen=True):
    """A command that has ended. ``output`` is stdout and stderr as they came."""

    output: str
    returncode: int
    timed_out: bool = False


def told(done: Completed, timeout_s: float) -> str:
    """A command's end in words for a model."""
    text = done.output if done.output.endswith("\n") or not done.output else done.output + "\n"
    if done.timed_out:
        return f"{text}[killed: no end within {timeout_s:g} s]\n"
    return f"{text}[exit code {done.returncode}]\n" if done.returncode else text or "[no output]\n"


class Sandbox(ABC):
    """One box. Commands may run side by side; what one leaves running dies with it."""

    limits: Limits

    @classmethod
    @abstractmethod
    async def open(cls, source: Source, limits: Limits) -> Self:
        """Raises ``EnvDown``."""

    @abstractmethod
    async def execute(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", output_bytes: int | None = None
    ) -> tuple[bytes, int | None]:
        """Output and return code of ``argv``; None if it was killed at the deadline. Raises ``EnvDown``."""

    @abstractmethod
    async def close(self) -> None:
        """Ends what runs and frees everything. May be called twice."""

    async def run(self, command: str, timeout_s: float) -> Completed:
        """``command`` for bash, in the work folder. Raises ``EnvDown``."""
        command = _argument(command)
        if len(command.encode()) > MAX_COMMAND:
            return Completed(f"the command is longer than {MAX_COMMAND} bytes; do it in parts\n", TOO_LONG)
        return await self.run_program(["bash", "-c", command], timeout_s)

    async def run_program(self, argv: Sequence[str], timeout_s: float, *, stdin: bytes = b"") -> Completed:
        """``execute``, with what it wrote as text. Raises ``EnvDown``."""
        output, code = await self.execute(argv, timeout_s=timeout_s, stdin=stdin)
        text = output.decode(errors="replace")
        return Completed(text, TIMED_OUT, True) if code is None else Completed(text, code)

    async def read_file(self, path: str, limit: int = 1_000_000) -> bytes:
        """Raises ``OSError`` for what cannot be read or is longer than ``limit`` bytes."""
        script = 'test -f "$1" || { echo "no such file"; exit 1; }; head -c "$2" -- "$1"'
        argv = ["bash", "-c", script, "read", _argument(path), str(limit + 1)]
        data, code = await self.execute(argv, timeout_s=FILE_TIMEOUT_S, output_bytes=limit + 1024)
        if code != 0:
            raise OSError(f"{path}: {data.decode(errors='replace').strip()[-200:]}")
        if len(data) > limit:
            raise OSError(f"{path}: longer than {limit} bytes")
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        """Also makes its folder. Raises ``OSError``."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        argv = ["bash", "-c", script, "write", _argument(path)]
        output, code = await self.execute(argv, timeout_s=FILE_TIMEOUT_S, stdin=data)
        if code != 0:
            raise OSError(f"{path}: {output.decode(errors='replace').strip()[-200:]}")


def _argument(text: str) -> str:
    """Without what a process's argument cannot hold, and a model may write."""
    return text.replace("\0", "").encode(errors="replace").decode()


class Bounded:
    """The first and the last bytes of a stream, ``limit`` in all."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._lost = 0

    def add(self, data: bytes) -> None:
        room = max(0, self._half - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:  # cut now and then, so that a byte is moved about once
            self._cut()

    def _cut(self) -> None:
        extra = len(self._tail) - self._half
        if extra > 0:
            self._lost += extra
            del self._tail[:extra]

    def value(self) -> bytes:
        self._cut()
        gap = f"\n[... {self._lost} bytes left out ...]\n".encode() if self._lost else b""
        return bytes(self._head) + gap + bytes(self._tail)


async def communicate(
    argv: Sequence[str],
    *,
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[bytes, int | None]:
    """Output (bounded) and return code of a process of the host; None if it was killed at the deadline. The process
    leads a group, which is killed at the deadline and on cancellation; ``variables`` take the place of this process's
    environment. Raises ``EnvDown`` if it cannot be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            env=variables,
        )
    except OSError as error:
        raise EnvDown(f"sandbox: cannot start {argv[0]} ({error.strerror})") from None
    output = Bounded(output_bytes)
    code: int | None = None
    try:
        async with asyncio.timeout(timeout_s):
            async with asyncio.TaskGroup() as group:
                group.create_task(_drain(process, output))
                if stdin:
                    group.create_task(_feed(process, stdin))
            code = await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await _gone(process, output)
    return output.value(), code


async def _gone(process: asyncio.subprocess.Process, output: Bounded) -> None:
    """Until a killed process and all who held its output are gone."""

    async def rest() -> None:
        await _drain(process, output)
        await process.wait()

    try:
        await to_the_end(rest(), KILL_GRACE_S)
    except TimeoutError:
        raise EnvDown(f"sandbox: a killed command is still there after {KILL_GRACE_S:g} s") from None


async def _drain(process: asyncio.subprocess.Process, output: Bounded) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(65_536):
        output.add(data)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read all
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()
