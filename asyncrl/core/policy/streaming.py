"""Multi-version streaming: several versions generate side by side, and servers are shared out among them (DORA §4).

What each server holds is the only bond: a request whose trajectory has tokens goes to any server of their version. New
groups go to the newest version that servers hold. What older ones have begun ends there, on fewer and fewer servers:

* A server that runs nothing takes the newest weights, unless it is the last of a version that is still needed.
* A cycle of repartition (§4.3), at a new version and now and then, gives each version servers in proportion to what it
  has to do, at least one; an older version that has more of them gives up those that hold the least. What such a server
  runs goes to the others of its version, if they have room for all of it; it gets nothing more, and pulls once it is
  empty.
* Where a KV cache is fuller than the threshold, the requests that came last go to servers of the same version that stay
  below it (§4.3, "utilization-based").

A server that drains gives its version up, too. If it is the last of a version that is needed, it takes what that
version has begun, and nothing else, until that has ended.

So a server keeps its version and what it has while it can, the fewest tokens are moved, and nothing but newest weights
is ever loaded: "decrease the legacy versions and increase the latest one".

**One version a trajectory (C1).** A request with tokens is routed and moved to servers that hold their version alone,
and one changes its version only when it runs nothing.

**None is stranded (C2).** Let a trajectory have tokens of version v. Until its group has ended v is needed, so when
servers give v up in a plan, one that does not stays: see ``needed``. Versions of servers that are up never go back, so
no server but a failed one is ever to hold weights again that it has not. What only a failed one could go on with waits
for it, and is begun anew when neither it nor another has v (``Abort``).

**Legacy slots (§4.3, "staleness-aware data supplementation").** An older version is given a group only where the newest
is full or no server has it, and then only if the step that is trained next is not the group's last one: that step would
wait for it. Nothing is given to it either while a server is on its way to the newest, and if none has that, to none but
the newest held: the others shall end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

from asyncrl.core.policy.load import Admission, Load, Move
from asyncrl.core.policy.migration import Limits
from asyncrl.core.policy.routing import RequestView, least_loaded, prefix_affine
from asyncrl.core.staleness.base import StalenessControl


class Versions:
    """What each version has to do, and the servers that give theirs up. ``control`` says how long a version may still
    be trained. What a plan asks costs O(servers), and what moves."""

    def __init__(self, control: StalenessControl) -> None:
        self._control = control
        self._generate: dict[int, dict[int, None]] = {}
        """Unfinished group → versions that it was given to."""
        self._groups: Counter[int] = Counter()
        """Version → such groups."""
        self._leaving: dict[str, int] = {}
        """Server → the version that it gives up."""
        self._kept: dict[str, None] = {}
        """Servers that drain, and are the last ones of a version that is needed."""
        self._work: Counter[int] = Counter()
        """Version → requests that run or wait for it."""
        self._initial = 0
        """Requests without a version that wait."""

    def see(self, loads: Sequence[Load], levels: Mapping[int | None, Collection[RequestView]]) -> None:
        """What the servers are like at the start of a plan, and the requests that wait."""
        waiting = {version: len(level) for version, level in levels.items()}
        self._initial = waiting.pop(None, 0)
        self._work = Counter({version: count for version, count in waiting.items() if version is not None})
        holders: dict[int, list[Load]] = {}
        for load in loads:
            if load.promised >= 0:
                holders.setdefault(load.promised, []).append(load)
                self._work[load.promised] += load.running
            if self._leaving.get(load.name, load.promised) != load.promised:
                del self._leaving[load.name]
            if load.draining:
                self._leaving[load.name] = load.promised
                self._kept.pop(load.name, None)
        for version, group in holders.items():
            last = max(group, key=lambda load: (load.name not in self._leaving, load.running, -load.index))
            self._leaving.pop(last.name, None)
            last.needed = self._work[version] > 0 or self._groups[version] > 0
            if last.draining and last.needed:
                self._kept[last.name] = None
            for load in group:
                load.leaving = load.name in self._leaving

    def left(self, group: int, playing: int = 0) -> None:
        """So many trajectories of the group are under way."""
        for version in () if playing else self._generate.pop(group, ()):
            self._groups[version] -= 1

    def has_begun(self, name: str) -> bool:
        return name in self._kept

    def given(self, group: int, version: int) -> None:
        versions = self._generate.setdefault(group, {})
        if version not in versions:
            versions[version] = None
            self._groups[version] += 1

    def supplements(self, version: int) -> bool:
        """May this older version be given groups that nobody else takes?"""
        deadline = self._control.deadline(version)
        return deadline is None or deadline > self._control.snapshot().step

    def router(self, newest: int, loads: Sequence[Load], admission: Admission) -> NewestFirst:
        return NewestFirst(self, newest, loads, admission)

    def moves(
        self, loads: Sequence[Load], newest: int, limits: Limits, room: Callable[[int], int] | None
    ) -> Iterator[Move]:
        """Carried out in the loads. With ``room`` it is time for a cycle of repartition."""
        ours: dict[int, list[Load]] = {}
        for load in loads:
            if load.up and not (load.pinned or load.cold or load.leaving):
                ours.setdefault(load.version, []).append(load)
        relieved = {
            version: [move for load in servers for move in _relieved(load, servers, limits.kv_threshold)]
            for version, servers in ours.items()
        }
        yield from chain.from_iterable(relieved.values())
        if room is not None:
            calm = {version: servers for version, servers in ours.items() if not relieved[version]}
            yield from self._repartition(loads, calm, newest, limits.kv_threshold, room(newest))

    def _repartition(
        self, loads: Sequence[Load], ours: Mapping[int, list[Load]], newest: int, kv_threshold: float, room: int
    ) -> Iterator[Move]:
        held = Counter(load.promised for load in loads if load.promised >= 0 and not load.leaving)
        work = {version: max(self._work[version], self._groups[version], 1) for version in held}
        work[newest] = max(1, self._work[newest] + (self._initial if room else 0))
        servers = sum(load.promised >= 0 and not load.draining for load in loads)
        total = sum(work.values())
        for version in sorted(ours.keys() - {newest}):
            in_order = sorted(ours[version], key=lambda load: (load.tokens, load.index))
            leave = min(len(in_order), held[version] - max(1, servers * work[version] // total))
            while leave > 0:
                moves = _emptied(in_order[:leave], in_order[leave:], kv_threshold)
                if moves is not None:
                    for load in in_order[:leave]:
                        load.leaving = True
                        self._leaving[load.name] = version
                    yield from moves
                    break
                leave //= 2


def _fits(request: RequestView, load: Load, kv_threshold: float) -> bool:
    return (
        load.tokens + request.tokens <= kv_threshold * load.max_tokens
        and load.running + request.slots <= load.max_running
    )


def _relieved(source: Load, servers: Sequence[Load], kv_threshold: float) -> Iterator[Move]:
    """Requests of a server whose KV cache is too full go where it is not, the last to come first."""
    for request in reversed(source.requests.values()):
        if source.tokens <= kv_threshold * source.max_tokens:
            return
        fit = [load for load in servers if load is not source and _fits(request, load, kv_threshold)]
        if fit:
            move = Move(source, min(fit, key=lambda load: (load.tokens, load.index)), [request])
            move.carry_out()
            yield move


def _emptied(sources: Sequence[Load], others: Sequence[Load], kv_threshold: float) -> list[Move] | None:
    """All that the sources run, spread over the others; None if it does not fit. Carried out if it does."""
    trial = [load.copy() for load in others]
    heap = [(load.running, load.tokens, i) for i, load in enumerate(trial)]
    heapq.heapify(heap)
    moves: list[Move] = []
    for source in sources:
        given: dict[int, list[RequestView]] = {}
        for request in source.requests.values():
            full = []
            while heap and not _fits(request, trial[heap[0][2]], kv_threshold):
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            i = heap[0][2]
            trial[i].take(request)
            heapq.heapreplace(heap, (trial[i].running, trial[i].tokens, i))
            for entry in full:
                heapq.heappush(heap, entry)
            given.setdefault(i, []).append(request)
        moves += [Move(source, others[i], requests) for i, requests in given.items()]
    for move in moves:
        move.carry_out()
    return moves


class NewestFirst:
    """The routing strategy: what has a version goes to its servers, new groups to the newest."""

    passes_over = True

    def __init__(self, versions: Versions, newest: int, loads: Sequence[Load], admission: Admission) -> None:
        self._versions = versions
        self._newest = newest
        self._admission = admission
        self._held = {load.promised for load in loads}
        self._coming = any(
            (load.leaving and not load.draining) or (load.promised == newest and (load.cold or load.version < newest))
            for load in loads
        )
        self._servers: dict[int, list[Load]] = {}
        """Version → servers that take requests now."""
        for load in loads:
            if load.up and not load.cold and not load.leaving:
                self._servers.setdefault(load.version, []).append(load)
        self._full: set[int] = set()
        """Versions of which a request waits for room: those behind it do not overtake it."""
        begin = {version: [load for load in s if not load.draining] for version, s in self._servers.items()}
        held = sorted((version for version, servers in begin.items() if servers), reverse=True)
        self._begin = {
            version: [load for load in begin[version] if not load.waiting]
            for version in (held if newest in held else held[:1])
        }
        """Version → servers for new groups, the newest first."""

    def choose(self, request: RequestView) -> Load | None:
        v_traj = self._admission.v_traj(request)
        if v_traj is None:
            return self._begins(request)
        version = max(v_traj, request.after)
        if version in self._held or request.after >= 0:
            return self._take(request, version)
        # It has no token yet, and no server has the version of its group any more.
        newer = (self._take(request, held) for held in sorted(self._servers, reverse=True) if held > version)
        return next(filter(None, newer), None)

    def _take(self, request: RequestView, version: int) -> Load | None:
        if version in self._full:
            return None
        load = prefix_affine(request, self._servers.get(version, ()))
        if load is None:
            self._full.add(version)
        return load

    def _begins(self, request: RequestView) -> Load | None:
        if not self._admission.open(self._newest):
            return None
        for version, servers in self._begin.items():
            if version < self._newest and (self._coming or not self._versions.supplements(version)):
                return None
            if version not in self._full and self._admission.open(version):
                load = least_loaded(request, servers)
                if load is not None:
                    return load
        return None

    def placed(self, request: RequestView, load: Load) -> None:
        if request.group >= 0:  # an evaluation of all servers has no groups
            self._versions.given(request.group, load.version)

    def pull(self, request: RequestView, chosen: Load | None) -> Load | None:
        return None
