"""What happens inside a simulated inference server: continuous batching by StaleFlow's cost model, in closed form.

The rules, step by step (tests/sim/reference.py plays them one step at a time):

* A step gives each decoding sequence one token and takes the cost model's time. Once begun it takes that time, whoever
  leaves meanwhile; only when nobody is left is it given up. Who arrives meanwhile joins at its end.
* Sequences are admitted in the order of arrival, as long as the first one fits. Prefill is first come, first served.
  With ``chunked_prefill`` 0 it runs alone and first, one sequence at a time, while decoding stalls (SGLang without
  mixed chunks); else each step carries at most that many tokens of it. A sequence decodes once its own prefill is done.
* Running sequences and the prefix cache share the KV budget. Cached prefixes that nobody uses go first; then the
  sequence that was admitted last goes back to the front of the queue, and its tokens are prefilled again (Figure 11).
* Tokens are held for others once they were prefilled or once their sequence left. A prompt's last token is always
  computed, as in SGLang: something must be sampled from it.

Between two events each step is like the one before, so ``advance`` books any number of them at once: a sequence only
remembers at which decode step it began, and a heap knows who has to be reported next. An event costs O(log n), a token
nothing. Knows no loop: the caller says what time it is, and ``plan`` says when to come back.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from typing import Generic, TypeVar

from asyncrl.core.cost_model import CostModel
from asyncrl.sim.prefix_cache import ITEM, Node, PrefixCache

EPS = 1e-9
"""Seconds that count as the same moment."""

GENERATED = 256
"""Ids below are text bytes (sim/tokenizer.py); ids from here on were generated, and say how many tokens follow."""

_MASTER_MAX = 1 << 20
_master: array[int] = array("i")
"""Generated ids in the order of any response's end: … GENERATED + 2, GENERATED + 1, GENERATED."""


def countdown(follow: int, count: int) -> array[int]:
    """Ids of ``count`` generated tokens, of which ``follow`` - 1, ``follow`` - 2 … tokens follow. A copy of memory."""
    if follow > len(_master):
        if follow > _MASTER_MAX:
            return array("i", range(GENERATED + follow - 1, GENERATED + follow - 1 - count, -1))
        size = max(1024, 2 * len(_master), follow)
        _master[:] = array("i", range(GENERATED + size - 1, GENERATED - 1, -1))
    start = len(_master) - follow
    return _master[start : start + count]


class Sequence:
    """One reply in the making. ``tokens`` is the request's input, which nobody may change; ``remaining`` tokens follow
    it before the reply's own end, ``budget`` before its limit."""

    __slots__ = (
        "admission",
        "budget",
        "cached",
        "made",
        "node",
        "remaining",
        "reported",
        "start",
        "to_prefill",
        "tokens",
    )

    def __init__(self, tokens: array[int], remaining: int, budget: int) -> None:
        self.tokens = tokens
        self.remaining = remaining
        self.budget = budget
        self.made = 0
        """Tokens generated; booked when it is reported, preempted or gone."""
        self.reported = 0
        """Of them, those that were reported as due."""
        self.start = 0
        """The server's decode step before its first token."""
        self.admission = 0
        """Number of its admission while it decodes, else 0."""
        self.to_prefill = 0
        self.cached = 0
        """Tokens of its input that need no prefill."""
        self.node: Node | None = None
        """End of the prefix that it holds in the cache; locked."""

    @property
    def length(self) -> int:
        """Tokens with their KV, as booked."""
        return len(self.tokens) + self.made

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length`` once its last token is made."""
        if self.made == self.remaining:
            return "stop"
        return "length" if self.made == self.budget else None


S = TypeVar("S", bound=Sequence)


class Server(Generic[S]):
    """``max_tokens`` is the KV budget. With ``stream_interval`` i > 0 a sequence is due at each i-th token of it."""

    def __init__(
        self,
        *,
        cost: CostModel,
        max_running: int,
        max_tokens: int,
        stream_interval: int = 0,
        chunked_prefill: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        self.cost = cost
        self.waiting: OrderedDict[S, None] = OrderedDict()
        self.admitted: dict[S, None] = {}
        """In the order of admission: prefilling or decoding."""
        self.steps = 0
        """Decode steps."""
        self.busy_s = 0.0
        """Seconds spent in steps."""
        self.prefilled = 0
        """Tokens prefilled."""
        self.preemptions = 0
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._stream_interval = stream_interval
        self._chunked = chunked_prefill
        self._cache = PrefixCache() if prefix_cache else None
        self._prefilling: OrderedDict[S, None] = OrderedDict()
        self._pending = 0
        """Tokens that the prefilling sequences still have to compute."""
        self._decoding = 0
        """Sequences that decode."""
        self._kv = 0
        """Tokens of the decoding sequences: what a step has to read."""
        self._private = 0
        """KV tokens of admitted sequences that are not in the prefix cache."""
        self._due: list[tuple[int, int, S]] = []
        """Heap of (decode step, admission) at which a sequence is to be reported; entries of former admissions are
        stale."""
        self._admissions = 0
        self._slow = 1.0
        # The stretch that was planned: equal steps from the boundary ``_at`` to ``_until``.
        self._planned = 0
        self._at = self._until = self._now = 0.0
        self._decodes = False
        """Its steps decode."""
        self._chunk = 0
        """Tokens that each of its steps prefills."""
        self._goes_on = False
        """Nothing has to be decided at its end."""

    # --- what it holds

    @property
    def running(self) -> int:
        """Sequences with KV: decoding or prefilling."""
        return len(self.admitted)

    @property
    def used_tokens(self) -> int:
        """KV tokens of the admitted sequences, shared prefixes once."""
        return self._private + (self._cache.locked if self._cache else 0)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the prefix cache, whether a running sequence uses them or not."""
        return self._cache.size if self._cache else 0

    def __repr__(self) -> str:
        return f"<Server at step {self.steps}: {self.running} running, {len(self.waiting)} waiting>"

    # --- events: each is preceded by ``advance`` and followed by ``plan``

    def add(self, sequence: S) -> None:
        """It arrives."""
        self.waiting[sequence] = None

    def remove(self, sequence: S) -> None:
        """It is no longer wanted; harmless if it has left. What was computed of it stays in the prefix cache."""
        if sequence in self.admitted:
            self._freeze()
            self._leave(sequence)
            self._keep(sequence)
            if not self.admitted:
                self.busy_s += max(0.0, self._now - self._at)
                self._planned = 0
        else:
            self.waiting.pop(sequence, None)

    def slow(self, factor: float) -> None:
        """From the next step on, steps take ``factor`` times as long."""
        self._freeze()
        self._slow = factor

    def held(self, tokens: bytes, limit: int) -> int:
        """How many of the first ``limit`` tokens need no prefill."""
        return self._cache.find(tokens, limit).end if self._cache else 0

    def given(self, tokens: bytes) -> None:
        """Another server took their KV, and goes on with them."""
        if self._cache:
            self._cache.given(tokens)

    def hold(self, tokens: bytes) -> None:
        """KV that another server computed is there for those who come."""
        if self._cache:
            self._cache.insert(self._cache.find(b"", 0), tokens)
            self._evict()

    def flush(self) -> PrefixCache:
        """New weights: the prefix cache is worthless. Nothing may be admitted. What it was."""
        cache = self._cache or PrefixCache()
        assert not cache.locked, f"{cache.locked} tokens of the prefix cache are in use"
        if self._cache:
            self._cache = PrefixCache()
        return cache

    def advance(self, now: float) -> list[tuple[S, str | None]]:
        """Book the steps that have ended. Returns the sequences that have new tokens to report, in order, each with
        its finish reason if it has left."""
        self._now = now
        found: list[tuple[S, str | None]] = []
        while self._planned and not found:
            if now >= self._until - EPS:
                steps, end = self._planned, self._until
            elif self._planned == 1:
                break
            else:
                n = self._decoding if self._decodes else 0
                elapsed = (now - self._at) / self._slow
                steps = min(self.cost.steps_in(elapsed, n, self._kv, self._chunk), self._planned - 1)
                if not steps:
                    break
                end = self._at + self._slow * self.cost.time_of(steps, n, self._kv, self._chunk)
            self.busy_s += end - self._at
            self._at = end
            self._planned -= steps
            if self._decodes:
                tokens = steps * self._decoding
                self.steps += steps
                self._kv += tokens
                self._private += tokens
                self._evict()
            if self._chunk:
                self._prefill(steps * self._chunk)
            if self._due and self._due[0][0] <= self.steps:
                self._report(found)
            if self._planned:
                break
            if self._goes_on and not found:
                self._stretch()
        return found

    def plan(self, now: float, admit: bool) -> float | None:
        """Let sequences in (if ``admit``) or out, and plan the next steps. When to come back at the latest, or None if
        there is nothing to do."""
        if self._planned and now > self._at + EPS:  # a step is in flight
            if admit and self.waiting and len(self.admitted) < self._max_running:
                self._freeze()
        else:
            if now > self._at + EPS:  # was idle
                self._at = now
            self._preempt()
            if admit:
                self._admit()
            self._stretch()
        if not self._planned:
            return None
        # When a prefill ends and nobody waits, there is nothing to decide: decoding goes on to the next report.
        self._goes_on = not (self._decodes or self._chunked or (admit and self.waiting))
        return self._until + self._after_prefill() if self._goes_on else self._until

    # --- steps

    def _stretch(self) -> None:
        """Equal steps from here to the next event."""
        self._decodes, self._chunk = self._decoding > 0, 0
        if self._pending and not self._chunked:
            self._decodes, self._chunk, steps = False, self._pending, 1
        elif self._pending:
            self._chunk = min(self._chunked, self._pending)
            first = next(iter(self._prefilling)).to_prefill
            steps = max(1, min(self._pending // self._chunked, -(-first // self._chunked)))
            if self._decodes:
                steps = min(steps, self._steps_to_event())
        elif self._decodes:
            steps = self._steps_to_event()
        else:
            self._planned = 0
            return
        n = self._decoding if self._decodes else 0
        self._planned = steps
        self._until = self._at + self._slow * self.cost.time_of(steps, n, self._kv, self._chunk)

    def _steps_to_event(self) -> int:
        """Decode steps until a sequence is due or the KV budget is full; at least one."""
        steps = self._next_due() - self.steps
        if len(self.admitted) > 1:
            steps = min(steps, (self._max_tokens - self.used_tokens) // self._decoding)
        return max(1, steps)

    def _next_due(self) -> int:
        """The decode step at which a sequence is due. One must be decoding."""
        due = self._due
        while due[0][2].admission != due[0][1]:
            heapq.heappop(due)
        return due[0][0]

    def _after_prefill(self) -> float:
        """Seconds of decoding behind the prefill in flight until something can happen; never too long."""
        n, kv, steps = self._decoding, self._kv, 1
        if self._prefilling:
            sequence = next(iter(self._prefilling))
            n, kv = n + 1, kv + sequence.length
            steps = self._until_report(sequence) - sequence.made
        if self._decoding:
            steps = min(steps, self._next_due() - self.steps)
        steps = min(steps, (self._max_tokens - self.used_tokens) // max(1, n))
        return self._slow * self.cost.time_of(steps, n, kv) if steps > 0 else 0.0

    def _freeze(self) -> None:
        """Nothing but the step in flight is certain any more."""
        if self._planned > 1:
            n = self._decoding if self._decodes else 0
            self._planned = 1
            self._until = self._at + self._slow * self.cost.step(n, self._kv, self._chunk)

    def _prefill(self, tokens: int) -> None:
        self.prefilled += tokens
        self._pending -= tokens
        while tokens:
            sequence = next(iter(self._prefilling))
            part = min(tokens, sequence.to_prefill)
            tokens -= part
            sequence.to_prefill -= part
            if not sequence.to_prefill:
                del self._prefilling[sequence]
                self._begin(sequence)

    def _begin(self, sequence: S) -> None:
        """Its prefill is done: it decodes from the next step on, and others can use its tokens."""
        if self._cache and sequence.node:
            self._private -= sequence.length - sequence.node.end
            node = self._cache.insert(sequence.node, _bytes_behind(sequence, sequence.node.end))
            if node is not sequence.node:
                self._cache.lock(node)
                self._cache.unlock(sequence.node)
                sequence.node = node
        self._admissions += 1
        sequence.admission = self._admissions
        sequence.start = self.steps - sequence.made
        self._decoding += 1
        self._kv += sequence.length
        self._expect(sequence)

    def _until_report(self, sequence: S) -> int:
        """How many tokens it will have made when it is to be reported next."""
        made = min(sequence.remaining, sequence.budget)
        return min(made, sequence.reported + self._stream_interval) if self._stream_interval else made

    def _expect(self, sequence: S) -> None:
        due = sequence.start + self._until_report(sequence)
        heapq.heappush(self._due, (due, sequence.admission, sequence))
        if len(self._due) > 64 + 2 * self._decoding:
            self._due = [e for e in self._due if e[2].admission == e[1]]
            heapq.heapify(self._due)

    def _report(self, found: list[tuple[S, str | None]]) -> None:
        """Add those that are due to ``found``."""
        while self._due and self._due[0][0] <= self.steps:
            _, admission, sequence = heapq.heappop(self._due)
            if sequence.admission != admission:
                continue
            sequence.made = sequence.reported = self.steps - sequence.start
            reason = sequence.finish_reason
            found.append((sequence, reason))
            if reason is None:
                self._expect(sequence)
            else:
                self._leave(sequence)
                self._keep(sequence)

    # --- in and out

    def _admit(self) -> None:
        while self.waiting and len(self.admitted) < self._max_running and self._pending < max(1, self._chunked):
            sequence = next(iter(self.waiting))
            length = sequence.length
            # Room for its tokens and for one step of everyone.
            free = self._max_tokens - self.used_tokens - len(self.admitted) - 1
            if free < 1:
                return
            node, cached = None, 0
            if self._cache:
                node = self._cache.find(_bytes_behind(sequence, 0), length - 1)
                cached = node.end
                free -= self._cache.unlocked(node)
            if length - cached > free:
                return
            if self._cache and node:
                self._cache.lock(node)
            del self.waiting[sequence]
            self.admitted[sequence] = None
            self._prefilling[sequence] = None
            sequence.node = node
            sequence.cached = min(cached, len(sequence.tokens))
            sequence.to_prefill = length - cached
            self._pending += length - cached
            self._private += length - cached
            self._evict()

    def _preempt(self) -> None:
        """When not even one step fits, the youngest go back to the queue."""
        while len(self.admitted) > 1 and self.used_tokens + self._decoding > self._max_tokens:
            sequence = next(reversed(self.admitted))
            self._leave(sequence)
            if self._cache and sequence.node:
                self._cache.unlock(sequence.node)
                sequence.node = None
            self.waiting[sequence] = None
            self.waiting.move_to_end(sequence, last=False)
            self.preemptions += 1

    def _evict(self) -> None:
        """Cached tokens that nobody uses make room. Booked late: until the next event nobody could find them."""
        if self._cache:
            self._cache.evict(self._cache.size + self._private - self._max_tokens)

    def _leave(self, sequence: S) -> None:
        """It is admitted no longer; its books are closed, its lock in the cache is still there."""
        del self.admitted[sequence]
        if sequence.admission:
            sequence.made = self.steps - sequence.start
            sequence.admission = 0
            self._decoding -= 1
            self._kv -= sequence.length
        else:
            if self._chunk:  # its part of the step in flight is spent, but nobody gets it
                before = 0
                for other in self._prefilling:
                    if other is sequence:
                        break
                    before += other.to_prefill
                self._chunk -= max(0, min(sequence.to_prefill, self._chunk - before))
            del self._prefilling[sequence]
            self._pending -= sequence.to_prefill
        self._private -= sequence.length - (sequence.node.end if sequence.node else 0)

    def _keep(self, sequence: S) -> None:
        """What was computed of a sequence that left stays in the prefix cache."""
        if self._cache and sequence.node:
            behind = _bytes_behind(sequence, sequence.node.end)
            self._cache.insert(sequence.node, behind[: len(behind) - ITEM * sequence.to_prefill])
            self._cache.unlock(sequence.node)
            sequence.node = None


def _bytes_behind(sequence: Sequence, tokens: int) -> bytes:
    """What it consists of, input and output, behind the first ``tokens``."""
    whole = len(sequence.tokens)
    if tokens >= whole:
        done = tokens - whole
        return countdown(sequence.remaining - done, sequence.made - done).tobytes()
    data = (sequence.tokens[tokens:] if tokens else sequence.tokens).tobytes()
    return data + countdown(sequence.remaining, sequence.made).tobytes() if sequence.made else data
