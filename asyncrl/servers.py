"""What a run starts on this machine beside the trainer: inference servers (the embedded engine or SGLang) and relays of
weights, one process each.

Owns the child processes. One that ends by itself is started again, a few times: the proxy sends a server's requests
elsewhere meanwhile and brings its weights up to date when it answers again, and the other relays go on without one.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from asyncrl.access import VARIABLE, gloo_interface
from asyncrl.config import Recipe
from asyncrl.leftovers import MEMORY, Leftovers
from asyncrl.processes import Child, ChildError, free_port
from asyncrl.weights.store import PREFIX

T = TypeVar("T")

STEADY_S = 600.0
"""A process that ran for so long was in order: its restarts are counted anew. One that dies again and again has a cause
that a restart does not mend."""
MAX_BACKOFF_S = 30.0


class LocalProcesses(ABC):
    """``places`` are the URLs of running ones, which stay untouched; for each that is empty a process on loopback is
    started. ``note`` prints a line for the user; ``token`` is given to what is started (``access.py``)."""

    def __init__(
        self, recipe: Recipe, places: Sequence[str], *, logs: Path, note: Callable[[str], None], token: str
    ) -> None:
        self._recipe = recipe
        self._token = token
        self._logs = logs
        self._note = note
        self._ports: dict[int, int] = {}
        self._children: dict[int, Child] = {}
        self._new: list[int] = []
        """Processes that are not watched yet."""
        self._grown = asyncio.Event()
        self._retired: dict[str, None] = {}
        """Names of those that are not started again."""
        self._outliving: Leftovers | None = None
        self.urls: list[str] = []
        for place in places:
            self._place(place)

    def _place(self, url: str) -> int:
        """Its index."""
        index = len(self.urls)
        if not url:
            self._ports[index] = free_port()
            url = f"http://127.0.0.1:{self._ports[index]}"
        self.urls.append(url)
        return index

    async def start(self) -> None:
        """Start all processes; does not wait until they are ready."""
        for index in self._ports:
            await self._add(index)

    async def add(self, url: str) -> int:
        """One more: the index of that ``url``, or of a new process where it is empty. Raises ``ChildError``."""
        if not url and not self._children:
            raise ChildError("this run starts no servers; give the URL of one that runs")
        index = self._place(url)
        if not url:
            await self._add(index)
        return index

    async def _add(self, index: int) -> None:
        self._children[index] = await self._started(index)
        self._new.append(index)
        self._grown.set()

    async def until_death(self, starting: Awaitable[T]) -> T:
        """``starting``, unless a process ends before it is done: then ``ChildError`` with its last words, at once."""

        async def guard(child: Child) -> None:
            await child.wait()
            raise ChildError(child.death())

        async with asyncio.TaskGroup() as group:
            guards = [group.create_task(guard(child)) for child in self._children.values()]
            result = await starting
            for task in guards:
                task.cancel()
        return result

    async def watch(self) -> None:
        """Until cancelled; starts ended processes anew."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._grown.wait()
                self._grown.clear()
                new, self._new = self._new, []
                for index in new:
                    group.create_task(self._keep(index))

    async def stop(self) -> None:
        if self._outliving is not None:
            self._outliving.look()
        async with asyncio.TaskGroup() as group:
            for child in self._children.values():
                group.create_task(child.stop())
        if self._outliving is not None:
            await asyncio.to_thread(self._outliving.close)
            self._outliving = None

    @property
    def _leftovers(self) -> Leftovers:
        """Of what tidies nothing up: SGLang, and relays that are killed with this process."""
        if self._outliving is None:
            self._outliving = Leftovers()
        return self._outliving

    def owns(self, index: int) -> bool:
        """Whether that one is started here."""
        return index in self._ports

    def began(self, name: str) -> float | None:
        """When the process of that name was started, in loop time; None if there is none, or it has ended."""
        child = self._find(name)
        return None if child is None else child.began

    def kill(self, name: str) -> None:
        """The process of that name ends at once, if it was started here; ``watch`` starts it again."""
        if (child := self._find(name)) is not None:
            child.kill()

    def retire(self, name: str) -> None:
        """The process of that name ends in order, if it was started here, and is not started again."""
        self._retired[name] = None
        if (child := self._find(name)) is not None:
            child.terminate()

    def _find(self, name: str) -> Child | None:
        return next((c for c in self._children.values() if c.name == name and c.exit_code is None), None)

    async def _keep(self, index: int) -> None:
        """Keep one process running. Out of restarts it stays dead: the run ends when no server is left."""
        engine, loop = self._recipe.engine, asyncio.get_running_loop()
        tries = 0
        while True:
            child = self._children[index]
            await child.wait()
            if child.name in self._retired:
                return
            if loop.time() - child.began > STEADY_S:
                tries = 0
            if tries == engine.restarts:
                break
            self._note(f"{child.death()}; starting it again")
            while self._children[index] is child and tries < engine.restarts:
                await asyncio.sleep(min(MAX_BACKOFF_S, engine.restart_backoff_s * 2**tries))
                tries += 1
                if child.name in self._retired:
                    return
                try:
                    self._children[index] = await self._started(index)
                except ChildError as error:  # that counts as a death
                    self._note(f"{child.name}: cannot be started again ({error})")
            if self._children[index] is child:
                break
        again = f"; it died {tries + 1} times and is given up" if tries else ""
        self._note(f"{child.death()}{again}")

    async def _started(self, index: int) -> Child:
        """Raises ``ChildError``."""
        try:
            return await self._start(index)
        except OSError as error:
            raise ChildError(str(error)) from None

    @abstractmethod
    async def _start(self, index: int) -> Child:
        """Raises ``ChildError`` or ``OSError``."""


class LocalRelays(LocalProcesses):
    """``weights.relays`` of them, where the recipe asks for relays and names none."""

    def __init__(self, recipe: Recipe, *, logs: Path, note: Callable[[str], None], token: str = "") -> None:
        weights = recipe.weights
        count = weights.relays if weights.transport == "relay" else 0
        super().__init__(recipe, weights.relay_urls or [""] * count, logs=logs, note=note, token=token)

    async def _start(self, index: int) -> Child:
        self._leftovers.folder(Path(MEMORY, f"{PREFIX}{self._ports[index]}"))
        command = [sys.executable, "-m", "asyncrl.weights.relay_main", "--port", str(self._ports[index])]
        command += ["--chunk-mb", str(self._recipe.weights.chunk_mb), "--log-level", "warning"]
        return await Child.start(
            f"relay {index}", command, log=self._logs / f"relay-{index}.log", env={VARIABLE: self._token}
        )


class LocalServers(LocalProcesses):
    """Those at ``places``: ``engine.urls`` unless they are given, or else ``engine.count`` to be started."""

    def __init__(
        self,
        recipe: Recipe,
        places: Sequence[str] | None = None,
        *,
        logs: Path,
        note: Callable[[str], None],
        token: str = "",
    ) -> None:
        engine = recipe.engine
        places = engine.urls or [""] * engine.count if places is None else places
        super().__init__(recipe, places, logs=logs, note=note, token=token)

    async def _start(self, index: int) -> Child:
        engine = self._recipe.engine
        env = {"OMP_NUM_THREADS": str(engine.threads), "MKL_NUM_THREADS": str(engine.threads), VARIABLE: self._token}
        env |= gloo_interface(self._recipe.weights.address)
        if engine.gpus:
            env["CUDA_VISIBLE_DEVICES"] = engine.gpus[index % len(engine.gpus)]
        name, log = f"server {index}", self._logs / f"server-{index}.log"
        if engine.kind == "embedded":
            return await Child.start(name, self._embedded(index), log=log, env=env)
        # Otherwise /health generates a token each time, and fails while generation is paused.
        env |= {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "HF_HUB_OFFLINE": "1"}
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")  # torch's own place: it is to stay
        env |= {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))}
        folder = tempfile.mkdtemp(prefix="asyncrl-server-")
        try:
            child = await Child.start(name, self._sglang(index), log=log, env=env | {"TMPDIR": folder})
        except BaseException:
            shutil.rmtree(folder)
            raise
        self._leftovers.session(child.pid, folder)
        return child

    def _embedded(self, index: int) -> list[str]:
        engine, recipe = self._recipe.engine, self._recipe
        return [
            *(sys.executable, "-m", "asyncrl.serve", recipe.model.path),
            *("--port", str(self._ports[index]), "--device", engine.device, "--dtype", recipe.model.dtype),
            *("--max-running-requests", str(engine.max_running_requests)),
            *("--max-total-tokens", str(engine.max_total_tokens)),
            *("--host-kv-tokens", str(engine.host_kv_tokens)),
            *(("--kv-reuse",) if engine.kv_reuse else ()),
            *("--seed", str(recipe.seed * 1000 + index), "--log-level", "warning"),
            *engine.args,
        ]

    def _sglang(self, index: int) -> list[str]:
        engine, recipe = self._recipe.engine, self._recipe
        host_share = 1 + engine.host_kv_tokens / engine.max_total_tokens  # its host memory has what the GPU has, too
        return [
            engine.python or sys.executable,
            *((engine.script,) if engine.script else ("-m", "sglang.launch_server")),
            *("--model-path", recipe.model.path, "--host", "127.0.0.1", "--port", str(self._ports[index])),
            *("--dtype", recipe.model.dtype, "--random-seed", str(recipe.seed * 1000 + index)),
            *("--max-running-requests", str(engine.max_running_requests)),
            *("--max-total-tokens", str(engine.max_total_tokens)),
            *(() if engine.device == "auto" else ("--device", engine.device)),
            *(("--enable-hierarchical-cache", "--hicache-ratio", f"{host_share:g}") if engine.host_kv_tokens else ()),
            *("--incremental-streaming-output", "--enable-metrics"),
            *engine.args,
        ]
