"""The rules of a simulated server (sim/server.py) played one step and one token at a time, with lists and sets.

Slow and obvious on purpose: what the closed forms, heaps and trees of the real one are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.core.cost_model import CostModel
from asyncrl.sim.server import GENERATED

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Job:
    """One reply. ``chunks`` are (time, new tokens, finish reason, cached tokens)."""

    tokens: Tokens
    remaining: int
    budget: int
    chunks: list[tuple[float, int, str | None, int]] = field(default_factory=list)
    made: int = 0
    sent: int = 0
    to_prefill: int = 0
    cached: int = 0
    shared: int = 0

    @property
    def whole(self) -> Tokens:
        return self.tokens + tuple(GENERATED + self.remaining - 1 - i for i in range(self.made))

    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.made == self.remaining else "length" if self.made == self.budget else None


class Reference:
    """``at(time, event)`` schedules events; ``run`` plays them all. ``on_end`` hears of each reply's end."""

    def __init__(
        self,
        cost: CostModel,
        *,
        max_running: int,
        max_tokens: int,
        stream_interval: int,
        chunked_prefill: int,
        prefix_cache: bool,
        on_end: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.cost = cost
        self.max_running = max_running
        self.max_tokens = max_tokens
        self.interval = stream_interval
        self.chunked = chunked_prefill
        self.cached_prefixes = prefix_cache
        self.on_end = on_end
        self.now = 0.0
        self.slow = 1.0
        self.paused = False
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.held: dict[Tokens, int] = {}
        """Every prefix in the cache, each standing for its last token, by last use."""
        self.uses = 0
        self.steps = self.prefilled = self.preemptions = self.most_used = 0
        self.busy_s = 0.0
        self._events: list[tuple[float, Callable[[], None]]] = []

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._events.append((time, event))

    # --- events

    def arrive(self, job: Job) -> None:
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        if job in self.running:
            self._leave(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        else:
            return
        self._send(job, "abort")

    def pause(self) -> None:
        self.paused = True
        for job in [*self.running, *self.waiting]:
            self.abort(job)

    def resume(self) -> None:
        self.paused = False

    def load(self) -> None:
        """New weights, while paused."""
        self.held.clear()

    # --- time

    def run(self) -> None:
        while True:
            self._external(self.now)
            self._preempt()
            self._admit()
            if not self.running:
                if not self._events:
                    return
                self.now = max(self.now, self._events[0][0])
                continue
            self._step()

    def _external(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._events.pop(0)[1]()

    def _step(self) -> None:
        decoding = [job for job in self.running if not job.to_prefill]
        prefilling = [job for job in self.running if job.to_prefill]
        shares: list[tuple[Job, int]] = []
        if prefilling and not self.chunked:
            decoding, shares = [], [(prefilling[0], prefilling[0].to_prefill)]
        else:
            left = self.chunked
            for job in prefilling:
                shares.append((job, min(left, job.to_prefill)))
                left -= shares[-1][1]
        kv = sum(len(job.whole) for job in decoding)
        seconds = self.slow * self.cost.step(len(decoding), kv, sum(tokens for _, tokens in shares))
        start, end = self.now, self.now + seconds
        while self._events and self._events[0][0] < end:
            self.now, event = self._events.pop(0)
            event()
            if not self.running:
                self.busy_s += self.now - start
                return
        self.now = end
        self.busy_s += seconds
        self.steps += bool(decoding)
        decoding = [job for job in decoding if job in self.running]
        for job in decoding:
            job.made += 1
        self._evict()
        self.most_used = max(self.most_used, self._used())
        for job, tokens in shares:
            if job in self.running:
                job.to_prefill -= tokens
                self.prefilled += tokens
                if not job.to_prefill:
                    self._hold(job)
        for job in decoding:
            if job.finish_reason:
                self._leave(job)
                self._send(job, job.finish_reason)
            elif self.interval and job.made - job.sent == self.interval:
                self._send(job, None)

    # --- sequences

    def _send(self, job: Job, reason: str | None) -> None:
        job.chunks.append((self.now, job.made - job.sent, reason, job.cached))
        job.sent = job.made
        if reason is not None:
            self.on_end(job)

    def _admit(self) -> None:
        while self.waiting and not self.paused and len(self.running) < self.max_running:
            pending = sum(job.to_prefill for job in self.running)
            if pending and pending >= self.chunked:
                return
            job = self.waiting[0]
            whole = job.whole
            shared = max((n for n in range(len(whole)) if n == 0 or whole[:n] in self.held), default=0)
            job.shared, job.to_prefill = shared, len(whole) - shared
            if self._used([job]) + len(self.running) + 1 > self.max_tokens:
                return
            job.cached = min(shared, len(job.tokens))
            self.running.append(self.waiting.pop(0))
            self._evict()

    def _preempt(self) -> None:
        while len(self.running) > 1 and self._used() + sum(not j.to_prefill for j in self.running) > self.max_tokens:
            job = self.running.pop()
            self._touch(job.whole[: job.shared])
            self.waiting.insert(0, job)
            self.preemptions += 1

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        self._hold(job)

    # --- memory

    def _locked(self, more: list[Job]) -> set[Tokens]:
        return {job.whole[:n] for job in [*self.running, *more] for n in range(1, job.shared + 1)}

    def _private(self) -> int:
        return sum(len(job.whole) - job.shared for job in self.running)

    def _used(self, more: list[Job] = []) -> int:  # noqa: B006
        return self._private() + sum(len(j.whole) - j.shared for j in more) + len(self._locked(more))

    def _touch(self, prefix: Tokens) -> None:
        self.uses += 1
        for n in range(1, len(prefix) + 1):
            self.held[prefix[:n]] = self.uses

    def _hold(self, job: Job) -> None:
        """What was computed of it is there for others."""
        if self.cached_prefixes:
            computed = len(job.whole) - job.to_prefill
            self._touch(job.whole[:computed])
            job.shared = computed

    def _evict(self) -> None:
        while self._private() + len(self.held) > self.max_tokens:
            locked, inner = self._locked([]), {prefix[:-1] for prefix in self.held}
            leaves = [p for p in self.held if p not in inner and p not in locked]
            del self.held[min(leaves, key=lambda p: self.held[p])]
