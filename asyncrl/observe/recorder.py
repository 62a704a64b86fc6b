"""Recorder: the ``Observer`` of a run. Keeps what progress shows and writes the run directory.

The calls of ``Observer`` only count and append to a queue. ``flush`` turns the queue into lines, off the loop: the
runtime runs it on the ``Blocking`` port every few seconds. It may run on another thread than the calls, so the two
share nothing but the queue (a deque, whose ends are atomic). The queue is bounded: a call that finds it full flushes
on the spot, so nothing is lost; the error of such a flush is kept for the next ``flush`` or ``close``.
"""

from __future__ import annotations

import contextlib
import math
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.config import Recipe
from asyncrl.core.types import OBSERVED_VERSION, Record, Trajectory
from asyncrl.observe.busy import Mark, ServerTime, bubble_share, tokens_per_second, trainer_idle_share
from asyncrl.observe.run_dir import EVALS, METRICS, TRACE, TRAJECTORIES, LineFile, RunDirError
from asyncrl.observe.summary import StalenessSummary, Summary, package_versions, reward_edges
from asyncrl.observe.trace import TraceEncoder
from asyncrl.ports import Observer, StepMetrics

QUEUE_LIMIT = 16_384
"""Events that may wait for a flush."""
COUNTER_INTERVAL_S = 0.1
"""Least distance of two values of one counter in the trace."""
REQUEST_SPANS = frozenset({"generate", "episode"})
NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Evaluation(Record, frozen=True, kw_only=True):
    """Policy ``version`` played ``n`` held-out tasks, ``at`` seconds after the run began."""

    version: int
    accuracy: float
    n: int
    at: float


class Recorder(Observer):
    """Observes one run. ``clock`` gives loop time in seconds; ``decode`` turns token ids into text, and is called on
    the thread that flushes. Without ``tokens``, trajectories are written without tokens, logprobs and text. Raises
    ``RunDirError`` if the folder cannot be written or holds a run already."""

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        clock: Callable[[], float],
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        tokens: bool = True,
    ) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"{run_dir}: cannot make the folder ({error.strerror}): give another --run-dir") from None
        self.recipe = recipe
        self.clock = clock
        self.start = clock()
        # What progress and the summary read.
        self.metrics: dict[str, float] = {}  # of the newest step
        self.rewards: list[float] = []  # mean of every step
        self.evals: list[Evaluation] = []
        self.servers: dict[str, ServerTime] = {}
        self.gauges: dict[str, float] = {}  # newest value of every counter
        self.states: Counter[str] = Counter()  # finished trajectories by final state
        self._staleness: Counter[int] = Counter()  # trained trajectories by staleness
        self._trainer_busy = 0.0
        # Ends of the first and of the newest step; before the first step, the newest is the run's start.
        self._first: Mark | None = None
        self._newest = Mark(at=self.start)
        self._counted: dict[str, float] = {}  # counter → time of its newest value in the trace
        # Shared with the thread that flushes.
        self._queue: deque[tuple[Any, ...]] = deque()
        self._lock = threading.Lock()  # held while writing
        self._error: RunDirError | None = None
        self._decode = decode
        self._tokens = tokens
        self._trace = TraceEncoder(self.start)
        self._files = {name: LineFile(run_dir / name) for name in (METRICS, EVALS, TRAJECTORIES, TRACE)}

    # --- Observer -----------------------------------------------------------------------------------------------------

    def step(self, metrics: StepMetrics) -> None:
        self._trainer_busy += metrics.train_s + metrics.update_s
        before, mark = self._newest, self._mark(metrics.at, metrics.tokens)
        line = step_line(metrics, before, mark, self.start)
        self._staleness.update(metrics.batch.step - t.v_traj for t in metrics.batch.trajectories)
        self._newest = mark
        self._first = self._first or mark
        self.metrics = line
        self.rewards.append(line["reward/mean"])
        self._put(("line", METRICS, line))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        self.states[str(state)] += 1
        self._put(("trajectory", trajectory, str(state), self.clock() - self.start))

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        time = self.servers.get(name)
        if time is None:
            time = self.servers[name] = ServerTime(at)
        ended = time.update(at, running, version, up)
        if ended is not None:
            self._put(("busy", name, ended))

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        if name in REQUEST_SPANS and not self.recipe.run.trace_requests:
            return
        self._put(("span", track, name, start, end, args))

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        self._put(("instant", track, name, at, args))

    def counter(self, name: str, at: float, value: float) -> None:
        self.gauges[name] = value
        if at - self._counted.get(name, -COUNTER_INTERVAL_S) >= COUNTER_INTERVAL_S:
            self._counted[name] = at
            self._put(("counter", name, at, value))

    def eval(self, version: int, accuracy: float, n: int) -> None:
        evaluation = Evaluation(version=version, accuracy=accuracy, n=n, at=self.clock() - self.start)
        self.evals.append(evaluation)
        self._put(("line", EVALS, msgspec.to_builtins(evaluation)))

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

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time from one step's end to the next; the first step's own length while there is only one."""
        if self._first is None:
            return None
        if len(self.rewards) == 1:
            return self.metrics["time/step"]
        return (self._newest.at - self._first.at) / (len(self.rewards) - 1)

    def summary(
        self,
        *,
        exit: str,
        started: str,
        command: Sequence[str],
        ledger: Mapping[str, int],
        reasons: Mapping[str, Mapping[str, int]] = NO_ARGS,
    ) -> Summary:
        """The run so far. ``started`` is its start's time of day; ``ledger`` counts trajectories by state, ``reasons``
        by final state and reason."""
        first, last = reward_edges(self.rewards)
        window = (self._first, self._newest) if self._first is not None else None
        after = [e.accuracy for e in self.evals if e.version > self.evals[0].version]
        return Summary(
            recipe=self.recipe.name,
            exit=exit,
            started=started,
            seconds=self.clock() - self.start,
            steps=len(self.rewards),
            reward_first=first,
            reward_last=last,
            heldout_before=self.evals[0].accuracy if self.evals else None,
            heldout_after=after[-1] if after else None,
            staleness=StalenessSummary(
                mean=sum(k * n for k, n in self._staleness.items()) / self._staleness.total() if self.rewards else None,
                max=max(self._staleness, default=None),
                bound=self.recipe.staleness.limit,
            ),
            bubble_share=bubble_share(*window) if window else None,
            trainer_idle_share=trainer_idle_share(*window) if window else None,
            tokens=max(self._newest.tokens, int(self.gauges.get("rollout/tokens", 0))),
            ledger=dict(ledger),
            reasons=dict(reasons),
            seed=self.recipe.seed,
            command=list(command),
            packages=package_versions(),
        )

    def _mark(self, at: float, tokens: int) -> Mark:
        totals = [time.totals(at) for time in self.servers.values()]
        return Mark(
            at=at,
            busy=sum(busy for busy, _ in totals),
            available=sum(available for _, available in totals),
            trainer_busy=self._trainer_busy,
            tokens=tokens,
        )

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


def step_line(metrics: StepMetrics, before: Mark, mark: Mark, start: float) -> dict[str, float]:
    """One line of ``metrics.jsonl``: flat, slash-named numbers.

    ``time/*`` are seconds (``time/at`` since the run began), ``response/*`` generated tokens of a trajectory,
    ``staleness/count/K`` trajectories of staleness K, ``env/NAME`` the mean of the environment's metric NAME, and
    ``tokens/s``, ``bubble/share`` and ``bubble/trainer_idle`` are since the step before (the first time: since the run
    began).
    """
    batch, trajectories = metrics.batch, metrics.batch.trajectories
    n = len(trajectories)
    rewards = [t.reward for t in trajectories]
    lengths = sorted(t.generated for t in trajectories)
    staleness = [batch.step - t.v_traj for t in trajectories]
    mean = sum(rewards) / n
    line: dict[str, float] = {
        "step": batch.step,
        "version": batch.step + 1,
        "time/at": metrics.at - start,
        "time/step": metrics.seconds,
        "time/wait": metrics.wait_s,
        "time/train": metrics.train_s,
        "time/update": metrics.update_s,
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / n) ** 0.5,
        "response/mean": sum(lengths) / n,
        "response/p95": lengths[math.ceil(0.95 * n) - 1],
        "response/max": lengths[-1],
        "staleness/mean": sum(staleness) / n,
        "staleness/max": max(staleness),
        "tokens/batch": sum(lengths),
        "tokens/total": metrics.tokens,
        "tokens/s": tokens_per_second(before, mark),
    }
    for k, count in sorted(Counter(staleness).items()):
        line[f"staleness/count/{k}"] = count
    values: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.metrics.items():
            values.setdefault(name, []).append(value)
    line |= {f"env/{name}": sum(v) / len(v) for name, v in values.items()}
    line |= {f"trainer/{name}": value for name, value in metrics.trainer.items()}
    line |= {f"buffer/{name}": value for name, value in metrics.buffer.items()}
    line |= {f"ledger/{name}": value for name, value in metrics.ledger.items()}
    bubble, idle = bubble_share(before, mark), trainer_idle_share(before, mark)
    if bubble is not None:
        line["bubble/share"] = bubble
    if idle is not None:
        line["bubble/trainer_idle"] = idle
    return line


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
    ``logprobs`` are those of the generated tokens; ``text`` has one piece for each observed or generated stretch.
    These three are left out without ``tokens``."""
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
    }
    if not tokens:
        return line
    line["tokens"] = t.tokens.tolist()
    # Rounded to 4 digits; for numbers ≤ 0 this is round(p, 4) at half its cost, which is most of a line's.
    line["logprobs"] = [int(p * 1e4 - 0.5) / 1e4 for p in compress(t.logprobs, t.loss_mask)]
    if decode is not None:
        line["text"] = text = []
        begin = 0
        for generated, stretch in groupby(runs, key=lambda run: run[0] != OBSERVED_VERSION):
            end = begin + sum(n for _, n in stretch)
            text.append({"by": "policy" if generated else "env", "text": decode(line["tokens"][begin:end])})
            begin = end
    return line
