"""A simulated inference server: the Engine port on virtual time, by StaleFlow's cost model.

Continuous batching with prefill, a KV budget with preemption into a waiting queue, weight loading, and death. Between
two events the sequences' progress has a closed form (core/cost_model.py), so an event costs O(running) and a token
nothing.

Generated ids count down to the end of their response: id ``GENERATED + r`` says that r tokens follow, and
``GENERATED`` itself is the end of turn. So a response that is cut off and sent again with its tokens goes on to the
length that was drawn for it, on any server, without hidden state.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from asyncrl.core.cost_model import CostModel
from asyncrl.ports import Chunk, EngineError, EngineInfo, EngineLoad, EngineRejected, GenerateRequest

GENERATED = 256
"""Ids below are text bytes (sim/tokenizer.py); ids from here on were generated."""

Lengths = Callable[[random.Random], int]


class _Sequence:
    """One reply in the making. ``remaining`` tokens follow before its own end, ``budget`` before its limit."""

    __slots__ = ("budget", "emitted", "index", "made", "outbox", "prompt", "remaining", "wake")

    def __init__(self, index: int, prompt: int, remaining: int, budget: int) -> None:
        self.index = index
        self.prompt = prompt
        self.remaining = remaining
        self.budget = budget
        self.made = 0
        self.emitted = 0
        self.outbox: deque[Chunk | EngineError] = deque()
        self.wake: Callable[[], None] = lambda: None

    @property
    def kv(self) -> int:
        return self.prompt + self.made

    @property
    def to_go(self) -> int:
        return min(self.remaining, self.budget) - self.made

    @property
    def ended(self) -> str | None:
        """``stop`` or ``length`` once its last token is made."""
        if self.made == self.remaining:
            return "stop"
        return "length" if self.made == self.budget else None


class SimEngine:
    """``lengths`` draws the length of each response; ``load_s`` is the time a weight load takes."""

    def __init__(
        self,
        name: str,
        *,
        rng: random.Random,
        lengths: Lengths,
        cost: CostModel | None = None,
        max_running: int = 256,
        max_tokens: int = 1_000_000,
        context_length: int = 40_960,
        load_s: float = 0.5,
        stream_interval: int = 0,
    ) -> None:
        self.name = name
        self.version = 0
        self._rng = rng
        self._lengths = lengths
        self._cost = cost or CostModel()
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._context_length = context_length
        self._load_s = load_s
        self._stream_interval = stream_interval
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._held: deque[_Sequence] = deque()
        """Arrived while paused."""
        self._by_rid: dict[str, list[_Sequence]] = {}
        self._paused = False
        self._dead = False
        self._at = 0.0
        """Virtual time up to which the running sequences' progress is booked."""
        self._timer: asyncio.TimerHandle | None = None
        self.steps = 0
        """Decode steps since the start."""

    # --- Engine port

    async def connect(self) -> EngineInfo:
        self._check_alive()
        return EngineInfo(
            name=self.name,
            version=self.version,
            max_running_requests=self._max_running,
            max_total_tokens=self._max_tokens,
            context_length=self._context_length,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._check_alive()
        total = len(request.input_ids) + request.max_new_tokens
        if total > min(self._context_length, self._max_tokens):
            raise EngineRejected(f"{self.name}: {total} tokens exceed its context of {self._context_length}")
        if request.rid in self._by_rid:
            raise EngineRejected(f"{self.name}: duplicate request id {request.rid}")
        sequences = [self._sequence(request, index) for index in range(request.n)]
        arrived = asyncio.Event()
        for sequence in sequences:
            sequence.wake = arrived.set
        self._by_rid[request.rid] = sequences
        self._advance()
        (self._held if self._paused else self._waiting).extend(sequences)
        self._schedule()
        unfinished = len(sequences)
        try:
            while unfinished:
                await arrived.wait()
                arrived.clear()
                for sequence in sequences:
                    while sequence.outbox:
                        item = sequence.outbox.popleft()
                        if isinstance(item, EngineError):
                            raise item
                        unfinished -= item.finish_reason is not None
                        yield item
        finally:
            del self._by_rid[request.rid]
            self._remove(sequences)

    async def abort(self, rid: str) -> None:
        self._check_alive()
        sequences = self._by_rid.get(rid, [])
        self._advance()
        for sequence in sequences:
            if any(sequence is other for queue in (self._running, self._waiting, self._held) for other in queue):
                self._emit(sequence, sequence.ended or "abort")
        self._remove(sequences)

    async def pause(self) -> None:
        self._check_alive()
        self._advance()
        self._paused = True
        for sequence in [*self._running, *self._waiting]:
            self._emit(sequence, sequence.ended or "abort")
        self._running.clear()
        self._waiting.clear()
        self._schedule()

    async def resume(self) -> None:
        self._check_alive()
        self._advance()
        self._paused = False
        self._waiting.extend(self._held)
        self._held.clear()
        self._schedule()

    async def load_from_disk(self, path: str, version: int) -> None:
        await asyncio.sleep(self._load_s)
        self._check_alive()
        self.version = version

    async def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        self._check_alive()

    async def load_from_group(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str, version: int
    ) -> None:
        await self.load_from_disk(group, version)

    async def health(self) -> bool:
        return not self._dead

    async def load(self) -> EngineLoad:
        self._check_alive()
        self._advance()
        return EngineLoad(
            running=len(self._running), waiting=len(self._waiting) + len(self._held), used_tokens=self._used()
        )

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # --- faults

    def kill(self) -> None:
        """The process dies: every request breaks off, and what was not streamed yet is lost."""
        self._dead = True
        for sequence in [*self._running, *self._waiting, *self._held]:
            sequence.outbox.append(EngineError(f"{self.name}: connection lost"))
            sequence.wake()
        self._running.clear()
        self._waiting.clear()
        self._held.clear()
        self._schedule()

    def restart(self) -> None:
        """A new process with the initial weights."""
        self._dead = False
        self._paused = False
        self.version = 0

    # --- the model of a server

    def _sequence(self, request: GenerateRequest, index: int) -> _Sequence:
        last = request.input_ids[-1]
        remaining = last - GENERATED if last > GENERATED else max(1, self._lengths(self._rng))
        return _Sequence(index, len(request.input_ids), remaining, request.max_new_tokens)

    def _used(self) -> int:
        return sum(s.kv for s in self._running)

    def _advance(self) -> None:
        """Book the decode steps that fit between the last booking and now."""
        now = asyncio.get_running_loop().time()
        if self._running and now > self._at:
            n, kv = len(self._running), self._used()
            steps = min(self._cost.steps_in(now - self._at, n, kv), min(s.to_go for s in self._running))
            self._at += self._cost.time_of(steps, n, kv)
            self.steps += steps
            for sequence in self._running:
                sequence.made += steps
        if not self._running:
            self._at = max(self._at, now)

    def _schedule(self) -> None:
        """Let waiting sequences in as the KV budget allows, preempt the youngest when it is full, and set the timer for
        the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._paused or self._dead:
            return
        used = self._used()
        while len(self._running) > 1 and used + len(self._running) > self._max_tokens:
            victim = self._running.pop()
            self._waiting.appendleft(victim)
            used -= victim.kv
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            if used + sequence.kv + len(self._running) + 1 > self._max_tokens:
                break
            self._running.append(self._waiting.popleft())
            used += sequence.kv
            self._at += self._cost.prefill * sequence.kv
        if self._running:
            n = len(self._running)
            steps = min(self._until_event(s) for s in self._running)
            if n > 1:
                steps = max(1, min(steps, (self._max_tokens - used) // n))
            self._timer = asyncio.get_running_loop().call_at(self._at + self._cost.time_of(steps, n, used), self._event)

    def _until_event(self, sequence: _Sequence) -> int:
        if not self._stream_interval:
            return sequence.to_go
        return min(sequence.to_go, self._stream_interval - (sequence.made - sequence.emitted) % self._stream_interval)

    def _event(self) -> None:
        self._timer = None
        self._advance()
        ended = [s for s in self._running if s.to_go <= 0]
        for sequence in ended:
            self._emit(sequence, sequence.ended)
        if ended:
            self._running = [s for s in self._running if s.to_go > 0]
        if self._stream_interval:
            for sequence in self._running:
                if sequence.made - sequence.emitted >= self._stream_interval:
                    self._emit(sequence, None)
        self._schedule()

    def _emit(self, sequence: _Sequence, finish_reason: str | None) -> None:
        """Hand over the tokens made since the last chunk. They count down: see the module's docstring."""
        new = sequence.made - sequence.emitted
        top = GENERATED + sequence.remaining - sequence.emitted - 1
        sequence.emitted = sequence.made
        sequence.outbox.append(
            Chunk(
                index=sequence.index,
                output_ids=array("i", range(top, top - new, -1)),
                logprobs=array("f", [-0.5]) * new,
                versions=array("i", [self.version]) * new,
                finish_reason=finish_reason,
            )
        )
        sequence.wake()

    def _remove(self, sequences: Sequence[_Sequence]) -> None:
        """Forget sequences that are still here (aborted, or their caller left)."""
        gone = {id(s) for s in sequences}
        if any(id(s) in gone for queue in (self._running, self._waiting, self._held) for s in queue):
            self._advance()
            self._running = [s for s in self._running if id(s) not in gone]
            self._waiting = deque(s for s in self._waiting if id(s) not in gone)
            self._held = deque(s for s in self._held if id(s) not in gone)
            self._schedule()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineError(f"{self.name}: connection refused")

    def __repr__(self) -> str:
        return f"<SimEngine {self.name} v{self.version} {len(self._running)} running, {len(self._waiting)} waiting>"
