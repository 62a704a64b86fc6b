"""Tally: the ``Observer`` that keeps a run's numbers in memory: metrics of each step, totals, the summary.

What is written into a run directory is ``Recorder``'s, which is a Tally that also writes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.config import Recipe
from asyncrl.config.redact import redacted_command
from asyncrl.core.observed import Observed, expected_staleness
from asyncrl.core.types import Record, Trajectory
from asyncrl.observe.busy import (
    Mark,
    Segment,
    ServerTime,
    bubble_share,
    observed,
    tokens_per_second,
    trainer_idle_share,
)
from asyncrl.observe.summary import StalenessSummary, Summary, package_versions, reward_edges
from asyncrl.ports import Observer, StepMetrics

RECENT_STEPS = 8
"""A prediction is of what the run was like in this many steps."""
RECENT_GROUPS = 64
"""The tail of the lengths is over at least so many groups, and the last two batches."""

COUNT = "staleness/count/"
"""Before the staleness of so many trajectories of a step."""

NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Evaluation(Record, frozen=True, kw_only=True):
    """Policy ``version`` played ``n`` held-out episodes, ``at`` seconds after the run began. ``details``: pass@k, and
    the accuracy of each of several sources."""

    version: int
    accuracy: float
    n: int
    at: float
    details: Mapping[str, float] = NO_ARGS


class Tally(Observer):
    """Observes one run. ``clock`` gives loop time in seconds. Its calls only count."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float]) -> None:
        self.recipe = recipe
        self.clock = clock
        self.start = clock()
        # What progress and the summary read.
        self.metrics: dict[str, float] = {}  # of the newest step
        self.rewards: list[float] = []  # mean of every step
        self.evals: list[Evaluation] = []
        self._before = 0  # steps that the run had done when it was resumed
        self._tokens_before = 0  # and tokens that its servers had generated
        self.servers: dict[str, ServerTime] = {}
        self.left: set[str] = set()  # of these, those that are gone for good
        self.gauges: dict[str, float] = {}  # newest value of every counter
        self.budget = ""  # what the staleness budget moved last, and why
        self.states: Counter[str] = Counter()  # finished trajectories by final state
        self._staleness: Counter[int] = Counter()  # trained trajectories by staleness
        self._trainer_busy = 0.0
        self._trained = 0  # generated tokens of all batches
        self._episode_s = 0.0
        self._longest_s = 0.0  # of the episodes that ended since the newest step
        self._episodes_a_slot = 1 if recipe.rollout.expand_num_return_sequences else recipe.rollout.group_size
        # Of the groups that were trained last: generated tokens of the longest member, of all, and their number.
        self._groups: deque[tuple[int, int, int]] = deque(maxlen=max(RECENT_GROUPS, 2 * recipe.rollout.batch_groups))
        # Ends of the first and of the newest step; before the first step, the newest is the run's start.
        self._first: Mark | None = None
        self._newest = Mark(at=self.start)
        self._recent: deque[Mark] = deque([self._newest], maxlen=RECENT_STEPS + 1)

    # --- Observer -----------------------------------------------------------------------------------------------------

    def step(self, metrics: StepMetrics) -> None:
        self._trainer_busy += metrics.train_s + metrics.update_s
        for group in metrics.batch.groups:
            lengths = [t.generated for t in group.trajectories]
            self._groups.append((max(lengths), sum(lengths), len(lengths)))
            self._trained += sum(lengths)
        before, mark = self._newest, self._mark(metrics.at, self._tokens_before + metrics.tokens)
        line = step_line(metrics, before, mark, self.start) | self._prediction(mark)
        self._staleness.update(metrics.batch.step - t.v_traj for t in metrics.batch.trajectories)
        self._newest = mark
        self._first = self._first or mark
        self.metrics = line
        self.rewards.append(line["reward/mean"])

    def _prediction(self, mark: Mark) -> dict[str, float]:
        """``response/tailness``: M_tail of recent groups. ``rollout/episodes``, ``rollout/longest_s``: mean number in
        progress, and seconds of the longest that ended, since the step before. ``predicted/staleness``: from the last
        ``RECENT_STEPS`` steps. What is not known yet is left out."""
        rollout, staleness = self.recipe.rollout, self.recipe.staleness
        line = {"response/tailness": self._tailness()}
        before = self._recent[-1]
        if mark.episode_s > before.episode_s and mark.at > before.at:
            line["rollout/episodes"] = (mark.episode_s - before.episode_s) / (mark.at - before.at)
            line["rollout/longest_s"] = self._longest_s
            self._longest_s = 0.0
        self._recent.append(mark)
        if (seen := self.observed(self._recent[0], mark)) is not None:
            line["predicted/staleness"] = expected_staleness(
                seen,
                control=staleness.family,
                bound=self.gauges.get("staleness/bound", staleness.bound),
                queue=staleness.queue,
                batch=self.recipe.batch_trajectories,
                slots=self._episodes_a_slot * int(self.gauges.get("rollout/slots", rollout.num_envs)),
            )
        for name in ("staleness/bound", "rollout/slots", "coordinator/cost_error", "loop/lag_p99"):
            if name in self.gauges:
                line[name] = self.gauges[name]
        return line

    def observed(self, first: Mark, last: Mark) -> Observed | None:
        """What the run was like between two marks, by the tail of its recent groups; None if too little happened."""
        kept = self.states["consumed"] / ((self.states["consumed"] + self.states["filtered"]) or 1)
        return observed(first, last, tailness=self._tailness(), kept=kept or 1.0)

    def _tailness(self) -> float:
        longest, total, members = (sum(column) for column in zip(*self._groups, strict=True))
        return longest / len(self._groups) * members / total if total else 1.0

    @property
    def newest(self) -> Mark:
        """The end of the newest step; before the first, the run's start."""
        return self._newest

    @property
    def tokens(self) -> int:
        """What the servers have generated since the run began, as far as it is known."""
        return max(self._newest.tokens, self._tokens_before + int(self.gauges.get("rollout/tokens", 0)))

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        self.states[str(state)] += 1

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        self._server(name, at, running, version, up)

    def _server(self, name: str, at: float, running: int, version: int, up: bool) -> Segment | None:
        """The busy segment that this ends, if it does."""
        time = self.servers.get(name)
        if time is None:
            time = self.servers[name] = ServerTime(at)
        return time.update(at, running, version, up)

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        """Of spans, episodes are counted."""
        if name == "episode":
            self._episode_s += self._episodes_a_slot * (end - start)
            self._longest_s = max(self._longest_s, end - start)

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        """Of moments, the newest move of the staleness budget is kept, and which servers left."""
        if track == "budget":
            self.budget = name
        elif name == "left":
            self.left.add(track)

    def counter(self, name: str, at: float, value: float) -> None:
        self.gauges[name] = value

    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = NO_ARGS) -> None:
        at = self.clock() - self.start
        self.evals.append(Evaluation(version=version, accuracy=accuracy, n=n, at=at, details=dict(details)))

    # --- What a run came to -------------------------------------------------------------------------------------------

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time from one step's end to the next; the first step's own length while there is only one."""
        if self._first is None:
            return None
        steps = len(self.rewards) - self._before
        return self.metrics["time/step"] if steps == 1 else (self._newest.at - self._first.at) / (steps - 1)

    def resume(self, seconds: float, steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> None:
        """Count on from where a run was after ``seconds``, by its lines until then: rewards, evaluations, staleness,
        tokens and times are those of the whole run; everything else is since it was resumed."""
        self.start -= seconds
        self.rewards = [row["reward/mean"] for row in steps]
        self.evals = [msgspec.convert(row, Evaluation) for row in evals]
        self._before = len(self.rewards)
        counts = (item for row in steps for item in row.items() if item[0].startswith(COUNT))
        for key, count in counts:
            self._staleness[int(key.removeprefix(COUNT))] += count
        self._tokens_before = steps[-1]["tokens/total"] if steps else 0
        self._newest = self._recent[-1] = msgspec.structs.replace(self._newest, tokens=self._tokens_before)

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
                mean=sum(k * n for k, n in self._staleness.items()) / self._staleness.total()
                if self._staleness
                else None,
                max=max(self._staleness, default=None),
                bound=self.recipe.staleness.limit,
            ),
            bubble_share=bubble_share(*window) if window else None,
            trainer_idle_share=trainer_idle_share(*window) if window else None,
            tokens=self.tokens,
            ledger=dict(ledger),
            reasons=dict(reasons),
            seed=self.recipe.seed,
            command=redacted_command(command),
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
            trained=self._trained,
            episode_s=self._episode_s,
        )


def step_line(metrics: StepMetrics, before: Mark, mark: Mark, start: float) -> dict[str, float]:
    """One line of ``metrics.jsonl``: flat, slash-named numbers.

    ``time/*`` are seconds (``time/at`` since the run began; ``time/streamed``, where the trainer streams, is what of
    ``time/train`` was begun before the batch was complete), ``response/*`` generated tokens of a trajectory,
    ``staleness/count/K`` trajectories of staleness K, ``env/NAME`` the mean of the environment's metric NAME,
    ``source/NAME/*`` the share of the batch, mean reward and generated tokens of one of several sources, and
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
        "tokens/total": mark.tokens,
        "tokens/s": tokens_per_second(before, mark),
    }
    for k, count in sorted(Counter(staleness).items()):
        line[f"{COUNT}{k}"] = count
    sources: dict[str, list[Trajectory]] = {}
    for group in batch.groups:
        if group.task.source:
            sources.setdefault(group.task.source, []).extend(group.trajectories)
    for source, own in sorted(sources.items()):
        line[f"source/{source}/share"] = len(own) / n
        line[f"source/{source}/reward"] = sum(t.reward for t in own) / len(own)
        line[f"source/{source}/response"] = sum(t.generated for t in own) / len(own)
    values: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.metrics.items():
            values.setdefault(name, []).append(value)
    if metrics.streamed_s:
        line["time/streamed"] = metrics.streamed_s
    line |= {f"env/{name}": sum(v) / len(v) for name, v in values.items()}
    line |= {f"trainer/{name}": value for name, value in metrics.trainer.items()}
    line |= {f"buffer/{name}": value for name, value in metrics.buffer.items()}
    line |= {f"envs/{name}": value for name, value in metrics.envs.items()}
    line |= {f"ledger/{name}": value for name, value in metrics.ledger.items()}
    bubble, idle = bubble_share(before, mark), trainer_idle_share(before, mark)
    if bubble is not None:
        line["bubble/share"] = bubble
    if idle is not None:
        line["bubble/trainer_idle"] = idle
    return line
