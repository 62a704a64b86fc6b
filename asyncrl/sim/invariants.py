"""The laws of a run, checked all the way: an Observer that hears everything, and looks at the books at every step.

    ledger      every trajectory is live or final once; the live ones are those of the groups that the buffer holds
    staleness   nothing is trained beyond the recipe's bound, nor before its time; no group more often than its reuse
    tokens      a response is the one that a server sampled: no token lost, repeated, or of another request
    versions    of a trajectory never decrease, or are one, as the recipe has it; of a server decrease only if it was
                down; a server that pulls is given nothing
    answers     a trajectory ends once; steps follow one another
    capacity    at the end no server runs anything, nothing waits, no group is open, every environment is closed
    time        what lasts ends after it began, and not later than now
    progress    a train step comes within ``stall_s``, or ``Stalled`` says who holds what

An event costs O(1), a trajectory's end O(turns) and a look at its version column as a whole, a step O(live
trajectories).

    Checked.watch()    waits for: the latest moment of the next step    woken by: the clock
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from asyncrl.core.ledger import Ledger, LedgerError
from asyncrl.core.snapshot import FleetSnapshot
from asyncrl.core.staleness.base import StalenessSnapshot
from asyncrl.core.types import OBSERVED_VERSION, Trajectory
from asyncrl.ports import Observer, StepMetrics
from asyncrl.sim.engine import GENERATED
from asyncrl.sim.loop import who_waits

NO_ARGS: Mapping[str, Any] = MappingProxyType({})
NAMED = 12
"""Parts that ``Stalled`` describes."""


class InvariantViolation(Exception):
    """A law of the runtime was broken: a bug. One line."""


class Stalled(InvariantViolation):
    """No train step for too long. One line that names who holds what."""


class Books(msgspec.Struct, kw_only=True):
    """Where the run's state is read. ``parts`` describe themselves by their ``repr``."""

    ledger: Ledger
    group_size: int
    group_size_redundancy: int
    """Trajectories that a group may have beside ``group_size`` until it is complete."""
    staleness: Callable[[], StalenessSnapshot]
    initial: Callable[[], int] = lambda: 0
    """Groups that have begun and are not reserved yet."""
    pulling: Callable[[str], bool] = lambda server: False
    """Whether a server is being given weights on its own."""
    fleet: Callable[[], FleetSnapshot]
    open_envs: Callable[[], int]
    parts: Sequence[object]


class _Server:
    """What was last heard of a server."""

    __slots__ = ("running", "up", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.running = 0
        self.up = True


class Checked(Observer):
    """Passes everything on to ``inner``. ``limit`` is the largest staleness of a trained group, None if there is none;
    ``one_version`` says that a trajectory is one version's; a group is trained ``reuse`` times at most; ``first`` is
    the step that is trained first. ``books`` are set once the run is wired."""

    def __init__(
        self,
        inner: Observer,
        *,
        limit: int | None,
        one_version: bool = False,
        reuse: int = 1,
        first: int = 0,
        stall_s: float,
    ) -> None:
        self.books: Books | None = None
        self._violation: InvariantViolation | None = None
        """The first one: what is found after it may be its consequence."""
        self._inner = inner
        self._limit = limit
        self._one_version = one_version
        self._reuse = reuse
        self._uses: dict[int, int] = {}
        """Group that was trained → how often."""
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._next_step = first
        self._stepped_at = self._loop.time()
        self._ended = bytearray()
        """1 for each id of a trajectory that has ended."""
        self._servers: dict[str, _Server] = {}

    # --- Observer

    def step(self, metrics: StepMetrics) -> None:
        batch = metrics.batch
        if batch.step != self._next_step:
            raise self._broken(f"step {batch.step} was trained where step {self._next_step} was due")
        for group in batch.groups:
            staleness = batch.step - group.v_traj
            if staleness < 0 or (self._limit is not None and staleness > self._limit):
                raise self._broken(
                    f"step {batch.step} trained group {group.id} of version {group.v_traj}: staleness {staleness} is "
                    f"outside 0 … {'∞' if self._limit is None else self._limit}"
                )
            self._uses[group.id] = self._uses.get(group.id, 0) + 1
            if self._uses[group.id] > self._reuse:
                raise self._broken(f"step {batch.step} trained group {group.id} for the {self._uses[group.id]}th time")
            for trajectory in group.trajectories:
                if trajectory.versions[-1] > batch.step:
                    raise self._broken(f"step {batch.step} trained tokens of version {trajectory.versions[-1]}")
        self._next_step += 1
        self._stepped_at = self._loop.time()
        self._check_ledger()
        self._inner.step(metrics)

    def trajectory(self, trajectory: Trajectory, state: str) -> None:
        number = trajectory.id
        if number >= len(self._ended):
            self._ended.extend(bytes(number + 1))
        if self._ended[number]:
            raise self._broken(f"trajectory {number} ended twice, the second time as {state}")
        self._ended[number] = 1
        if broken := _tokens_broken(trajectory) or _versions_broken(trajectory, one=self._one_version):
            raise self._broken(f"trajectory {number}: {broken}")
        self._inner.trajectory(trajectory, state)

    def server(self, name: str, at: float, running: int, version: int, up: bool = True) -> None:
        known = self._servers.get(name)
        if known is None:
            known = self._servers[name] = _Server(version)
        if version < known.version and known.up:
            raise self._broken(f"{name} went back from version {known.version} to {version} without being down")
        if running < 0:
            raise self._broken(f"{name} runs {running} requests: a slot was given back twice")
        if running > known.running and self.books is not None and self.books.pulling(name):
            raise self._broken(f"{name} was given a request while it takes weights")
        known.running, known.version, known.up = running, version, up
        self._inner.server(name, at, running, version, up)

    def span(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        if not start <= end <= self._loop.time():
            raise self._broken(f"{name} on {track} lasts from {start:g} to {end:g} s, at {self._loop.time():g} s")
        self._inner.span(track, name, start, end, args)

    def instant(self, track: str, name: str, at: float, args: Mapping[str, Any] = NO_ARGS) -> None:
        self._inner.instant(track, name, at, args)

    def counter(self, name: str, at: float, value: float) -> None:
        self._inner.counter(name, at, value)

    def eval(self, version: int, accuracy: float, n: int, details: Mapping[str, float] = NO_ARGS) -> None:
        self._inner.eval(version, accuracy, n, details)

    def _broken(self, law: str) -> InvariantViolation:
        violation = InvariantViolation(law)
        self._violation = self._violation or violation
        return violation

    # --- the books

    def _check_ledger(self) -> None:
        if (books := self.books) is None:
            return
        try:
            books.ledger.check_conserved()
        except LedgerError as error:
            raise self._broken(str(error)) from error
        live, staleness = len(books.ledger.live), books.staleness()
        unfinished = staleness.reserved + books.initial()
        groups = unfinished + staleness.occupied
        extra = live - groups * books.group_size  # of unfinished groups, less what failed in them
        if not 0 <= extra <= unfinished * books.group_size_redundancy:
            raise self._broken(
                f"{live} trajectories are live, but the buffer holds {groups} groups of {books.group_size}"
            )

    def check_end(self) -> None:
        """After the run, however it ended: all tasks are gone, so nothing may be held any more. What was broken before
        is raised again, as it may have come out as an error of another kind."""
        if self._violation is not None:
            raise self._violation
        if (books := self.books) is None:
            return
        self._check_ledger()
        if live := len(books.ledger.live):
            raise self._broken(f"{live} trajectories never reached a final state")
        fleet = books.fleet()
        for instance in fleet.instances:
            if instance.running or instance.tokens:
                raise self._broken(
                    f"{instance.name} still has {instance.running} requests with {instance.tokens} tokens"
                )
        if fleet.waiting:
            raise self._broken(f"{fleet.waiting} requests still wait for a server")
        if left := books.open_envs():
            raise self._broken(f"{left} more environments were made than closed")

    async def watch(self) -> None:
        """A service of the run: raises ``Stalled``."""
        while True:
            left = self._stepped_at + self._stall_s - self._loop.time()
            if left <= 0:
                break
            await asyncio.sleep(left)
        parts = [repr(part) for part in self.books.parts] if self.books else []
        more = [f"and {len(parts) - NAMED} more"] if len(parts) > NAMED else []
        raise Stalled(
            f"no train step for {self._stall_s:g} s, at {self._loop.time():.3f} s; "
            + "; ".join([*parts[:NAMED], *more, who_waits(self._loop)])
        )


def _tokens_broken(t: Trajectory) -> str | None:
    """Generated ids count down by one (sim/engine.py), so the ends of a response tell its length: one that lost or
    repeated a token, or got another's, has a wrong one. Every observation has at least a token, so a turn's response is
    what was generated before its end."""
    generated = t.loss_mask.tobytes()
    begin = 0
    for turn, end in enumerate(t.turn_ends):
        first = generated.find(1, begin, end)
        begin = end
        if first < 0:
            return f"turn {turn} has no response"
        head, last = t.tokens[first], t.tokens[end - 1]
        if end - first != head - last + 1 or last < GENERATED or generated.find(0, first, end) >= 0:
            return (
                f"the response of turn {turn} has {end - first} tokens that count from {head} to {last}: tokens were "
                "lost or repeated"
            )
    return None


def _versions_broken(t: Trajectory, *, one: bool) -> str | None:
    column = np.frombuffer(t.versions, dtype=np.int32)
    if one and len(several := set(np.unique(column).tolist()) - {OBSERVED_VERSION}) > 1:
        return f"several versions generated it: {sorted(several)}"
    for start, end in pairwise((0, *(t.segment_ends or (len(column),)))):
        versions = column[start:end]
        ends = np.flatnonzero(versions[1:] != versions[:-1])
        runs = [v for v in versions[ends].tolist() + versions[-1:].tolist() if v != OBSERVED_VERSION]
        if runs != sorted(runs):
            return f"its tokens' versions go back: {runs}"
        if runs and runs[0] < t.v_traj:
            return f"tokens of version {runs[0]}, older than V_traj {t.v_traj}"
    return None
