"""What a plan of StaleFlow's coordinator costs: 256 servers × 65,536 trajectories, on one core.

    python bench/planning.py [--servers 256] [--trajectories 65536] [--plans 300] [--profile] [--json FILE]

A fleet in which three quarters of the trajectories run, on servers of three versions, and the rest wait for one. Books
are kept as the proxy keeps them, and commands take effect between two plans. Each row is a kind of event; after a batch
of that many events plans are made until one is finished, as the runtime does. The budget for a batch is 10 ms.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.core.commands import Interrupt, Pull, Route
from asyncrl.core.coordinator import Coordinator
from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import FleetSnapshot, InstanceSnapshot
from asyncrl.core.types import Record

GROUP = 16
BUDGET_S = 0.010
COST = CostModel(k1=1e-8, k3=2e-5)
"""Servers that gain by a 193rd request: else most plans would route nothing."""


class Server:
    """One server's books."""

    def __init__(self, name: str, version: int, running: int) -> None:
        self.name = name
        self.version = version
        self.max_running = 2 * running
        self.up = True
        self.requests: dict[int, RequestView] = {}
        self.tokens = self.routed = self.interrupted = 0

    def snapshot(self) -> InstanceSnapshot:
        return InstanceSnapshot(
            name=self.name,
            version=self.version,
            up=self.up,
            running=len(self.requests),
            tokens=self.tokens,
            max_running=self.max_running,
            max_tokens=4_000_000,
            kv_tokens=self.tokens,
            requests=self.requests,
            routed=self.routed,
            interrupted=self.interrupted,
        )


class Fleet:
    """All books, and events that change them."""

    def __init__(self, servers: int, trajectories: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._running = 3 * trajectories // (4 * servers)
        self.newest = 2
        self.servers = [Server(f"server {i:03}", i % 3, self._running) for i in range(servers)]
        self._by_name = {s.name: s for s in self.servers}
        self._levels: dict[int | None, dict[int, RequestView]] = {}
        self._next = 0
        self._of_group: dict[int, int] = {}
        self.rooms = {0: 0, 1: 0, 2: 0}
        for server in self.servers:
            for _ in range(self._running):
                self._add(server, self._request(server.version, home=server.name))
        for _ in range(trajectories - servers * self._running):
            self._wait(self._request(None))

    def _request(self, v_traj: int | None, home: str | None = None) -> RequestView:
        self._next += 1
        tokens = int(self._random.lognormvariate(6.0, 0.6))
        return RequestView(
            v_traj=v_traj,
            tokens=tokens,
            id=self._next,
            sequence=self._next,
            group=self._next // GROUP,
            home=home,
            prefix=tokens // 2 if home else 0,
        )

    def _add(self, server: Server, request: RequestView) -> None:
        server.requests[request.id] = request
        server.tokens += request.tokens

    def _wait(self, request: RequestView) -> None:
        self._levels.setdefault(request.v_traj, {})[request.id] = request

    def _take(self, id: int) -> RequestView:
        for v_traj, level in self._levels.items():
            if (request := level.pop(id, None)) is not None:
                if not level:
                    del self._levels[v_traj]
                return request
        raise KeyError(id)

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(
            instances=tuple(s.snapshot() for s in self.servers),
            waiting=0,
            suspended=False,
            newest=self.newest,
            waiting_requests={v: level.values() for v, level in self._levels.items()},
            mean_new_tokens=2_000.0,
        )

    def carry_out(self, commands: list[Any]) -> int:
        """All commands at once. The number of requests that they move."""
        moved = 0
        for command in commands:
            server = self._by_name[command.instance]
            match command:
                case Pull():
                    moved += len(server.requests)
                    self._cut(server, list(server.requests))
                    server.version = self.newest
                case Interrupt(requests=ids):
                    self._cut(server, ids)
                    server.interrupted += len(ids)
                case Route(requests=ids):
                    moved += len(ids)
                    server.routed += len(ids)
                    for id in ids:
                        request = self._take(id)
                        v_traj = self._of_group.setdefault(request.group, server.version)
                        if request.v_traj is None:
                            values = {f: getattr(request, f) for f in RequestView.__struct_fields__}
                            request = RequestView(**{**values, "v_traj": v_traj})
                        self._add(server, request)
        return moved

    def _cut(self, server: Server, ids: Any) -> None:
        for id in ids:
            request = server.requests.pop(id)
            server.tokens -= request.tokens
            self._wait(request)

    # --- events

    def complete(self, count: int, turns: bool) -> None:
        """Requests end; as many come, as turns of the same conversations or, with new groups' room, as initial ones."""
        for _ in range(count):
            server = self._random.choice(self.servers)
            if server.requests:
                id = next(iter(server.requests))
                request = server.requests.pop(id)
                server.tokens -= request.tokens
                if turns:
                    self._wait(self._request(request.v_traj, home=server.name))
                else:
                    self._wait(self._request(None))
                    self.rooms = {v: self.rooms[v] + 1 for v in self.rooms}

    def push(self) -> None:
        """The trainer's next version, and a batch's room on it."""
        self.newest += 1
        self.rooms[self.newest] = 64

    def fail(self) -> str:
        """A server dies; another comes."""
        server = self._random.choice(self.servers)
        self._cut(server, list(server.requests))
        return server.name


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Row(Record, frozen=True, kw_only=True):
    """Milliseconds; ``events_ms`` is of all plans that a batch of events took, the others of one plan; ``moved`` is
    requests a batch."""

    events: str
    plans: int
    events_ms: float
    moved: float
    snapshot_ms: float
    plan_ms: float
    p99_ms: float
    max_ms: float


def measure(name: str, fleet: Fleet, coordinator: Coordinator, batches: int, event: Callable[[], None]) -> Row:
    def room(version: int) -> int:
        return fleet.rooms.get(version, 0)

    times: list[float] = []
    snapshots: list[float] = []

    def plan() -> int:
        moved = 0
        while True:
            began = time.process_time()
            snapshot = fleet.snapshot()
            taken = time.process_time()
            commands = coordinator.plan(snapshot, room)
            times.append(1000 * (time.process_time() - taken))
            snapshots.append(1000 * (taken - began))
            moved += fleet.carry_out(commands)
            if not coordinator.unfinished:
                return moved

    plan()
    times.clear()
    snapshots.clear()
    moved = 0
    for _ in range(batches):
        event()
        moved += plan()
    return Row(
        events=name,
        plans=len(times),
        events_ms=(sum(times) + sum(snapshots)) / batches,
        moved=moved / batches,
        snapshot_ms=statistics.mean(snapshots),
        plan_ms=statistics.mean(times),
        p99_ms=percentile(times, 0.99),
        max_ms=max(times),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=256)
    parser.add_argument("--trajectories", type=int, default=65_536)
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="of the plans after 64 ended turns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def start() -> tuple[Fleet, Coordinator]:
        coordinator = Coordinator(routing="waterfall", synchronization="selective", migration="throughput", cost=COST)
        return Fleet(args.servers, args.trajectories, seed=0), coordinator

    rows: list[Row] = []
    fleet, coordinator = start()
    for count in (1, 16, 64, 256):
        name = f"{count} turns end, others come"
        rows.append(measure(name, fleet, coordinator, args.plans, lambda count=count: fleet.complete(count, True)))
    fleet, coordinator = start()
    for count in (16, 256):
        name = f"{count} trajectories end, groups begin"
        rows.append(measure(name, fleet, coordinator, args.plans, lambda count=count: fleet.complete(count, False)))
    fleet, coordinator = start()
    rows.append(measure("a new version, room for 64 groups", fleet, coordinator, 20, fleet.push))
    fleet, coordinator = start()
    rows.append(measure("a server fails and is back", fleet, coordinator, 50, lambda: coordinator.forget(fleet.fail())))
    head = f"{'batch of events':40} {'moved':>8} {'plans':>6} {'ms':>8}"
    print(f"{head} {'snapshot':>9} {'plan ms':>8} {'p99':>8} {'max':>8}")
    for row in rows:
        batch = f"{row.events:40} {row.moved:8.1f} {row.plans:6} {row.events_ms:8.2f}"
        print(f"{batch} {row.snapshot_ms:9.2f} {row.plan_ms:8.2f} {row.p99_ms:8.2f} {row.max_ms:8.2f}")
    if args.profile:
        fleet, coordinator = start()
        profile = cProfile.Profile()
        profile.runcall(measure, "", fleet, coordinator, args.plans, lambda: fleet.complete(64, True))
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
    if args.json:
        result = {
            "servers": args.servers,
            "trajectories": args.trajectories,
            "budget_ms": 1000 * BUDGET_S,
            "rows": [{f: getattr(r, f) for f in Row.__struct_fields__} for r in rows],
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
