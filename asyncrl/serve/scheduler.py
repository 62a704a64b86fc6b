"""Continuous batching as plain bookkeeping: who waits, who runs, who is done. No torch, no clock, no I/O.

Owns every live ``Sequence`` (one reply to be generated) and two budgets: ``max_running`` sequences at once, and
``max_tokens`` tokens (prompt and output) of all running sequences together. Order is first in, first out: a sequence
that does not fit makes the ones behind it wait. When running sequences outgrow the token budget, the youngest goes
back to the head of the queue (its KV is recomputed later); the oldest is never put back, so work always goes on.

The engine's thread calls it between decode steps; nothing else may. Every sequence gets exactly one ``finish``.

State of a sequence::

    arriving ──arrived──▶ waiting ──admit──▶ running ──append(stop|length)──▶ finished
       │                   ▲  │               │  │
       └───────────────────┼──┴────abort──────┼──┴──abort──▶ finished
                           └──make_room, pause(retract)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from asyncrl.wire import FinishReason, WeightSpan

GROWTH_RESERVE = 32
"""Tokens that admission leaves free for each running sequence, so that a new one does not push out another at once."""

MODES = ("abort", "retract", "in_place")


class Sequence:
    """One reply to be generated. ``sink`` is what the server wants back with each chunk; the scheduler ignores it.

    ``stop_ids`` end it once it has ``min_new`` tokens; ``interval`` is the number of tokens of a streamed chunk
    (0: everything at the end). ``sent`` tokens have been handed over. ``spans`` say which weights sampled which tokens.
    ``cached`` tokens of the prompt were not computed for it when it first ran.
    """

    __slots__ = (
        "cached", "finish", "interval", "logprobs", "max_new", "min_new", "output", "prompt", "retractions", "rid",
        "sent", "sink", "spans", "stop_ids", "temperature", "top_k", "top_p",
    )  # fmt: skip

    def __init__(
        self,
        *,
        rid: str,
        prompt: Seq[int],
        max_new: int,
        min_new: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_ids: frozenset[int] = frozenset(),
        interval: int = 0,
        sink: object = None,
    ) -> None:
        self.rid = rid
        self.prompt = list(prompt)
        self.max_new = max_new
        self.min_new = min_new
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.stop_ids = stop_ids
        self.interval = interval
        self.sink = sink
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int]] = []
        self.sent = 0
        self.cached = 0
        self.retractions = 0
        self.finish: FinishReason | None = None

    @property
    def tokens(self) -> int:
        """How many they are: prompt and output so far."""
        return len(self.prompt) + len(self.output)

    def ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    def weight_spans(self) -> list[WeightSpan]:
        """Runs of output tokens by the version of the weights that sampled them."""
        ends = [start for _, start in self.spans[1:]] + [len(self.output)]
        return [WeightSpan(version=v, start=s, end=e) for (v, s), e in zip(self.spans, ends, strict=False) if e > s]

    def __repr__(self) -> str:
        state = self.finish.type if self.finish else "live"
        return f"<Sequence {self.rid} {len(self.prompt)}+{len(self.output)}/{self.max_new} {state}>"


class Scheduler:
    """See the module. ``paused`` is None or the mode; ``holding`` stops admission alone (a weight update is due)."""

    def __init__(self, *, max_running: int, max_tokens: int) -> None:
        self.max_running = max_running
        self.max_tokens = max_tokens
        self.arriving: dict[Sequence, None] = {}
        """Their KV is on its way from another server; nobody waits for them."""
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.used = 0  # Invariant: the sum of .tokens over running
        self.paused: str | None = None
        self.holding = False

    @property
    def frozen(self) -> bool:
        """Running sequences must not advance."""
        return self.paused is not None

    @property
    def idle(self) -> bool:
        """No sequence holds KV, and none is about to."""
        return not self.running and (self.frozen or not (self.waiting or self.arriving))

    def fits(self, prompt: int, max_new: int) -> bool:
        """Whether a sequence of this size can ever run."""
        return prompt + max_new <= self.max_tokens

    def add(self, sequence: Sequence, *, arriving: bool = False) -> None:
        """Queue a sequence, or have it wait for ``arrived`` first. The caller has checked ``fits``."""
        if not self.fits(len(sequence.prompt), sequence.max_new):
            raise ValueError(f"{sequence!r} can never fit into {self.max_tokens} tokens")
        if arriving:
            self.arriving[sequence] = None
        else:
            self.waiting.append(sequence)

    def arrived(self, sequences: Iterable[Sequence]) -> bool:
        """Queue those that were not aborted meanwhile; True if there are any."""
        left = [sequence for sequence in sequences if sequence in self.arriving]
        for sequence in left:
            del self.arriving[sequence]
            self.waiting.append(sequence)
        return bool(left)

    def admit(self, budget: int) -> list[Sequence]:
        """Move the head of the queue to running, about ``budget`` prompt tokens at most (but at least one sequence).

        They must be prefilled, and get their next token, before ``make_room`` is called again.
        """
        admitted: list[Sequence] = []
        spent = 0
        promised = self.used
        while self.waiting and not self.frozen and not self.holding and len(self.running) < self.max_running:
            head = self.waiting[0]
            reserve = GROWTH_RESERVE * len(self.running)
            if promised + head.tokens + 1 + reserve > self.max_tokens and self.running:
                break
            if admitted and spent + head.tokens > budget:
                break
            self.waiting.popleft()
            self.running[head] = None
            self.used += head.tokens
            promised += head.tokens + 1
            spent += head.tokens
            admitted.append(head)
        return admitted

    def make_room(self) -> list[Sequence]:
        """Put the youngest back until every running sequence can get one more token; they lose their KV."""
        retracted: list[Sequence] = []
        while self.used + len(self.running) > self.max_tokens:
            retracted.append(next(reversed(self.running)))
            self._retract(retracted[-1])
        return retracted

    def append(self, sequence: Sequence, token: int, logprob: float, version: str) -> bool:
        """Record a sampled token; True if it finished the sequence (which then runs no more)."""
        output = sequence.output
        if not sequence.spans or sequence.spans[-1][0] != version:
            sequence.spans.append((version, len(output)))
        output.append(token)
        sequence.logprobs.append(logprob)
        self.used += 1
        if token in sequence.stop_ids and len(output) > sequence.min_new:
            self._finish(sequence, FinishReason(type="stop", matched=token))
        elif len(output) >= sequence.max_new:
            self._finish(sequence, FinishReason(type="length", length=sequence.max_new))
        else:
            return False
        return True

    def abort(self, match: Callable[[Sequence], bool]) -> tuple[list[Sequence], list[Sequence]]:
        """Finish every live sequence that matches; (those that were running, those that were waiting)."""
        running = [s for s in self.running if match(s)]
        for sequence in running:
            self._finish(sequence, FinishReason(type="abort", message="Aborted"))
        waiting = [s for s in (*self.waiting, *self.arriving) if match(s)]
        if waiting:
            self.waiting = deque(s for s in self.waiting if not match(s))
            for sequence in waiting:
                self.arriving.pop(sequence, None)
                sequence.finish = FinishReason(type="abort", message="Abort in waiting queue")
        return running, waiting

    def pause(self, mode: str) -> list[Sequence]:
        """Stop in ``retract`` or ``in_place`` mode (``abort`` needs ``abort`` first); those that lose their KV."""
        self.paused = mode
        if mode == "in_place":
            return []
        retracted = list(self.running)
        for sequence in reversed(retracted):
            self._retract(sequence)
        return retracted

    def resume(self) -> None:
        self.paused = None

    def live(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting
        yield from self.arriving

    def _retract(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.used -= sequence.tokens
        sequence.retractions += 1
        self.waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        del self.running[sequence]
        self.used -= sequence.tokens
        sequence.finish = reason
