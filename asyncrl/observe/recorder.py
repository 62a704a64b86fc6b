"""Recorder: the ``Observer`` of a run that writes the run directory.

The calls of ``Observer`` only count and append to a queue. ``flush`` turns the queue into lines, off the loop: the
runtime runs it on the ``Blocking`` port every few seconds. It may run on another thread than the calls, so the two
share nothing but the queue (a deque, whose ends are atomic). The queue is bounded: a call that finds it full flushes
on the spot, so nothing is lost; the error of such a flush is kept for the next ``flush`` or ``close``.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, groupby
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Recipe
from asyncrl.core.types import Trajectory
from asyncrl.observe.run_dir import (
    EVALS,
    METRICS,
    TRACE,
    TRAJECTORIES,
    LineFile,
    Resumed,
    RunDirError,
    read_lines,
    rewind,
)
from asyncrl.observe.tally import NO_ARGS, Tally
from asyncrl.observe.trace import TraceEncoder
from asyncrl.ports import StepMetrics

QUEUE_LIMIT = 16_384
"""Events that may wait for a flush."""
COUNTER_INTERVAL_S = 0.1
"""Least distance of two values of one counter in the trace."""
REQUEST_SPANS = frozenset({"generate", "episode"})


class Recorder(Tally):
    """Observes one run. ``clock`` gives loop time in seconds; ``decode`` turns token ids into text, and is called on
    the thread that flushes. Without ``tokens``, trajectories are written without tokens, logprobs and text. ``resume``
    is where the folder's run goes on. Raises ``RunDirError`` if the
    folder cannot be written, or holds a run already that is not resumed."""

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        clock: Callable[[], float],
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        tokens: bool = True,
        resume: Resumed | None = None,
    ) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"{run_dir}: cannot make the folder ({error.strerror}): give another --run-dir") from None
        super().__init__(recipe, clock)
        if resume is not None:
            rewind(run_dir, resume)
            self.resume(resume.at, list(read_lines(run_dir / METRICS)), list(read_lines(run_dir / EVALS)))
        self._counted: dict[str, float] = {}  # counter → time of its newest value in the trace
        # Shared with the thread that flushes.
        self._queue: deque[tuple[Any, ...]] = deque()
        self._lock = threading.Lock()  # held while writing
        self._error: RunDirError | None = None
        self._decode = decode
        self._tokens = tokens
        self.fill: Callable[[Trajectory], None] = lambda trajectory: None
        """Brings back tokens that were put aside; on the thread that flushes."""
        self._trace = TraceEncoder(self.start)
        names = (METRICS, EVALS, TRAJECTORIES, TRACE)
        self._files = {name: LineFile(run_dir / name, append=resume is not None) for name in names}

    # --- Observer -----------------------------------------------------------------------------------------------------

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self._put(("line", METRICS, self.metrics))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        super().trajectory(trajectory, state)
        self._put(("trajectory", trajectory, str(state), self.clock() - self.start))

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        ended = self._server(name, at, running, version, up)
        if ended is not None:
            self._put(("busy", name, ended))

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().span(track, name, start, end, args)
        if self.recipe.run.trace_requests or name not in REQUEST_SPANS:
            self._put(("span", track, name, start, end, args))

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        super().instant(track, name, at, args)
        self._put(("instant", track, name, at, args))

    def counter(self, name: str, at: float, value: float) -> None:
        super().counter(name, at, value)
        if at - self._counted.get(name, -COUNTER_INTERVAL_S) >= COUNTER_INTERVAL_S:
            self._counted[name] = at
            self._put(("counter", name, at, value))

    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = NO_ARGS) -> None:
        super().eval(version, accuracy, n, details)
        self._put(("line", EVALS, msgspec.to_builtins(self.evals[-1])))

    # --- Files --------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write everything that was queued before the call. May run on any thread. Raises ``RunDirError``."""
        with self._lock:
            if self._error is None:
                try:
                    self._write()
                except RunDirError as error:
                    self._error = error
            if self._error is not None:
                self._queue.clear()
                raise self._error

    def close(self) -> None:
        """End the open busy segments, flush, and close the files. Raises ``RunDirError``."""
        at = self.clock()
        for name, time in self.servers.items():
            ended = time.update(at, 0, time.version, time.up)
            if ended is not None:
                self._put(("busy", name, ended))
        try:
            self.flush()
            self._files[TRACE].write(self._trace.end())
        finally:
            for file in self._files.values():
                file.close()

    def _put(self, event: tuple[Any, ...]) -> None:
        if len(self._queue) >= QUEUE_LIMIT:
            with contextlib.suppress(RunDirError):  # kept in _error: the next flush() or close() raises it
                self.flush()
        self._queue.append(event)

    def _write(self) -> None:
        lines: dict[str, list[bytes]] = {name: [] for name in self._files}
        trace = self._trace
        for _ in range(len(self._queue)):
            match self._queue.popleft():
                case ("line", name, line):
                    lines[name].append(msgspec.json.encode(line) + b"\n")
                case ("trajectory", trajectory, state, at):
                    self.fill(trajectory)
                    line = trajectory_line(trajectory, state, at, self._decode, self._tokens)
                    lines[TRAJECTORIES].append(msgspec.json.encode(line) + b"\n")
                case ("busy", name, segment):
                    lines[TRACE].append(trace.busy(name, segment))
                case ("span", *event):
                    lines[TRACE].append(trace.span(*event))
                case ("instant", *event):
                    lines[TRACE].append(trace.instant(*event))
                case ("counter", *event):
                    lines[TRACE].append(trace.counter(*event))
        for name, file in self._files.items():
            if lines[name]:
                file.write(b"".join(lines[name]))


def version_runs(versions: array[int]) -> list[tuple[int, int]]:
    """Run-length code of a version column: (version, number of tokens); observed tokens are ``OBSERVED_VERSION``."""
    runs: list[tuple[int, int]] = []
    begin, total = 0, len(versions)
    while begin < total:
        version = versions[begin]
        end, step = begin + 1, 1
        while step:  # gallop: stretches are compared whole, twice as long while they are equal, else half
            if end + step <= total and versions[end : end + step] == array("i", [version]) * step:
                end, step = end + step, 2 * step
            else:
                step //= 2
        runs.append((version, end - begin))
        begin = end
    return runs


def trajectory_line(
    t: Trajectory, state: str, at: float, decode: Callable[[Sequence[int]], str] | None, tokens: bool = True
) -> dict[str, Any]:
    """One line of ``trajectories.jsonl``. ``versions`` are (version, tokens) runs, from which the loss mask follows;
    ``turn_seconds`` are (waiting for a server, generating, environment); ``logprobs`` are of generated tokens;
    ``text`` has a piece for what each side said in each turn. ``tokens``, ``logprobs`` and ``text`` are left out
    without ``tokens``."""
    runs = version_runs(t.versions)
    line: dict[str, Any] = {
        "id": t.id,
        "group": t.group_id,
        "index": t.index,
        "task": t.task_id,
        "state": state,
        "reward": t.reward,
        "v_traj": t.v_traj,
        "versions": runs,
        "turns": t.turns,
        "finish_reason": t.finish_reason,
        "at": round(at, 3),
        "metrics": dict(t.metrics),
        "turn_ends": t.turn_ends,
        "turn_rewards": t.turn_rewards,
        "segment_ends": t.segment_ends,
        "turn_seconds": [[round(s, 4) for s in seconds] for seconds in t.turn_seconds],
        "reset_s": round(t.reset_s, 4),
    }
    if not tokens:
        return line
    line["tokens"] = t.tokens.tolist()
    # Rounded to 4 digits; for numbers ≤ 0 this is round(p, 4) at half its cost, which is most of a line's.
    line["logprobs"] = [int(p * 1e4 - 0.5) / 1e4 for p in compress(t.logprobs, t.loss_mask)]
    if decode is not None:
        line["text"] = text = []
        begin = 0
        for turn_end in t.turn_ends or (len(t.tokens),):
            for generated, stretch in groupby(t.loss_mask[begin:turn_end]):
                end = begin + len(list(stretch))
                text.append({"by": "policy" if generated else "env", "text": decode(line["tokens"][begin:end])})
                begin = end
    return line
