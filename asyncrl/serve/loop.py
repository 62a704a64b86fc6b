"""The engine: one thread that alternates between what the server asks and steps of the model.

``Engine`` owns the scheduler, the cache, the model and the sampler; only its thread touches them. The server speaks to
it by jobs: plain functions that run between two steps, and whose results come back as asyncio futures. What a step
produced goes to the server in one hand-over, whatever the number of rows.

The thread waits on its inbox when there is nothing to generate (woken by a job), and otherwise only looks into it
between steps. An exception in a step ends the thread and is given to ``on_crash``: the server then goes down.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from asyncrl.core.types import Record
from asyncrl.serve.kv_cache import KVCache
from asyncrl.serve.model import Model
from asyncrl.serve.prefix_cache import PrefixCache
from asyncrl.serve.sampler import Sampler
from asyncrl.serve.scheduler import MODES, Scheduler, Sequence
from asyncrl.serve.spec import ServeError
from asyncrl.serve.weights import Tensors, apply, digest
from asyncrl.wire import FinishReason, KvKey, KvReq, WeightSpan

PREFILL_TOKENS = 4096
"""Prompt tokens that one step may prefill, so that running sequences are not kept waiting for long."""

PAST_S = 10.0
"""How long other servers may take KV that new weights have made worthless here: a request is moved to another server of
its version while, or because, this one takes the next."""

T = TypeVar("T")


class Output(NamedTuple):
    """New tokens of a sequence since its last output. The last one has ``finish`` and ``spans``."""

    sequence: Sequence
    ids: list[int]
    logprobs: list[float]
    version: str
    done: int  # output tokens so far, these included
    finish: FinishReason | None
    spans: list[WeightSpan] | None


class LoadSnapshot(Record, frozen=True, kw_only=True):
    """Load as of the last step. ``throughput`` is in generated tokens a second, over the last second of work."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    throughput: float = 0.0


class KvMismatch(ServeError):
    """Another server asks for KV that is not what this one computes."""


class _Past(NamedTuple):
    """What was kept when the weights changed."""

    key: KvKey
    rows: PrefixCache


class _Job(NamedTuple):
    run: Callable[[], Any]
    ready: Callable[[], bool]
    future: asyncio.Future[Any]
    holds: bool  # while it waits, nothing new is admitted


class Engine:
    """See the module. ``deliver`` gets each hand-over on the event loop that made the engine. With ``kv_reuse`` other
    servers of the same weights give it KV and take it from here."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        scheduler: Scheduler,
        sampler: Sampler,
        *,
        deliver: Callable[[list[Output]], None],
        on_crash: Callable[[BaseException], None],
        kv_reuse: bool = False,
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.weight_version = "default"
        self.load = LoadSnapshot()
        self._cache = cache
        self._sampler = sampler
        self._deliver = deliver
        self._on_crash = on_crash
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._deferred: list[_Job] = []
        self._outputs: list[Output] = []
        self._session = False
        self._kv_reuse = kv_reuse
        self._past: _Past | None = None
        self._digest = ""
        """Of the weights; empty until somebody asks."""
        self._meter = _Meter()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end after the step it is in; True if it did in time."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- What the server asks (on the event loop) ---------------------------------------------------------------------

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed since the start (``KVCache.prefilled``)."""
        return self._cache.prefilled

    def add(self, sequences: list[Sequence], *, arriving: bool = False) -> None:
        """Queue new sequences, or have them wait for ``arrived``; their outputs come through ``deliver``."""

        def run() -> None:
            for sequence in sequences:
                self.scheduler.add(sequence, arriving=arriving)

        self._call(run)

    def abort(self, match: Callable[[Sequence], bool]) -> asyncio.Future[None]:
        """Finish every matching live sequence with what it has."""
        return self._call(lambda: self._abort(match))

    def pause(self, mode: str) -> asyncio.Future[None]:
        if mode not in MODES:
            raise ServeError(f"pause mode {mode!r} is not known; use one of {', '.join(MODES)}")

        def run() -> None:
            if mode == "abort":
                self._abort(lambda sequence: True)
            for sequence in self.scheduler.pause(mode):
                self._cache.remove(sequence)

        return self._call(run)

    def resume(self) -> asyncio.Future[None]:
        return self._call(self.scheduler.resume)

    def flush(self, *, wait: bool) -> asyncio.Future[bool]:
        """Drop the prefixes that are kept, and return True, once no sequence holds KV; ``wait`` for that, or say False
        at once."""

        def run() -> bool:
            if self.scheduler.idle:
                self._cache.forget()
            return self.scheduler.idle

        return self._call(run, ready=(lambda: self.scheduler.idle) if wait else (lambda: True))

    def set_version(self, version: str, *, abort_all: bool = False) -> asyncio.Future[None]:
        def run() -> None:
            if abort_all:
                self._abort(lambda sequence: True)
            self._set_version(version)

        return self._call(run)

    def kv_wanted(self, ids: list[int]) -> asyncio.Future[KvReq]:
        """What to ask another server for."""
        return self._call(lambda: KvReq(input_ids=ids, key=self._kv_key(), beyond=self._cache.held(ids)))

    def kv_rows(self, request: KvReq) -> asyncio.Future[torch.Tensor | None]:
        """What another server asks for; None if there is no more than it has. Raises ``KvMismatch``."""

        def run() -> torch.Tensor | None:
            past, key = self._past, self._kv_key()
            if request.key == key:
                rows = self._cache.rows_of(request.input_ids, request.beyond)
            elif past is not None and request.key == past.key:
                rows = self._cache.rows_of(request.input_ids, request.beyond, past.rows)
            else:
                raise KvMismatch(f"this server has {key}, not {request.key}")
            if rows is not None and self.model.device.type == "cuda":
                torch.cuda.current_stream(self.model.device).synchronize()  # its way to host memory may not be over
            return rows

        return self._call(run)

    def arrived(
        self, sequences: list[Sequence], request: KvReq | None = None, rows: torch.Tensor | None = None
    ) -> asyncio.Future[bool]:
        """Queue what waits for KV, with the first ``rows`` of what was asked for, or without. False if these came too
        late: the weights are others now, or nobody wants them any more."""

        def run() -> bool:
            wanted = self.scheduler.arrived(sequences)
            if not wanted or request is None or rows is None or request.key != self._kv_key():
                return False
            self._cache.insert(request.input_ids[: rows.shape[3]], rows)
            return True

        return self._call(run)

    def begin_update(self) -> asyncio.Future[None]:
        """Open an update session: running requests end first unless paused, and new ones wait until it is over."""

        def run() -> None:
            if self._session:
                raise ServeError("a weight update is open already; POST /end_weight_update first")
            self._session = True

        return self._call(run, ready=self._updatable, holds=True)

    def end_update(self) -> asyncio.Future[None]:
        def run() -> None:
            if not self._session:
                raise ServeError("no weight update is open; POST /begin_weight_update first")
            self._session = False

        return self._call(run)

    def check_update(self, *, flush_cache: bool, session: bool) -> asyncio.Future[None]:
        """Raise ``ServeError`` now if ``update`` with these arguments would be refused."""
        return self._call(lambda: self._check_update(flush_cache, session))

    def update(
        self, tensors: Tensors, version: str | None, *, flush_cache: bool, session: bool, abort_all: bool = False
    ) -> asyncio.Future[None]:
        """Replace weights in place. At once when paused; otherwise running requests end first (or are aborted), and new
        ones wait. Frozen requests keep their old KV, so with ``in_place`` ones the cache cannot be flushed. No other
        request ever begins with rows of the old weights."""

        def run() -> None:
            if abort_all:
                self._abort(lambda sequence: True)
            self._check_update(flush_cache, session)
            self._forget()
            apply(self.model.parameters, tensors)
            if version is not None:
                self._set_version(version)

        ready = (lambda: True) if abort_all else self._updatable
        return self._call(run, ready=ready, holds=True)

    def _call(
        self, run: Callable[[], T], *, ready: Callable[[], bool] = lambda: True, holds: bool = False
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(_Job(run, ready, future, holds))
        return future

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_jobs():
                    self._step()
                    self._hand_over()
        except BaseException as error:
            self._post(self._on_crash, error)

    def _take_jobs(self) -> bool:
        """Run the jobs that are due; wait for one while there is nothing to generate. False: stop."""
        while True:
            try:
                while (job := self._inbox.get_nowait()) is not None:
                    self._deferred.append(job)
                return False
            except Empty:
                pass
            self._run_due()
            if self._busy():
                return True
            job = self._inbox.get()
            if job is None:
                return False
            self._deferred.append(job)

    def _busy(self) -> bool:
        s = self.scheduler
        return not s.frozen and bool(s.running or (s.waiting and not s.holding))

    def _run_due(self) -> None:
        """Run deferred jobs that are ready, in order; one that is not ready does not stop the others."""
        waiting = []
        for job in self._deferred:
            if job.future.cancelled():
                continue
            if not job.ready():
                waiting.append(job)
                continue
            try:
                result = job.run()
            except ServeError as error:
                self._post(_fail, job.future, error)
            else:
                # What a job caused is to be seen before its answer.
                self._publish_load()
                self._hand_over()
                self._post(_resolve, job.future, result)
        self._deferred = waiting
        self.scheduler.holding = self._session or any(job.holds for job in waiting)

    def _step(self) -> None:
        scheduler, cache = self.scheduler, self._cache
        admitted = scheduler.admit(PREFILL_TOKENS)
        while admitted:
            wave, admitted = cache.wave(admitted)
            by_arena: dict[int, list[Sequence]] = {}
            for sequence in wave:
                by_arena.setdefault(cache.arena_index(sequence.tokens), []).append(sequence)
            for sequences in by_arena.values():
                self._record(sequences, self.model.prefill(cache, sequences))
        for sequence in scheduler.make_room():
            cache.remove(sequence)
        if scheduler.running:
            order, positions, groups = cache.batch()
            tokens = torch.tensor([s.output[-1] for s in order], device=self.model.device)
            self._record(order, self.model.decode(tokens, positions, groups))
        room = scheduler.max_tokens - scheduler.used
        cache.trim(room)
        if self._past is not None:
            self._past.rows.trim(max(0, room - cache.kept))
        self._publish_load()

    def _record(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        ids, logprobs = self._sampler.sample(logits, sequences)
        version, append = self.weight_version, self.scheduler.append
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            if append(sequence, token, logprob, version):
                self._cache.remove(sequence)
                self._emit(sequence)
            elif sequence.interval and len(sequence.output) - sequence.sent >= sequence.interval:
                self._emit(sequence)
        self._meter.add(len(sequences))

    def _emit(self, sequence: Sequence) -> None:
        """Queue what is new of a sequence for the next hand-over."""
        start, finish = sequence.sent, sequence.finish
        sequence.sent = done = len(sequence.output)
        spans = sequence.weight_spans() if finish else None
        ids, logprobs = sequence.output[start:], sequence.logprobs[start:]
        self._outputs.append(Output(sequence, ids, logprobs, self.weight_version, done, finish, spans))

    def _abort(self, match: Callable[[Sequence], bool]) -> None:
        running, waiting = self.scheduler.abort(match)
        for sequence in running:
            self._cache.remove(sequence)
        for sequence in running + waiting:
            self._emit(sequence)

    def _updatable(self) -> bool:
        return self.scheduler.frozen or not self.scheduler.running

    def _check_update(self, flush_cache: bool, session: bool) -> None:
        if session and not self._session:
            raise ServeError("weight updates must run between begin_weight_update() and end_weight_update()")
        if flush_cache and self.scheduler.paused == "in_place" and self.scheduler.running:
            raise ServeError("the cache cannot be flushed while requests are paused in place; the weights are kept: "
                             "pause with mode retract or abort, or send flush_cache false")  # fmt: skip

    def _set_version(self, version: str) -> None:
        # A chunk carries one version, so what the old one sampled goes out first.
        for sequence in self.scheduler.live():
            if sequence.interval and len(sequence.output) > sequence.sent:
                self._emit(sequence)
        self.weight_version = version

    def _kv_key(self) -> KvKey:
        model, spec = self.model, self.model.spec
        self._digest = self._digest or digest(model)
        return KvKey(
            version=self.weight_version,
            model=self._digest,
            dtype=str(model.dtype).removeprefix("torch."),
            shape=(spec.layers, spec.kv_heads, spec.head_dim),
        )

    def _forget(self) -> None:
        """The weights are about to change."""
        if self._kv_reuse and self._cache.kept + self._cache.hosted:
            past = self._past = _Past(self._kv_key(), self._cache.forget())
            self._post(self._loop.call_later, PAST_S, self._call, lambda: self._drop(past))
        self._cache.forget()
        self._digest = ""

    def _drop(self, past: _Past) -> None:
        if self._past is past:
            self._past = None

    def _publish_load(self) -> None:
        s = self.scheduler
        self.load = LoadSnapshot(
            running=len(s.running),
            waiting=len(s.waiting) + len(s.arriving),
            used_tokens=s.used,
            throughput=self._meter.rate,
        )

    def _hand_over(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._post(self._deliver, outputs)

    def _post(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: the server has gone, and nobody is left to tell
            if not self._loop.is_closed():
                raise


class _Meter:
    """Tokens a second, over windows of about a second of work."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        elapsed = time.monotonic() - self._since
        if elapsed >= 1.0:
            self.rate = self._tokens / elapsed
            self._tokens, self._since = 0, self._since + elapsed


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: ServeError) -> None:
    if not future.done():
        future.set_exception(error)
