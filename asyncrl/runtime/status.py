"""Status: who holds the gate and why, read from the books of the components at one moment. Plain data, no I/O.

The gate is what the run as a whole waits for: a step's batch, the trainer, the delivery of weights, an evaluation.
Behind it stand holders, each a wait that nobody else here can end: an environment, a server, the trainer, a place.
Their lines are sentences with numbers; the watchdog cuts those that allow it (runtime/stall.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence, Set
from heapq import nsmallest

import msgspec

from asyncrl.core.ledger import LedgerError, State
from asyncrl.core.types import Record
from asyncrl.runtime.controller import BATCH, DELIVERY, EPISODES, EVALUATION
from asyncrl.runtime.evaluation import Evaluator
from asyncrl.runtime.fleet import Launcher
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.parameter_server import ParameterServer
from asyncrl.runtime.restarts import RestartingTrainer
from asyncrl.runtime.sample_buffer import SampleBuffer
from asyncrl.runtime.stage import PLACE, SERVER, Stage

SHOWN = 8
"""Holders of one kind that are named; the others are counted."""


class Holder(Record, frozen=True, kw_only=True):
    """One wait. ``left_s`` is what is left of its own deadline, None if it has none; ``cut`` ends it."""

    line: str
    since: float
    left_s: float | None = None
    cut: Callable[[str], None] | None = None


class Status(Record, frozen=True, kw_only=True):
    """``gate`` is one sentence; ``holders`` stand behind it, longest wait first, and ``more`` like them that are not
    listed; ``others`` wait too, for something that the run as a whole does not wait for."""

    gate: str
    holders: Sequence[Holder]
    more: int
    others: Sequence[Holder]

    def lines(self) -> list[str]:
        return [self.gate, *shown(self.holders, "  ", self.more), *shown(self.others, "also: ")]


class Books:
    """Reads one run. ``bound`` is the largest staleness of the recipe, None if there is none; ``control_timeout_s`` a
    server's deadline for taking weights; ``launcher`` is that of servers that were started here."""

    def __init__(
        self,
        *,
        gate: Stage,
        buffer: SampleBuffer,
        proxy: LLMProxy,
        parameters: ParameterServer,
        trainer: RestartingTrainer,
        evaluator: Evaluator,
        bound: int | None,
        control_timeout_s: float,
        launcher: Launcher | None,
    ) -> None:
        self._gate = gate
        self._buffer = buffer
        self._proxy = proxy
        self._parameters = parameters
        self._trainer = trainer
        self._evaluator = evaluator
        self._bound = bound
        self._control_timeout_s = control_timeout_s
        self._launcher = launcher
        # Of the status that is being made.
        self._silent: Set[str] = frozenset()
        self._most: int | None = SHOWN
        self._more = 0

    def status(self, doing: str = "", *, silent: Set[str] = frozenset(), whole: bool = False) -> Status:
        """Now. ``doing`` is what the training job says that it does; ``silent`` servers do not answer. ``whole``: with
        all holders, not just those that are shown."""
        stage, self._silent, self._more = self._gate, silent, 0
        self._most = None if whole else SHOWN
        now = asyncio.get_running_loop().time()
        gate = f"{stage.who} waits for {stage.what}, {now - stage.since:.0f} s"
        trainer = [self._trainers(wait, doing, now) for wait in self._trainer.stages]
        servers = list(self._servers(now))
        match stage.what:
            case what if what == BATCH:
                holders, text = self._episodes(now, servers)
                gate += f": {text}"
            case what if what == EVALUATION:
                stages = [(s, s.who) for s in self._evaluator.stages if s.what]
                holders = self._leaves(stages, servers, now)
            case what if what == EPISODES:
                holders = []
            case what if what == DELIVERY:
                holders = servers
            case _:
                holders = trainer
        holders = holders or servers or trainer
        named = {id(holder) for holder in holders}
        others = [h for h in (*servers, *trainer) if id(h) not in named]
        if stage.what != BATCH and (text := self.rollouts()):
            others.append(Holder(line=text, since=now))
        return Status(gate=gate, holders=sorted(holders, key=lambda h: h.since), more=self._more, others=others)

    def rollouts(self) -> str:
        """What has become of them, where the trainer is down or they are so far ahead that none may start."""
        snapshot = self._buffer.snapshot()
        s, up = snapshot.staleness, self._trainer.up
        members = self._buffer.unfinished()
        unfinished = {start.group_id for start, _, lease in members if lease is not None and start.v_traj is not None}
        taken = s.reserved + s.occupied
        if up and (unfinished or taken < s.capacity):
            return ""
        trainer = "the trainer" if up else "the trainer, which is started again"
        if unfinished:
            text = f"rollouts go on with version {snapshot.version} without {trainer}"
            return f"{text}: {len(unfinished)} groups are under way, {s.occupied} ready"
        text = f"rollouts wait for {trainer}: the buffer is full"
        return f"{text}, {s.occupied} groups are ready, {taken} of {s.capacity} places taken"

    async def silent(self) -> set[str]:
        """Servers that do not answer, for ``status`` to tell the hung one from those that wait for it."""
        instances = [i for i in self._proxy.instances if i.up]
        async with asyncio.TaskGroup() as group:
            answers = [(i.name, group.create_task(i.engine.health())) for i in instances]
        return {name for name, answer in answers if not answer.result()}

    async def doing(self) -> str:
        """What the training job says that it does, where something is asked of it."""
        return await self._trainer.doing() if self._trainer.stages else ""

    def progress(self) -> tuple[object, ...]:
        """Another value whenever a token came, an environment made a step, an episode was scored, a batch was taken, or
        weights moved. What merely fails or starts anew is no progress."""
        counts = self._buffer.ledger.counts()
        stages = [lease.stage for _, _, lease in self._buffer.unfinished() if lease is not None and lease.stage]
        return (
            sum(i.generated for i in self._proxy.instances),
            sum(i.version for i in self._proxy.instances),
            sum(stage.turns for stage in (*stages, *self._evaluator.stages)),
            *(counts[state] for state in (State.SCORED, State.OCCUPIED, State.CONSUMED, State.FILTERED, State.SURPLUS)),
            self._parameters.newest,
            self._parameters.version,
            self._trainer.version,
        )

    def faults(self) -> list[str]:
        """What the books hold and nobody has, or the reverse; one that lasts is a leak. O(live episodes)."""
        found = []
        ledger = self._buffer.ledger
        try:
            ledger.check_conserved()
        except LedgerError as error:
            found.append(f"ledger: {error}")
        for i in self._proxy.instances:
            if i.running < 0 or i.tokens < 0:
                found.append(
                    f"{i.name}: {i.running} requests with {i.tokens} tokens, as something was given back twice"
                )
            elif not i.streams and (i.running or i.tokens):
                found.append(f"{i.name}: {i.running} slots and {i.tokens} tokens are taken, but no request has them")
        return found

    def starved(self, limit_s: float) -> list[str]:
        """Who has waited longer than that for a server or a place, while the run gets on without."""
        now = asyncio.get_running_loop().time()
        return [
            f"group {start.group_id}, trajectory {number} has waited {now - lease.stage.since:.0f} s for "
            f"{lease.stage.what} while others were served; {self._why_no_server()}"
            for start, number, lease in self._buffer.unfinished()
            if lease is not None
            and lease.stage is not None
            and lease.stage.what in (SERVER, PLACE)
            and now - lease.stage.since > limit_s
        ]

    # --- holders

    def _episodes(self, now: float, servers: list[Holder]) -> tuple[list[Holder], str]:
        """Those that the batch waits for, and how far it is."""
        snapshot = self._buffer.snapshot()
        s = snapshot.staleness
        unfinished = [(start, number, lease) for start, number, lease in self._buffer.unfinished() if lease is not None]
        groups = len({start.group_id for start, _, _ in unfinished})
        text = f"{s.occupied} groups are ready, {groups} unfinished"
        if s.due and self._bound is not None:
            due = [u for u in unfinished if u[0].v_traj is not None and u[0].v_traj + self._bound <= s.step]
            unfinished = due or unfinished
            text += f", {s.due} of them due now"
        if not unfinished:
            text += f"; none may start: {s.reserved + s.occupied} of {s.capacity} places are taken on version "
            text += f"{snapshot.version}"
        stages = []
        later = []
        for start, number, lease in unfinished:
            who = f"group {start.group_id}: trajectory {number}"
            if lease.stage is not None:
                stages.append((lease.stage, who))
            elif lease.due > now:
                line = f"{who}, which failed, is begun anew in {lease.due - now:.0f} s (env.backoff_s)"
                later.append(Holder(line=line, since=now, left_s=lease.due - now))
        if (untaken := len(unfinished) - len(stages) - len(later)) > 0:
            text += f", {untaken} episodes wait for a free slot (rollout.num_envs)"
        return self._leaves(stages, servers, now) + later, text

    def _leaves(self, stages: Sequence[tuple[Stage, str]], servers: list[Holder], now: float) -> list[Holder]:
        """Episodes that wait for a server wait for those that do not serve, if there are such."""
        own = [(stage, who) for stage, who in stages if stage.what != SERVER or not servers]
        listed = own if self._most is None else nsmallest(self._most, own, key=lambda wait: wait[0].since)
        self._more += len(own) - len(listed)
        return [self._episode(stage, who, now) for stage, who in listed] + (servers if len(own) < len(stages) else [])

    def _episode(self, stage: Stage, who: str, now: float) -> Holder:
        cut: Callable[[str], None] = stage.cut
        more = ""
        if stage.server:
            instance = next(i for i in self._proxy.instances if i.name == stage.server)
            more = f" ({instance.running} running, {instance.generated} tokens so far"
            more += ", does not answer)" if stage.server in self._silent else ")"
            cut = self._cut_server(instance)
        elif stage.what == SERVER:
            more = f" ({self._why_no_server()})"
        return self._holder(stage, f"{who}, {stage.what}{more}", now, cut)

    def _why_no_server(self) -> str:
        snapshot = self._proxy.snapshot()
        up = [i for i in snapshot.instances if i.up]
        if not up:
            return f"none of {len(snapshot.instances)} servers is up"
        if snapshot.suspended:
            return "all are suspended for new weights"
        taken = sum(i.running >= i.max_running or i.tokens >= i.max_tokens for i in up)
        pulling = sum(i.pulling for i in up)
        return f"{len(up)} up, {taken} full, {pulling} taking weights, {snapshot.waiting} requests wait"

    def _trainers(self, stage: Stage, doing: str, now: float) -> Holder:
        holder = self._holder(stage, f"trainer, {stage.what}{f' ({doing})' if doing else ''}", now, stage.cut)
        if self._trainer.up and holder.cut is not None:
            return holder
        # A checkpoint has trainer.step_timeout_s, as has each part of a restart; of restarts there are so many.
        return msgspec.structs.replace(holder, left_s=math.inf, cut=None)

    def _servers(self, now: float) -> Iterator[Holder]:
        """Those that do not serve, and the delivery that they are part of."""
        for i in self._proxy.instances:
            if i.asked is not None:
                if self._silent and i.name not in self._silent:
                    continue  # it waits for the others
                what, since = i.asked
                mute = ", does not answer" if i.name in self._silent else ""
                line, limit_s = f"{i.name}, asked {what}, {now - since:.0f} s{mute}", self._control_timeout_s
                yield Holder(
                    line=f"{line}, deadline {limit_s:g} s (engine.control_timeout_s)",
                    since=since,
                    left_s=since + limit_s - now,
                    cut=self._cut_server(i) if self._launcher and self._launcher.began(i.name) is not None else None,
                )
            elif not i.up:
                if not i.draining:
                    line = f"{i.name} is down, {now - i.down_since:.0f} s" + (f": {i.why}" if i.why else "")
                    yield Holder(line=line, since=i.down_since)
            elif i.pulling:
                yield Holder(line=f"{i.name}, at version {i.version}, waits for newer weights to arrive", since=now)
        if (delivery := self._parameters.stage).what and all(i.asked is None for i in self._proxy.instances):
            yield self._holder(delivery, f"new weights wait for {delivery.what}", now, delivery.cut)

    def _holder(self, stage: Stage, text: str, now: float, cut: Callable[[str], None]) -> Holder:
        line = f"{text}, {now - stage.since:.0f} s"
        if stage.limit_s is not None:
            line += f", deadline {stage.limit_s:g} s" + (f" ({stage.key})" if stage.key else "")
        return Holder(
            line=line,
            since=stage.since,
            left_s=None if stage.limit_s is None else stage.since + stage.limit_s - now,
            cut=cut if stage.scope is not None else None,
        )

    def _cut_server(self, instance: Instance) -> Callable[[str], None]:
        def cut(why: str) -> None:
            if self._launcher is not None:
                self._launcher.kill(instance.name)
            instance.cut(asyncio.get_running_loop().time())

        return cut


def shown(holders: Sequence[Holder], indent: str, more: int = 0) -> list[str]:
    """A line each of the first, and how many there are beside."""
    lines = [f"{indent}{holder.line}" for holder in holders[:SHOWN]]
    if (more := more + len(holders) - len(lines)) > 0:
        lines.append(f"{indent}and {more} more")
    return lines
