"""StaleFlow's algorithms 2 to 5 and equations 2 to 4 written down as the paper has them: slow, and with no thought.

What asyncrl has otherwise is marked: servers that may not be commanded, slots, the limit of running requests, prefill,
the unit of a gain, what μ is a share of, who pulls, and which two servers migration is about.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot


@dataclass
class Inst:
    """S[i]."""

    snapshot: InstanceSnapshot
    inst_version: int
    run_trajs: list[RequestView]
    wait_trajs: list[RequestView]
    kv_cache: int

    @property
    def n(self) -> int:
        return sum(t.slots for t in self.run_trajs)


@dataclass
class Staleness:
    """The staleness manager, as far as a plan sees it: rooms that each reservation makes smaller by one."""

    rooms: dict[int, int]
    reserved: dict[int, int] = field(default_factory=dict)

    def verify(self, version: int) -> bool:
        return self.rooms.get(version, 0) > len(self.reserved)


def system(instances: list[InstanceSnapshot]) -> list[Inst]:
    found = []
    for i in instances:
        requests, waiting, run, wait = list(i.requests.values()), i.waiting, [], []
        for request in reversed(requests):
            if waiting > 0:
                wait.insert(0, request)
                waiting -= request.slots
            else:
                run.insert(0, request)
        found.append(Inst(i, i.version, run, wait, i.kv_tokens))
    return found


def check_routable(t: RequestView, i: Inst, staleness: Staleness) -> bool:
    if not i.snapshot.up or i.snapshot.pulling or i.inst_version < t.after:  # asyncrl's
        return False
    v_traj = staleness.reserved.get(t.group) if t.v_traj is None else t.v_traj
    if v_traj is None:
        return staleness.verify(i.inst_version)
    return i.inst_version >= v_traj


def use(cost: CostModel, n: int, kv_cache: int, prefill: float = 0.0) -> float:
    """asyncrl's, for Eq. 2: time that goes into sequences, in place of their number."""
    if n == 0:
        return 0.0
    step = cost.k1 * kv_cache + max(cost.k2, cost.k3 * n) + cost.k4 + cost.k5 * prefill
    return (cost.k1 * kv_cache + cost.k3 * n) / step


def compute_marginal_gain(
    cost: CostModel, t: RequestView, i: Inst, spread: float, pull_share: float | None = None
) -> float | None:
    """None where it would wait. ``pull_share``, which is asyncrl's: the instance pulls before, and prefills all that it
    runs again, of which the trajectory bears this share."""
    y = i.kv_cache + t.tokens <= i.snapshot.max_tokens and len(i.wait_trajs) == 0
    if i.n and i.n + t.slots > i.snapshot.max_running:  # asyncrl's
        y = False
    if not y:
        return None
    held = t.prefix if t.home == i.snapshot.name and i.inst_version == t.after else 0  # asyncrl's
    if pull_share is None:
        prefill = t.tokens - held
    else:
        prefill = t.tokens + i.kv_cache * pull_share
    gain = use(cost, i.n + t.slots, i.kv_cache + t.tokens, prefill * spread) - use(cost, i.n, i.kv_cache)
    return gain / i.snapshot.slowness  # asyncrl's


def levels(ts_trajs: list[RequestView]) -> list[list[RequestView]]:
    """The multi-level queue."""
    initial = [t for t in ts_trajs if t.v_traj is None]
    partial = [t for t in ts_trajs if t.v_traj is not None]
    started = sorted({t.oldest for t in partial})  # V_traj, or the version of the last token, which is asyncrl's
    return [[t for t in partial if t.oldest == v] for v in started] + [initial]


def best_of(cost: CostModel, group: list[Inst], t: RequestView, spread: float) -> tuple[float, Inst] | None:
    best = None
    for i in group:
        gain = compute_marginal_gain(cost, t, i, spread)
        if gain is not None and (best is None or gain > best[0]):
            best = gain, i
    return best


def select(
    cost: CostModel, mu: float, s: list[Inst], t: RequestView, staleness: Staleness, spread: float
) -> Inst | None:
    """Algorithm 3 for one trajectory. μ is a share of the best gain of all versions, which is asyncrl's."""
    candidates = [i for i in s if check_routable(t, i, staleness)]
    groups = [[i for i in candidates if i.inst_version == v] for v in sorted({c.inst_version for c in candidates})]
    bests = [best for group in groups if (best := best_of(cost, group, t, spread)) is not None]
    for gain, inst in bests:
        most = max(gain for gain, _ in bests)
        if gain >= most - (1.0 - mu) * abs(most):
            return inst
    return None


def assign(t: RequestView, i: Inst, staleness: Staleness) -> None:
    if t.v_traj is None:
        staleness.reserved.setdefault(t.group, i.inst_version)
    i.run_trajs.append(t)
    i.kv_cache += t.tokens


def routing_strategy(
    cost: CostModel, mu: float, s: list[Inst], ts_trajs: list[RequestView], staleness: Staleness, spread: float = 0.0
) -> list[tuple[str, int]]:
    """Algorithm 3. Changes ``s`` and ``staleness``."""
    routing: list[tuple[str, int]] = []
    for queue in levels(ts_trajs):
        for t in queue:
            selected = select(cost, mu, s, t, staleness, spread)
            if selected is None:
                return routing
            routing.append((selected.snapshot.name, t.id))
            assign(t, selected, staleness)
    return routing


def synchronization_strategy(
    cost: CostModel,
    mu: float,
    s: list[Inst],
    ts_trajs: list[RequestView],
    staleness: Staleness,
    ps_version: int,
    spread: float = 0.0,
) -> list[str]:
    """Algorithm 4, whose candidates asyncrl tries one after another as the trajectories need them, not each alone."""
    s = copy.deepcopy(s)
    candidates = []
    for i in s:
        if not i.snapshot.up or i.snapshot.pulling or i.snapshot.pinned:  # asyncrl's
            continue
        if ps_version > i.inst_version and not any(check_routable(t, i, staleness) for t in ts_trajs):
            candidates.append(i)
    sync: list[str] = []
    share = min(1.0, len(candidates) / max(1, len(ts_trajs)))
    for t in [t for queue in levels(ts_trajs) for t in queue]:
        selected = select(cost, mu, s, t, staleness, spread)
        best, most = None, float("-inf")
        for i in [replace(i, inst_version=ps_version) for i in candidates]:
            gain = compute_marginal_gain(cost, t, i, spread, share)
            if check_routable(t, i, staleness) and gain is not None and gain > most:
                best, most = i, gain
        if best is not None and (selected is None or selected.inst_version >= ps_version):
            there = None if selected is None else compute_marginal_gain(cost, t, selected, spread)
            if there is None or most > there:
                sync.append(best.snapshot.name)
                candidates = [i for i in candidates if i.snapshot.name != best.snapshot.name]
                s[[i.snapshot.name for i in s].index(best.snapshot.name)] = selected = best
        if selected is None:
            break
        assign(t, selected, staleness)
    return sorted(sync)


def migration_strategy(
    cost: CostModel, phi_wait: int, phi_throughput: float, s: list[Inst]
) -> tuple[list[tuple[str, set[int]]], float]:
    """Algorithm 5: what is cut, and the widest gap, which is asyncrl's: of the speed at which a sequence decodes, from
    an instance to one that is not older."""
    migration = []
    s = [i for i in s if i.snapshot.up and not i.snapshot.pulling and not i.snapshot.pinned]  # asyncrl's
    for i in s:
        wait_cnt = len(i.wait_trajs)
        if wait_cnt > phi_wait:
            excess = wait_cnt - phi_wait
            migration.append((i.snapshot.name, {t.id for t in i.wait_trajs[-excess:]}))
    free = [i for i in s if not i.wait_trajs]
    gaps = [step(cost, a) / step(cost, b) for a in free for b in free if b.inst_version >= a.inst_version]
    return migration, max([1.0, *gaps])


def step(cost: CostModel, i: Inst) -> float:
    return i.snapshot.slowness * (cost.k1 * i.kv_cache + max(cost.k2, cost.k3 * max(1, i.n)) + cost.k4)
